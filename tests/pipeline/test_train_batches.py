"""Fetches: which groups the trainer takes at once, from the first one, which may wait for a full queue, to the last."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby, product
from math import floor

import pytest

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.types import TrainSample, TrajectoryId
from headway.events import BatchTaken, GroupAdmitted, GroupRewarded, GroupSettled, OptimizerStepped, UpdateFinished
from headway.pipeline.admission.ledger import Fate, Ledger
from headway.pipeline.admission.message_queue import MessageQueue
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.admission.staleness import Staleness
from headway.pipeline.admission.train_batches import TrainBatch, TrainBatches
from headway.pipeline.run import Status
from headway.planner.simulation.virtual_clock import Deadlock, run_virtual
from tests.pipeline.books import Books, Rules
from tests.pipeline.cases import Case, cases, faulty, for_each
from tests.pipeline.fake_policies import FakeCritic
from tests.pipeline.fakes import FakeReward, fails, prompt
from tests.pipeline.invariants import check_everything, check_however_it_ended
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.pipeline.test_end_of_run import ENDS
from tests.tiers import a_share_and_all, mostly_slow

# ---------------------------------------------------------------------------------------------- taken alone

B = 4
"""Groups of a version, in two fetches."""


class Alone:
    """`TrainBatches` over a queue that the test fills, and a trainer that the test is."""

    def __init__(self, *, total: int | None = None, fill_first: bool = False, eta: int = 1) -> None:
        staleness = Staleness(Fraction(eta), B, 1, total, {"rollout-0": 0})
        self.state = RunState(staleness, Ledger(), MessageQueue(staleness), lambda _: None)
        self.fetches = TrainBatches(self.state, 2, fill_first=fill_first)

    async def comes(self, count: int) -> None:
        for _ in range(count):
            await self.rewarded(self.admitted())

    def admitted(self) -> int:
        row = self.state.ledger.admitted
        return self.state.admit(prompt(0, row))

    async def rewarded(self, number: int) -> None:
        self.state.rewarded(number)
        await self.state.queue.send(Group(number, prompt(0, number), 1, SamplingParams(1)))

    def trains(self, fetch: TrainBatch | None) -> None:
        assert fetch is not None
        for group in fetch.groups:
            self.state.consume(group.number, Fate.TRAINED, lag=0)

    async def asks(self) -> asyncio.Future[TrainBatch | None]:
        """A request, after everything that can happen at once did."""
        asked = asyncio.ensure_future(self.fetches.get())
        await asyncio.sleep(1.0)
        return asked


def numbers(fetch: TrainBatch | None) -> list[int] | None:
    return None if fetch is None else [group.number for group in fetch.groups]


@pytest.mark.parametrize(
    ("consumed", "fetching", "took"),
    [
        (0, 0, False),
        (0, 3, False),
        (0, 4, True),
        (2, 1, False),
        (2, 2, True),
        (3, 1, True),
        (4, 0, False),
        (4, 3, False),
        (6, 2, True),
    ],
)
def test_a_version_is_taken_when_all_that_it_trains_is_and_not_all_of_it_consumed(
    consumed: int, fetching: int, took: bool
):
    state = Alone().state
    state.consumed, state.in_training = consumed, fetching
    assert state.took_version is took


def test_the_next_versions_batch_waits_until_this_version_is_trained_to_its_end():
    async def main() -> None:
        alone = Alone()
        await alone.comes(8)
        first, second = await alone.fetches.get(), await alone.fetches.get()
        assert [numbers(first), numbers(second)] == [[0, 1], [2, 3]]
        third = await alone.asks()
        alone.trains(first)
        await asyncio.sleep(1.0)
        assert not third.done(), "half of its version is not trained"
        alone.trains(second)
        following = await third
        assert following is not None
        assert (following.index, following.version, numbers(following)) == (2, 1, [4, 5])

    run_virtual(main())


def test_batches_are_numbered_and_carry_the_version_that_trains_them():
    async def main() -> list[tuple[int, int]]:
        alone, seen = Alone(), []
        for _ in range(3):
            await alone.comes(4)
            for _ in range(2):
                fetch = await alone.fetches.get()
                alone.trains(fetch)
                assert fetch is not None
                seen.append((fetch.index, fetch.version))
                alone.state.load("rollout-0", alone.state.version)
        return seen

    assert run_virtual(main()) == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]


@pytest.mark.parametrize(
    ("come", "expected"),
    [(4, [[0, 1], [2, 3], None]), (5, [[0, 1], [2, 3], [4], None]), (6, [[0, 1], [2, 3], [4, 5], [], None])],
    ids=["at a version's end", "inside a batch", "at a batch's end inside a version"],
)
def test_an_empty_batch_comes_only_where_the_data_leaves_a_version_short(come: int, expected: list[object]):
    async def main() -> list[list[int] | None]:
        alone, taken = Alone(), []
        await alone.comes(come)
        alone.state.queue.close()
        for _ in expected:
            fetch = await alone.fetches.get()
            if fetch is not None:
                alone.trains(fetch)
            taken.append(numbers(fetch))
        return taken

    assert run_virtual(main()) == expected


def test_a_stop_ends_a_batch_that_waits_and_one_that_is_not_asked_for_yet():
    async def main() -> None:
        alone = Alone()
        await alone.comes(5)
        alone.trains(await alone.fetches.get())
        alone.trains(await alone.fetches.get())
        waiting = await alone.asks()
        assert not waiting.done()
        alone.state.request_stop()
        assert await waiting is None
        assert await alone.fetches.get() is None
        assert alone.state.staleness.total == 4

    run_virtual(main())


def test_a_stop_within_a_version_still_gives_the_rest_of_it():
    async def main() -> None:
        alone = Alone()
        await alone.comes(8)
        first = await alone.fetches.get()
        alone.state.request_stop()
        second = await alone.fetches.get()
        assert numbers(second) == [2, 3]
        third = await alone.asks()
        alone.trains(first)
        alone.trains(second)
        assert await third is None

    run_virtual(main())


# ---------------------------------------------------------------------------------------------- fill_queue


def test_the_first_batch_waits_for_all_that_may_run_ahead_and_later_ones_do_not():
    async def main() -> None:
        alone = Alone(fill_first=True)
        await alone.comes(6)
        late = [alone.admitted(), alone.admitted()]
        first = await alone.asks()
        await alone.rewarded(late[1])
        await asyncio.sleep(1.0)
        assert not first.done()
        await alone.rewarded(late[0])
        assert numbers(await first) == [0, 1]
        alone.state.discard(late[1], Fate.FAILED, "unlucky")
        assert numbers(await alone.fetches.get()) == [2, 3], "though there is room for one more"

    run_virtual(main())


def test_a_discard_makes_room_for_a_group_that_is_waited_for():
    async def main() -> None:
        alone = Alone(fill_first=True)
        await alone.comes(7)
        unlucky = alone.admitted()
        first = await alone.asks()
        alone.state.discard(unlucky, Fate.FILTERED, "zero variance")
        await asyncio.sleep(1.0)
        assert not first.done(), "there is room for another one"
        await alone.comes(1)
        assert numbers(await first) == [0, 1]

    run_virtual(main())


@pytest.mark.parametrize("total", [5, 2, 1])
def test_with_a_smaller_total_it_waits_for_that(total: int):
    async def main() -> None:
        alone = Alone(fill_first=True, total=total)
        await alone.comes(total - 1)
        first = await alone.asks()
        assert not first.done()
        await alone.comes(1)
        alone.state.queue.close()
        assert numbers(await first) == list(range(min(2, total)))

    run_virtual(main())


def test_when_the_data_gives_out_first_it_takes_what_there_is():
    async def main() -> None:
        alone = Alone(fill_first=True)
        await alone.comes(3)
        first = await alone.asks()
        assert not first.done()
        alone.state.queue.close()
        assert numbers(await first) == [0, 1]
        assert numbers(await alone.fetches.get()) == [2]
        assert await alone.fetches.get() is None

    run_virtual(main())


def test_a_stop_ends_the_wait_for_a_full_queue():
    async def main() -> None:
        alone = Alone(fill_first=True)
        await alone.comes(3)
        alone.admitted()
        first = await alone.asks()
        alone.state.request_stop()
        assert await first is None
        assert len(alone.state.queue) == 3, "nothing was taken"

    run_virtual(main())


def test_without_it_the_first_batch_waits_for_itself_alone_and_an_empty_queue_keeps_it_waiting():
    async def main() -> None:
        alone = Alone()
        await alone.comes(2)
        assert numbers(await alone.fetches.get()) == [0, 1]
        await alone.fetches.get()

    with pytest.raises(Deadlock):
        run_virtual(main())


def filled(mode: str = "async_stale", **more: object) -> Scenario:
    scenario = Scenario(mode, **more)  # type: ignore[arg-type]
    scenario.async_training["fill_queue"] = True
    return scenario


def queued(run: Run) -> int:
    """Groups that were rewarded and kept before the first batch."""
    (first, *_), gone = (
        run.of(BatchTaken),
        {e.number for e in run.of(GroupSettled) if e.fate in ("filtered", "failed")},
    )
    before = run.events[: run.events.index(first)]
    return len({e.number for e in before if isinstance(e, GroupRewarded)} - gone)


@mostly_slow("mode", MODES, quick=["on_policy", "async_stale", "overlapped"])
def test_in_every_mode_the_first_batch_finds_one_plus_eta_versions_of_groups(mode: str):
    run = check_everything(filled(mode, replicas=2, problems=2).run().assert_completed())
    config = run.pipeline.config
    assert queued(run) == floor((1 + config.async_training.staleness_threshold) * config.groups_per_version)


@mostly_slow(
    ("mode", "eta"),
    product(["one_step_off", "async_partial"], ["0", "1", "7/3"]),
    quick=[("one_step_off", "0"), ("one_step_off", "7/3"), ("async_partial", "1")],
)
def test_discards_are_refilled_before_the_first_batch(mode: str, eta: str):
    reward = FakeReward(lambda p: fails("unlucky") if p.row % 5 == 2 else [1.0, 1.0] if p.row % 7 == 3 else [0.0, 1.0])
    scenario = filled(mode, reward=reward, filters=True)
    scenario.async_training["staleness_threshold"] = eta
    run = check_everything(scenario.run().assert_completed())
    assert queued(run) == floor((1 + Fraction(eta)) * run.pipeline.config.groups_per_version)
    assert run.groups["failed"] > 0


@pytest.mark.parametrize("total", [16, 32])
def test_a_short_run_fills_its_queue_with_all_that_it_trains(total: int):
    scenario = filled(total=total)
    scenario.async_training["staleness_threshold"] = 2
    run = check_everything(scenario.run().assert_completed())
    assert queued(run) == total
    assert run.groups["trained"] == total


@pytest.mark.parametrize("rows", [*ENDS.values(), 1, 16, 23])
def test_data_that_gives_out_before_the_queue_is_full_is_trained_all_the_same(rows: int):
    reward = FakeReward(lambda p: fails("unlucky") if p.row % 5 == 2 else [0.0, 1.0])
    run = check_everything(filled(rows=rows, epochs=1, reward=reward).run().assert_completed())
    kept = sum(row % 5 != 2 for row in range(rows))
    assert queued(run) == min(kept, 24)
    assert run.groups["trained"] == kept


def test_a_full_queue_changes_when_the_first_batch_is_taken_and_lets_lag_come_to_its_bound():
    plain = Scenario("async_stale", async_training={"staleness_threshold": "2", "order": "fifo", "window": None})
    full = filled(async_training={"staleness_threshold": "2", "order": "fifo", "window": None})
    runs = [scenario.run().assert_completed() for scenario in (plain, full)]
    assert runs[0].of(BatchTaken)[0].time < runs[1].of(BatchTaken)[0].time
    largest = [max(lag for step in run.of(OptimizerStepped) for lag in step.lags) for run in runs]
    assert largest[1] == floor(1 + 2 - Fraction(1, 16)) >= largest[0]


@a_share_and_all
def test_everything_holds_in_every_run_that_fills_its_queue(share: float):
    """Runs hundreds of random jobs."""

    def check(case: Case) -> None:
        scenario = case.scenario()
        scenario.async_training["fill_queue"] = True
        run = check_however_it_ended(scenario.run(), Books, check_everything)
        if run.status is Status.COMPLETED and run.of(BatchTaken) and not case.faults:
            rules, kept = Rules.of(scenario), {e.number for e in run.of(GroupAdmitted)}
            kept -= {e.number for e in run.of(GroupSettled) if e.fate in ("filtered", "failed")}
            assert queued(run) == min(rules.limit(0), rules.total or len(kept), len(kept))

    for_each(cases(), share * 40, check)
    for_each(faulty("stop", "dies", "joins"), share * 30, check)


# ---------------------------------------------------------------------------------------------- the last batch


@pytest.mark.parametrize("roles", [{}, {"logp_ranks": 1}, {"critic": True}], ids=["none", "logp", "critic"])
def test_an_empty_last_batch_makes_a_version_of_what_was_trained_and_is_told_to_nobody(roles: dict[str, object]):
    """Ten fetches of the data, four a version."""
    if "critic" in roles:
        roles = {"critic": FakeCritic()}
    run = Scenario("async_partial", rows=40, epochs=1, problems=1, **roles).run()  # type: ignore[arg-type]
    run.assert_completed()
    assert [len(fetch.numbers) for fetch in run.of(BatchTaken)] == [4] * 10
    assert [update.version for update in run.of(UpdateFinished)] == [1, 2, 3]
    assert len(run.trainer.steps) == 10
    assert run.validated()[-1] == 3


# ---------------------------------------------------------------------------------------------- on the ranks


def episodes(samples: Sequence[TrainSample]) -> list[TrajectoryId]:
    return [sample.episode for sample in samples]


@pytest.mark.parametrize("mode", ["on_policy", "async_partial", "overlapped"])
def test_the_ranks_are_told_of_a_batch_before_anything_is_computed_and_forget_it_with_its_last_step(mode: str):
    sections = {"actor": {"ppo_epochs": 2}, "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.1}}}
    run = Scenario(mode, async_training={"require_batches": 2}, sections=sections).run().assert_completed()
    taken, steps = run.of(BatchTaken), run.trainer.steps
    assert len(run.trainer.fetches) == len(taken)
    for number, (mini_batches, begun, ended) in enumerate(run.trainer.fetches):
        assert (begun, ended) == (4 * number, 4 * number + 4), "two mini-batches, twice"
        given = [episodes(samples) for samples in mini_batches]
        assert given * 2 == [episodes(samples) for samples in steps[begun:ended]]


# ---------------------------------------------------------------------------------------------- progress


def progress(run: Run) -> list[list[float]]:
    """Of the steps of each version."""
    contexts = run.trainer.contexts
    return [[c.progress for c in group] for _, group in groupby(contexts, key=lambda context: context.version)]


@mostly_slow(
    ("mode", "shape"),
    product(["async_partial", "overlapped", "colocate_async"], [(1, 1), (3, 1), (2, 3)]),
    quick=[("async_partial", (1, 1)), ("overlapped", (3, 1)), ("colocate_async", (2, 3))],
)
def test_progress_runs_through_the_steps_of_every_version(mode: str, shape: tuple[int, int]):
    """``shape``: mini-batches per batch and epochs."""
    batches, epochs = shape
    scenario = Scenario(mode, async_training={"require_batches": batches}, sections={"actor": {"ppo_epochs": epochs}})
    scenario.mini_batch = 2
    run = scenario.run().assert_completed()
    k = run.pipeline.config.async_training.trigger_parameter_sync_step * batches * epochs
    assert progress(run) == [[step / k for step in range(k)]] * 6
    assert [context.version for context in run.trainer.contexts] == [v for v in range(6) for _ in range(k)]


@pytest.mark.parametrize("rows", ENDS.values(), ids=ENDS)
def test_a_version_that_the_data_leaves_short_ends_before_its_progress_does(rows: int):
    run = Scenario("async_stale", rows=rows, epochs=1).run().assert_completed()
    made = -(-rows // 4)
    assert progress(run) == [[step / 4 for step in range(min(4, made - first))] for first in range(0, made, 4)]


@a_share_and_all
def test_progress_is_a_share_in_every_run(share: float):
    def check(case: Case) -> None:
        run = case.scenario().run()
        k = case.fetches_per_version * case.require_batches * case.ppo_epochs
        for version in progress(run):
            assert version == [step / k for step in range(len(version))]
            assert len(version) <= k
        if run.status is Status.COMPLETED and not case.by_epochs:
            assert [len(version) for version in progress(run)] == [k] * case.versions

    for_each(cases(), share * 60, check)
