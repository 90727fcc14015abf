"""Common parts of a run's console views, and the report at its end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from headway.events import Event
from headway.reports import human
from headway.reports.metrics.group_tally import OTHER_REASONS
from headway.reports.run_directory import RunDirectory
from headway.runtime.user_code import by_fault

BIASED_BELOW = 0.9
REASONS_SHOWN = 3
FILTERED_FROM, ENOUGH_GROUPS = 0.8, 64
"""Minimum share of filtered groups, and minimum number of latest groups, for the end report to advise a change."""


class ConsoleView(Protocol):
    """Observer and row sink that also shows the phases before and after training."""

    def phase(self, text: str, detail: str = "") -> None:
        """Show the run's phase ``text`` (making the model, starting workers). ``detail``: its progress."""

    def warn(self, text: str) -> None:
        """Show a warning about the reports themselves."""

    def note(self, text: str) -> None:
        """Show a note on the reports, like the place where a tracker shows the run."""

    def on_event(self, event: Event) -> None: ...

    def on_row(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def report_end(
    console: Console,
    summary: dict[str, Any],
    run: RunDirectory,
    model: Path | None,
    *,
    resumable: bool = False,
    trackers: Sequence[tuple[str, str]] = (),
) -> None:
    """Print the end of a run: results, bottleneck, places of its files, and advice.

    ``model``: the exported model, or None; ``trackers``: names of trackers, and where each shows the run.
    """
    tensorboard = run.tensorboard if any(run.tensorboard.glob("*")) else None  # somebody may have removed it
    console.print()
    console.print(_headline(summary), soft_wrap=True)
    for line in _remarks(summary):
        if console.is_terminal:
            console.print(Padding(line, (0, 0, 0, 2), expand=False))
        else:
            console.print(Text("  ").append_text(line), soft_wrap=True)
    console.print()
    for name, where in (("model", model), ("TensorBoard", tensorboard), ("events", run.events), *trackers):
        if where is not None:
            console.print(_place(name, Text(str(where))), soft_wrap=True)
    console.print(_place("next", _command("headway report", run.path)), soft_wrap=True)
    if run.samples.is_file():
        console.print(_place("", _command("headway show", run.path)), soft_wrap=True)
    if tensorboard is not None:
        console.print(_place("", _command("tensorboard --logdir", tensorboard)), soft_wrap=True)
    if resumable:
        command = _command("headway train --resume", run.path)
        if _hardly_trains(summary):
            command.append(" a.b=c")
        console.print(_place("go on", command), soft_wrap=True)


def _place(name: str, what: Text) -> Text:
    """Return a line of ``name`` and a path. It is never wrapped, so that the path can be copied."""
    return Text.assemble("  ", (f"{name:<13}", "bright_black"), what)


def _command(words: str, path: Path) -> Text:
    return Text(f"{words} {shlex.quote(str(path))}", style="bold")


def _headline(summary: dict[str, Any]) -> Text:
    status = summary["status"]
    style = {"completed": "green", "interrupted": "yellow"}.get(status, "red")
    text = Text.assemble((f"{status.capitalize()}", f"bold {style}"))
    if summary["reason"]:
        text.append(f" ({summary['reason']})")
    evaluations = summary["eval"]
    if evaluations:
        text.append(": validation reward ").append(human.score(evaluations[0]["accuracy"]), "bold")
        if len(evaluations) > 1:
            text.append(" → ").append(human.score(evaluations[-1]["accuracy"]), "bold")
            best = max(evaluations, key=lambda evaluation: evaluation["accuracy"])
            if best["accuracy"] > evaluations[-1]["accuracy"]:
                text.append(f" (best {human.score(best['accuracy'])}, version {best['version']})")
    return text


def _not_trained(summary: dict[str, Any]) -> Text:
    """Return the line on untrained groups: ``Not trained: 484 filtered (453 all rewards are 0, 31 all rewards are
    1).``
    """
    parts = []
    for fate, reasons in summary["reasons"].items():
        parts.append(f"{human.count(summary['groups'][fate])} {fate} ({_frequent(reasons)})")
    return Text(f"Not trained: {'; '.join(parts)}.")


def _frequent(reasons: Mapping[str, int]) -> str:
    """Return the most frequent of ``reasons`` with their counts."""
    faults = by_fault({reason: times for reason, times in reasons.items() if reason != OTHER_REASONS})[:REASONS_SHOWN]
    parts = [f"{human.count(times)} {why}" for why, times in faults]
    if others := sum(reasons.values()) - sum(times for _, times in faults):
        parts.append(f"and {human.count(others)} others")
    return ", ".join(parts)


def _episodes(summary: dict[str, Any]) -> Text:
    """The line on episodes: ``640 episodes: 3.1 turns on average, 41% of their time in the environment; 3 failed …``"""
    agents, counts = summary["agents"], summary["episodes"]
    parts = [f"{human.count(summary['trajectories'])} episodes finished"]
    if agents:
        parts.append(f"{human.number(agents['num_turns/mean'])} turns on average (at most {agents['num_turns/max']})")
    if "environment_s/share" in agents:
        parts.append(f"{human.share(agents['environment_s/share'])} of their time in the environment")
    why = f" ({_frequent(summary['episodes_failed'])})" if summary["episodes_failed"] else ""
    return Text(f"{', '.join(parts)}; {human.count(counts['failed'])} failed{why}.")


def _hardly_trains(summary: dict[str, Any]) -> bool:
    """Tell whether at least `FILTERED_FROM` of the run's latest groups were filtered."""
    filtered = summary["filtered"]
    return bool(filtered["recent_groups"] >= ENOUGH_GROUPS and filtered["recent_share"] >= FILTERED_FROM)


def _rose(evaluations: Sequence[dict[str, Any]]) -> bool:
    """Tell whether validation reward was ever above its first value."""
    first, *later = (evaluation["accuracy"] for evaluation in evaluations)
    return bool(max(later) > first or first == 1.0)


def _remarks(summary: dict[str, Any]) -> Iterator[Text]:
    groups, lag, evaluations = summary["groups"], summary["lag"], summary["eval"]
    bound = "no bound" if lag["bound"] is None else f"bound {lag['bound']}"
    yield Text(
        f"{human.count(groups['trained'])} groups trained in {human.count(summary['optimizer_steps'])} optimizer "
        f"steps, {human.duration(summary['wall_s'])}; version {summary['version']}; "
        f"lag at most {human.UNKNOWN if lag['max'] is None else lag['max']} ({bound}); "
        f"{human.count(summary['partial']['total_partial_num'])} trajectories of more than one version."
    )
    if summary["status"] == "completed" and len(evaluations) > 1 and not _rose(evaluations):
        flat = "Validation reward did not rise: docs/troubleshooting.md has what a flat reward comes from."
        yield Text(flat, style="yellow")
    if summary["agents"] or summary["episodes_failed"]:
        yield _episodes(summary)
    if summary["reasons"]:
        yield _not_trained(summary)
    yield Text(summary["bottleneck"], style="bold")
    if _hardly_trains(summary):
        share, of = summary["filtered"]["recent_share"], summary["filtered"]["recent_groups"]
        yield Text(
            f"Of the last {human.count(of)} groups {human.share(share)} were filtered. More will be unless "
            "the prompts or the reward are changed. If the reward had been higher before, remove "
            "the checkpoints since then, and go on with a lower actor.optim.lr.",
            style="yellow",
        )
    if not summary["balanced"]:
        yield Text("The ledger does not balance: some groups have no fate, or two.", style="red")
    ratio = summary["bias"]["length_ratio"]
    if ratio is not None and ratio < BIASED_BELOW:
        yield Text(
            f"Answers that were trained on have {human.share(ratio)} of the length of those that were asked for: "
            "long ones are being lost.",
            style="yellow",
        )
