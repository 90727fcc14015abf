"""Mixtures of experts: vLLM fuses what the files have by expert, and on a CPU packs it in an order of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.interfaces import OnUpdate
from tests.contract.harness import endless, make_calls
from tests.vllm.serving import TOLERANCE, Served

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32},
    "qwen3_moe padded": {"moe_intermediate_size": 24},
}


@pytest.mark.parametrize("which", SHAPES)
async def test_each_version_of_a_mixture_is_served_as_the_trainer_has_it(which: str, tmp_path: Path) -> None:
    """Over 5 s: vLLM is started."""
    served = Served(tmp_path / "model", shape={"family": which.split()[0], "tied": False, **SHAPES[which]})
    await served.engine.start()
    try:
        np.testing.assert_allclose(await served.engine.probe(), served.probe_reference(), atol=TOLERANCE, rtol=0)
        served.assert_logprobs(await served.collect(make_calls(0)))
        for policy in (OnUpdate.INTERRUPT, OnUpdate.DRAIN, OnUpdate.KEEP):
            await served.update(policy)
            served.assert_logprobs(await served.collect(make_calls(1, n=2), endless(2, n=2)))
    finally:
        await served.engine.close()
