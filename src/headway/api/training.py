"""Training from Python: new and resumed runs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.api.function_files import Functions
from headway.api.python_settings import layer, load_checked, load_resumed, settings_given
from headway.api.run_handle import LEFT_AT_ONCE, Run, load
from headway.api.storage.stored_run import located
from headway.api.subprocess_client import carry_out_apart
from headway.config.loading import LoadedConfig
from headway.config.schema import Config
from headway.errors import ConfigError, UserError, boundary, shown
from headway.reports.run_directory import Occupied, RunDirectory, free_names

if TYPE_CHECKING:
    from rich.console import Console

Function = Callable[..., Any] | str
"""A function, or its name: ``file.py:function``, or a built-in one."""

AHEAD = Path("code")
"""Placeholder for the folder of functions, for checks before the run's directory exists."""


def train(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    resume: str | os.PathLike[str] | Run | None = None,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    data: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    reward: Function | Sequence[Function | Mapping[str, Any]] | Mapping[str, Any] | None = None,
    loss: Function | Mapping[str, Any] | None = None,
    advantage: Function | None = None,
    task: Function | Mapping[str, Any] | None = None,
    tools: Function | Sequence[Function] | None = None,
    environment: Function | None = None,
    program: Function | None = None,
    agent: Function | Mapping[str, Any] | None = None,
    **sections: Any,
) -> Run:
    """Train a model, or resume a run that ended early. Returns the run when it has ended.

    The run has its own process, which prints what ``headway train`` prints; in a notebook the cell's output shows and
    updates it. Ctrl-C, or a notebook's interrupt button, makes the run finish its version and save; then the run is
    returned with the ``status`` ``interrupted``. A second Ctrl-C leaves at once.

    Functions are pickled by value and kept in the run's directory, so that functions of a notebook or a script need no
    file. They run as copies in other processes: their changes to variables are not seen here.

    Args:
        config: a YAML file, or its content as a mapping. Not for a resumed run, which has its own.
        settings: settings that override those of ``config``, by dotted key or nested: ``{"rollout.n": 8}``.
        resume: a run, its directory, or its storage as a URL, to resume from its newest checkpoint.
        model: ``model.path``; a mapping is the section ``model``.
        data: ``data.train``; a mapping is the section ``data``.
        reward: ``reward.function``; several are ``reward.functions``; a mapping is the section ``reward``.
        loss: ``algorithm.policy_loss.loss_mode``; a mapping is the section ``algorithm.policy_loss``.
        advantage: ``algorithm.adv_estimator``.
        task: ``data.task.name``; a mapping is the section ``data.task``.
        tools: ``agent.tools``, one or several.
        environment: ``agent.environment``, a class.
        program: ``agent.program``.
        agent: ``agent.client``; a mapping is the section ``agent``.
        sections: other sections and top-level settings: ``rollout={"n": 8}``, ``mode="async_stale"``.

    Raises:
        UserError: an argument is wrong: `ConfigError` for a setting, `UserCodeError` for a function that cannot be
            called or pickled. Nothing is left behind.
        RunError: the run failed. Its directory keeps everything up to the failure.
        KeyboardInterrupt: the run was left at once.
    """
    own = {"model": model, "data": data, "reward": reward, "loss": loss, "advantage": advantage, "task": task}
    own |= {"tools": tools, "environment": environment, "program": program, "agent": agent}
    values = settings_given(config if isinstance(config, Mapping) else None, settings, {**own, **sections})
    if resume is not None:
        if config is not None:
            raise ConfigError("resume takes the settings that the run was begun with; drop config, or give settings")
        if isinstance(resume, str):
            resume, url = located(resume, values.get("run.storage"), values.pop("run.dir", None), print)
            values |= {} if url is None else {"run.storage": url}
        return _resume(load(resume), Functions(values))
    if not isinstance(config, str | os.PathLike | Mapping):
        given = "" if config is None else f", not {shown(config)}"
        raise ConfigError(f"expected config, a YAML file like recipes/demo.yaml or a mapping{given}; or resume, a run")
    path = None if isinstance(config, Mapping) else Path(config).expanduser()
    return _begin(path, Functions(values))


def _train(loaded: LoadedConfig, console: Console | None) -> int:
    """Carry out a new run, in the subprocess. Returns the exit code."""
    from headway.api.run import train

    return train(loaded, console)


def _go_on(path: Path, before: Config, loaded: LoadedConfig, console: Console | None) -> int:
    """Resume a run, in the subprocess. Returns the exit code."""
    from headway.api.run import resume

    return resume(path, before, loaded, console)


def _begin(path: Path | None, functions: Functions) -> Run:
    checked = load_checked(path, layer(functions.settings(AHEAD))).config.run  # an error leaves no trace
    with _directory(checked.dir, checked.name, functions) as directory:
        own = functions.settings(directory.code.absolute()) | {"run.dir": str(directory.path)}
        carry_out_apart(partial(_train, load_checked(path, layer(own))), cell_output())
    return _ended(Run(directory.path))


def _resume(run: Run, functions: Functions) -> Run:
    code = RunDirectory(run.path).code.absolute()
    functions.move_away(code)  # before their names go into the settings
    before, loaded = load_resumed(run.path, layer(functions.settings(code)))
    written = functions.write(code) if functions else []
    try:
        carry_out_apart(partial(_go_on, run.path, before, loaded), cell_output())
    finally:
        # In any case: a refused resume has not written its configuration
        settled = RunDirectory(run.path).config.read_text(encoding="utf-8")
        for file in written:
            if str(file.with_suffix(".py")) not in settled:  # the resume was refused, and the run is unchanged
                file.unlink(missing_ok=True)
    return _ended(run)


def _ended(run: Run) -> Run:
    if run.summary.get("reason") == LEFT_AT_ONCE:
        raise KeyboardInterrupt
    return run


@contextmanager
def _directory(given: Path | None, name: str, functions: Functions) -> Iterator[RunDirectory]:
    """Make the run's directory with the functions in it. Both are removed if no run began there.

    Raises `UserError` if the directory is not empty, has a folder of functions already, or cannot be written.
    """
    directory, there = _made(given, name)
    code = directory.code.absolute()
    if functions and code.exists():
        raise Occupied(
            f"run.dir={directory.path} has {code.name} already, where the functions are to be written; give the path "
            "of a directory, new or empty"
        )
    try:
        if functions:
            with boundary(f"{code} cannot be made; give a run.dir that you may write to", UserError):
                functions.write(code)
        yield directory
    finally:
        if not directory.config.exists():  # a run that begins writes it first
            if functions:  # otherwise the folder is the user's
                shutil.rmtree(code, ignore_errors=True)
            if not there:
                with suppress(OSError):
                    directory.path.rmdir()


def _made(given: Path | None, name: str) -> tuple[RunDirectory, bool]:
    """Make a run's directory, and tell whether it existed. Raises `UserError` if it is in use or not empty."""
    if given is not None:
        directory, there = RunDirectory(given), given.exists()
        directory.check_free()
        with boundary(f"run.dir={given} cannot be made; give one that you may write to", UserError):
            given.mkdir(parents=True, exist_ok=True)
        return directory, there
    for path in free_names(name):
        cannot = f"run.dir={path} cannot be made; give one that you may write to"
        # A run that began in the same second may have this name.
        with boundary(cannot, UserError), suppress(FileExistsError):
            path.mkdir(parents=True)
            return RunDirectory(path), False
    raise AssertionError("unreachable: there is always another number")


def cell_output() -> Callable[[str], None] | None:
    """Return a function that shows a page of HTML in place of the previous one; None outside of notebooks.

    IPython is only asked if it is loaded. In a terminal it has no cells.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    handle: Any = None

    def show(page: str) -> None:
        nonlocal handle
        bundle = {"text/html": page, "text/plain": unescape(re.sub(r"<[^>]*>", "", page))}
        if handle is None:
            handle = display(bundle, raw=True, display_id=True)
        else:
            handle.update(bundle, raw=True)

    return show
