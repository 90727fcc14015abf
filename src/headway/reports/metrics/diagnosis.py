"""One sentence: who the bottleneck was, for what share of the time, and what to change.

The side that waits is never the bottleneck; the side that it waits for is. So: the trainer waiting for groups blames
generation (or the reward, or a filter that leaves little of what is generated), generation with nothing admitted blames
training, or the saving of checkpoints that keeps the trainer from it, and both in turn blame the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.reports.human import share

BALANCED_BELOW = 0.10
"""Share of the wall time below which waits are not worth a change."""
TURNS_ABOVE = 0.15
"""Share of waiting above which both sides wait for each other: they do not overlap."""
SLOTS_EMPTY_BELOW = 0.5
MOSTLY_IN_ENVIRONMENTS = 0.3
"""Share of their time that episodes spend outside of generation from which on empty slots are explained by it."""
MOSTLY_FILTERED = 0.5
"""Share of filtered groups from which on the trainer waits for the filter more than for generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Shares of the wall time (0 to 1), each one a wait in which a side did nothing else."""

    trainer_waited: float
    """Share of the wall time in which the trainer waited for groups, for whatever reason."""
    waited_for_reward: float = 0.0
    """Part of ``trainer_waited`` in which nothing decoded and a reward was being computed."""
    trainer_stalled: float = 0.0
    """Share of the wall time in which the trainer waited for a parameter update."""
    waited_for_validation: float = 0.0
    """Part of ``trainer_stalled`` in which a validation was waited for."""
    moving_weights: float = 0.0
    """Share of the wall time that the phases of updates took; of send and recv, side by side, the longer one counts."""
    trained: float = 1.0
    """Share of the wall time in which the trainer computed."""
    saving: float = 0.0
    """Share of the wall time in which the trainer saved checkpoints and computed nothing."""
    idle_while_saving: float = 0.0
    """Share of time in which replicas were idle while the trainer saved a checkpoint."""
    rollout_idle: float = 0.0
    """Mean over replicas of the share of time without prefill or decoding."""
    rollout_stalled: float = 0.0
    """Part of ``rollout_idle`` in which replicas were paused for an update."""
    slot_utilization: float | None = None
    in_environments: float = 0.0
    """Share of the time of episodes in which their programs worked between turns; no share of the wall time."""
    filtered: float = 0.0
    """Share of the scored groups that a filter took out; no share of time."""
    one_process: bool = False
    """True if all workers are in one process, as with ``cluster.backend=inline``: there are no devices to give."""
    drains: bool = False
    """True if an update waits until answers in flight are finished: that wait counts as waiting for generation."""

    @property
    def draining(self) -> float:
        return max(self.trainer_stalled - self.waited_for_validation - self.moving_weights, 0.0) if self.drains else 0.0


def bottleneck(shares: TimeShares) -> str:
    """The sentence on the bottleneck: which side it was, for what share of the time, and what to change."""
    update = max(shares.trainer_stalled - shares.waited_for_validation - shares.draining, 0.0)
    generation = max(shares.trainer_waited - shares.waited_for_reward, 0.0) + shares.draining
    # While the trainer waits for the reward, idle replicas wait for that, too, and not for the trainer.
    elsewhere = shares.rollout_stalled + shares.idle_while_saving + shares.waited_for_reward
    training = max(shares.rollout_idle - elsewhere, 0.0)
    losses = {
        "update": max(update, shares.rollout_stalled),
        "validation": shares.waited_for_validation,
        "reward": shares.waited_for_reward,
        "saving": shares.saving,
        "generation": generation,
        "training": training,
    }
    worst = max(losses, key=losses.__getitem__)
    if losses[worst] < BALANCED_BELOW:
        return _balanced(losses[worst])
    if worst == "training" and shares.saving > shares.trained:
        worst = "saving"
    turns = worst in ("generation", "training") and min(generation, training) >= TURNS_ABOVE
    mostly_filtered = shares.filtered >= MOSTLY_FILTERED and shares.draining <= 0.5 * generation
    if mostly_filtered and (worst == "generation" or turns):
        return _filtered(generation, shares.filtered)
    if turns:
        return _turns(generation, training)
    match worst:
        case "update":
            return _update(update, shares.rollout_stalled)
        case "validation":
            return _validation(shares.waited_for_validation)
        case "reward":
            return _reward(shares.waited_for_reward)
        case "saving":
            return _saving(shares.saving)
        case "generation":
            return _generation(generation, shares)
        case _:
            return _training(training, shares)


def _balanced(waited: float) -> str:
    return (
        f"Balanced: nothing held training or generation up for more than {share(waited)} of the time; change nothing."
    )


def _turns(generation: float, training: float) -> str:
    return (
        f"Training and generation took turns: the trainer waited for groups {share(generation)} of the time and "
        f"generation for the trainer {share(training)}; raise async_training.staleness_threshold so that they overlap."
    )


def _update(trainer: float, rollouts: float) -> str:
    return (
        f"The parameter update was the bottleneck: it stalled the trainer {share(trainer)} and generation "
        f"{share(rollouts)} of the time; update less often with a larger async_training.trigger_parameter_sync_step."
    )


def _validation(waited: float) -> str:
    return (
        f"Validation was the bottleneck: updates waited for it {share(waited)} of the time; validate less often with a "
        "larger rollout.test_freq, or on fewer held-out problems."
    )


def _reward(waited: float) -> str:
    return (
        f"The reward was the bottleneck: the trainer waited for it {share(waited)} of the time while nothing decoded; "
        "raise reward.workers, or make the reward function faster."
    )


def _saving(saved: float) -> str:
    return (
        f"Saving checkpoints was the bottleneck: the trainer did that {share(saved)} of the time, and did not train; "
        "save less often with a larger trainer.save_freq."
    )


def _generation(waited: float, shares: TimeShares) -> str:
    who = f"Generation was the bottleneck: the trainer waited for groups {share(waited)} of the time"
    slots = shares.slot_utilization
    if shares.draining > 0.5 * waited:
        return (
            f"{who}, most of it until answers in flight had finished before an update; set "
            "async_training.on_update=interrupt, or raise async_training.trigger_parameter_sync_step."
        )
    if slots is not None and slots < SLOTS_EMPTY_BELOW and shares.in_environments >= MOSTLY_IN_ENVIRONMENTS:
        return (
            f"{who} while only {share(slots)} of its slots were filled, as episodes were in their environments "
            f"{share(shares.in_environments)} of their time; raise async_training.staleness_threshold so that more of "
            "them are in flight, or make the environments' steps faster."
        )
    if slots is not None and slots < SLOTS_EMPTY_BELOW:
        return (
            f"{who} while only {share(slots)} of its slots were filled; raise "
            "async_training.staleness_threshold so that more groups are in flight, or give the rollout role more "
            f"devices{_devices(shares)}."
        )
    return (
        f"{who}; give the rollout role more devices, or raise rollout.max_concurrent where memory allows"
        f"{_devices(shares)}."
    )


def _filtered(waited: float, filtered: float) -> str:
    """Say that the filter was the bottleneck: however fast answers are generated, few of them train."""
    return (
        f"The filter was the bottleneck: the trainer waited for groups {share(waited)} of the time, and "
        f"{share(filtered)} of those that were generated were filtered, as all their answers got the same reward; take "
        "prompts of another difficulty or a larger rollout.n, and see whether the reward has collapsed, before giving "
        "generation more devices."
    )


def _training(waited: float, shares: TimeShares) -> str:
    return (
        f"Training was the bottleneck: generation waited for the trainer {share(waited)} of the time; give the trainer "
        f"more devices, or take some from the rollout role{_devices(shares)}."
    )


def _devices(shares: TimeShares) -> str:
    """Return the remark that advice about devices needs where both sides share one process; else ""."""
    return " (now both share one process: cluster.backend=ray gives each its own)" if shares.one_process else ""
