"""Commands ``headway config`` and ``recipes``: settings explained from the schema, and the recipes that come along."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.common import command, complete_config, complete_key
from headway.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from headway.config.schema_keys import Key, KeyTable

MOST_RELATED = 8
"""Maximum number of related keys that are named."""


@command
def config(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY", help="A section, like rollout, or a key, like rollout.n.", autocompletion=complete_key
        ),
    ] = None,
) -> None:
    """Explain settings: all sections, the keys of a section, or one key in detail."""
    from rich.console import Console

    from headway.config.aliases import canonical_key
    from headway.config.schema_keys import tables as all_tables

    console, tables = Console(markup=False, highlight=False), list(all_tables())
    if key is None:
        _print_sections(console, tables)
        return
    plain = _plain(canonical_key(key))
    named = [(part, one) for part in tables for one in part.keys if _plain(one.name) == plain]
    sections = [part for part in tables if part.name and _plain(part.name) == plain]
    if named:
        _print_key(console, named, [one for part in tables for one in part.keys])
    if named and sections:
        console.print()
    if sections:
        inner = dict.fromkeys(part.name for part in tables if part.name.startswith(f"{sections[0].name}."))
        _print_section(console, sections, list(inner))
    if not named and not sections:
        raise ConfigError(_unknown(key))


def _unknown(key: str) -> str:
    from headway.config.aliases import GONE, canonical_key, gone_text
    from headway.config.schema_messages import meant

    if canonical_key(key) in GONE:
        return gone_text(key)
    candidates = meant(key)
    return f"{key}: unknown key; " + (
        f"did you mean {' or '.join(candidates)}?" if candidates else "headway config lists the sections"
    )


def _print_sections(console: Console, tables: Sequence[KeyTable]) -> None:
    top = [part for part in tables if not part.name]
    rows = [(key.name, _first_sentence(key.meaning)) for part in top for key in part.keys]
    # Reversed: of several parts with one name the first one counts.
    sections = {part.name: _first_sentence(part.meaning) for part in reversed(tables) if part.name.count(".") == 0}
    rows += [(name, meaning) for name, meaning in reversed(sections.items()) if name]
    _print_table(console, rows)
    console.print("\nheadway config SECTION lists the keys of one, headway config KEY tells all about a key.")


def _print_section(console: Console, sections: Sequence[KeyTable], inner: Sequence[str]) -> None:
    for part in sections:
        chosen = f" with {part.chosen_by}" if part.chosen_by else ""
        console.print(f"{part.name}{chosen}: {_terminal(part.meaning)}")
        rows = [
            (key.name.removeprefix(f"{part.name}."), _terminal(key.default), _first_sentence(key.meaning))
            for key in part.keys
        ]
        _print_table(console, rows)
        console.print()
    if inner:
        console.print(f"Sections in it: {', '.join(inner)}")


def _print_key(console: Console, named: Sequence[tuple[KeyTable, Key]], everyone: Sequence[Key]) -> None:
    from headway.config.presets import PRESETS
    from headway.config.schema_keys import spelled

    name = _plain(named[0][1].name)
    console.print(name)
    for part, key in named:
        rows = [("value", _terminal(key.value)), ("default", _terminal(key.default))]
        if part.chosen_by:
            rows.insert(0, ("with", part.chosen_by))
        _print_table(console, rows, indent=2)
        console.print(f"\n{_terminal(key.meaning)}\n")
    by_value: dict[str, list[str]] = {}
    for mode, values in PRESETS.items():
        if name in values:
            by_value.setdefault(spelled(values[name]), []).append(mode)
    if by_value:
        console.print("Set by the mode:")
        _print_table(console, [(value, ", ".join(modes)) for value, modes in by_value.items()], indent=2)
        console.print()
    mentioned = re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", " ".join(key.meaning for _, key in named))
    known = [one.name for one in everyone if one.name != name]
    mentioning = [one.name for one in everyone if f"`{name}`" in one.meaning]
    related = list(dict.fromkeys(one for one in [*mentioned, *mentioning] if one in known))
    if related:
        console.print(f"See also: {', '.join(related[:MOST_RELATED])}")


def _print_table(console: Console, rows: Sequence[Sequence[str]], indent: int = 0) -> None:
    from rich.padding import Padding
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for index in range(len(rows[0]) if rows else 0):
        last = index == len(rows[0]) - 1
        table.add_column(overflow="fold", max_width=None if last else 30)
    for row in rows:
        table.add_row(*row)
    if rows:
        console.print(Padding(table, (0, 0, 0, indent), expand=False))


def _plain(key: str) -> str:
    """Return a key without the indices or brackets of lists."""
    return re.sub(r"\[\d*\]", "", key)


def _first_sentence(markdown: str) -> str:
    return re.split(r"(?<=[.]) (?=[A-Z`])", _terminal(markdown), maxsplit=1)[0]


def _terminal(markdown: str) -> str:
    """Return a line of Markdown as text for a terminal: without backticks, with the paths of linked pages."""
    return re.sub(r"\[[^\]]*\]\((?!http)([^)]*)\)", r"docs/\1", markdown).replace("`", "")


@command
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Print this recipe, to copy and change.", autocompletion=complete_config),
    ] = None,
) -> None:
    """List the recipes that come with Headway, or print one."""
    from rich.console import Console
    from rich.table import Table

    from headway.config import recipes as shipped

    if name is None:
        table = Table.grid(padding=(0, 2))
        for one, file in shipped.recipes().items():
            table.add_row(one, shipped.about(file))
        console = Console(markup=False, highlight=False)
        console.print(table)
        console.print("\nheadway train NAME [a.b=c ...] runs one, headway recipes NAME prints it;")
        console.print("those of plan/ are profiles: headway plan NAME compares settings by one.")
        console.print(f"The files are in {shipped.home() / 'recipes'}", soft_wrap=True)
        return
    recipe = shipped.find_recipe(Path(name))
    if recipe not in shipped.recipes().values():
        meant = " or ".join(shipped.similar_recipes(Path(name))) or "demo"
        raise ConfigError(f"{name}: there is no such recipe; headway recipes lists all, such as {meant}")
    typer.echo(recipe.read_text(encoding="utf-8"), nl=False)
