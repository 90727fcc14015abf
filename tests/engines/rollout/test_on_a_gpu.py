"""Sleep and updates where the weights are on a device: host copies, windows, and memory that others can have."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch

from headway.data.interfaces.rollout import OnUpdate
from headway.engines.rollout.native.fused_forward import FusedForward, best_forward
from headway.engines.rollout.native.varlen_attention import DTYPES
from tests.engines.rollout.serving import Source, collect, endless, serving
from tests.engines.rollout.support import FAMILIES, make_model, make_request, reference_logprobs, tokens_of

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
async def test_recorded_steps_sample_from_the_model_before_and_after_an_update(family: str, dtype: torch.dtype) -> None:
    old, new = (make_model(family, seed=seed).to(dtype) for seed in (0, 3))
    async with serving(Source(new), model=copy.deepcopy(old).to("cuda")) as engine:
        assert engine._core._runner._graphs is not None
        first = await collect(engine, [make_request(number) for number in range(6)])
        await engine.pause(OnUpdate.INTERRUPT)
        await engine.stage_weights(1)
        await engine.activate(1)
        await engine.resume()
        second = await collect(engine, [make_request(number) for number in range(6, 12)])
        assert engine._core._runner._graphs.works
        assert engine._core._runner._graphs.recorded
    tolerance = LOOSE if dtype is torch.float32 else 0.1  # of bfloat16's rounding, on the mean of a response
    for groups, model in ((first, old), (second, new)):
        for group in groups:
            for k, response in enumerate(group.tokens):
                expected = reference_logprobs(model.float(), group, k)
                assert np.abs(response.logprobs - expected).mean() <= tolerance


async def test_recorded_steps_are_right_when_the_cache_is_divided_anew_and_back() -> None:
    model = make_model(max_position_embeddings=640)
    async with serving(model=copy.deepcopy(model).to("cuda"), max_context=640) as engine:
        for wave in range(3):
            groups = await collect(engine, [make_request(wave, n=2, length=5, max_tokens=500, stop_token_ids=())])
            expected = [reference_logprobs(model, groups[0], k) for k in range(2)]
            for response, reference in zip(groups[0].tokens, expected, strict=True):
                np.testing.assert_allclose(response.logprobs, reference, atol=LOOSE)
        graphs = engine._core._runner._graphs
        assert graphs is not None
        assert graphs.works
        assert len(graphs.recorded) > 2


async def test_recorded_steps_give_the_tokens_of_eager_ones() -> None:
    answers = []
    for enforce_eager in (True, False):
        async with serving(model=make_model().to("cuda"), enforce_eager=enforce_eager) as engine:
            groups = await collect(engine, [make_request(number) for number in range(6)])
            answers.append(tokens_of(groups))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", [(4, 4, 8), (14, 2, 64), (32, 8, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_of_different_lengths_attend_in_one_call(
    dtype: torch.dtype, heads: tuple[int, int, int], family: str
) -> None:
    sizes = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
    # Llama's hidden size has to be a multiple of the heads; of large weights bfloat16 alone would make a difference.
    model = make_model(family, hidden_size=8 * heads[0], initializer_range=0.1, **sizes)
    forward = best_forward(model.to("cuda", dtype), 64)
    assert isinstance(forward, FusedForward) and forward.varlen
