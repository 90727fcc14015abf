"""Sleep and updates where the weights are on a device: host copies, windows, and memory that others can have."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch

from headway.interfaces import OnUpdate
from tests.engines.rollout.serving import Source, collect, endless, serving
from tests.engines.rollout.support import make_model, make_request

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = {"hidden_size": 256, "intermediate_size": 1024}
LOOSE = 1e-3
"""Of log-probs on a device whose matrix products may round differently from the host's."""


@pytest.mark.parametrize("dual_buffer", [True, False], ids=["dual", "in place"])
@pytest.mark.parametrize("keep_weights", [True, False])
async def test_weights_leave_the_device_in_sleep_and_new_ones_come_back(dual_buffer: bool, keep_weights: bool) -> None:
    old, new = make_model(**SIZES), make_model(seed=3, **SIZES)
    nbytes = sum(parameter.nbytes for parameter in old.parameters())
    expected = []
    for model in (old, new):
        async with serving(model=model) as engine:
            expected.append(await engine.probe())
    async with serving(Source(new), model=copy.deepcopy(old).to("cuda"), dual_buffer=dual_buffer) as engine:
        waiting = asyncio.create_task(collect(engine, [endless(0), endless(1)]))
        await engine.pause(OnUpdate.INTERRUPT)
        np.testing.assert_allclose(await engine.probe(), expected[0], atol=LOOSE)
        awake = torch.cuda.memory_allocated()
        await engine.sleep(keep_weights=keep_weights)
        assert torch.cuda.memory_allocated() <= awake - nbytes
        if keep_weights:
            await engine.wake()
            np.testing.assert_allclose(await engine.probe(), expected[0], atol=LOOSE)
            await engine.sleep()
        await engine.stage_weights(1)
        await engine.activate(1)
        await engine.wake()
        np.testing.assert_allclose(await engine.probe(), expected[1], atol=LOOSE)
        await engine.resume()
        await waiting
        assert len(await collect(engine, [make_request(2)])) == 1
