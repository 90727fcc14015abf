"""Command ``headway show``: answers of a run's sampled groups and held-out problems, token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.common import command, say
from headway.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

LAST = 40
"""Number of samples in the table without ``--last``."""

Group = Annotated[int | None, typer.Argument(min=0, metavar="GROUP", help="A group's number; default: a table.")]


@command
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    group: Group = None,
    fate: Annotated[str | None, typer.Option(metavar="FATE", help="Only groups of this fate, like filtered.")] = None,
    source: Annotated[str | None, typer.Option(metavar="SOURCE", help="Only prompts from this source.")] = None,
    last: Annotated[int | None, typer.Option(min=1, metavar="N", help=f"So many lines; default: {LAST}.")] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Held-out problems; GROUP is then the number of one.")
    ] = False,
    color: Annotated[
        str,
        typer.Option(
            metavar="BY", help="What tokens are coloured by: gap, logprob, advantage, entropy, version or mask."
        ),
    ] = "gap",
    tokens: Annotated[bool, typer.Option("--tokens", help="A table of tokens, with all their numbers.")] = False,
    episode: Annotated[int | None, typer.Option(min=0, metavar="K", help="Only this episode of the group.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of lines, or the whole sample.")] = False,
) -> None:
    """Show what a run said: a table of the groups that were drawn, or one of them token by token."""
    of_table = {"--fate": fate is not None, "--source": source is not None, "--last": last is not None}
    of_group = {"--tokens": tokens, "--episode": episode is not None, "--color": color != "gap"}
    wrong = of_group if group is None else of_table | (of_group if validation else {})
    for option in (option for option, is_given in wrong.items() if is_given):
        if option in of_table:
            raise ConfigError(f"{option} chooses lines of the table; leave GROUP out")
        raise ConfigError(f"{option} shows one group that was trained; give its number: GROUP")
    if group is None:
        _table(run, validation, fate, source, last or LAST, as_json)
    elif validation:
        _problem(run, group, as_json)
    else:
        _group(run, group, color, tokens, episode, as_json)


def _table(run: Path, validation: bool, fate: str | None, source: str | None, last: int, as_json: bool) -> None:
    from headway.reports.sample_printer import print_table
    from headway.reports.sample_query import listed

    with _damage_told(run) as damaged:
        table = listed(run, damaged, last=last, validation=validation, fate=fate, source=source)
    if as_json:
        _print_json(table.lines)
    elif not table.lines:
        typer.echo(f"no group that left a sample was {fate}" if fate is not None else "no sample is of this source")
    else:
        print_table(table.lines, _console(), left_out=table.left_out)


def _problem(run: Path, problem: int, as_json: bool) -> None:
    from headway.reports.sample_printer import print_validations
    from headway.reports.sample_query import of_problem

    with _damage_told(run) as damaged:
        samples = of_problem(run, problem, damaged)
    if as_json:
        _print_json(samples)
    else:
        print_validations(samples, _console())


def _group(run: Path, number: int, color: str, tokens: bool, episode: int | None, as_json: bool) -> None:
    from headway.reports.sample_printer import print_group
    from headway.reports.sample_query import found, of_episode
    from headway.reports.samples.token_view import Color

    if color not in list(Color):
        raise ConfigError(f"--color: got {color}, expected one of {', '.join(Color)}")
    with _damage_told(run) as damaged:
        sample = found(run, number, damaged)
    if as_json:
        _print_json(of_episode(sample, episode))
    else:
        print_group(sample, _console(), color=Color(color), tokens=tokens, episode=episode)


@contextmanager
def _damage_told(run: Path) -> Iterator[list[int]]:
    """Yield a list for the numbers of damaged lines, and report their number on stderr."""
    damaged: list[int] = []
    yield damaged
    if damaged:
        first = ", ".join(map(str, damaged[:3])) + (", …" if len(damaged) > 3 else "")
        say(f"damaged lines of {run / 'samples.jsonl'}, which are left out: {len(damaged)} (line {first})")


def _print_json(value: object) -> None:
    """Print JSON. Control characters, and those that UTF-8 cannot encode, become JSON escapes."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    typer.echo(re.sub(r"[^\n\x20-\x7e]", lambda c: c[0] if c[0].isprintable() else json.dumps(c[0])[1:-1], text))


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False)
