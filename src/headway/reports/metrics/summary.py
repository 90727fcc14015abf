"""The run in one JSON object, ``summary.json``, and one sentence on its bottleneck, from `RunMetrics`.

The sentence says who the bottleneck was, for what share of the time, and what to change. The side that waits is never
the bottleneck; the side that it waits for is. So: the trainer waiting for groups blames generation (or the reward, or a
filter that leaves little of what is generated), generation with nothing admitted blames training, or the saving of
checkpoints or the work between steps that keeps the trainer from it, and both in turn blame the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headway.events import WAITS_FOR_GROUPS, Span
from headway.reports.human import share
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.version_row import histogram

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
    between_steps: float = 0.0
    """Share of the wall time in which the trainer had a batch and computed nothing: advantages, rows, results."""
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


SENTENCES = {
    "balanced": ("Balanced: nothing held training or generation up for more than {worst} of the time; change nothing."),
    "turns": (
        "Training and generation took turns: the trainer waited for groups {generation} of the time and generation for "
        "the trainer {training}; raise async_training.staleness_threshold so that they overlap."
    ),
    "update": (
        "The parameter update was the bottleneck: it stalled the trainer {update} and generation {rollout_stalled} of "
        "the time; update less often with a larger async_training.trigger_parameter_sync_step."
    ),
    "validation": (
        "Validation was the bottleneck: updates waited for it {worst} of the time; validate less often with a larger "
        "rollout.test_freq, or on fewer held-out problems."
    ),
    "reward": (
        "The reward was the bottleneck: the trainer waited for it {worst} of the time while nothing decoded; raise "
        "reward.workers, or make the reward function faster."
    ),
    "saving": (
        "Saving checkpoints was the bottleneck: the trainer did that {saving} of the time, and did not train; save "
        "less often with a larger trainer.save_freq."
    ),
    "between": (
        "Work between the trainer's steps was the bottleneck: for {between_steps} of the time it had groups and "
        "computed nothing, as advantages were computed and rows handed to it; make fewer, larger steps with a larger "
        "actor.ppo_mini_batch_size{devices}."
    ),
    "filter": (
        "The filter was the bottleneck: the trainer waited for groups {generation} of the time, and {filtered} of "
        "those that were generated were filtered, as all their answers got the same reward; take prompts of another "
        "difficulty or a larger rollout.n, and see whether the reward has collapsed, before giving generation more "
        "devices."
    ),
    "training": (
        "Training was the bottleneck: generation waited for the trainer {training} of the time; give the trainer more "
        "devices, or take some from the rollout role{devices}."
    ),
    "draining": (
        "{waited}, most of it until answers in flight had finished before an update; set "
        "async_training.on_update=interrupt, or raise async_training.trigger_parameter_sync_step."
    ),
    "environments": (
        "{waited} while only {slot_utilization} of its slots were filled, as episodes were in their environments "
        "{in_environments} of their time; raise async_training.staleness_threshold so that more of them are in flight, "
        "or make the environments' steps faster."
    ),
    "slots": (
        "{waited} while only {slot_utilization} of its slots were filled; raise async_training.staleness_threshold so "
        "that more groups are in flight, or give the rollout role more devices{devices}."
    ),
    "generation": (
        "{waited}; give the rollout role more devices, or raise rollout.max_concurrent where memory allows{devices}."
    ),
}
"""Bottleneck → the sentence on it, with fields of `TimeShares` and what `bottleneck` adds. The last four are on
generation."""


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
        "between": shares.between_steps,
        "generation": generation,
        "training": training,
    }
    worst = max(losses, key=losses.__getitem__)
    of_one_process = " (now both share one process: cluster.backend=ray gives each its own)"
    return SENTENCES[_name(worst, losses, shares)].format(
        **{name: share(value) for name, value in asdict(shares).items()},
        worst=share(losses[worst]),
        waited=f"Generation was the bottleneck: the trainer waited for groups {share(generation)} of the time",
        generation=share(generation),
        training=share(training),
        update=share(update),
        devices=of_one_process if shares.one_process else "",
    )


def _name(worst: str, losses: Mapping[str, float], shares: TimeShares) -> str:
    """Return the key of the sentence, by what lost the most time and what explains it."""
    if losses[worst] < BALANCED_BELOW:
        return "balanced"
    instead = {"saving": shares.saving, "between": shares.between_steps}
    if worst == "training" and max(instead.values()) > shares.trained:
        return max(instead, key=instead.__getitem__)
    generation = losses["generation"]
    turns = worst in ("generation", "training") and min(generation, losses["training"]) >= TURNS_ABOVE
    mostly_filtered = shares.filtered >= MOSTLY_FILTERED and shares.draining <= 0.5 * generation
    if mostly_filtered and (worst == "generation" or turns):
        return "filter"
    if turns or worst != "generation":
        return "turns" if turns else worst
    if shares.draining > 0.5 * generation:
        return "draining"
    if shares.slot_utilization is None or shares.slot_utilization >= SLOTS_EMPTY_BELOW:
        return "generation"
    return "environments" if shares.in_environments >= MOSTLY_IN_ENVIRONMENTS else "slots"


NOTHING_TRAINED = "Nothing was trained, so there is no bottleneck to name."


def summary(metrics: RunMetrics) -> dict[str, Any]:
    """Return the run so far as one object. Ratios are of the wall time, null before there is any."""
    started, finished, window, totals = metrics.started, metrics.finished, metrics.window, metrics.totals
    occupancy, updates = metrics.occupancy, metrics.updates
    shares = time_shares(metrics)
    return {
        "mode": started.mode if started else None,
        "seed": started.seed if started else None,
        "status": finished.status if finished else "running",
        "reason": finished.reason if finished else None,
        "resumed": metrics.resumed,
        "trainer_restarts": metrics.trainer_restarts,
        "checkpoints": metrics.checkpoints,
        "storage": metrics.storage,
        "fetches": totals.fetches,
        "optimizer_steps": totals.optimizer_steps,
        "skipped_steps": totals.skipped_steps,
        "version": finished.version if finished else metrics.version,
        "wall_s": _seconds(window),
        "groups": metrics.tally.counts(),
        "reasons": {fate: dict(reasons) for fate, reasons in metrics.tally.reasons.items()},
        "filtered": _filtered(metrics),
        "episodes": metrics.tally.episode_counts(),
        "episodes_failed": dict(metrics.tally.failures),
        "balanced": metrics.tally.balances(
            finished.groups if finished else None, finished.episodes if finished else None
        ),
        "left_out": metrics.left_out,
        "trajectories": totals.finished,
        "agents": totals.episodes.values(),
        "preempted": totals.preempted,
        "unpinned": totals.unpinned,
        "tokens": {
            "generated": totals.generated_tokens,
            "trained": totals.trained.total,
            "prefilled": totals.prefilled_tokens,
            "cached": totals.cached_tokens,
        },
        # Those that are kept: the summary has to stay readable, and fit on a nearly full disk.
        "eval": [
            {"version": event.version, "accuracy": event.accuracy}
            | ({"by_source": event.by_source} if event.by_source else {})
            for event in metrics.validated
        ],
        "lag": _lag(metrics),
        "trainer/idle_ratio": occupancy.trainer_idle(window) if window else None,
        "rollouter/idle_ratio": occupancy.rollouter_idle(window) if window else None,
        "rollouter/slot_utilization": occupancy.slot_utilization(window) if window else None,
        "partial": totals.partial_values(),
        "stale": {"samples_processed": metrics.stale_groups, "trajectory_processed": totals.stale_trajectories},
        "param_update": {
            "count": updates.updates,
            "trainer_stall_s": updates.trainer,
            "rollout_stall_s": updates.rollout,
            **updates.phases,
        },
        "validation": {
            "count": metrics.validations.count,
            "stall_s": updates.validation + metrics.lease_validation_s,
        },
        "throughput": _throughput(metrics),
        "bias": metrics.bias(),
        "stage_waits_s": occupancy.stage_waits(window) if window else {},
        "warnings": metrics.warnings,
        "bottleneck": bottleneck(shares) if shares else NOTHING_TRAINED,
    }


def time_shares(metrics: RunMetrics) -> TimeShares | None:
    """Shares of the wall time, by what it went to; None before the first optimizer step.

    The wall time includes waiting after the last step for a batch that never came.
    """
    if (window := metrics.window) is None:
        return None
    occupancy = metrics.occupancy
    stalls = metrics.updates_before_last_step  # the last update comes after the last step, outside the wall time
    in_vain = _waited_in_vain(metrics, window[1])
    waited = occupancy.trainer_waits.within(window) + in_vain
    if in_vain and metrics.finished is not None:
        window = (window[0], metrics.finished.time)
    wall = _seconds(window)
    idle = occupancy.trainer_idle(window)
    processes = {(worker.host, worker.pid) for worker in metrics.workers.values()}

    def share(seconds: float) -> float:
        return min(max(seconds / wall, 0.0), 1.0)

    return TimeShares(
        trainer_waited=share(waited),
        waited_for_reward=share(occupancy.seconds("waited_for_reward", window)),
        trainer_stalled=share(stalls.trainer),
        waited_for_validation=share(stalls.validation + metrics.lease_validation_s),
        moving_weights=share(stalls.moving_weights),
        trained=1.0 if idle is None else 1.0 - idle,
        between_steps=share(occupancy.seconds("between_steps", window)),
        saving=share(occupancy.seconds("saved", window)),
        idle_while_saving=occupancy.idle_while_saving(window),
        rollout_idle=occupancy.rollouter_idle(window) or 0.0,
        rollout_stalled=share(stalls.rollout),
        slot_utilization=occupancy.slot_utilization(window),
        in_environments=metrics.totals.episodes.environment_share or 0.0,
        filtered=metrics.tally.filtered_share() or 0.0,
        one_process=len(processes) == 1 and all(pid is not None for _, pid in processes),
        drains=metrics.started is not None and metrics.started.on_update == "drain",
    )


def _waited_in_vain(metrics: RunMetrics, since: float) -> float:
    """Seconds from ``since`` to the run's end that were spent waiting for a batch that never came."""
    if metrics.finished is None:
        return 0.0
    waits = metrics.occupancy.stage_waits((since, metrics.finished.time))
    return max((by_whom.get(WAITS_FOR_GROUPS, 0.0) for by_whom in waits.values()), default=0.0)


def _seconds(window: Span | None) -> float:
    return window[1] - window[0] if window else 0.0


def _filtered(metrics: RunMetrics) -> dict[str, float | int | None]:
    """The share of filtered groups among those trained or filtered, over the run and lately."""
    filtered, of = metrics.tally.recently_filtered()
    return {
        "share": metrics.tally.filtered_share(),
        "recent_share": filtered / of if of else None,
        "recent_groups": of,
    }


def _lag(metrics: RunMetrics) -> dict[str, Any]:
    mean, maximum = metrics.lag_so_far()
    return {
        "mean": mean,
        "max": maximum,
        "bound": metrics.started.lag_bound if metrics.started else None,
        "order": metrics.started.order if metrics.started else None,
        "histogram": histogram(metrics.lags),
    }


def _throughput(metrics: RunMetrics) -> dict[str, float | None]:
    """Throughputs per second of wall time; samples are groups."""
    wall, totals = _seconds(metrics.window), metrics.totals
    counts = {
        "samples_per_s": metrics.tally.fates["trained"],
        "trajectories_per_s": totals.trained.count,
        "trained_tokens_per_s": totals.trained.total,
        "generated_tokens_per_s": totals.generated_tokens,
    }
    return {name: count / wall if wall else None for name, count in counts.items()}
