"""log π_prox: a stage between queue and trainer where it has ranks of its own, otherwise a part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product

import pytest
from hypothesis import strategies as st

from headway.errors import RunError, StallError, UpdateFailed, WorkerDied
from headway.events import BatchTaken, RunFinished, RunStarted, StageChanged, UpdateFinished
from headway.pipeline.run import Status
from headway.reports.metrics.summary import summary
from tests.pipeline.cases import TICK, Case, cases, faulty, for_each
from tests.pipeline.fake_policies import FakeLogProb, FakeReceiver
from tests.pipeline.fakes import FakeReward, Time, fails
from tests.pipeline.figures import check_figures, replay
from tests.pipeline.invariants import (
    BatchesAhead,
    check_cancelled_at_any_moment,
    check_everything_ahead,
    check_however_it_ended,
)
from tests.pipeline.machines import ROUNDING, overlap
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.pipeline.test_end_of_run import ENDS
from tests.pipeline.test_update_recovery import SCHEDULES, TIMEOUT_S, both_schedules, failed
from tests.tiers import a_share_and_all, a_twentieth_and_all, enough, mostly_slow

STREAMING = ["stream_off_policy", "async_stale", "async_partial"]
"""Modes with four fetches a version."""
RUN_AHEAD = ["one_step_off", "async_stale", "async_partial", "overlapped"]
"""Modes in which a version's first batch may be there before the version is served."""
SHAPES = [(4, 1, 1), (3, 1, 2), (2, 2, 2), (8, 1, 1), (2, 1, 3), (1, 2, 2)]
"""As `cases.SHAPES`, of which most have one batch per version: there nothing can be computed ahead."""


def logp(run: Run) -> FakeLogProb:
    assert run.logp is not None
    return run.logp


def steps(run: Run) -> list[Time]:
    return [span for what, span in run.trainer.computed if what == "an optimizer step"]


def check_versions(run: Run) -> Run:
    """Each batch was asked about once, in order, under the version that it was trained at, and trained on the answer.

    The engine refuses every version but the one that it serves, from the start of the question to its end.
    """
    asked, fetches = [ask.version for ask in logp(run).asked], [fetch.version for fetch in run.of(BatchTaken)]
    # In a run that broke off, one that was asked about may not have reached the trainer, or the other way round.
    both = len(fetches) if run.status is not None else min(len(asked), len(fetches))
    assert asked[:both] == fetches[:both]
    if run.status is not None:
        assert len(asked) == len(fetches)
    for samples, context in zip(run.trainer.steps, run.trainer.contexts, strict=True):
        assert {sample.columns["prox_logprobs"].handle for sample in samples} == {context.version}
    assert run.trainer.proximal == []
    return run


def check_ahead(run: Run) -> Run:
    check_figures(run)
    return check_versions(check_everything_ahead(run))


# ---------------------------------------------------------------------------------------------- on ranks of its own


@mostly_slow(
    ("mode", "ranks"),
    product(MODES, [1, 3]),
    quick=[("on_policy", 1), ("one_step_off", 3), ("stream_off_policy", 1), ("overlapped", 3)],
)
def test_on_ranks_of_its_own_it_computes_every_batch_under_the_version_that_trains_it(mode: str, ranks: int):
    run = check_ahead(Scenario(mode, logp_ranks=ranks, replicas=2, problems=2).run().assert_completed())
    assert len(logp(run).asked) == run.groups["trained"] // 4
    assert {ask.samples for ask in logp(run).asked} == {8}
    assert "LogProb" in {event.stage for event in run.of(StageChanged)}


def test_the_run_names_its_stages_in_the_order_in_which_data_flows():
    run = Scenario("on_policy", total=8, logp_ranks=1).run().assert_completed()
    flow = ["PromptLoader", "Generate", "Reward", "LogProb", "ActorTrain", "ParamUpdate", "Validate"]
    assert run.of(RunStarted)[0].stages == flow
    assert {event.stage for event in run.of(StageChanged)} == set(flow)


@mostly_slow("mode", STREAMING, quick=["async_stale"])
def test_it_works_on_a_versions_next_batches_while_the_trainer_is_busy(mode: str):
    run = Scenario(mode, logp_ranks=1, logp_s=1.0, trainer={"step_s": lambda _: 4.0}).run().assert_completed()
    asked, made = logp(run).asked, steps(run)
    for index, ask in enumerate(asked):
        busy = any(overlap(ask.span, step) for step in made)
        assert busy == (index % 4 > 0), "beside the steps of its version, but for the first"
    assert all(ask.span[1] <= step[0] for ask, step in zip(asked, made, strict=True)), "before the batch's own step"


def test_what_the_trainer_would_have_computed_itself_takes_it_no_time():
    """Twelve fetches in four versions: it waits for the log-probs of each version's first batch alone."""
    timing = {"total": 48, "lengths": lambda _: 1, "slots": 64, "trainer": {"step_s": lambda _: 4.0, "forward_s": 1.0}}
    settings = {"trigger_parameter_sync_step": 3, "staleness_threshold": 1}
    inside = Scenario("async_stale", async_training={**settings, "use_rollout_log_probs": False}, **timing).run()
    beside = Scenario("async_stale", async_training=settings, logp_ranks=1, logp_s=1.0, **timing).run()
    assert inside.assert_completed().ended - beside.assert_completed().ended == 8.0


@mostly_slow("mode", ["one_step_off", "async_partial", "overlapped"], quick=["one_step_off", "overlapped"])
def test_time_in_which_the_trainer_computes_is_no_time_in_which_it_waits_for_groups(mode: str):
    run = Scenario(mode, logp_ranks=1, trainer={"step_s": lambda _: 8.0}).run().assert_completed()
    metrics, _ = replay(run)
    assert metrics.window is not None
    wall = metrics.window[1] - metrics.window[0]
    idle = metrics.occupancy.trainer_idle(metrics.window)
    assert idle is not None
    assert metrics.occupancy.trainer_waits.within(metrics.window) <= idle * wall + ROUNDING
    if mode != "overlapped":  # there it also waits for logp to load each version
        assert summary(metrics)["bottleneck"].startswith("Training was the bottleneck")


@mostly_slow("mode", MODES, quick=["one_step_off", "async_partial", "overlapped"])
def test_it_takes_no_batch_of_a_version_that_the_trainer_has_not_reached(mode: str):
    """It is much faster than the trainer, and much more is generated than the trainer takes."""
    scenario = Scenario(mode, logp_ranks=1, logp_s=0.0, lengths=lambda _: 1, slots=64)
    scenario.trainer = {"step_s": lambda _: 16.0}
    run = check_ahead(scenario.run().assert_completed())
    per_version = run.pipeline.config.groups_per_version // 4
    for index, fetch in enumerate(run.of(BatchTaken)):
        made = sum(end <= fetch.time for _, end in steps(run))
        assert made >= index // per_version * per_version
        assert fetch.version == index // per_version


@mostly_slow("mode", MODES, quick=["on_policy", "async_stale", "overlapped"])
def test_the_first_batch_of_a_version_waits_until_all_its_ranks_serve_it(mode: str):
    def slow(run: Run) -> None:
        run.others[1]._load_s = 5.0

    run = check_ahead(Scenario(mode, logp_ranks=2, script=slow).run().assert_completed())
    served = dict(run.others[1].loads)
    assert run.others[0].loads != run.others[1].loads
    for ask in logp(run).asked:
        assert ask.version == 0 or served[ask.version] <= ask.span[0]
    waited = [ask for ask in logp(run).asked if ask.version and served[ask.version] == ask.span[0]]
    assert waited or mode not in RUN_AHEAD, "groups were there before"


@mostly_slow(
    ("rows", "mode"), product(ENDS.values(), STREAMING), quick=[*zip(ENDS.values(), cycle(STREAMING), strict=False)]
)
def test_when_the_data_gives_out_the_last_batch_is_short_and_an_empty_one_is_not_asked_about(rows: int, mode: str):
    run = check_ahead(Scenario(mode, rows=rows, epochs=1, problems=2, logp_ranks=1).run().assert_completed())
    assert run.groups["trained"] == run.groups["admitted"] == rows
    assert [update.version for update in run.of(UpdateFinished)] == list(range(1, -(-rows // 16) + 1))
    assert [ask.samples for ask in logp(run).asked] == [8] * (rows // 4) + [2 * (rows % 4)] * (rows % 4 > 0)


@mostly_slow("mode", MODES, quick=["one_step_off", "overlapped"])
def test_discards_change_nothing_about_it(mode: str):
    reward = FakeReward(lambda p: fails("unlucky") if p.row % 5 == 2 else [1.0, 1.0] if p.row % 7 == 3 else [0.0, 1.0])
    run = Scenario(mode, reward=reward, filters=True, logp_ranks=1, replicas=3).run()
    check_ahead(run.assert_completed())
    assert run.groups["failed"] > 0 and run.groups["filtered"] > 0
    assert run.version == 6


def test_together_with_a_reference_inside_the_batch_both_columns_arrive():
    run = check_ahead(Scenario("async_partial", logp_ranks=1, reference_on_trainer_ranks=True).run().assert_completed())
    columns = {tuple(sorted(sample.columns)) for samples in run.trainer.steps for sample in samples}
    assert columns == {("advantages", "prox_logprobs", "ref_logprobs")}


# ---------------------------------------------------------------------------------------------- random schedules


def beside(case: Case) -> Scenario:
    """The case with a role that recomputes on up to three ranks, faster or slower than the trainer."""
    scenario = case.scenario()
    scenario.logp_ranks = 1 + case.seed % 3
    scenario.logp_s = case.seed % 5 * 32 * TICK
    return scenario


@a_twentieth_and_all
def test_everything_holds_in_every_run_with_it(share: float):
    """Dozens of whole runs."""
    ends: set[Status | None] = set()
    ahead = 0

    def check(case: Case) -> None:
        nonlocal ahead
        run = check_however_it_ended(beside(case).run(), BatchesAhead, check_ahead)
        ends.add(run.status)
        ahead += any(overlap(ask.span, step) for ask in logp(run).asked for step in steps(run))

    several = st.sampled_from(SHAPES).flatmap(lambda shape: cases(shape=shape, use_rollout_log_probs=False))
    for_each(several, share * 80, check)
    assert Status.COMPLETED in ends
    assert ahead >= enough(20, share), "cases in which nothing is computed ahead prove little"


@pytest.mark.slow
@pytest.mark.parametrize("share", [1], ids=["all"])
def test_a_run_may_be_stopped_at_any_time_and_ends_at_a_version(share: float):
    stopped = 0

    def check(case: Case) -> None:
        nonlocal stopped
        run = check_however_it_ended(beside(case).run(), BatchesAhead, check_ahead)
        stopped += run.status is Status.INTERRUPTED

    for_each(faulty("stop", use_rollout_log_probs=False), share * 60, check)
    assert stopped >= enough(20, share)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1], ids=["all"])
def test_replicas_may_die_join_or_hang_meanwhile(share: float):
    """Takes seconds: many random schedules."""

    def check(case: Case) -> None:
        check_however_it_ended(beside(case).run(), BatchesAhead, check_ahead)

    for_each(faulty("dies", "joins", use_rollout_log_probs=False), share * 30, check)
    limits = {"update_timeout_s": 20.0, "recv_s": 0.25, "load_s": 0.125}
    for_each(faulty("never_receives", "silent on activate", use_rollout_log_probs=False, **limits), share * 20, check)


@a_share_and_all
def test_a_run_with_it_may_be_cancelled_at_any_moment_and_is_over_at_once(share: float):
    check_cancelled_at_any_moment(cases(use_rollout_log_probs=False), 50, share, beside, check_versions)


# ---------------------------------------------------------------------------------------------- failures


def scenario(mode: str, script: Callable[[Run], None]) -> Scenario:
    """Updates, and calls of the role, that do not end within seven seconds are given up; forty without an event."""
    sections = {
        "param_update": {"timeout_s": TIMEOUT_S, "schedule": SCHEDULES[mode]},
        "cluster": {"stall_timeout_s": 40.0},
    }
    return Scenario(mode, replicas=2, logp_ranks=2, sections=sections, script=script)


def first_update(mode: str) -> float:
    return scenario(mode, lambda _: None).run().of(UpdateFinished)[0].time


def never_receives(rank: FakeReceiver) -> None:
    rank.never_receives = True


def never_loads(rank: FakeReceiver) -> None:
    rank.never_loads = True


@mostly_slow(
    ("mode", "hangs"),
    product(SCHEDULES, [never_receives, never_loads]),
    quick=[("async_partial", never_receives), ("overlapped", never_loads)],
)
def test_a_rank_that_says_nothing_during_an_update_ends_the_run_with_its_name(
    mode: str, hangs: Callable[[FakeReceiver], None]
):
    run = failed(
        scenario(mode, lambda run: hangs(run.others[1])),
        UpdateFailed,
        "logp-1 .*did not answer within param_update.timeout_s = 7 s",
    )
    assert run.ended < first_update(mode) + 2 * TIMEOUT_S + 2


@both_schedules
def test_a_rank_that_dies_during_an_update_ends_the_run_with_its_name(mode: str):
    def dies(run: Run) -> None:
        run.others[1].dies_on_receive = WorkerDied("logp-1 was killed")

    run = failed(scenario(mode, dies), WorkerDied, "logp-1 was killed")
    assert run.ended < first_update(mode) + 2 * TIMEOUT_S


def raises(error: BaseException) -> Callable[[], None]:
    def answer() -> None:
        raise error

    return answer


@both_schedules
def test_a_rank_that_dies_while_it_computes_ends_the_run_with_its_name(mode: str):
    def dies(run: Run) -> None:
        logp(run).answers = raises(WorkerDied("logp-1 was killed"))

    run = failed(scenario(mode, dies), WorkerDied, "logp-1 was killed")
    assert run.trainer.steps == []
    assert run.groups["in_flight"] == run.groups["admitted"]


@both_schedules
def test_one_that_does_not_serve_the_version_ends_the_run(mode: str):
    def refuses(run: Run) -> None:
        logp(run).answers = raises(RunError("logp-1 serves version 7"))

    failed(scenario(mode, refuses), RunError, "logp-1 serves version 7")


@both_schedules
def test_ranks_that_compute_for_ever_end_the_run_with_the_stages_name_when_nothing_moves_any_more(mode: str):
    def hangs(run: Run) -> None:
        logp(run).hangs = True

    run = failed(scenario(mode, hangs), StallError, r"LogProb .*\(?1 item\(s\)\)?; ActorTrain waits for LogProb")
    last = [event.time for event in run.events if not isinstance(event, RunFinished) and event.time < run.ended]
    assert run.ended == max(last) + 40.0 or run.ended < first_update(mode) + 2 * 40.0


# ---------------------------------------------------------------------------------------------- on the trainer's ranks


@mostly_slow(
    ("mode", "shape"),
    product(MODES, [(1, 1), (2, 2)]),
    quick=[
        ("on_policy", (2, 2)),
        ("one_step_off", (1, 1)),
        ("stream_off_policy", (1, 1)),
        ("overlapped", (2, 2)),
        ("colocate_sync", (1, 1)),
    ],
)
def test_on_the_trainers_ranks_it_is_asked_once_per_batch_and_before_a_versions_first_step(
    mode: str, shape: tuple[int, int]
):
    """``shape``: mini-batches per batch and epochs. The trainer keeps weights of its own for the later fetches."""
    batches, epochs = shape
    settings = {"use_rollout_log_probs": False, "require_batches": batches}
    run = Scenario(mode, async_training=settings, sections={"actor": {"ppo_epochs": epochs}}).run().assert_completed()
    per_fetch = batches * epochs
    fetches = [fetch.version for fetch in run.of(BatchTaken)]
    assert run.trainer.proximal == [(version, index * per_fetch) for index, version in enumerate(fetches)]
    per_version = run.pipeline.config.groups_per_version // (4 * batches)
    for version in range(6):
        first = fetches.index(version)
        assert run.trainer.proximal[first] == (version, version * per_version * per_fetch)
    for samples, context in zip(run.trainer.steps, run.trainer.contexts, strict=True):
        assert {sample.columns["prox_logprobs"].handle for sample in samples} == {context.version}


def test_where_the_engines_log_probs_are_taken_nobody_is_asked():
    run = Scenario("async_partial").run().assert_completed()
    assert run.trainer.proximal == []
    assert "LogProb" not in {event.stage for event in run.of(StageChanged)}
