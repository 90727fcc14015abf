"""The critic's turns: values of a batch, advantages, training on them; on ranks of its own, and on the trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from headway.errors import NonFinite, StallError, WorkerDied
from headway.events import BatchTaken, CheckpointSaved, CriticStepped, StageChanged, TrainerBusy
from headway.pipeline import off_policy_guard
from headway.pipeline.run import Status
from tests.pipeline.cases import TICK, Case, cases, faulty, for_each
from tests.pipeline.fake_policies import FakeCritic
from tests.pipeline.fakes import Time
from tests.pipeline.figures import check_figures
from tests.pipeline.invariants import (
    BatchesAhead,
    check_cancelled_at_any_moment,
    check_everything_ahead,
    check_however_it_ended,
)
from tests.pipeline.machines import overlap
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.pipeline.test_end_of_run import ENDS
from tests.pipeline.test_update_recovery import failed
from tests.tiers import a_share_and_all, enough, mostly_slow

places = pytest.mark.parametrize("inside", [True, False], ids=["inside the batch", "ranks of its own"])


def critic(run: Run) -> FakeCritic:
    assert run.scenario.critic is not None
    return run.scenario.critic


def turns(run: Run) -> list[tuple[str, int]]:
    return [(turn.what, turn.fetch) for turn in critic(run).turns]


def critic_steps(run: Run, fetch: int) -> list[Time]:
    return [turn.span for turn in critic(run).turns if (turn.what, turn.fetch) == ("train", fetch)]


def actor_steps(run: Run, fetch: int) -> list[Time]:
    """Of the optimizer steps on a batch, which their advantages tell."""
    spans = [span for what, span in run.trainer.computed if what == "an optimizer step"]
    of = [{sample.columns["advantages"].handle for sample in samples} for samples in run.trainer.steps]
    return [span for span, fetches in zip(spans, of, strict=False) if fetches == {fetch}]


def check_turns(run: Run) -> Run:
    """values ▶ advantages ▶ training, fetch after fetch, one thing at a time; and the events say just that."""
    config, fetches = run.pipeline.config, run.of(BatchTaken)
    epochs, size = config.critic.ppo_epochs, config.actor.ppo_mini_batch_size
    due = [
        (what, fetch.fetch)
        for fetch in fetches
        for what in ["values", "advantages", *["train"] * (-(-len(fetch.numbers) // size) * epochs)]
    ]
    if run.status is None:
        due.append(("values", len(fetches)))  # of one that did not reach the trainer any more
    done = critic(run).turns
    assert turns(run) == due[: len(done)]
    assert run.status is None or len(done) == len(due), "a batch that was taken was not learned from"
    assert all(a.span[1] <= b.span[0] for a, b in pairwise(done))
    told, trained = run.of(CriticStepped), [turn for turn in done if turn.what == "train"]
    assert [(event.fetch, event.span) for event in told] == [(turn.fetch, turn.span) for turn in trained]
    assert [event.step for event in told] == list(range(len(told)))
    assert [event.version for event in told] == [fetches[event.fetch].version for event in told]
    for fetch in fetches:
        prepared = [turn.span[1] for turn in done if (turn.what, turn.fetch) == ("advantages", fetch.fetch)]
        assert all(step[0] >= prepared[0] for step in actor_steps(run, fetch.fetch)), "trained before it had advantages"
    return run


def check_saved(run: Run) -> Run:
    """The critic comes before the trainer, and has learned from just what the trainer has."""
    copied = [(what, span) for what, span in run.trainer.computed if what == "the copy for a checkpoint"]
    versions = [event.version for event in run.of(CheckpointSaved)]
    names = [path for path, _ in critic(run).saved]
    assert names[: len(versions)] == [Path(f"checkpoints/critic/version_{version}") for version in versions]
    ended = run.status is not None
    assert not ended or len(names) == len(versions)
    for version, (began, end), (_, whole) in zip(versions, critic(run).copied, copied, strict=False):
        assert end <= whole[0]
        learned = {turn.fetch for turn in critic(run).turns if turn.what == "train" and turn.span[1] <= began}
        assert learned == {fetch.fetch for fetch in run.of(BatchTaken) if fetch.version < version}
        assert not any(overlap((began, end), turn.span) for turn in critic(run).turns), "it was busy when it was copied"
    return run


def check_all(run: Run) -> Run:
    if not run.scenario.critic_on_trainer_ranks:
        check_figures(run)
    return check_saved(check_turns(check_everything_ahead(run)))


# ---------------------------------------------------------------------------------------------- order


@mostly_slow(
    ("mode", "inside"),
    product(MODES, [True, False]),
    quick=[("colocate_async", True), ("on_policy", False), ("async_partial", True), ("overlapped", False)],
)
def test_every_batch_is_valued_then_given_advantages_then_trained_on(mode: str, inside: bool):
    run = Scenario(mode, critic=FakeCritic(), critic_on_trainer_ranks=inside, replicas=2, problems=2).run()
    check_all(run.assert_completed())
    assert len(turns(run)) == 3 * run.groups["trained"] // 4
    stages = {event.stage for event in run.of(StageChanged)} & {"Values", "CriticTrain"}
    assert stages == (set() if inside else {"Values", "CriticTrain"})


@mostly_slow("mode", MODES, quick=["one_step_off", "stream_off_policy"])
def test_inside_the_batch_it_is_trained_before_the_actor_and_the_ranks_do_one_thing_at_a_time(mode: str):
    run = Scenario(mode, critic=FakeCritic(), critic_on_trainer_ranks=True).run().assert_completed()
    for fetch in run.of(BatchTaken):
        assert critic_steps(run, fetch.fetch)[-1][1] <= actor_steps(run, fetch.fetch)[0][0]
    spans = sorted(span for _, span in run.trainer.computed)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    busy = [event.what for event in run.of(TrainerBusy) if event.version == 0]
    per_version = run.pipeline.config.groups_per_version // 4
    assert busy == ["critic", "critic", "step"] * per_version


def test_the_critics_training_inside_the_batch_is_the_trainers_work():
    run = Scenario("on_policy", critic=FakeCritic(), critic_on_trainer_ranks=True).run().assert_completed()
    check_figures(run)


@mostly_slow("mode", MODES, quick=["on_policy", "async_stale"])
def test_on_ranks_of_its_own_it_is_trained_beside_the_actor(mode: str):
    run = Scenario(mode, critic=FakeCritic(step_s=2.0)).run().assert_completed()
    for fetch in run.of(BatchTaken):
        (mine,), (theirs,) = critic_steps(run, fetch.fetch), actor_steps(run, fetch.fetch)
        assert mine[0] == theirs[0] and overlap(mine, theirs)
    assert {event.what for event in run.of(TrainerBusy)} == {"step", "gather"}


def test_a_slow_critic_keeps_the_next_batch_waiting_and_changes_nothing_of_what_is_learned():
    """Groups come in the same order; which critic a value comes from does not depend on who was faster."""
    orders = []
    for step_s in (0.0, 0.5, 8.0):
        run = Scenario("on_policy", critic=FakeCritic(step_s=step_s)).run().assert_completed()
        orders.append((turns(check_turns(run)), [fetch.numbers for fetch in run.of(BatchTaken)]))
    assert orders[0] == orders[1] == orders[2]
    slow = Scenario("async_partial", critic=FakeCritic(step_s=8.0)).run().assert_completed()
    waits = [b[0] - a[1] for a, b in pairwise(actor_steps(slow, f)[0] for f in range(24))]
    assert min(waits) >= 7.0, "eight seconds for the critic's step, one of them beside the actor's"


@places
@pytest.mark.parametrize("epochs", [1, 3])
def test_it_makes_its_own_number_of_epochs_in_the_actors_mini_batches(epochs: int, inside: bool):
    sections: dict[str, Any] = {"critic": {"ppo_epochs": epochs}, "actor": {"ppo_epochs": 2}}
    run = Scenario(
        "on_policy",
        total=12,
        async_training={"require_batches": 3},
        sections=sections,
        critic=FakeCritic(),
        critic_on_trainer_ranks=inside,
    ).run()
    check_all(run.assert_completed())
    indices = [[sample.columns["returns"].index for sample in samples] for samples in critic(run).trained]
    assert indices == [list(range(i, i + 8)) for i in (0, 8, 16)] * epochs
    assert {tuple(sorted(sample.columns)) for samples in critic(run).trained for sample in samples} == {
        ("returns", "values")
    }
    assert len(actor_steps(run, 0)) == 6
    assert [event.metrics["critic/loss"] for event in run.of(CriticStepped)] == list(range(3 * epochs))
    state = run.trainer.saved[-1][1]
    assert (state["trainer"]["steps"], state["critic"]["steps"]) == (6, 3 * epochs)
    told = [] if inside else ["begin", "end"] * len(run.of(BatchTaken))
    assert critic(run).fetches == told, "on the trainer's ranks the trainer tells them"


@places
@pytest.mark.parametrize("rows", ENDS.values(), ids=ENDS)
def test_when_the_data_gives_out_it_learns_from_the_short_batch_and_sees_no_empty_one(rows: int, inside: bool):
    scenario = Scenario("async_stale", rows=rows, epochs=1, critic=FakeCritic(), critic_on_trainer_ranks=inside)
    run = check_all(scenario.run().assert_completed())
    assert [len(samples) for samples in critic(run).trained] == [8] * (rows // 4) + [2 * (rows % 4)] * (rows % 4 > 0)


def test_with_log_probs_on_ranks_of_their_own_both_stages_stand_in_line():
    run = check_all(Scenario("async_partial", logp_ranks=1, critic=FakeCritic()).run().assert_completed())
    waits = {event.waiting_for for event in run.of(StageChanged) if event.stage == "Values"}
    assert "LogProb" in waits
    waits = {event.waiting_for for event in run.of(StageChanged) if event.stage == "ActorTrain"}
    assert "Values" in waits


# ---------------------------------------------------------------------------------------------- skipped steps


@places
@pytest.mark.parametrize("limit", [0, 2])
def test_too_many_skipped_steps_in_a_row_end_the_run_naming_the_critics_learning_rate(
    monkeypatch: pytest.MonkeyPatch, limit: int, inside: bool
):
    monkeypatch.setattr(off_policy_guard, "MOST_SKIPPED", limit)
    run = failed(
        Scenario(
            "async_partial",
            critic=FakeCritic(skips=lambda step: step >= 3),
            critic_on_trainer_ranks=inside,
        ),
        NonFinite,
        rf"^{limit + 1} optimizer steps in a row .*lower critic\.optim\.lr",
    )
    assert [event.skipped for event in run.of(CriticStepped)] == [False] * 3 + [True] * (limit + 1)
    assert not any(event.what == "gather" for event in run.of(TrainerBusy)) or limit > 0


@mostly_slow("inside", [True, False], quick=[True])
def test_as_many_as_are_borne_between_finite_ones_change_nothing(monkeypatch: pytest.MonkeyPatch, inside: bool):
    """Nor do the actor's, which are counted for themselves."""
    monkeypatch.setattr(off_policy_guard, "MOST_SKIPPED", 2)
    run = Scenario(
        "async_partial",
        critic=FakeCritic(skips=lambda step: step % 3 > 0),
        critic_on_trainer_ranks=inside,
        trainer={"skips": lambda step: step % 3 > 0},
    ).run()
    assert check_turns(run.assert_completed()).groups["dropped"] == 64
    assert sum(event.skipped for event in run.of(CriticStepped)) == 16


# ---------------------------------------------------------------------------------------------- checkpoints


@mostly_slow(("inside", "step_s"), product([True, False], [0.25, 8.0]), quick=[(True, 0.25), (False, 8.0)])
def test_its_last_checkpoint_comes_before_the_trainers_and_after_all_its_steps(inside: bool, step_s: float):
    run = Scenario("async_partial", critic=FakeCritic(step_s=step_s), critic_on_trainer_ranks=inside).run()
    check_all(run.assert_completed())
    assert [path.name for path, _ in critic(run).saved] == ["version_6"]


@mostly_slow(
    ("mode", "inside", "step_s"),
    product(["one_step_off", "async_stale", "async_partial", "overlapped"], [True, False], [0.25, 8.0]),
    quick=[("one_step_off", True, 0.25), ("overlapped", False, 8.0)],
)
def test_so_do_those_for_which_the_next_batch_is_already_valued(mode: str, inside: bool, step_s: float):
    run = Scenario(
        mode, critic=FakeCritic(step_s=step_s), critic_on_trainer_ranks=inside, sections={"trainer": {"save_freq": 1}}
    ).run()
    check_all(run.assert_completed())
    assert [path.name for path, _ in critic(run).saved] == [f"version_{version}" for version in range(1, 7)]


# ---------------------------------------------------------------------------------------------- random schedules


def with_critic(case: Case) -> Scenario:
    """The case with a critic, faster or slower than the trainer, with or without log-probs on ranks of their own."""
    scenario = case.scenario()
    ticks = (32 * TICK, 0.0, 128 * TICK)
    scenario.critic = FakeCritic(value_s=ticks[case.seed % 3], step_s=ticks[case.seed // 3 % 3])
    scenario.critic_on_trainer_ranks = case.seed // 9 % 2 == 0
    scenario.logp_ranks = case.seed // 18 % 2 if not case.use_rollout_log_probs else 0
    scenario.sections["critic"] = {"ppo_epochs": 1 + case.seed // 36 % 2}
    return scenario


def check_case(case: Case) -> Run:
    return check_however_it_ended(with_critic(case).run(), BatchesAhead, check_all)


@a_share_and_all
def test_everything_holds_in_every_run_with_a_critic(share: float):
    """Dozens of whole runs."""
    beside = 0

    def check(case: Case) -> None:
        nonlocal beside
        run = check_case(case)
        beside += any(
            overlap(mine, theirs)
            for fetch in run.of(BatchTaken)
            for mine in critic_steps(run, fetch.fetch)
            for theirs in actor_steps(run, fetch.fetch)
        )

    for_each(cases(), share * 60, check)
    assert beside >= enough(4, share)


@a_share_and_all
def test_a_run_with_a_critic_may_be_stopped_at_any_time(share: float):
    stopped = 0

    def check(case: Case) -> None:
        nonlocal stopped
        stopped += check_case(case).status is Status.INTERRUPTED

    for_each(faulty("stop"), share * 40, check)
    assert stopped >= enough(15, share)


@a_share_and_all
def test_a_run_with_a_critic_may_be_cancelled_at_any_moment_and_is_over_at_once(share: float):
    check_cancelled_at_any_moment(cases(), 40, share, with_critic, check_turns)


# ---------------------------------------------------------------------------------------------- failures


class Dying(FakeCritic):
    """``dies_in``: what its ranks do when they die, for the third time."""

    def __init__(self, dies_in: str) -> None:
        super().__init__()
        self._dies_in = dies_in
        self.done: list[str] = []
        self._own = self._compute
        self.ranks = self._dies

    async def _dies(self, doing: str, seconds: float) -> None:
        self.done.append(doing)
        if self.done.count(self._dies_in) == 3:
            raise WorkerDied("critic-0 was killed")
        await self._own(doing, seconds)


@pytest.mark.parametrize("dies_in", ["values", "a step of the critic"])
def test_its_death_ends_the_run_with_its_name_and_without_a_checkpoint(dies_in: str):
    run = failed(Scenario("async_partial", critic=Dying(dies_in)), WorkerDied, "critic-0 was killed")
    assert critic(run).saved == [] and run.trainer.saved == []


class Silent(FakeCritic):
    async def forward_values(self, samples: Sequence[object]) -> list[Any]:
        if self.trained:
            await asyncio.Event().wait()
        return await super().forward_values(samples)  # type: ignore[arg-type]


def test_its_silence_ends_the_run_when_nothing_moves_any_more_and_names_it():
    sections = {"cluster": {"stall_timeout_s": 40.0}}
    failed(
        Scenario("async_partial", critic=Silent(), sections=sections),
        StallError,
        r"Values waits for the critic \(1 item\(s\)\).*ActorTrain waits for Values",
    )
