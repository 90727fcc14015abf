"""Pause, resume, abort, sleep: nothing is lost, nothing is sampled twice."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import OnUpdate, Priority
from headway.data.types import FinishReason
from headway.errors import RunError
from tests.engines.rollout.support import (
    AskedCore,
    activate,
    assert_logprobs,
    finish,
    make_core,
    make_model,
    make_request,
    steps,
    tokens_of,
)
from tests.tiers import mostly_slow

MODEL = make_model()
REQUESTS = [make_request(i, stop_token_ids=(1, 3, 5)) for i in range(6)]


@cache
def undisturbed() -> dict[tuple[int, int], list[int]]:
    core = make_core(MODEL, slots=5)
    core.ask(REQUESTS, "owner")
    return tokens_of(finish(core))


@mostly_slow("policy", OnUpdate, quick=[OnUpdate.DRAIN, OnUpdate.INTERRUPT])
def test_a_pause_without_an_update_changes_no_token(policy: OnUpdate) -> None:
    core = make_core(MODEL, slots=5)
    core.ask(REQUESTS, "owner")
    groups: list[Group] = []
    while len(groups) < len(REQUESTS):
        groups += steps(core, 3)
        core.pause(policy)
        if policy is OnUpdate.DRAIN:
            groups += finish(core)
        assert not core.has_work
        core.resume()
    assert tokens_of(groups) == undisturbed()


def test_a_drain_finishes_what_was_submitted_and_starts_nothing_later() -> None:
    core = make_core(MODEL, slots=2)
    core.ask(REQUESTS[:3], "owner")
    steps(core, 2)
    core.pause(OnUpdate.DRAIN)
    core.ask(REQUESTS[3:], "owner")
    assert core.draining
    groups = finish(core)
    assert sorted(g.number for g in groups) == [0, 1, 2]
    assert FinishReason.ABORTED not in {t.finish_reason for g in groups for t in g.trajectories}
    assert not core.draining and core.unfinished() == [3, 4, 5]
    core.resume()
    assert tokens_of(groups + finish(core)) == undisturbed()


def test_an_idle_engine_is_drained_at_once() -> None:
    core = make_core(MODEL)
    core.pause(OnUpdate.DRAIN)
    assert not core.draining
    core.ask(REQUESTS[:1], "owner")
    assert not core.has_work
    core.resume()
    assert len(finish(core)) == 1


def test_a_drain_can_be_cut_short_by_a_stronger_pause_or_by_resuming() -> None:
    core = make_core(MODEL, slots=4)
    core.ask(REQUESTS[:2], "owner")
    steps(core, 2)
    core.pause(OnUpdate.DRAIN)
    core.ask(REQUESTS[2:], "owner")
    assert core.pause(OnUpdate.INTERRUPT).interrupted > 0
    assert not core.draining and not core.has_work
    core.resume()
    core.pause(OnUpdate.DRAIN)
    core.resume()
    assert not core.draining
    assert sorted(g.number for g in finish(core)) == list(range(6))


def test_an_interrupt_counts_only_what_was_decoding() -> None:
    core = make_core(MODEL, slots=6)
    core.ask([make_request(i, stop_token_ids=()) for i in range(3)], "owner")
    assert core.pause(OnUpdate.INTERRUPT).interrupted == 0
    core.resume()
    steps(core, 1)
    assert core.pause(OnUpdate.INTERRUPT).interrupted == 6
    assert core.pause(OnUpdate.INTERRUPT).interrupted == 0
    assert core.stats().waiting == 12


def test_a_keep_can_still_become_an_interrupt() -> None:
    core = make_core(MODEL, slots=5)
    core.ask(REQUESTS, "owner")
    groups = steps(core, 2)
    assert core.pause(OnUpdate.KEEP).interrupted == 0
    assert core.pause(OnUpdate.INTERRUPT).interrupted == 5
    core.resume()
    assert tokens_of(groups + finish(core)) == undisturbed()


def test_interrupted_trajectories_go_on_before_waiting_ones_start() -> None:
    core = make_core(MODEL, slots=4)
    core.ask([make_request(i, stop_token_ids=()) for i in range(3)], "owner")
    steps(core, 3)
    core.pause(OnUpdate.INTERRUPT)
    core.resume()
    assert [g.number for g in finish(core)] == [0, 1, 2]


def test_an_abort_ends_groups_where_they_are_and_only_those() -> None:
    core = make_core(MODEL, slots=7)
    core.ask([make_request(i, stop_token_ids=()) for i in range(4)], "owner")
    core.ask([make_request(1, n=1, priority=Priority.VALIDATION)], "validation")
    steps(core, 3)
    aborted = core.abort_groups([3, 1, 99])
    assert sorted(g.number for g in aborted) == [1, 3]
    by_number = {g.number: g for g in aborted}
    assert sorted(t.length for t in by_number[1].trajectories) == [0, 0, 3, 3]
    assert [t.length for t in by_number[3].trajectories] == [0] * 4
    for group in aborted:
        for trajectory, response in zip(group.trajectories, group.tokens, strict=True):
            assert trajectory.finish_reason is FinishReason.ABORTED
            assert trajectory.length == len(response.ids) and bool(trajectory.version_spans) == bool(trajectory.length)
    assert core.unfinished() == [0, 1, 2]
    rest = finish(core)
    assert sorted(g.number for g in rest) == [0, 1, 2]  # 1 is the validation's
    assert core.abort_groups([0]) == []
    core.abort("owner", [0, 10**6])
    core.abort("nobody", [0])
    assert core.take_finished() == []


def test_an_abort_reaches_what_is_paused_parked_or_held_back() -> None:
    core = make_core(MODEL, slots=4)
    core.ask([make_request(i, stop_token_ids=()) for i in range(2)], "owner")
    steps(core, 2)
    core.pause(OnUpdate.DRAIN)
    core.ask([make_request(2)], "owner")
    assert [g.number for g in core.abort_groups([2])] == [2]
    core.pause(OnUpdate.INTERRUPT)
    assert [g.number for g in core.abort_groups([0])] == [0]
    core.resume()
    assert [g.number for g in finish(core)] == [1]


def test_a_drain_ends_when_the_rest_is_aborted() -> None:
    core = make_core(MODEL)
    core.ask(REQUESTS[:2], "owner")
    steps(core, 1)
    core.pause(OnUpdate.DRAIN)
    core.abort_groups([0, 1])
    assert not core.draining and not core.has_work


def test_what_an_owner_forgets_disappears_without_a_word() -> None:
    core = make_core(MODEL, slots=5)
    core.ask(REQUESTS[:3], "one")
    core.ask(REQUESTS[3:], "other")
    steps(core, 2)
    core.forget("one")
    assert len(core._scheduler) == sum(request.n for request in REQUESTS[3:])
    expected = {key: ids for key, ids in undisturbed().items() if key[0] >= 3}
    assert tokens_of(finish(core)) == expected


def test_sleep_frees_the_cache_and_loses_nothing() -> None:
    core = make_core(MODEL, slots=5)
    core.ask(REQUESTS, "owner")
    groups = steps(core, 2)
    with pytest.raises(RunError, match="pause it first"):
        core.sleep()
    core.pause(OnUpdate.KEEP)
    core.sleep()
    core.sleep()
    assert not hasattr(core._runner.cache, "_kv")
    with pytest.raises(RunError, match="wake"):
        core.resume()
    core.wake()
    core.wake()
    core.resume()
    assert tokens_of(groups + finish(core)) == undisturbed()


class Schedule:
    """Drives a core through random commands, and keeps account of what was asked of it."""

    def __init__(self, core: AskedCore, seed: int) -> None:
        self.core = core
        self.rng = np.random.default_rng(seed)
        self.models = {0: MODEL}
        self.submitted: set[int] = set()
        self.aborted: set[int] = set()
        self.groups: list[Group] = []

    def act(self) -> None:
        match self.rng.integers(8):
            case 0 | 1:
                number = len(self.submitted)
                self.submitted.add(number)
                self.core.ask([make_request(number, n=int(self.rng.integers(1, 5)))], "owner")
            case 2:
                self.core.pause(OnUpdate.INTERRUPT)
                self.update()
            case 3:
                self.core.pause(OnUpdate.DRAIN)
            case 4 if self.submitted:
                number = int(self.rng.choice(sorted(self.submitted)))
                self.aborted.add(number)
                self.groups += self.core.abort_groups([number])
            case 5 if not self.core.has_work:
                self.core.pause(OnUpdate.INTERRUPT)
                keep_weights = bool(self.rng.integers(2))
                self.core.sleep(keep_weights=keep_weights)
                if not keep_weights:
                    self.update()
                self.core.wake()
            case _:
                self.core.resume()
        self.groups += steps(self.core, int(self.rng.integers(1, 6)))

    def update(self) -> None:
        version = len(self.models)
        model = copy.deepcopy(self.models[version - 1])
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        self.models[version] = model
        activate(self.core, version, model)


@mostly_slow("seed", range(4), quick=[3])
def test_random_commands_lose_nothing_and_every_token_is_its_versions(seed: int) -> None:
    schedule = Schedule(make_core(MODEL, slots=6), seed)
    for _ in range(40):
        schedule.act()
    schedule.core.resume()
    schedule.groups += finish(schedule.core)

    assert sorted(g.number for g in schedule.groups) == sorted(schedule.submitted)
    assert schedule.core.unfinished() == []
    for group in schedule.groups:
        for trajectory, response in zip(group.trajectories, group.tokens, strict=True):
            if trajectory.finish_reason is FinishReason.ABORTED:
                assert group.number in schedule.aborted
            assert (np.diff(response.versions) >= 0).all()
    assert_logprobs(schedule.groups, schedule.models)
