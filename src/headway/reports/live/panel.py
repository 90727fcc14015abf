"""The panel of the live view: a snapshot of plain values taken at one instant, and its drawing for a width.

Colours are only where they tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from headway.events import Event, RunStarted, ValidationFinished
from headway.reports import human
from headway.reports.metrics.group_tally import GroupsInFlight
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.run_sums import halved

HISTORY = 200
"""Least number of versions whose rewards are kept; of more than twice as many every second one is, and both ends."""


@dataclass(frozen=True, slots=True)
class StageLine:
    """A stage at one instant: what it does, or whom it has been waiting for, and for how long."""

    name: str
    state: str
    waiting_for: str | None
    active: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    started: RunStarted
    elapsed_s: float
    trained: int
    eta_s: float | None
    evaluations: tuple[ValidationFinished, ...]
    """Results of validations, in order of versions."""
    rewards: tuple[float, ...]
    lag_mean: float | None
    lag_max: int | None
    trainer_idle: float | None
    rollouter_idle: float | None
    trainer_version: int
    served: tuple[tuple[str, int], ...]
    counts: dict[str, int]
    whereabouts: GroupsInFlight
    row: dict[str, Any]
    """The last complete version's metrics."""
    stages: tuple[StageLine, ...]
    finished: bool


class SnapshotTaker:
    """Watches a run beside its `RunMetrics` and takes snapshots. ``clock`` runs on between two events."""

    def __init__(self, metrics: RunMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._event_time = 0.0
        self._seen_at = 0.0
        self._rewards: list[float] = []
        self._row: dict[str, Any] = {}

    def on_event(self, event: Event) -> None:
        self._event_time, self._seen_at = event.time, self._clock()

    def on_row(self, row: dict[str, Any]) -> None:
        self._row = self._row | row
        if "reward/mean" in row:
            self._rewards.append(row["reward/mean"])
            if len(self._rewards) > 2 * HISTORY:
                self._rewards = halved(self._rewards)

    def take(self) -> Snapshot | None:
        """Take a snapshot; None before the run has started."""
        metrics = self._metrics
        started = metrics.started
        if started is None:
            return None
        finished = metrics.finished
        now = self._event_time + self._clock() - self._seen_at if finished is None else finished.time
        trained = metrics.tally.fates["trained"]
        trainer_idle, rollouter_idle = metrics.idle_so_far()
        lag_mean, lag_max = metrics.lag_so_far()
        return Snapshot(
            started=started,
            elapsed_s=now - started.time,
            trained=trained,
            eta_s=self._eta(now, trained, started.total_groups),
            evaluations=tuple(metrics.evaluations)[-HISTORY:],
            rewards=tuple(self._rewards),
            lag_mean=lag_mean,
            lag_max=lag_max,
            trainer_idle=trainer_idle,
            rollouter_idle=rollouter_idle,
            trainer_version=metrics.version,
            served=tuple(sorted(metrics.served.items())),
            counts=metrics.tally.counts(),
            whereabouts=metrics.tally.whereabouts(),
            row=self._row,
            stages=tuple(
                StageLine(stage.name, stage.state, stage.waiting_for, stage.active, max(now - stage.since, 0.0))
                for stage in sorted(metrics.occupancy.stages.values(), key=lambda stage: started.place_of(stage.name))
            ),
            finished=finished is not None,
        )

    def _eta(self, now: float, trained: int, total: int | None) -> float | None:
        if total is None or trained >= total:
            return None
        return self._metrics.pace.seconds_left(now, total)


TWO_COLUMNS_FROM = 110
LABEL_WIDTH = 10
OFTEN_IDLE = 0.3
MANY_FILTERED = 4
"""Number of filtered groups per trained one from which on the panel shows a warning."""

FIRST = ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/clip_fraction")
"""Optimizer metrics that the panel shows before any other."""

ACCENT = "cyan"
QUIET = "bright_black"
GOOD = "green"
LOOK_HERE = "yellow"


Row = tuple[str, Text]
"""A row of the panel: its label and its text."""


def panel(snapshot: Snapshot, width: int) -> RenderableType:
    """Draw the whole view: progress, then learning beside flow (above it on a narrow terminal), then the stages."""
    parts = [_title(snapshot), _progress(snapshot, width - 4), Text(), *_body(snapshot, width), Text()]
    if not snapshot.finished:
        parts += [*_stages(snapshot), Text()]
    return Group(*parts)


def _body(snapshot: Snapshot, width: int) -> list[Text]:
    if width < TWO_COLUMNS_FROM:
        room = width - LABEL_WIDTH - 6
        return _lines(_learning(snapshot, room) + _flow(snapshot, room), LABEL_WIDTH)
    half = width // 2 - 1
    left = _lines(_learning(snapshot, half - LABEL_WIDTH - 6), LABEL_WIDTH)
    right = _lines(_flow(snapshot, half - LABEL_WIDTH - 6), LABEL_WIDTH)
    for line in left:
        line.truncate(half, overflow="ellipsis", pad=True)
    left += [Text(" " * half) for _ in right[len(left) :]]
    return [
        Text.assemble(one, other, no_wrap=True, overflow="ellipsis")
        for one, other in zip_longest(left, right, fillvalue="")
    ]


def _title(snapshot: Snapshot) -> RenderableType:
    title = Text.assemble(("  Headway ", "bold"), (f"{snapshot.started.mode}, seed {snapshot.started.seed} ", QUIET))
    return Rule(title, align="left", style=QUIET)


def _progress(snapshot: Snapshot, width: int) -> RenderableType:
    done = human.count(snapshot.trained)
    if (total := snapshot.started.total_groups) is None:
        return _indented(Text.assemble((done, "bold"), f" groups trained in {human.duration(snapshot.elapsed_s)}"))
    fraction = min(snapshot.trained / max(total, 1), 1.0)
    left = "" if snapshot.eta_s is None or snapshot.finished else f", {human.duration(snapshot.eta_s)} left"
    text = Text.assemble(
        (f" {human.share(fraction):>4}", "bold"),
        (f"  {done}/{human.count(total)} groups", ""),
        (f"  {human.duration(snapshot.elapsed_s)}{left}", QUIET),
    )
    bar = _bar(fraction, max(width - text.cell_len, 10), ACCENT)
    return _indented(bar.append_text(text))


def _bar(fraction: float, width: int, style: str) -> Text:
    full = round(min(max(fraction, 0.0), 1.0) * width)
    return Text.assemble(("━" * full, style), ("─" * (width - full), QUIET))


def _learning(snapshot: Snapshot, width: int) -> list[Row]:
    spark = min(max(width - 36, 8), 40)
    return [
        ("validation", _validation(snapshot, spark)),
        ("reward", _reward(snapshot, spark)),
        ("length", _lengths(snapshot.row)),
        *([("episodes", _episodes(snapshot.row))] if "num_turns/mean" in snapshot.row else []),
        ("optimizer", _optimizer(snapshot.row, width)),
    ]


def _validation(snapshot: Snapshot, spark: int) -> Text:
    """Show the mean reward of the held-out problems: the first, the last, and the course between them."""
    if not snapshot.evaluations:
        return Text("not measured yet", style=QUIET)
    history = [event.accuracy for event in snapshot.evaluations]
    text = Text(human.score(history[0]))
    if len(history) > 1:
        style = f"bold {GOOD}" if history[-1] > history[0] else "bold"
        text.append("  ▸  ", QUIET).append(human.score(history[-1]), style)
        text.append(f"  {human.sparkline(history, spark)}", ACCENT)
    return text.append(f"  version {snapshot.evaluations[-1].version}", QUIET)


def _reward(snapshot: Snapshot, spark: int) -> Text:
    if not snapshot.rewards:
        since = "since the resume" if snapshot.trainer_version else "yet"
        return Text(f"nothing trained {since}", style=QUIET)
    text = Text(human.score(snapshot.rewards[0]))
    if len(snapshot.rewards) > 1:
        text.append("  ▸  ", QUIET).append(human.score(snapshot.rewards[-1]), "bold")
        text.append(f"  {human.sparkline(snapshot.rewards, spark)}", ACCENT)
    return text


def _lengths(row: dict[str, Any]) -> Text:
    if "response_length/mean" not in row:
        return Text(human.UNKNOWN, style=QUIET)
    return _pairs(
        ("mean", human.number(row["response_length/mean"])),
        ("max", human.count(row["response_length/max"])),
        ("cut off", human.share(row["response_length/clip_ratio"])),
    )


def _episodes(row: dict[str, Any]) -> Text:
    """The line of programs' episodes; failures are named only where there are any."""
    pairs = [("turns", f"{row['num_turns/mean']:.1f}"), ("max", human.count(row["num_turns/max"]))]
    if "environment_s/share" in row:
        pairs.append(("environment", human.share(row["environment_s/share"])))
    text = _pairs(*pairs)
    if failed := row["episodes/failed_ratio"]:
        text.append("  failed ", QUIET).append(human.share(failed), LOOK_HERE)
    return text


def _optimizer(row: dict[str, Any], width: int) -> Text:
    """The line of the optimizer: as many of the trainer's own metrics as fit."""
    names = [name for name in row if name.startswith("actor/") and not name.endswith("_steps")]
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    if not names:
        return Text(human.UNKNOWN, style=QUIET)
    text = Text()
    if skipped := row.get("actor/skipped_steps", 0):
        text.append(f"{human.count(skipped)} steps skipped  ", LOOK_HERE)
    for name in names:
        pair = _pairs((name.removeprefix("actor/").replace("_", " "), human.number(row[name])))
        if text.cell_len + pair.cell_len > width:
            break
        text.append_text(pair).append("  ")
    text.rstrip()
    return text


def _flow(snapshot: Snapshot, width: int) -> list[Row]:
    return [
        ("lag", _lag(snapshot)),
        ("versions", _versions(snapshot)),
        ("idle", _idle(snapshot, min(max((width - 29) // 2, 4), 10))),
        ("now", _whereabouts(snapshot)),
        ("fates", _fates(snapshot.counts)),
    ]


def _lag(snapshot: Snapshot) -> Text:
    bound = "none" if snapshot.started.lag_bound is None else str(snapshot.started.lag_bound)
    if snapshot.lag_mean is None:
        return _pairs(("bound", bound)).append(f"  {snapshot.started.order}", QUIET)
    return _pairs(("mean", f"{snapshot.lag_mean:.2f}"), ("max", str(snapshot.lag_max)), ("bound", bound)).append(
        f"  {snapshot.started.order}", QUIET
    )


def _versions(snapshot: Snapshot) -> Text:
    total, each = snapshot.started.total_groups, snapshot.started.groups_per_version
    of = "" if total is None else f" of {total // each}"
    text = _pairs(("trainer", f"{snapshot.trainer_version}{of}"))
    served = sorted({version for _, version in snapshot.served})
    if not served:
        return text
    if len(served) == 1 and len(snapshot.served) > 2:
        return text.append("  ").append_text(_pairs((f"all {len(snapshot.served)} replicas", str(served[0]))))
    return text.append("  ").append_text(_pairs(*((name, str(version)) for name, version in snapshot.served[:4])))


def _idle(snapshot: Snapshot, bar: int) -> Text:
    text = Text()
    for who, ratio in (("trainer", snapshot.trainer_idle), ("rollouts", snapshot.rollouter_idle)):
        style = LOOK_HERE if (ratio or 0.0) > OFTEN_IDLE else "default"
        text.append(f"{who} ", QUIET).append(f"{human.share(ratio):>4} ", style)
        text.append_text(_bar(ratio or 0.0, bar, style)).append("   ")
    text.rstrip()
    return text


def _whereabouts(snapshot: Snapshot) -> Text:
    where = snapshot.whereabouts
    return _pairs(
        ("generating", human.count(where.generating)),
        ("queued", human.count(where.queued)),
        ("training", human.count(where.training)),
    )


def _fates(counts: dict[str, int]) -> Text:
    """The line of the groups' fates; failures are named only where there are any, for the line has to fit."""
    trained, filtered = counts["trained"], counts["filtered"]
    text = _pairs(("trained", human.count(trained))).append("  filtered ", QUIET)
    text.append(human.count(filtered), LOOK_HERE if filtered > MANY_FILTERED * trained else "")
    for fate in ("dropped", "failed"):
        if counts[fate]:
            text.append("  ").append(f"{fate} ", QUIET).append(human.count(counts[fate]), LOOK_HERE)
    return text


def _stages(snapshot: Snapshot) -> list[Text]:
    """Return each stage and whom it waits for, one line each."""
    rows = [(stage.name, _stage(stage)) for stage in snapshot.stages]
    return _lines(rows, max((len(name) for name, _ in rows), default=0))


def _stage(stage: StageLine) -> Text:
    seconds = human.duration(stage.seconds)
    if stage.waiting_for is not None:
        text = Text.assemble(("waits for ", QUIET), stage.waiting_for)
    else:
        text = Text(stage.state.lower().replace("_", " "), style=ACCENT if stage.state.upper() == "PROCESSING" else "")
        if stage.active > 1:
            text.append(f" {human.count(stage.active)}")
    return text.append(f"  {seconds}", QUIET) if stage.seconds >= 1 else text


def _lines(rows: list[Row], label_width: int) -> list[Text]:
    """Return a line for each row. A grid would look alike and take three times as long, at the cost of the run."""
    return [
        Text.assemble((f"  {label:<{label_width}}  ", QUIET), text, no_wrap=True, overflow="ellipsis")
        for label, text in rows
    ]


def _pairs(*pairs: tuple[str, str]) -> Text:
    """Join pairs as ``name value  name value``: names quiet, values plain."""
    text = Text()
    for index, (name, value) in enumerate(pairs):
        text.append("  " if index else "").append(f"{name} ", QUIET).append(value)
    return text


def _indented(text: RenderableType) -> RenderableType:
    return Padding(text, (0, 0, 0, 2))
