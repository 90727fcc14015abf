"""The report: what became of each setting, in three parts; lines of at most 80 columns where words allow it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from headway.config.migration.recipe_writer import body, in_yaml
from headway.config.migration.translation import Translation, TranslationOutcome, shown_value
from headway.config.migration_tables.table_rows import ReportPart

WIDTH = 80
NOTHING = "nothing to do"
"""Beginning of remarks on settings that nobody misses."""


def report(found: Translation) -> str:
    """Return the report as text."""
    lines = [f"{', '.join(source.name for source in found.sources)}: {found.project.name}"]
    for source in found.sources:
        lines += _wrapped(source.remarks, "note: ", "      ")
    for part in ReportPart:
        outcomes = sorted(found.of(part), key=_urgency)
        lines += ["", f"{part.value} ({len(outcomes)})"]
        for note, group in groupby(outcomes, key=lambda one: "" if one.answer.values else one.answer.note):
            lines += _settings(list(group), note, found.project.name)
        lines += [] if outcomes else ["  none"]
    if found.open:
        lines += ["", "Before it runs, headway doctor asks for"]
        lines += _wrapped(found.open, "  - ", "    ")
    return "\n".join(lines) + "\n"


def _urgency(one: TranslationOutcome) -> tuple[int, str]:
    """Return what outcomes are sorted by: those with values, those with something to do, and the rest by its remark."""
    if one.answer.values or not one.answer.note:
        return 0, ""
    return (2 if one.answer.note.startswith(NOTHING) else 1), one.answer.note


def _settings(outcomes: Sequence[TranslationOutcome], note: str, project: str) -> Iterator[str]:
    """Yield the lines of settings that share a remark; without one each has its own."""
    for one in outcomes:
        yield from _setting(one, project)
    yield from textwrap.wrap(note, WIDTH, initial_indent="    ", subsequent_indent="    ")


def _setting(one: TranslationOutcome, project: str) -> Iterator[str]:
    theirs = f"  {one.key}={shown_value(one)}" + ("" if one.given else f"  ({project}'s default)")
    ours = [f"{key}={in_yaml(value)}" for key, value in one.answer.values.items()]
    if one.answer.part is ReportPart.TAKEN and len(ours) == 1 and not one.answer.note:
        line = theirs if theirs.strip() == ours[0] else f"{theirs} → {ours[0]}"
        if len(line) <= WIDTH:
            yield line
            return
    yield theirs
    yield from (f"    → {one}" for one in ours)
    if ours and one.answer.note:
        yield from textwrap.wrap(one.answer.note, WIDTH, initial_indent="    ", subsequent_indent="    ")


def _wrapped(lines: list[str], first: str, further: str) -> list[str]:
    return [
        part for line in lines for part in textwrap.wrap(line, WIDTH, initial_indent=first, subsequent_indent=further)
    ]


def recipe(found: Translation, written_to: str | None) -> str:
    """Return the recipe as text, with comments on where each value is from."""
    names = ", ".join(source.name for source in found.sources)
    head = [f"# From {names} ({found.project.name}), by headway import: behind each value the setting that it is from."]
    head += [f"#   headway train {written_to or 'recipe.yaml'} --dry-run"]
    if found.unknown:
        head += ["#", "# The files do not say these, so set them yourself"]
        head += _wrapped(found.unknown, "#   - ", "#     ")
    if found.open:
        head += ["#", "# Before it runs, headway doctor asks for"]
        head += _wrapped(found.open, "#   - ", "#     ")
    comments = {}
    for key, one in found.origins().items():
        name = one.key if one.given else f"{found.project.name}'s default of {one.key}"
        remark = (
            one.answer.note if one.answer.part is ReportPart.DIFFERS and key == next(iter(one.answer.values)) else ""
        )
        value = f"={shown_value(one)}" if one.answer.part is ReportPart.DIFFERS else ""
        comments[key] = (f"{name}{value}", remark)
    return "\n".join(head) + "\n" + body(found.values, comments)
