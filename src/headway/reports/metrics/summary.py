"""The run in one JSON object, ``summary.json``, from what `RunMetrics` has accumulated so far."""

from __future__ import annotations

from typing import Any

from headway.events import WAITS_FOR_GROUPS, Span, ValidationFinished
from headway.reports.metrics.diagnosis import TimeShares, bottleneck
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.version_row import histogram, partial_values

NOTHING_TRAINED = "Nothing was trained, so there is no bottleneck to name."


def summary(metrics: RunMetrics) -> dict[str, Any]:
    """Return the run so far as one object. Ratios are of the wall time, null before there is any."""
    started, finished, window, totals = metrics.started, metrics.finished, metrics.window, metrics.totals
    occupancy = metrics.occupancy
    shares = time_shares(metrics)
    return {
        "mode": started.mode if started else None,
        "seed": started.seed if started else None,
        "status": finished.status if finished else "running",
        "reason": finished.reason if finished else None,
        "resumed": metrics.resumed,
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
        "trajectories": totals.trajectories,
        "agents": totals.episodes.values(),
        "preempted": totals.preempted,
        "unpinned": totals.unpinned,
        "tokens": {
            "generated": totals.generated_tokens,
            "trained": totals.trained.tokens,
            "prefilled": totals.prefilled_tokens,
            "cached": totals.cached_tokens,
        },
        "eval": [_evaluation(event) for event in metrics.evaluations],
        "lag": _lag(metrics),
        "trainer/idle_ratio": occupancy.trainer_idle(window) if window else None,
        "rollouter/idle_ratio": occupancy.rollouter_idle(window) if window else None,
        "rollouter/slot_utilization": occupancy.slot_utilization(window) if window else None,
        "partial": partial_values(totals.partial, totals.trajectories, totals.max_partial_span),
        "stale": {"samples_processed": metrics.stale_groups, "trajectory_processed": totals.stale_trajectories},
        "param_update": _param_update(metrics),
        "validation": {
            "count": metrics.evaluations.count,
            "stall_s": metrics.updates.stalls.validation + metrics.lease_validation_s,
        },
        "throughput": _throughput(metrics),
        "bias": metrics.bias(),
        "stage_waits_s": occupancy.stage_waits(window) if window else {},
        "warnings": metrics.warnings,
        "bottleneck": bottleneck(shares) if shares else NOTHING_TRAINED,
    }


def time_shares(metrics: RunMetrics) -> TimeShares | None:
    """Shares of the wall time, by what it went to; None before the first optimizer step.

    The wall time includes waiting after the last step for a fetch that never came.
    """
    if (window := metrics.window) is None:
        return None
    occupancy = metrics.occupancy
    stalls = metrics.updates.before_last_step  # the last update comes after the last step, outside the wall time
    in_vain = _waited_in_vain(metrics, window[1])
    waited = occupancy.trainer_waited(window) + in_vain
    if in_vain and metrics.finished is not None:
        window = (window[0], metrics.finished.time)
    wall = _seconds(window)
    idle = occupancy.trainer_idle(window)

    def share(seconds: float) -> float:
        return min(max(seconds / wall, 0.0), 1.0)

    return TimeShares(
        trainer_waited=share(waited),
        waited_for_reward=share(occupancy.waited_for_reward(window)),
        trainer_stalled=share(stalls.trainer),
        waited_for_validation=share(stalls.validation + metrics.lease_validation_s),
        moving_weights=share(stalls.moving_weights),
        trained=1.0 if idle is None else 1.0 - idle,
        saving=share(occupancy.trainer_saved(window)),
        idle_while_saving=occupancy.idle_while_saving(window),
        rollout_idle=occupancy.rollouter_idle(window) or 0.0,
        rollout_stalled=share(stalls.rollout),
        slot_utilization=occupancy.slot_utilization(window),
        in_environments=metrics.totals.episodes.environment_share or 0.0,
        filtered=metrics.tally.filtered_share() or 0.0,
        one_process=_one_process(metrics),
        drains=metrics.started is not None and metrics.started.on_update == "drain",
    )


def _one_process(metrics: RunMetrics) -> bool:
    """Tell whether all workers are known to be in one process: the run is inline."""
    processes = {(worker.host, worker.pid) for worker in metrics.workers.values()}
    return len(processes) == 1 and all(pid is not None for _, pid in processes)


def _waited_in_vain(metrics: RunMetrics, since: float) -> float:
    """Seconds from ``since`` to the run's end that were spent waiting for a fetch that never came."""
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


def _evaluation(event: ValidationFinished) -> dict[str, Any]:
    by_source = {"by_source": event.by_source} if event.by_source else {}
    return {"version": event.version, "accuracy": event.accuracy, **by_source}


def _lag(metrics: RunMetrics) -> dict[str, Any]:
    mean, maximum = metrics.lag_so_far()
    return {
        "mean": mean,
        "max": maximum,
        "bound": metrics.started.lag_bound if metrics.started else None,
        "order": metrics.started.order if metrics.started else None,
        "histogram": histogram(metrics.lags),
    }


def _param_update(metrics: RunMetrics) -> dict[str, Any]:
    stalls = metrics.updates.stalls
    return {
        "count": stalls.updates,
        "trainer_stall_s": stalls.trainer,
        "rollout_stall_s": stalls.rollout,
        **metrics.updates.phases,
    }


def _throughput(metrics: RunMetrics) -> dict[str, float | None]:
    """Throughputs per second of wall time; samples are groups."""
    wall, totals = _seconds(metrics.window), metrics.totals
    counts = {
        "samples_per_s": metrics.tally.fates["trained"],
        "trajectories_per_s": totals.trained.trajectories,
        "trained_tokens_per_s": totals.trained.tokens,
        "generated_tokens_per_s": totals.generated_tokens,
    }
    return {name: count / wall if wall else None for name, count in counts.items()}
