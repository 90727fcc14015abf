"""The probe sees what is really served, and disturbs nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from headway.data.interfaces.rollout import OnUpdate
from headway.engines.rollout.native.fused_forward import FusedForward, Projection
from headway.engines.rollout.native.native_core import EngineCore
from headway.engines.rollout.native.policy_forward import ModuleForward
from headway.errors import RunError
from headway.models.logprobs import PROBE_PREFILL, probe_rows, probe_sequences, probe_vector
from tests.engines.rollout.serving import Source, serving
from tests.engines.rollout.support import (
    CONTEXT,
    FAMILIES,
    TOLERANCE,
    VOCABULARY,
    activate,
    finish,
    make_core,
    make_model,
    make_request,
    steps,
    tokens_of,
)
from tests.tiers import crossed, mostly_slow


def reference(model: PreTrainedModel, temperature: float = 1.0) -> NDArray[np.float32]:
    """What a trainer computes: the responses' log-probs, row by row, by one plain forward over each."""
    responses = []
    for row in probe_rows(VOCABULARY):
        ids = torch.from_numpy(row.input_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0].float() / temperature, -1)
        chosen = logprobs[row.prompt_length - 1 : -1].gather(1, ids[row.prompt_length :, None])
        responses.append(chosen.squeeze(1).numpy())
    return probe_vector(responses)


def probe(core: EngineCore) -> NDArray[np.float32]:
    with torch.inference_mode():
        logprobs = core.probe()
    assert logprobs is not None
    return logprobs


@given(st.integers(1, 300_000))
def test_the_sequences_are_fixed_ids_of_the_vocabulary_and_spread_over_it(vocab_size: int) -> None:
    ids = probe_sequences(vocab_size)
    assert ids.shape == (4, 6) and ids.dtype == np.int64
    assert np.array_equal(ids, probe_sequences(vocab_size))
    assert ids.min() >= 0 and ids.max() < vocab_size
    if vocab_size >= 100:
        gaps = np.diff(np.sort(ids.ravel()), prepend=0, append=vocab_size)
        assert gaps.max() < 3 * vocab_size / ids.size and len(np.unique(ids)) == ids.size


def test_rows_split_the_sequences_into_prompt_and_response() -> None:
    rows = probe_rows(VOCABULARY)
    assert np.array_equal([row.input_ids for row in rows], probe_sequences(VOCABULARY))
    assert all(row.prompt_length == PROBE_PREFILL and row.loss_mask.all() for row in rows)


@crossed(("family", "tied"), FAMILIES, [True, False])
def test_it_equals_a_plain_forward(family: str, tied: bool) -> None:
    model = make_model(family, tied=tied)
    core = make_core(model)
    assert isinstance(core._runner._forward, FusedForward)
    logprobs = probe(core)
    assert logprobs.shape == (8,) and logprobs.dtype == np.float32
    np.testing.assert_allclose(logprobs, reference(model), atol=TOLERANCE, rtol=0)


def test_it_equals_a_plain_forward_where_the_module_itself_is_served() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3
    )
    model = GPT2LMHeadModel(config).eval()
    core = make_core(model, max_batched_tokens=6)
    assert isinstance(core._runner._forward, ModuleForward)
    np.testing.assert_allclose(probe(core), reference(model), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("temperature", "applied"), [(0.7, 0.7), (2.0, 2.0), (0.0, 1.0)])
def test_the_runs_temperature_is_applied(temperature: float, applied: float) -> None:
    model = make_model()
    core = make_core(model, temperature=temperature)
    np.testing.assert_allclose(probe(core), reference(model, applied), atol=TOLERANCE, rtol=0)


def goes_stale(part: Projection) -> None:
    """An update does not reach it: it has a copy of the weights as they are."""
    part._weight = part._weight.clone()
    part._transposed = part._weight.t()


def stale_head(core: EngineCore) -> None:
    goes_stale(core._runner._forward._head)  # type: ignore[attr-defined]


def stale_qkv(core: EngineCore) -> None:
    goes_stale(core._runner._forward._layers[1].qkv)  # type: ignore[attr-defined]


def stale_gate_up(core: EngineCore) -> None:
    goes_stale(core._runner._forward._layers[0].gate_up)  # type: ignore[attr-defined]


@mostly_slow("go_stale", [stale_head, stale_qkv, stale_gate_up], quick=[stale_qkv])
def test_a_tensor_that_an_update_does_not_reach_is_noticed(go_stale: Callable[[EngineCore], None]) -> None:
    old, new = make_model(), make_model()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-2)
    core = make_core(old)
    go_stale(core)
    np.testing.assert_allclose(probe(core), reference(old), atol=TOLERANCE, rtol=0)
    activate(core, 1, new)
    assert np.abs(probe(core) - reference(new)).max() > 100 * TOLERANCE


def test_a_packed_copy_that_is_not_made_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.engines.rollout.native.fused_forward.PACKED_FROM", 0)
    core = make_core(make_model())
    monkeypatch.setattr(core._runner._forward, "refresh", lambda: None)
    new = make_model(seed=1)
    activate(core, 1, new)
    assert np.abs(probe(core) - reference(new)).max() > 100 * TOLERANCE


@mostly_slow("policy", OnUpdate, quick=[OnUpdate.KEEP])
def test_probing_at_any_time_changes_no_token(policy: OnUpdate) -> None:
    requests = [make_request(i, stop_token_ids=(1, 3)) for i in range(5)]
    outcomes = []
    for probing in (False, True):
        core = make_core(make_model(), slots=3)
        core.ask(requests, "owner")
        groups = []
        while len(groups) < len(requests):
            groups += steps(core, 2)
            if probing:
                probe(core)
            core.pause(policy)
            groups += finish(core)
            if probing:
                probe(core)
            core.resume()
        outcomes.append((tokens_of(groups), [r.logprobs.tolist() for g in groups for r in g.tokens]))
    assert outcomes[0] == outcomes[1]


def test_probing_is_no_activity_of_the_rollout() -> None:
    core = make_core(make_model())
    probe(core)
    stats = core.stats()
    assert stats.busy == [] and stats.prefilled_tokens == stats.generated_tokens == 0


def test_a_context_that_is_too_short_cannot_tell() -> None:
    assert make_core(make_model(), max_context=5).probe() is None
    assert probe(make_core(make_model(), max_context=6)).shape == (8,)


def test_asleep_it_needs_the_weights() -> None:
    core = make_core(make_model())
    core.pause(OnUpdate.KEEP)
    expected = probe(core)
    core.sleep()
    assert np.array_equal(probe(core), expected)
    core.weights.memory.move_out()
    with pytest.raises(RunError, match="sleep; call wake"):
        core.probe()
    core.wake()
    assert np.array_equal(probe(core), expected)
    core.sleep(keep_weights=False)
    with pytest.raises(RunError, match=r"cannot probe: .*given up"):
        core.probe()


@pytest.mark.parametrize("dual_buffer", [True, False])
async def test_after_an_update_it_equals_the_sender(dual_buffer: bool) -> None:
    new = make_model(seed=3)
    async with serving(Source(new), dual_buffer=dual_buffer, temperature=0.5) as engine:
        await engine.pause(OnUpdate.KEEP)
        before = await engine.probe()
        await engine.stage_weights(1)
        if dual_buffer:
            assert np.array_equal(await engine.probe(), before)
        else:
            with pytest.raises(RunError, match=r"cannot probe: .* call activate\(1\)"):
                await engine.probe()
        await engine.activate(1)
        np.testing.assert_allclose(await engine.probe(), reference(new, 0.5), atol=TOLERANCE, rtol=0)
