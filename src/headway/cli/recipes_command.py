"""Command ``headway recipes``: the recipes that come with Headway, wherever it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.common import Debug, errors_as_messages
from headway.cli.completion import complete_config
from headway.errors import ConfigError


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Print this recipe, to copy and change.", autocompletion=complete_config),
    ] = None,
    debug: Debug = False,
) -> None:
    """List the recipes that come with Headway, or print one."""
    with errors_as_messages(debug):
        from headway.config import recipes as shipped

        if name is None:
            _list()
            return
        recipe = shipped.find_recipe(Path(name))
        if recipe not in shipped.recipes().values():
            meant = " or ".join(shipped.similar_recipes(Path(name))) or "demo"
            raise ConfigError(f"{name}: there is no such recipe; headway recipes lists all, such as {meant}")
        typer.echo(recipe.read_text(encoding="utf-8"), nl=False)


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from headway.config.recipes import about, home, recipes

    table = Table.grid(padding=(0, 2))
    for name, file in recipes().items():
        table.add_row(name, about(file))
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print("\nheadway train NAME [a.b=c ...] runs one, headway recipes NAME prints it;")
    console.print("those of plan/ are profiles: headway plan NAME compares settings by one.")
    console.print(f"The files are in {home() / 'recipes'}", soft_wrap=True)
