"""Functions given as objects: pickled by value into a folder, each beside a Python file that loads it.

    reward=score ─▶ FOLDER/score.pkl, FOLDER/score.py ─▶ reward.function=FOLDER/score.py:score

So settings stay plain text, every process loads the function as it loads one from a user's file, and
``headway train --resume`` finds it again.

A function of a script or a notebook is pickled by value. One that an importable module defines is pickled as its
name, and imported when it is loaded.
"""

from __future__ import annotations

import inspect
import keyword
import pickle
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headway.config.aliases import canonical_key
from headway.config.layers import lies_in
from headway.errors import ConfigError, UserCodeError, said_by


def pickled(function: Any, name: str) -> bytes:
    """Pickle a function, a class or a callable object. ``name``: its name in messages.

    Raises `UserCodeError` where it holds something that cannot be pickled.
    """
    import cloudpickle

    try:
        pickle: bytes = cloudpickle.dumps(function)
    except Exception as cause:
        raise UserCodeError(
            f"{name} cannot be sent to the processes that call it ({said_by(cause)}). Make what it uses inside the "
            "function, or put both into a file and give file.py:name"
        ) from cause
    return pickle


TAKE_FUNCTIONS = (
    "reward.function",
    "reward.functions",
    "data.task.name",
    "algorithm.policy_loss.loss_mode",
    "algorithm.adv_estimator",
    "algorithm.rollout_correction",
    "model.warmup.demonstrations",
    "agent.tools",
    "agent.environment",
    "agent.program",
    "agent.client",
)
"""Settings that name functions of the user's own."""
MOST_OF_SOURCE = 10_000
"""Maximum number of characters of a function's source that are written beside it."""

_FILE = '''"""{name}: given to Headway as an object, by {shown}.

It is in {name}.pkl beside this file, pickled by Python {python}, and is the same in every process.{source}
"""

from headway.runtime.user_code import pickled_beside

{name} = pickled_beside(__file__)
'''


class Functions:
    """Functions among the user's settings. ``settings``: dotted key → value."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Find the functions. Raises `ConfigError` for one at a setting that takes none."""
        self._settings = settings
        self._found: list[tuple[str, Any]] = []
        """Pairs of a unique name and a function. Each function is there once."""
        for key, value in settings.items():
            self._replaced(key, value, partial(self._find, key))

    def __bool__(self) -> bool:
        return bool(self._found)

    def settings(self, folder: Path) -> dict[str, Any]:
        """Return the settings, each function replaced by ``FOLDER/name.py:name``."""

        def named(function: Any) -> str:
            name = next(name for name, other in self._found if other is function)
            return f"{folder / name}.py:{name}"

        return {key: self._replaced(key, value, named) for key, value in self._settings.items()}

    def move_away(self, folder: Path) -> None:
        """Rename functions whose names are taken in ``folder``, so that no file there is overwritten."""
        # The configuration that a resume reads still names the files of an earlier start
        taken = {file.stem for file in folder.glob("*")}
        self._found = [(_free(name, taken), function) for name, function in self._found]

    def write(self, folder: Path) -> list[Path]:
        """Write the functions, and return the files. Raises `UserCodeError` where one cannot be pickled."""
        # Pickle all before writing any: a failure leaves no file behind
        pickles = {name: pickled(function, name) for name, function in self._found}
        python, path = list(sys.version_info[:2]), [str(Path(entry or ".").absolute()) for entry in sys.path]
        written = []
        folder.mkdir(parents=True, exist_ok=True)
        for name, function in self._found:
            # A pickle in a pickle: the Python version is known before the inner one is opened
            whole = pickle.dumps({"python": python, "path": path, "pickled": pickles[name]})
            text = _FILE.format(
                name=name, shown=_shown(function), python=".".join(map(str, python)), source=_source(function)
            )
            (folder / f"{name}.pkl").write_bytes(whole)
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
            written += [folder / f"{name}.pkl", folder / f"{name}.py"]
        return written

    def _find(self, key: str, function: Any) -> str:
        if not lies_in(canonical_key(key), *TAKE_FUNCTIONS):
            kind = "a class" if isinstance(function, type) else "a function"
            raise ConfigError(
                f"{key}: got {_shown(function)}, {kind}; the settings that take functions are "
                f"{', '.join(TAKE_FUNCTIONS)}"
            )
        if not any(other is function for _, other in self._found):
            self._found.append((_free(_name(function, key), {name for name, _ in self._found}), function))
        return ""

    def _replaced(self, key: str, value: Any, replace: Callable[[Any], str]) -> Any:
        match value:
            case Mapping():
                return {name: self._replaced(key, inner, replace) for name, inner in value.items()}
            case list():
                return [self._replaced(key, inner, replace) for inner in value]
        return replace(value) if callable(value) else value


def _name(function: Any, key: str) -> str:
    name = str(getattr(function, "__name__", type(function).__name__))
    if name.isidentifier() and not keyword.iskeyword(name):
        return name
    *_, section, last = key.split(".")
    return section if last in ("function", "functions", "name") else last


def _free(name: str, taken: set[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def _shown(function: Any) -> str:
    """Return a function's qualified name, like ``__main__.score``."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _source(function: Any) -> str:
    """Return the source of a function as part of a docstring; empty if it has none."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    # Backslashes first: those that the second call puts before quotes must stay single.
    quoted = source[:MOST_OF_SOURCE].replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f" Its source was\n\n{textwrap.indent(quoted.rstrip(), '    ')}"
