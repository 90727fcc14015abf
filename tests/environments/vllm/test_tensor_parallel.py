"""A replica of two devices: vLLM's processes divide the model, and keep the engine's contract."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from headway.data.interfaces.rollout import OnUpdate
from headway.errors import HeadwayError
from tests.engines.contract.harness import make_calls
from tests.environments.vllm.serving import TOLERANCE, WAIT_S, Served


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def divided(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("divided"), shape={"tied": request.param}, tensor_parallel=2)
    asyncio.run(served.engine.start())
    yield served
    asyncio.run(served.engine.close())


def test_what_is_sampled_and_probed_is_the_models_own_over_updates_of_each_kind(divided: Served) -> None:
    """Over 5 s: a start of vLLM with two workers."""

    async def serve() -> None:
        np.testing.assert_allclose(
            await divided.engine.probe(), divided.probe_reference(), atol=TOLERANCE, rtol=0, err_msg="version 0"
        )
        for row, policy in enumerate((OnUpdate.INTERRUPT, OnUpdate.DRAIN)):
            answers = await divided.submit(make_calls(row, n=divided.engine.slots, max_tokens=96))
            await divided.sampled(32)
            await divided.update(policy)
            made = await answers
            divided.assert_logprobs(made)
            versions = {int(version) for answer in made for version in answer.tokens.versions}
            assert len(versions) == (2 if policy is OnUpdate.INTERRUPT else 1)
        await divided.update(OnUpdate.KEEP)

    asyncio.run(serve())


def test_a_worker_that_is_killed_ends_the_engine_and_all_of_its_processes(tmp_path: Path) -> None:
    """Over 5 s: a start of vLLM with two workers."""
    served = Served(tmp_path, tensor_parallel=2)
    before = set(psutil.Process().children(recursive=True))

    async def lose() -> list[psutil.Process]:
        await served.engine.start()
        started = [child for child in psutil.Process().children(recursive=True) if child not in before]
        workers = [child for child in started if "Worker" in child.name() + " ".join(child.cmdline())]
        assert len(workers) >= 2, [child.cmdline() for child in started]
        os.kill(workers[-1].pid, signal.SIGKILL)
        with pytest.raises(HeadwayError):
            await asyncio.wait_for(served.collect(make_calls(0, max_tokens=96, min_tokens=96)), WAIT_S)
        await served.engine.close()
        return started

    left = asyncio.run(lose())
    _, alive = psutil.wait_procs(left, timeout=WAIT_S)
    assert not alive
