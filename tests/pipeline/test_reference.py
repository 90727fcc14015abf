"""The reference policy: a stage of its own where it has ranks of its own, otherwise a part of the batch."""

from __future__ import annotations

from headway.events import OptimizerStepped, StageChanged, TrainerBusy
from tests.pipeline.fake_policies import FakeReference
from tests.pipeline.scenario import MODES, Run, Scenario
from tests.tiers import mostly_slow


def columns(run: Run) -> set[tuple[str, ...]]:
    return {tuple(sample.columns) for samples in run.trainer.steps for sample in samples}


@mostly_slow("mode", MODES, quick=["on_policy", "async_partial", "colocate_async"])
def test_on_ranks_of_its_own_it_is_a_stage_before_the_queue(mode: str):
    reference = FakeReference()
    run = Scenario(mode, reference=reference, problems=2).run().assert_completed()
    assert columns(run) == {("advantages", "ref_logprobs")}
    assert sum(reference.batches) == 2 * run.groups["trained"]
    assert run.trainer.forwards == []
    assert "RefLogProb" in {event.stage for event in run.of(StageChanged)}


def test_on_ranks_of_its_own_it_takes_all_groups_that_wait_as_one_batch():
    reference = FakeReference(seconds=20.0)
    Scenario("async_stale", reference=reference).run().assert_completed()
    assert reference.batches[0] == 2
    assert max(reference.batches) > 10


@mostly_slow("mode", MODES, quick=["one_step_off", "stream_off_policy", "colocate_sync"])
def test_on_the_trainers_ranks_it_runs_once_inside_each_batch(mode: str):
    """The fake trainer asserts that it is never asked to do two things at once."""
    run = Scenario(mode, reference_on_trainer_ranks=True).run().assert_completed()
    assert columns(run) == {("advantages", "ref_logprobs")}
    assert [count for _, count in run.trainer.forwards] == [8] * (run.groups["trained"] // 4)
    assert "RefLogProb" not in {event.stage for event in run.of(StageChanged)}


def test_a_forward_inside_a_batch_is_time_in_which_the_trainer_was_busy():
    run = Scenario("on_policy", total=4, reference_on_trainer_ranks=True).run().assert_completed()
    forward, step, gather = run.of(TrainerBusy)
    assert [(b.what, b.span[1] - b.span[0]) for b in (forward, step, gather)] == [
        ("forward", 0.5),
        ("step", 1.0),
        ("gather", 0.25),
    ]
    assert forward.span[1] <= step.span[0] and step.span[1] <= gather.span[0]


def test_recomputed_log_probs_are_computed_once_per_batch_and_kept_for_all_its_steps():
    run = Scenario(
        "on_policy",
        total=8,
        async_training={"use_rollout_log_probs": False, "require_batches": 2},
        sections={"actor": {"ppo_epochs": 2}},
    ).run()
    run.assert_completed()
    assert [count for _, count in run.trainer.forwards] == [16]
    assert len(run.of(OptimizerStepped)) == 4
    assert columns(run) == {("advantages", "prox_logprobs")}
    indices = [[sample.columns["prox_logprobs"].index for sample in samples] for samples in run.trainer.steps]
    assert indices == [list(range(8)), list(range(8, 16))] * 2


def test_reference_and_recomputation_together_make_two_forwards_one_after_the_other():
    scenario = Scenario("on_policy", total=4, reference_on_trainer_ranks=True)
    scenario.async_training = {"use_rollout_log_probs": False}
    run = scenario.run().assert_completed()
    assert [busy.what for busy in run.of(TrainerBusy)] == ["forward", "forward", "step", "gather"]
    assert columns(run) == {("advantages", "ref_logprobs", "prox_logprobs")}


def test_without_either_no_forward_is_made():
    run = Scenario("on_policy", total=4).run().assert_completed()
    assert run.trainer.forwards == []
    assert columns(run) == {("advantages",)}


def test_advantages_are_computed_once_per_batch_and_reach_every_sample():
    run = Scenario("on_policy", total=8, async_training={"require_batches": 2}).run().assert_completed()
    indices = [[sample.columns["advantages"].index for sample in samples] for samples in run.trainer.steps]
    assert indices == [list(range(8)), list(range(8, 16))]
