"""Runs that are killed and resumed, on the virtual clock."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from headway.errors import NothingToTrain
from headway.events import (
    BatchTaken,
    CriticStepped,
    Event,
    GroupAdmitted,
    GroupSettled,
    Note,
    OptimizerStepped,
    RunStarted,
    UpdatePhase,
    ValidationFinished,
    VersionReached,
)
from headway.pipeline.admission.ledger import Fate, Ledger
from headway.pipeline.admission.message_queue import MessageQueue
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.admission.run_journal import RunJournal
from headway.pipeline.admission.staleness import Staleness
from headway.pipeline.run import Status
from headway.planner.simulation.virtual_clock import run_virtual
from tests.pipeline.cases import TICK, Case, cases, for_each
from tests.pipeline.fake_policies import FakeCritic
from tests.pipeline.fakes import FakeReward, FakeSource, fails
from tests.pipeline.kills import check_history, run_with_kills
from tests.pipeline.scenario import Run, Scenario
from tests.tiers import a_share_and_all, a_twentieth_and_all, enough, mostly_slow

pytestmark = pytest.mark.timeout(600)

SAVES: dict[str, Any] = {"trainer": {"save_freq": 1}}
MODES = [
    "colocate_sync",
    "on_policy",
    "one_step_off",
    "stream_off_policy",
    "async_stale",
    "async_partial",
    "overlapped",
]
kills = st.lists(st.integers(4, 20), min_size=1, max_size=4)
"""Twentieths of an undisturbed run's time that each process lives."""


@a_twentieth_and_all
def test_whatever_is_killed_when_nothing_is_lost_and_nothing_trained_twice(share: float):
    """Takes long in its full share: each drawn case is run whole and killed up to four times."""
    undone = resumed_at = 0

    def check(drawn: tuple[Case, list[float]]) -> None:
        nonlocal undone, resumed_at
        case, moments = drawn
        length = case.scenario().run().ended
        lives = [floor(length * moment / 20 / TICK) * TICK for moment in moments]
        whole = check_history(run_with_kills(case.scenario(), lives))
        undone += sum(event.fate != "in_flight" for event in of(whole.record, GroupSettled)) > len(
            of(whole.surviving, GroupSettled)
        )
        resumed_at += any(version > 0 for version in whole.resumed)

    for_each(st.tuples(st.one_of(cases(save_freq=1), cases(save_freq=2)), kills), share * 100, check)
    least = enough(15, share)  # of 400 cases 125 undo something and 180 resume; hundreds of them differ by half of that
    assert undone > least
    assert resumed_at > least, "runs that start over prove nothing"


@a_share_and_all
@mostly_slow("mode", MODES, quick=["one_step_off", "async_partial"])
def test_any_moment_will_do_in_every_mode(mode: str, share: float):
    """Two runs that are killed, and one to the end, for each of 15 moments or a share of them."""
    scenario = Scenario(mode, sections=SAVES, problems=2, rows=90, epochs=1, replicas=2)
    length = scenario.run().ended
    resumed: set[int] = set()
    for part in range(1, 16, int(1 / share)):
        whole = check_history(run_with_kills(scenario, [length * part / 16, length / 3]))
        resumed.update(whole.resumed)
    assert len(resumed) > enough(3, share)


def of(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def in_mid_run(scenario: Scenario, version: int = 2) -> tuple[Run, dict[str, Any]]:
    """A run to its end, and the driver's state of its checkpoint of ``version``."""
    run = scenario.run().assert_completed()
    return run, json.loads(json.dumps(next(state for _, state in run.trainer.saved if state["version"] == version)))


def resumed(scenario: Scenario, state: dict[str, Any]) -> Run:
    run = replace(scenario, resume_from=state).run()
    if run.error is not None:
        raise run.error
    return run


def test_on_policy_goes_on_as_if_nothing_had_happened():
    """Nothing is in flight at a boundary: the same groups, in the same fetches, at the same steps."""
    scenario = Scenario("on_policy", sections=SAVES, problems=3)
    whole, state = in_mid_run(scenario, version=3)
    rest = resumed(scenario, state)

    def batches(events: list[Event]) -> list[tuple[Any, ...]]:
        rows = {event.number: (event.epoch, event.row, event.attempt) for event in of(events, GroupAdmitted)}
        return [(e.fetch, e.version, [(n, rows[n]) for n in e.numbers]) for e in of(events, BatchTaken)]

    assert batches(rest.events) == batches(whole.events)[3:]
    steps = [(e.step, e.version, e.fetch) for e in rest.of(OptimizerStepped)]
    assert steps == [(e.step, e.version, e.fetch) for e in whole.of(OptimizerStepped)][3:]
    assert rest.of(GroupSettled)[0].fate == "trained"
    assert rest.validated() == whole.validated()[3:]


def test_what_was_open_is_dropped_and_comes_back_first_in_order_as_a_further_attempt():
    scenario = Scenario("async_partial", sections=SAVES)
    _, state = in_mid_run(scenario)
    lost = [(number, epoch, row, attempt) for number, epoch, row, attempt in state["ledger"]["open"]]
    assert len(lost) > 3
    rest = resumed(scenario, state)
    dropped = [(event.number, event.fate, event.reason) for event in rest.of(GroupSettled)[: len(lost)]]
    assert dropped == [(number, "dropped", "resume") for number, *_ in lost]
    back = rest.of(GroupAdmitted)[: len(lost)]
    assert [(e.epoch, e.row, e.attempt) for e in back] == [(epoch, row, attempt + 1) for _, epoch, row, attempt in lost]
    assert back[0].number == state["admitted"], "numbers go on"
    new = rest.of(GroupAdmitted)[len(lost)]
    assert (new.row, new.attempt) == (state["source"]["given"], 0)


def test_what_waited_to_be_run_again_at_the_boundary_comes_before_what_was_open():
    scenario = Scenario("async_partial", sections=SAVES)
    _, state = in_mid_run(scenario)
    state["again"] = [[0, 700, 2], [0, 600, 0]]
    lost = [(epoch, row, attempt + 1) for _, epoch, row, attempt in state["ledger"]["open"]]
    rest = resumed(scenario, state)
    back = [(event.epoch, event.row, event.attempt) for event in rest.of(GroupAdmitted)]
    assert back[: len(lost) + 2] == [(0, 700, 3), (0, 600, 1), *lost]


def test_the_largest_lag_is_waited_for_by_all_that_was_ever_taken():
    """What still fits into a version is counted from the run's first group on."""
    waits = {"order": "ready", "max_lag": 1, "on_overdue": "wait", "staleness_threshold": "1"}
    scenario = Scenario("async_stale", async_training=waits, sections=SAVES)
    _, state = in_mid_run(scenario)
    rest = resumed(scenario, state)
    assert max(lag for step in rest.of(OptimizerStepped) for lag in step.lags) == 1
    assert rest.pipeline._state.queue._taken == rest.groups["trained"] == 96


def test_the_checkpoints_weights_are_served_before_anything_is_admitted():
    """With the initial model there would be room: η = 2 lets two versions' worth of groups ahead of version 1."""
    scenario = Scenario("async_partial", async_training={"staleness_threshold": "2"}, sections=SAVES, replicas=3)
    _, state = in_mid_run(scenario, version=1)
    rest = resumed(scenario, state)
    first = rest.events.index(rest.of(GroupAdmitted)[0])
    served = {e.where for e in of(rest.events[:first], UpdatePhase) if e.phase == "load" and e.version == 1}
    assert served == {"rollout-0", "rollout-1", "rollout-2"}
    assert rest.of(GroupAdmitted)[0].version == 1
    assert {event.version for event in of(rest.events, UpdatePhase)} == {1, 2, 3, 4, 5, 6}


def test_capacity_does_not_grow_by_what_was_trained_before():
    scenario = Scenario("async_stale", sections=SAVES)
    _, state = in_mid_run(scenario, version=4)
    rest = resumed(scenario, state)
    b, eta = scenario.config.groups_per_version, scenario.config.async_training.staleness_threshold
    for event in rest.of(GroupAdmitted):
        assert event.admitted - event.discarded <= (event.version + 1 + eta) * b
    at_first = [event for event in rest.of(GroupAdmitted) if event.version == 4]
    assert max(e.admitted - e.discarded for e in at_first) == (4 + 1 + eta) * b


def test_a_checkpoint_holds_the_boundary_also_where_the_next_version_has_begun_when_it_is_written():
    """Admission goes on while a checkpoint is written; what it lets in is not the checkpoint's."""
    scenario = Scenario("on_policy", sections=SAVES, trainer={"save_s": 8.0})
    run, state = in_mid_run(scenario)
    assert state["ledger"]["open"] == []
    reached = [event for event in run.of(VersionReached) if event.version == 2]
    assert reached[0].groups == {"admitted": 8, "trained": 8, "filtered": 0, "dropped": 0, "failed": 0, "in_flight": 0}


def test_a_run_that_was_interrupted_goes_on_from_its_last_boundary():
    scenario = Scenario("async_partial", script=lambda run: stop_at(run, 20.0))
    first = scenario.run()
    assert first.status is Status.INTERRUPTED
    state = json.loads(json.dumps(first.trainer.saved[-1][1]))
    assert 0 < state["version"] < 6
    rest = resumed(replace(scenario, script=None), state)
    assert (rest.status, rest.version) == (Status.COMPLETED, 6)


def stop_at(run: Run, time: float) -> None:
    import asyncio

    asyncio.get_running_loop().call_at(time, run.request_stop)


def test_a_run_that_was_killed_after_its_last_step_trains_nothing_more_and_validates():
    scenario = Scenario("async_stale", sections=SAVES, problems=2, test_freq=-1)
    whole, state = in_mid_run(scenario, version=6)
    rest = resumed(scenario, state)
    assert rest.status is Status.COMPLETED
    assert (rest.of(GroupAdmitted), rest.of(OptimizerStepped)) == ([], [])
    assert rest.validated() == [6]
    assert rest.groups == whole.groups


def test_a_run_may_be_made_longer():
    scenario = Scenario("async_stale", sections=SAVES)
    whole, state = in_mid_run(scenario, version=6)
    longer = resumed(replace(scenario, total=whole.groups["trained"] + 32), state)
    assert longer.status is Status.COMPLETED
    assert longer.groups["trained"] == whole.groups["trained"] + 32
    assert longer.version == 8


def test_a_run_that_ended_with_its_data_within_a_version_is_over():
    scenario = Scenario("async_stale", sections=SAVES, rows=41, epochs=1)
    whole, state = in_mid_run(scenario, version=3)
    assert state["data_ended"]
    rest = resumed(scenario, state)
    assert rest.version == whole.version == 3
    assert rest.of(OptimizerStepped) == []


@pytest.mark.parametrize(
    ("version", "test_freq", "expected"),
    [(2, 1, [2, 3, 4, 5, 6]), (2, 2, [2, 4, 6]), (3, 2, [4, 6]), (2, 3, [3, 6]), (4, 3, [6]), (2, -1, [6])],
)
def test_validations_go_on_in_step(version: int, test_freq: int, expected: list[int]):
    """The checkpoint's version is validated again where it was due: its result may not have been told."""
    scenario = Scenario("one_step_off", sections=SAVES, problems=2, test_freq=test_freq)
    _, state = in_mid_run(scenario, version)
    assert [event.version for event in of(resumed(scenario, state).events, ValidationFinished)] == expected


@mostly_slow("inside", [True, False], quick=[True])
def test_the_critics_turns_go_on(inside: bool):
    def scenario() -> Scenario:
        return Scenario("async_stale", sections=SAVES, critic=FakeCritic(), critic_on_trainer_ranks=inside)

    whole, state = in_mid_run(scenario())
    assert state["critic"]["steps"] == sum(event.version < 2 for event in whole.of(CriticStepped))
    rest = resumed(scenario(), state)
    steps = [(event.step, event.fetch, event.version) for event in rest.of(CriticStepped)]
    assert steps == [(e.step, e.fetch, e.version) for e in whole.of(CriticStepped) if e.version >= 2]


def test_roles_that_hold_the_policy_get_the_checkpoints_version_too():
    scenario = Scenario("async_partial", sections=SAVES, logp_ranks=2)
    _, state = in_mid_run(scenario)
    rest = resumed(scenario, state)
    assert [other.loads[0][0] for other in rest.others] == [2, 2]


def test_the_guard_keeps_what_it_lowered():
    scenario = Scenario("async_stale", async_training={"staleness_threshold": "1"}, sections=SAVES)
    _, state = in_mid_run(scenario)
    state["eta_now"] = "1/2"
    state["guard"]["clip_scale"] = 0.25

    def guarded(action: str) -> Run:
        guard = {"algorithm": {"guard": {"min_ess": 0.5, "action": action}}}
        return resumed(replace(scenario, sections={**SAVES, **guard}), state)

    lowered = guarded("lower_eta").pipeline
    assert lowered._state.staleness.eta == Fraction(1)
    assert lowered._state.staleness.eta_now == Fraction(1, 2)
    assert lowered._wiring.actor.guard.clip_scale == 1.0
    tightened = guarded("tighten").pipeline
    assert (tightened._state.staleness.eta_now, tightened._wiring.actor.guard.clip_scale) == (Fraction(1), 0.25)


def test_a_resumed_run_that_is_stopped_before_it_reaches_a_boundary_leaves_its_checkpoint_as_it_is():
    scenario = Scenario("async_partial", sections=SAVES)
    _, state = in_mid_run(scenario)
    rest = replace(scenario, resume_from=state, script=lambda run: stop_at(run, 0.125)).run()
    assert rest.status is Status.INTERRUPTED
    assert (rest.version, rest.trainer.saved) == (2, [])


def test_a_resumed_run_says_what_holds_now():
    scenario = Scenario("async_partial", sections=SAVES)
    _, state = in_mid_run(scenario)
    rest = resumed(replace(scenario, replicas=2, total=64 + 16), state)
    (started,) = rest.of(RunStarted)
    assert (started.total_groups, list(started.slots)) == (80, ["rollout-0", "rollout-1"])
    assert [event.version for event in rest.of(VersionReached)] == [3, 4, 5], "the boundary itself is told already"


def test_a_prompt_that_the_data_do_not_have_any_more_gives_way_to_the_next_one():
    scenario = Scenario("async_partial", sections=SAVES)
    _, state = in_mid_run(scenario)
    (number, epoch, _, attempt), *others = state["ledger"]["open"]
    gone = {**state, "ledger": {**state["ledger"], "open": [(number, epoch, 10**6, attempt), *others]}}
    back = resumed(scenario, gone).of(GroupAdmitted)[: 1 + len(others)]
    rows = [row for _, _, row, _ in others]
    assert [event.row for event in back] == [state["source"]["given"], *rows]


@mostly_slow("mode", ["one_step_off", "stream_off_policy", "async_stale", "async_partial"], quick=["async_stale"])
def test_on_other_replicas_and_episode_workers_groups_keep_their_numbers_and_batches(mode: str, tmp_path: Path):
    """Four replicas and two episode workers, then two and one, then three and four."""
    scenario = Scenario(mode, sections=SAVES, replicas=4, episode_workers=2)
    length = scenario.run().ended
    changes = [{"replicas": 2, "episode_workers": 1}, {"replicas": 3, "episode_workers": 4}]
    whole = check_history(
        run_with_kills(replace(scenario, journal=tmp_path / "journal"), [length * 3 / 5, length / 2], changes)
    )
    assert len(whole.resumed) == 2
    assert whole.resumed[0] > 0
    rows: dict[int, tuple[int, int, int]] = {}
    for event in of(whole.record, GroupAdmitted):
        row = event.epoch, event.row, event.attempt
        assert rows.setdefault(event.number, row) == row
    batches: dict[int, list[int]] = {}
    for taken in of(whole.record, BatchTaken):
        assert taken.numbers == batches.setdefault(taken.fetch, taken.numbers)
    assert not [event for event in of(whole.record, GroupSettled) if event.reason == "resume"]


def test_groups_that_failed_in_a_row_do_not_end_the_resumed_run_at_once(tmp_path: Path):
    scenario = Scenario("async_stale", sections=SAVES, journal=tmp_path / "journal")
    down = FakeReward(lambda prompt: fails("down") if prompt.row >= 48 else [0.0, 1.0])
    failed = replace(scenario, reward=down).run()
    assert isinstance(failed.error, NothingToTrain)
    state = json.loads(json.dumps(failed.trainer.saved[-1][1]))
    rest = resumed(scenario, state)
    assert rest.status is Status.COMPLETED


def test_failed_episodes_of_a_group_that_ended_are_counted_once(tmp_path: Path):
    """The checkpoint's ledger has them, as the group was made before it, and ended behind it."""
    config = Scenario("async_stale", n=4).config
    made = FakeSource(8, 1).next()

    def life() -> RunState:
        staleness = Staleness(Fraction(1), config.groups_per_version, 1, None, loaded={"rollout-0": 0})
        journal = RunJournal(tmp_path, config)
        return RunState(staleness, Ledger(4), MessageQueue(staleness), lambda _: None, journal=journal)

    async def main() -> None:
        first = life()
        first.journal.boundary(0, 0)
        number = first.admit(made)
        first.ledger.episodes_failed(number, 3)
        saved = json.loads(json.dumps(first.state()))
        first.discard(number, Fate.FAILED, "no answer")
        second = life()
        second.restore(saved, open_prompts=[made], again=[], eta_now=Fraction(1))
        assert second.admit(made) is None
        assert second.ledger.episode_counts()["failed"] == first.ledger.episode_counts()["failed"] == 4

    run_virtual(main())


@mostly_slow("moment", [1.0, 2.0, 4.0], quick=[2.0])
def test_a_stop_does_not_say_that_a_batch_did_not_come_again(moment: float, tmp_path: Path):
    scenario = Scenario("async_partial", sections=SAVES, journal=tmp_path / "journal")
    _, state = in_mid_run(scenario, version=5)
    rest = replace(scenario, resume_from=state, script=lambda run: stop_at(run, moment)).run()
    assert rest.status is Status.INTERRUPTED
    assert not [event for event in rest.of(Note) if "other groups than before" in event.text]


@pytest.mark.slow
def test_a_group_that_is_made_again_too_old_for_its_batch_is_dropped(tmp_path: Path):
    """Simulated answers are in no journal, as those of an episode worker that does not see it: groups are admitted
    earlier than before, where others that ended before them end at once.
    """
    case = Case(
        seed=3770,
        shared=True,
        overlapped=False,
        eta=Fraction(3, 2),
        fetches_per_version=1,
        require_batches=1,
        mini_batch=1,
        ppo_epochs=2,
        versions=5,
        by_epochs=False,
        short_by=0,
        admission="group",
        order="ready",
        window=1,
        on_update="interrupt",
        max_lag=0,
        on_overdue="drop",
        replicas=4,
        slots=7,
        kv_tokens=150,
        prefill_s=0.125,
        prefill_token_s=0.0,
        recv_s=0.25,
        load_s=0.125,
        n=2,
        problems=4,
        test_freq=2,
        save_freq=3,
        failing=0.2,
        flat=0.0,
        nonfinite=0.0,
        step_s=4.0,
        reward_s=1.0,
        longest=120,
        reference="inside the batch",
        use_rollout_log_probs=False,
    )
    killed_at = floor(case.scenario().run().ended * 19 / 20 / TICK) * TICK
    whole = check_history(run_with_kills(replace(case.scenario(), journal=tmp_path / "journal"), [killed_at]))
    assert whole.resumed == [3]
    (note,) = of(whole.record, Note)
    assert note.text == "version 4 is trained on other groups than before: not all of [9] came again"
    assert [event.reason for event in of(whole.surviving, GroupSettled) if event.number == 9] == ["overdue"]
