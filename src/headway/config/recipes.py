"""Recipes that come with Headway, and their files: in the package or, in a clone, beside ``src``.

demo, agents/lookup, lookup, recipes/demo.yaml ─▶ find_recipe ─▶ the recipe's file, where no file of that name is here
recipes/agents/lookup.py:look_up               ─▶ with_own_files ─▶ that file of ours, where none of that name is here
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from headway.config.conditions import with_texts

FOLDERS = ("recipes", "examples")
"""Folders that come with Headway."""
_OWN = re.compile(rf"(?:{'|'.join(FOLDERS)})/[^:]+")
"""Pattern of a path in `FOLDERS`, without the name of a function after it."""


@cache
def home() -> Path:
    """Return the directory with the folders: the package if it was installed from a wheel, else the clone."""
    package = Path(__file__).resolve().parents[1]
    return package if (package / FOLDERS[0]).is_dir() else package.parents[1]


@cache
def recipes() -> Mapping[str, Path]:
    """Return name → recipe, such as ``demo`` and ``algorithms/gspo``; recipes outside subfolders come first."""
    folder = home() / FOLDERS[0]
    files = sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def find_recipe(path: Path, *, beside: Path | None = None) -> Path:
    """Return ``path`` if it is a file, else the recipe with this name or this last part of its name, else ``path``.

    ``beside``: file whose directory ``path`` is relative to; None: the working directory.
    """
    meant = path if beside is None else beside.parent / path
    # A folder with the recipe's name, such as one with runs, is not the recipe.
    if _there(meant) and not meant.is_dir():
        return meant
    name = path.as_posix().removeprefix(f"{FOLDERS[0]}/").removesuffix(".yaml")
    named = [file for one, file in recipes().items() if name in (one, one.rpartition("/")[2])]
    return named[0] if named else meant


def similar_recipes(path: Path) -> list[str]:
    """Return names of recipes that resemble the last part of ``path``, at most three."""
    by_end = {name.rpartition("/")[2]: name for name in recipes()}
    return [by_end[end] for end in difflib.get_close_matches(path.stem, by_end, n=3)]


def about(recipe: Path) -> str:
    """Return the first sentence of the comment at the start of a recipe."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("# ").strip() for line in takewhile(lambda line: line.startswith("# "), lines)]
    return re.split(r"\. |\.?$", " ".join(comment), maxsplit=1)[0]


def with_own_files(value: Any) -> Any:
    """Return a value of the configuration with paths such as ``recipes/agents/lookup.py`` made absolute.

    A path below ``recipes`` or ``examples`` that does not exist in the working directory becomes that of the file that
    comes with Headway. Everything else is returned as it is.
    """

    def found(text: str) -> str:
        named = _OWN.match(text)
        return str(home() / text) if named and not _there(named[0]) and _there(home() / named[0]) else text

    return with_texts(value, found)


def _there(path: str | Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110  # Path's raises for names too long
