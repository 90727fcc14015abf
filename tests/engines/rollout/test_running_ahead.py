"""A step is launched before the tokens of the one before are read: nothing of what is sampled changes by that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import OnUpdate
from headway.devices import KINDS, Cpu
from headway.engines.host_copies import to_device, to_host
from headway.engines.rollout.native import decode_batch
from headway.errors import NonFinite
from tests.engines.rollout.support import (
    AskedCore,
    activate,
    assert_logprobs,
    finish,
    make_core,
    make_model,
    make_request,
    steps,
)
from tests.tiers import mostly_slow

MODELS = [make_model(seed=seed) for seed in range(3)]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.0},
    {"repetition_penalty": 1.7, "top_k": 9},
    {"min_tokens": 6, "logit_bias": ((1, 2.0),)},
    {"stop": ("3", "17 2")},
    {"min_p": 0.05, "max_tokens": 3},
]


class Ahead(Cpu):
    """A CPU that is taken for a device that works beside the thread."""

    runs_ahead = 1


def asked(core: AskedCore, numbers: Sequence[int]) -> None:
    core.ask([make_request(i, n=1 + i % 3, **SAMPLINGS[i % len(SAMPLINGS)]) for i in numbers], "owner")


def told(groups: Sequence[Group]) -> dict[tuple[int, int], tuple[Any, ...]]:
    """All that was sampled, to the bit, by (number, k)."""
    return {
        (group.number, k): (
            row.ids.tolist(),
            row.logprobs.tobytes(),
            row.versions.tolist(),
            group.trajectories[k].finish_reason,
        )
        for group in groups
        for k, row in enumerate(group.tokens)
    }


def of_both(play: Callable[[AskedCore], list[Group]], **settings: Any) -> list[list[Group]]:
    """What ``play`` gives where each step's tokens are read at once, and where the next one is launched before."""
    groups = []
    for kind in (Cpu(), Ahead()):
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setitem(KINDS, "cpu", kind)
            groups.append(play(make_core(MODELS[0], **settings)))
    return groups


def test_ends_and_updates_behind_a_drain_give_the_same_tokens_with_few_slots() -> None:
    def play(core: AskedCore) -> list[Group]:
        asked(core, range(9))
        groups = steps(core, 7)
        core.pause(OnUpdate.DRAIN)
        asked(core, range(9, 12))
        groups += finish(core)
        activate(core, 1, MODELS[1])
        core.resume()
        return groups + finish(core)

    at_once, ahead = of_both(play, slots=5)
    assert told(at_once) == told(ahead)
    assert len(ahead) == 12
    assert_logprobs([group for group in ahead if group.number % len(SAMPLINGS) == 0], dict(enumerate(MODELS)))


@mostly_slow("before", [1, 2, 5], quick=[2])
def test_interrupts_aborts_and_updates_in_between_find_every_token_that_was_launched(before: int) -> None:
    def play(core: AskedCore) -> list[Group]:
        asked(core, range(8))
        groups = steps(core, before)
        core.pause(OnUpdate.INTERRUPT)
        activate(core, 1, MODELS[1])
        core.resume()
        asked(core, range(8, 11))
        groups += steps(core, before)
        groups += core.abort_groups([0, 4, 9])
        groups += steps(core, 2)
        core.pause(OnUpdate.KEEP)
        activate(core, 2, MODELS[2])
        core.resume()
        groups += steps(core, 2)
        core.ask([make_request(11, n=2)], "owner")
        core.abort_older_than(1)
        return groups + finish(core)

    at_once, ahead = of_both(play, slots=40, max_batched_tokens=1000)
    assert told(at_once) == told(ahead)
    assert {version for *_, versions, _ in told(ahead).values() for version in versions} == {0, 1, 2}


def test_all_goes_on_when_memory_runs_short_and_rows_are_parked() -> None:
    of_token = 4 * 2 * 2 * 2 * 12

    def play(core: AskedCore) -> list[Group]:
        core.ask([make_request(i, n=2, stop_token_ids=(), max_tokens=40) for i in range(6)], "owner")
        return finish(core)

    for groups in of_both(play, slots=12, kv_cache_bytes=5 * 64 * of_token):
        assert sorted(group.number for group in groups) == list(range(6))
        assert all(len(row.ids) == 40 for group in groups for row in group.tokens)
        assert_logprobs(groups, {0: MODELS[0]})


def test_each_step_is_launched_before_the_tokens_of_the_one_before_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def watched(tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
        order.append("launch")
        read = to_host(tensors)

        def reading() -> Any:
            order.append("read")
            return read()

        return reading

    monkeypatch.setattr(decode_batch, "to_host", watched)
    monkeypatch.setitem(KINDS, "cpu", Ahead())
    core = make_core(MODELS[0])
    core.ask([make_request(0, n=3, max_tokens=5, stop_token_ids=())], "owner")
    finish(core)
    # No sixth step: that all answers end with the fifth is known without their tokens.
    assert order == ["launch", *4 * ["launch", "read"], "read"]


def test_a_batch_that_does_not_change_brings_nothing_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def counted(arrays: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
        copies[-1] += bool(arrays)
        return to_device(arrays, device)

    monkeypatch.setattr(decode_batch, "to_device", counted)
    monkeypatch.setitem(KINDS, "cpu", Ahead())
    core = make_core(MODELS[0])
    core.ask([make_request(0, n=3, max_tokens=40, stop_token_ids=(), top_p=0.9)], "owner")
    core.ask([make_request(1, n=1, max_tokens=30, stop_token_ids=(), temperature=0.5)], "owner")
    with torch.inference_mode():
        while core.has_work:
            copies.append(0)
            core.step()
    changed = [step for step, count in enumerate(copies) if count]
    assert max(copies) == 1
    # As calls start; every 16 steps, for the uniform numbers; when an answer has ended, found one step late.
    assert changed == [0, 16, 31]


def test_logits_that_are_not_finite_end_decoding_also_where_a_command_finds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KINDS, "cpu", Ahead())
    core = make_core(MODELS[0])
    core.ask([make_request(0, n=2)], "owner")
    steps(core, 2)
    with torch.no_grad():
        core._runner._forward._final_norm.weight.fill_(np.nan)  # type: ignore[attr-defined]
    steps(core, 1)
    for found_by in (lambda: core.pause(OnUpdate.KEEP), core.step):
        with pytest.raises(NonFinite, match="under version 0"), torch.inference_mode():
            found_by()
