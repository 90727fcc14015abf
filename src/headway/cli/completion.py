"""Completion of what the shell's own completion does not know: recipes and settings. Asked at each press of the key."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path


def complete_config(incomplete: str) -> Iterator[str]:
    """Yield recipes' names and YAML files, and folders on the way to some, that begin with ``incomplete``."""
    from headway.config.recipes import recipes

    typed, files = incomplete[: incomplete.rfind("/") + 1], list[str]()
    with suppress(OSError, RuntimeError):  # no such folder, none that may be read, or no such user
        here = [(one, one.is_dir()) for one in sorted(Path(typed or ".").expanduser().iterdir())]
        files = [
            f"{typed}{one.name}{'/' * is_folder}"
            for one, is_folder in here
            if is_folder or one.suffix in (".yaml", ".yml")
        ]
    yield from (one for one in chain(recipes(), files) if one.startswith(incomplete))


def complete_setting(incomplete: str) -> Iterator[str]:
    """Yield ``a.b=default`` for each key that begins with ``incomplete``; no value where the default is none, or
    a shell would take it apart.
    """
    from headway.config.reference import REQUIRED, keys

    none = (REQUIRED, "null")
    written = (
        f"{key.name}={'' if key.default in none or shlex.quote(key.default) != key.default else key.default}"
        for key in keys()
    )
    yield from (one for one in written if one.startswith(incomplete) and "[]" not in one and ".NAME" not in one)


def complete_key(incomplete: str) -> Iterator[str]:
    """Yield each section and each key that begins with ``incomplete``."""
    from headway.config.reference import parts

    names = dict.fromkeys(chain.from_iterable((part.name, *(key.name for key in part.keys)) for part in parts()))
    yield from (name for name in names if name and name.startswith(incomplete))
