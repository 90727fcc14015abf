"""Sleep gives memory back, really, and nothing that was asked for is lost by it."""

from __future__ import annotations

import asyncio
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import OnUpdate
from headway.engines.rollout.native.fused_forward import FusedForward
from headway.engines.rollout.native.native_core import EngineCore
from headway.engines.weights.served_weights import WeightMemory
from headway.errors import RunError
from tests.engines.rollout.serving import MODEL, Source, collect, endless, serving
from tests.engines.rollout.support import (
    FAMILIES,
    assert_logprobs,
    finish,
    make_core,
    make_model,
    make_request,
    served_tensors,
    steps,
    tokens_of,
)
from tests.tiers import crossed, mostly_slow

NEW = make_model(seed=3)
GREEDY = 100
"""Requests from this number on are greedy."""
either_buffer = pytest.mark.parametrize("dual_buffer", [True, False], ids=["dual", "in place"])


def device_bytes(core: EngineCore) -> int:
    """Of every tensor that the forward pass reads a weight from, joined ones included; each storage once."""
    forward = core._runner._forward
    assert isinstance(forward, FusedForward)
    tensors = [forward._embedding.weight, forward._final_norm.weight, *served_tensors(core).values()]
    parts: list[Any] = [forward._head]
    for layer in forward._layers:
        tensors += [layer.input_norm, layer.mlp_norm]
        parts += [layer.qkv, layer.out, layer.gate_up, layer.down]
        tensors += [] if layer.head_norms is None else [*layer.head_norms.weights]
    tensors += [tensor for part in parts for tensor in (part._weight, part._bias) if tensor is not None]
    storages = {id(tensor): tensor.untyped_storage() for tensor in tensors}.values()
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def full_bytes(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def asleep(core: EngineCore, *, keep_weights: bool) -> EngineCore:
    core.pause(OnUpdate.INTERRUPT)
    core.sleep(keep_weights=keep_weights)
    return core


@crossed(("family", "tied"), FAMILIES, [True, False])
def test_without_its_weights_an_engine_holds_none_of_them(family: str, tied: bool) -> None:
    model = make_model(family, tied=tied)
    core = make_core(model)
    assert device_bytes(core) == full_bytes(model)
    asleep(core, keep_weights=False)
    assert device_bytes(core) == core.weights.memory.nbytes == 0
    core.wake()
    assert device_bytes(core) == core.weights.memory.nbytes == full_bytes(model)


@pytest.mark.parametrize("keep_weights", [True, False])
def test_the_kv_cache_is_freed_and_taken_again(keep_weights: bool) -> None:
    core = make_core(MODEL)
    cache = weakref.ref(core._runner.cache._kv)
    asleep(core, keep_weights=keep_weights)
    assert cache() is None
    core.wake()
    assert core._runner.cache._kv.count_nonzero() == 0


@pytest.mark.parametrize("keep_weights", [True, False])
def test_copies_of_the_weights_are_freed_and_made_again(keep_weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.engines.rollout.native.fused_forward.PACKED_FROM", 0)
    core = make_core(MODEL)
    forward = core._runner._forward
    assert isinstance(forward, FusedForward)
    projections = forward._projections
    asleep(core, keep_weights=keep_weights)
    assert all(projection._packed is None for projection in projections)
    core.wake()
    assert all(projection._packed is not None for projection in projections)


def test_prompts_that_were_prefilled_for_later_are_freed_too() -> None:
    core = make_core(MODEL, slots=2)
    core.ask([make_request(0, n=4)], "owner")
    steps(core, 1)
    (prefilled,) = core._batch.contexts._prefills.values()
    kept = weakref.ref(prefilled.kv)
    del prefilled
    core.pause(OnUpdate.KEEP)
    core.sleep()
    assert kept() is None


def test_weights_that_are_kept_stay_where_they_are_on_a_cpu() -> None:
    core = make_core(MODEL)
    addresses = [tensor.data_ptr() for tensor in served_tensors(core).values()]
    asleep(core, keep_weights=True)
    core.wake()
    assert [tensor.data_ptr() for tensor in served_tensors(core).values()] == addresses


def test_weights_that_move_to_the_host_come_back_unchanged() -> None:
    core = make_core(MODEL)
    requests = [make_request(i, stop_token_ids=()) for i in range(3)]
    core.ask(requests, "owner")
    steps(core, 3)
    asleep(core, keep_weights=True)
    core.weights.memory.move_out()
    core.weights.memory.move_out()
    assert core.weights.memory.nbytes == 0
    core.wake()
    core.resume()
    undisturbed = make_core(MODEL)
    undisturbed.ask(requests, "owner")
    assert tokens_of(finish(core)) == tokens_of(finish(undisturbed))


def test_kept_weights_can_still_be_given_up() -> None:
    core = asleep(make_core(MODEL), keep_weights=True)
    core.weights.memory.move_out()
    core.sleep(keep_weights=False)
    assert core.weights.memory.nbytes == 0
    core.wake()
    with pytest.raises(RunError, match="given up"):
        core.resume()


def test_memory_that_several_tensors_share_is_taken_once() -> None:
    joint = torch.arange(6.0)
    memory = WeightMemory([joint[:2], joint[2:], joint.view(2, 3)])
    assert memory.nbytes == 24 and memory.there
    memory.move_out()
    assert memory.nbytes == 0 and not memory.there
    memory.restore()
    memory.restore()
    assert torch.equal(joint, torch.arange(6.0))
    memory.drop()
    memory.allocate()
    assert memory.there and joint.untyped_storage().nbytes() == 24


def test_weights_from_a_mapped_file_can_be_given_up(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    core = EngineCore(
        model,
        name="replica",
        seed=7,
        slots=2,
        max_context=16,
        max_batched_tokens=16,
        decode=str,
        clock=float,
    )
    asleep(core, keep_weights=False)
    assert device_bytes(core) == 0


def assert_theirs(groups: list[Group], model_of: dict[int, PreTrainedModel]) -> None:
    """Log-probs are those of each token's version, and greedy tokens the best; all versions sampled something."""
    assert_logprobs(groups, model_of)
    responses = [(group, k, response) for group in groups for k, response in enumerate(group.tokens)]
    assert {int(version) for _, _, response in responses for version in response.versions} == set(model_of)
    for group, k, response in responses:
        for version, model in model_of.items():
            mine = response.versions == version
            if group.number >= GREEDY:
                assert np.array_equal(likeliest(model, group, k)[mine], response.ids[mine])


def likeliest(model: PreTrainedModel, group: Group, k: int) -> NDArray[np.int64]:
    """[T] the best token at each place of a response, given what is before it."""
    prompt, response = group.tokens[0].prompt_ids, group.tokens[k].ids
    context = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    with torch.no_grad():
        return model(input_ids=context[None]).logits[0, len(prompt) - 1 : -1].argmax(-1).numpy()


def endless_greedy(number: int) -> Group:
    assert number >= GREEDY
    return endless(number, n=2, temperature=0.0)


@mostly_slow(
    ("dual_buffer", "keep_weights", "wake_first"),
    product([True, False], repeat=3),
    quick=[(True, False, False), (False, True, True)],
)
async def test_new_weights_reach_an_engine_asleep_and_everything_goes_on_from_there(
    dual_buffer: bool, keep_weights: bool, wake_first: bool
) -> None:
    async with serving(Source(NEW), dual_buffer=dual_buffer) as engine:
        sampled = asyncio.create_task(collect(engine, [endless(0), endless(1)]))
        greedy = asyncio.create_task(collect(engine, [endless_greedy(GREEDY)]))
        while (await engine.stats()).running < 8:
            pass
        await engine.pause(OnUpdate.INTERRUPT)
        await engine.sleep(keep_weights=keep_weights)
        assert (engine._core.weights.memory.nbytes == 0) is not keep_weights
        if wake_first:
            await engine.wake()
            if not keep_weights:
                with pytest.raises(RunError, match=r"cannot resume: .*given up"):
                    await engine.resume()
        await engine.stage_weights(1)
        await engine.activate(1)
        if not wake_first:
            with pytest.raises(RunError, match="while asleep; call wake"):
                await engine.resume()
            await engine.wake()
        await engine.resume()
        later = await collect(engine, [make_request(2), endless_greedy(GREEDY + 1)])
        assert_theirs([*await sampled, *await greedy], {0: MODEL, 1: NEW})
    assert_theirs(later, {1: NEW})


@either_buffer
async def test_an_engine_that_lost_its_weights_says_so_until_a_version_is_active(dual_buffer: bool) -> None:
    source = Source(NEW)
    async with serving(source, dual_buffer=dual_buffer) as engine:
        waiting = asyncio.create_task(collect(engine, [make_request(0)]))
        await engine.pause(OnUpdate.INTERRUPT)
        await engine.sleep(keep_weights=False)
        await engine.wake()
        source.break_after = 0
        with pytest.raises(RunError, match="the sender is gone"):
            await engine.stage_weights(1)
        with pytest.raises(RunError, match=r"cannot resume: .*given up"):
            await engine.resume()
        source.break_after = None
        await engine.stage_weights(2)
        with pytest.raises(RunError, match="cannot resume"):
            await engine.resume()
        await engine.activate(2)
        await engine.resume()
        await waiting


async def test_an_engine_is_not_put_to_sleep_while_it_decodes() -> None:
    async with serving() as engine:
        with pytest.raises(RunError, match="pause it first"):
            await engine.sleep(keep_weights=False)
        assert len(await collect(engine, [make_request(0)])) == 1
