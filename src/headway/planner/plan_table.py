"""Plan on a terminal: the rows, quickest first, the recommendation, and the plan's uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from headway.planner.grid import PlanSetting, in_words
from headway.planner.measure import PRECISION, config_of, fill_versions
from headway.planner.plan_rows import AS_GOOD, PlanRow, precision
from headway.planner.planner import PlanResult
from headway.planner.profiles.job_profile import EmpiricalLengths, Profile
from headway.planner.simulation.simulated_run import Simulation
from headway.reports import human
from headway.reports.timeline.html_timeline import write_html
from headway.reports.timeline.timeline import TimelineBuilder

ROWS_SHOWN = 16
"""Number of rows shown from the top of the table. The recommended row, the baseline and each preset's best row are
always shown."""
NAMED = 2
"""Number of settings that a plan names among those not simulated."""
WIDEST = 100
WIDE_FROM = 96
"""Width of the terminal, in columns, at which less important figures are shown, too."""
RECOMMENDED = "→"


@dataclass(frozen=True, slots=True)
class PlanColumn:
    title: str
    cell: Callable[[PlanRow], str]
    figure: bool = True
    """True for a measured value, False for a part of the setting."""
    wide: bool = False
    """True for a column that is left out where there is little room."""


COLUMNS = (
    PlanColumn("preset", lambda row: row.setting.preset, figure=False),
    PlanColumn(
        "train:\nroll.", lambda row: "shared" if row.setting.split.shared else str(row.setting.split), figure=False
    ),
    PlanColumn("η", lambda row: f"{float(row.setting.eta):g}", figure=False),
    PlanColumn("trig\nger", lambda row: str(row.setting.trigger), figure=False),
    PlanColumn("step\ns", lambda row: human.number(row.step_s)),
    PlanColumn("±", lambda row: human.share(row.relative_error), wide=True),
    PlanColumn("samples\n/s", lambda row: human.number(row.samples_per_s), wide=True),
    PlanColumn("idle\ntrain", lambda row: human.share(row.measured.trainer_idle_ratio)),
    PlanColumn("idle\nroll.", lambda row: human.share(row.measured.rollouter_idle_ratio)),
    PlanColumn("slots\nused", lambda row: human.share(row.measured.slot_utilization), wide=True),
    PlanColumn("lag\n/max", lambda row: f"{row.measured.lag_mean:.2f}/{row.measured.lag_max}"),
    PlanColumn("speed\n-up", lambda row: human.UNKNOWN if row.speedup is None else f"{row.speedup:.2f}×"),
)


def print_plan(plan: PlanResult, console: Console) -> None:
    """Print what ``headway plan`` found, in at most 100 columns."""
    console.print(render(plan, min(console.width, WIDEST)))


def render(plan: PlanResult, width: int) -> RenderableType:
    advice = plan.advice
    parts: list[RenderableType] = [_title(plan)]
    if plan.rows:
        parts += [_table(plan, width), *_notes(plan)]
    if advice.recommended is not None:
        parallel = [f"actor.parallel.{name}={each}" for name, each in plan.profile.train.parallel if each > 1]
        if (size := plan.profile.rollout.devices) > 1:
            parallel.append(f"rollout.tensor_model_parallel_size={size}")
        parts += [Text(), Text.assemble(("Recommended: ", "bold"), *_in_words(advice.recommended, parallel))]
    parts += [Text(), Text(advice.sentence, style="bold")]
    if assumptions := plan.profile.assumptions:
        caveat = f"The plan is as good as the profile's assumptions, which nobody measured ({len(assumptions)}):"
        parts += [Text(), Text(caveat, style="yellow"), _bullets(assumptions)]
    simulated = (
        f"Simulated {_counted(len(plan.rows), 'row')} with {human.count(plan.trajectories)} trajectories in "
        f"{human.duration(plan.wall_s)}, {human.count(round(plan.trajectories_per_s))} in a second of processor time."
    )
    parts += [Text(), Text(simulated, style="bright_black")]
    return Constrain(Group(*parts), width)


def _title(plan: PlanResult) -> Text:
    batch = plan.profile.batch
    return Text.assemble(
        (plan.profile.name, "bold"),
        f": {human.count(plan.profile.devices)} devices; a version trains B = {human.count(batch.groups_per_version)} "
        f"groups of {batch.n}, {batch.ppo_mini_batch_size} a mini-batch",
    )


def _table(plan: PlanResult, width: int) -> Table:
    columns = [column for column in COLUMNS if width >= WIDE_FROM or not column.wide]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bright_black")
    table.add_column("row", justify="right", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right" if column.figure else "left", no_wrap=True)
    for number, row in _shown(plan):
        chosen = row == plan.advice.recommended
        cells = (column.cell(row) for column in columns)
        table.add_row(f"{RECOMMENDED * chosen}{number}", *cells, style="bold green" if chosen else None)
    return table


def _shown(plan: PlanResult) -> list[tuple[int, PlanRow]]:
    """The rows that are shown, each with its number, as ``--row`` counts them."""
    # Reversed, so that the quickest row of each preset comes last and is kept.
    best_of_presets = {row.setting.preset: row for row in reversed(plan.rows)}.values()
    always = [plan.baseline, plan.advice.recommended, *best_of_presets]
    return [(place + 1, row) for place, row in enumerate(plan.rows) if place < ROWS_SHOWN or row in always]


def _notes(plan: PlanResult) -> list[Text]:
    parallel = plan.profile.train.parallel
    notes = [f"Training was measured with {in_words(parallel)}; other meshes need a profile of their own."]
    if plan.baseline is not None:
        notes.append(f"Speed-up over {plan.baseline.setting.preset} on {plan.baseline.setting.split}.")
    if hidden := len(plan.rows) - len(_shown(plan)):
        notes.append(f"{human.count(hidden)} more rows are not shown; --json writes them all.")
    if rough := sum(row.relative_error > PRECISION for row in plan.rows):
        hurried = sum(not row.complete for row in plan.rows)
        why = f", {human.count(hurried)} of them for want of time (--budget)" if hurried else ""
        notes.append(f"Not known within {human.share(PRECISION)}: {_counted(rough, 'row')}{why}.")
    chosen = plan.advice.recommended
    if chosen is not None and chosen != plan.rows[0]:
        first = plan.rows[0]
        known = "" if first.complete else f" Row 1 is known {precision(first.relative_error)} only."
        notes.append(
            f"Row {plan.rows.index(chosen) + 1}, not 1: of rows within {human.share(AS_GOOD)} of the quickest, those "
            f"cut short counted at the most that they may take, the least lag decides.{known}"
        )
    if isinstance(plan.profile.response, EmpiricalLengths) and plan.profile.response.replay:
        notes.append("Lengths are the run's, in order; a PROFILE's are drawn at random, and its plan may differ.")
    if plan.open:
        notes.append(f"Not simulated, as time was out (--budget): {_settings(plan.open)}.")
    if plan.skipped:
        notes.append(f"Not simulated, as others are expected to be quicker (--sweep): {_settings(plan.skipped)}.")
    return [Text(note, style="bright_black") for note in notes]


def _settings(settings: Sequence[PlanSetting]) -> str:
    more = f" and {human.count(len(settings) - NAMED)} more" if len(settings) > NAMED else ""
    return "; ".join(map(str, settings[:NAMED])) + more


def _in_words(row: PlanRow, parallel: Sequence[str]) -> tuple[str | tuple[str, str], ...]:
    setting, split = row.setting, row.setting.split
    where = (
        f"all {human.count(split.train_devices)} devices for both, {_counted(split.replicas, 'replica')}"
        if split.shared
        else f"{human.count(split.train_devices)} devices train, {human.count(split.rollout_devices)} generate "
        f"({_counted(split.replicas, 'replica')})"
    )
    given = setting.settings | {"async_training.staleness_threshold": f"{float(setting.eta):g}"}
    settings = [*(f"{key}={value}" for key, value in given.items()), *parallel]
    return (setting.preset, "bold green"), f", {where}: {' '.join(settings)}"


def _bullets(lines: Sequence[str]) -> Table:
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row("-", Text(line))
    return table


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{human.count(count)} {what}s"


VERSIONS_SHOWN = 6
"""Number of versions in the picture, after the pipeline has filled."""


def write_timeline(profile: Profile, setting: PlanSetting, path: Path) -> None:
    """Simulate ``setting`` for a few versions and write its timeline to ``path``, as an HTML page."""
    builder = TimelineBuilder(simulated=True)
    versions = fill_versions(setting.eta) + VERSIONS_SHOWN + ceil(setting.eta)
    Simulation(profile, config_of(profile, setting, versions), observers=(builder,)).run()
    write_html(builder.build(), path)
