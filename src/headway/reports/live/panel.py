"""The panel of the live view: a run's state, and its drawing for a width.

Colours are used only where they carry meaning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from headway.events import Event, RunStarted, ValidationFinished
from headway.reports import human
from headway.reports.metrics.occupancy import StageView
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.run_sums import Series

MOST_POINTS = 400
"""Maximum number of rewards in a run's curve."""


class RunProgress:
    """Present state of a run: metrics, newest row, and a ``clock`` that also runs between events."""

    def __init__(self, metrics: RunMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.metrics = metrics
        self.rewards: Series[float] = Series(MOST_POINTS)
        """Mean rewards of versions, at most `MOST_POINTS` of them."""
        self.row: dict[str, Any] = {}
        """Newest value of each metric."""
        self._clock = clock
        self._event_time = self._seen_at = 0.0

    def on_event(self, event: Event) -> None:
        self._event_time, self._seen_at = event.time, self._clock()

    def close(self) -> None: ...

    def on_row(self, row: dict[str, Any]) -> None:
        self.row = self.row | row
        if "reward/mean" in row:
            self.rewards.append(row["reward/mean"], row["reward/mean"])

    @property
    def now(self) -> float:
        """Time on the events' clock, which stops with the run."""
        finished = self.metrics.finished
        return self._event_time + self._clock() - self._seen_at if finished is None else finished.time

    @property
    def seconds(self) -> float:
        """Seconds since the run started."""
        return self.now - self.metrics.started.time if self.metrics.started else 0.0

    @property
    def trained(self) -> int:
        """Number of groups that were trained."""
        return self.metrics.tally.fates["trained"]

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end; None if unknown, or if all groups are trained."""
        total = self.metrics.started.total_groups if self.metrics.started else None
        if total is None or self.trained >= total:
            return None
        return self.metrics.pace.seconds_left(self.now, total)


TWO_COLUMNS_FROM = 110
LABEL_WIDTH = 10
OFTEN_IDLE = 0.3
MANY_FILTERED = 4
"""Minimum number of filtered groups per trained group for the panel to show a warning."""

FIRST = ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/clip_fraction")
"""Optimizer metrics that the panel shows first."""

ACCENT = "cyan"
QUIET = "bright_black"
GOOD = "green"
LOOK_HERE = "yellow"


Row = tuple[str, Text]
"""A row of the panel: its label and its text."""


def panel(run: RunProgress, width: int) -> RenderableType:
    """Draw the whole view: progress, then learning beside flow (above it on a narrow terminal), then the stages.

    Called under the lock of the events. What is returned can be printed without it.
    """
    if (started := run.metrics.started) is None:
        return Text()
    parts = [_title(started), _progress(run, started.total_groups, width - 4), Text()]
    parts += [*_body(run, started, width), Text()]
    if run.metrics.finished is None:
        parts += [*_stages(run, started), Text()]
    return Group(*parts)


def _body(run: RunProgress, started: RunStarted, width: int) -> list[Text]:
    if width < TWO_COLUMNS_FROM:
        room = width - LABEL_WIDTH - 6
        return _lines(_learning(run, room) + _flow(run, started, room), LABEL_WIDTH)
    half = width // 2 - 1
    left = _lines(_learning(run, half - LABEL_WIDTH - 6), LABEL_WIDTH)
    right = _lines(_flow(run, started, half - LABEL_WIDTH - 6), LABEL_WIDTH)
    for line in left:
        line.truncate(half, overflow="ellipsis", pad=True)
    left += [Text(" " * half) for _ in right[len(left) :]]
    return [
        Text.assemble(one, other, no_wrap=True, overflow="ellipsis")
        for one, other in zip_longest(left, right, fillvalue="")
    ]


def _title(started: RunStarted) -> RenderableType:
    title = Text.assemble(("  Headway ", "bold"), (f"{started.mode}, seed {started.seed} ", QUIET))
    return Rule(title, align="left", style=QUIET)


def _progress(run: RunProgress, total: int | None, width: int) -> RenderableType:
    done, elapsed = human.count(run.trained), human.duration(run.seconds)
    if total is None:
        return _indented(Text.assemble((done, "bold"), f" groups trained in {elapsed}"))
    fraction = min(run.trained / max(total, 1), 1.0)
    eta_s = run.seconds_left
    left = "" if eta_s is None or run.metrics.finished else f", {human.duration(eta_s)} left"
    text = Text.assemble(
        (f" {human.share(fraction):>4}", "bold"),
        (f"  {done}/{human.count(total)} groups", ""),
        (f"  {elapsed}{left}", QUIET),
    )
    bar = _bar(fraction, max(width - text.cell_len, 10), ACCENT)
    return _indented(bar.append_text(text))


def _bar(fraction: float, width: int, style: str) -> Text:
    full = round(min(max(fraction, 0.0), 1.0) * width)
    return Text.assemble(("━" * full, style), ("─" * (width - full), QUIET))


def _learning(run: RunProgress, width: int) -> list[Row]:
    spark = min(max(width - 36, 8), 40)
    return [
        ("validation", _validation(run.metrics.validated, spark)),
        ("reward", _reward(run, spark)),
        ("length", _lengths(run.row)),
        *([("episodes", _episodes(run.row))] if "num_turns/mean" in run.row else []),
        ("optimizer", _optimizer(run.row, width)),
    ]


def _validation(validated: Sequence[ValidationFinished], spark: int) -> Text:
    """Show the mean reward of the held-out problems: the first, the last, and the course between them."""
    if not validated:
        return Text("not measured yet", style=QUIET)
    history = [event.accuracy for event in validated]
    style = f"bold {GOOD}" if history[-1] > history[0] else "bold"
    return _course(history, spark, style).append(f"  version {validated[-1].version}", QUIET)


def _reward(run: RunProgress, spark: int) -> Text:
    if not (rewards := run.rewards.items):
        since = "since the resume" if run.metrics.version else "yet"
        return Text(f"nothing trained {since}", style=QUIET)
    return _course(rewards, spark, "bold")


def _course(scores: Sequence[float], spark: int, style: str) -> Text:
    """Show the first score, the last in ``style``, and the course between them."""
    text = Text(human.score(scores[0]))
    if len(scores) > 1:
        text.append("  ▸  ", QUIET).append(human.score(scores[-1]), style)
        text.append(f"  {human.sparkline(scores, spark)}", ACCENT)
    return text


def _lengths(row: Mapping[str, Any]) -> Text:
    if "response_length/mean" not in row:
        return Text(human.UNKNOWN, style=QUIET)
    return _pairs(
        ("mean", human.number(row["response_length/mean"])),
        ("max", human.count(row["response_length/max"])),
        ("cut off", human.share(row["response_length/clip_ratio"])),
    )


def _episodes(row: Mapping[str, Any]) -> Text:
    """The line of programs' episodes; failures are named only where there are any."""
    pairs = [("turns", f"{row['num_turns/mean']:.1f}"), ("max", human.count(row["num_turns/max"]))]
    if "environment_s/share" in row:
        pairs.append(("environment", human.share(row["environment_s/share"])))
    text = _pairs(*pairs)
    if failed := row["episodes/failed_ratio"]:
        text.append("  failed ", QUIET).append(human.share(failed), LOOK_HERE)
    return text


def _optimizer(row: Mapping[str, Any], width: int) -> Text:
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


def _flow(run: RunProgress, started: RunStarted, width: int) -> list[Row]:
    return [
        ("lag", _lag(run, started)),
        ("versions", _versions(run, started)),
        ("idle", _idle(run.metrics.idle_so_far(), min(max((width - 29) // 2, 4), 10))),
        ("now", _pairs(*((name, human.count(count)) for name, count in run.metrics.tally.whereabouts().items()))),
        ("fates", _fates(run.metrics.tally.counts())),
    ]


def _lag(run: RunProgress, started: RunStarted) -> Text:
    bound = "none" if started.lag_bound is None else str(started.lag_bound)
    mean, most = run.metrics.lag_so_far()
    so_far = () if mean is None else (("mean", f"{mean:.2f}"), ("max", str(most)))
    return _pairs(*so_far, ("bound", bound)).append(f"  {started.order}", QUIET)


def _versions(run: RunProgress, started: RunStarted) -> Text:
    total, each = started.total_groups, started.groups_per_version
    of = "" if total is None else f" of {total // each}"
    text = _pairs(("trainer", f"{run.metrics.version}{of}"))
    served = sorted(run.metrics.served.items())
    if not served:
        return text
    if len(served) > 2 and len({version for _, version in served}) == 1:
        return text.append("  ").append_text(_pairs((f"all {len(served)} replicas", str(served[0][1]))))
    return text.append("  ").append_text(_pairs(*((name, str(version)) for name, version in served[:4])))


def _idle(idle: tuple[float | None, float | None], bar: int) -> Text:
    text = Text()
    for who, ratio in zip(("trainer", "rollouts"), idle, strict=True):
        style = LOOK_HERE if (ratio or 0.0) > OFTEN_IDLE else "default"
        text.append(f"{who} ", QUIET).append(f"{human.share(ratio):>4} ", style)
        text.append_text(_bar(ratio or 0.0, bar, style)).append("   ")
    text.rstrip()
    return text


def _fates(counts: Mapping[str, int]) -> Text:
    """The line of the groups' fates; failures are named only where there are any, for the line has to fit."""
    trained, filtered = counts["trained"], counts["filtered"]
    text = _pairs(("trained", human.count(trained))).append("  filtered ", QUIET)
    text.append(human.count(filtered), LOOK_HERE if filtered > MANY_FILTERED * trained else "")
    for fate in ("dropped", "failed"):
        if counts[fate]:
            text.append("  ").append(f"{fate} ", QUIET).append(human.count(counts[fate]), LOOK_HERE)
    return text


def _stages(run: RunProgress, started: RunStarted) -> list[Text]:
    """Return each stage and whom it waits for, one line each, in the order in which data flows."""
    stages = sorted(run.metrics.occupancy.stages.values(), key=lambda stage: started.place_of(stage.name))
    rows = [(stage.name, _stage(stage, run.now - stage.since)) for stage in stages]
    return _lines(rows, max((len(name) for name, _ in rows), default=0))


def _stage(stage: StageView, seconds: float) -> Text:
    if stage.waiting_for is not None:
        text = Text.assemble(("waits for ", QUIET), stage.waiting_for)
    else:
        text = Text(stage.state.lower().replace("_", " "), style=ACCENT if stage.state.upper() == "PROCESSING" else "")
        if stage.active > 1:
            text.append(f" {human.count(stage.active)}")
    return text.append(f"  {human.duration(seconds)}", QUIET) if seconds >= 1 else text


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
