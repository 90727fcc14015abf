"""A window in which the run's processes are profiled: from one version's boundary to another's.

    RUN/profile.json ──boundary of the next version──▶ OPEN ──so many boundaries later, or a limit──▶ WRITING ─▶ IDLE

``headway ctl`` writes the file, on any machine with the directory. The run removes it when the window is over. The
window only watches events, and the run never waits for it: a process that begins late, fails or is lost has no trace,
and the run goes on.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import chain, compress, count
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any

from headway.config.sizing.timeouts import (
    PROFILE_AT_END_S,
    PROFILE_BEGINS_S,
    PROFILE_ENDS_S,
    PROFILE_LEFT_S,
    PROFILE_TAKEN_S,
)
from headway.data.interfaces.training import Profiled
from headway.errors import ConfigError, DataError, HeadwayError, RunError, UserError, said_by
from headway.events import Emit, Event, Note, ProfileTaken, RunFinished, RunStarted, VersionReached
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.stage import Signal
from headway.reports.record.events_file import look_through
from headway.reports.record.file_access import replace_file
from headway.reports.run_directory import RunDirectory, is_trained
from headway.runtime.task_groups import concurrently, end

MAX_VERSIONS = 1000
MAX_SECONDS = 120.0
"""Longest window in seconds. A process that computes small tensors records about 80 MB in ten seconds, and stands still
for some seconds at the end of a million operations. After a longer window it would be taken for lost."""


def ask(run: RunDirectory, versions: int, seconds: float) -> None:
    """Ask the process that trains ``run`` to profile ``versions`` versions, for at most ``seconds`` seconds.

    Raises:
        ConfigError: a number is out of range.
        UserError: no process trains the run, or a window was asked for already.
    """
    _check(versions, seconds)
    if is_trained(run.lock) is False:
        with suppress(DataError):
            if look_through(run.events).ended == "completed":
                raise UserError(
                    f"{run.path}: no process trains this run, which is complete: a run is asked while it trains"
                )
        raise UserError(f"{run.path}: no process trains this run. To go on with it: headway train --resume {run.path}")
    if run.profile_request.exists():
        raise UserError(f"{run.path}: this run has a profile under way; ask again when that is written")
    try:
        # In one step: the run may read it at any moment.
        replace_file(run.profile_request, json.dumps({"versions": versions, "seconds": seconds}))
    except OSError as cause:
        raise UserError(f"{run.path} cannot be written ({cause.strerror or cause}); ask as the run's user") from cause


def _check(versions: int, seconds: float) -> None:
    if not 1 <= versions <= MAX_VERSIONS:
        raise ConfigError(f"--versions: got {versions}, expected 1 to {MAX_VERSIONS}")
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(f"--seconds: got {seconds:g}, expected more than 0 and at most {MAX_SECONDS:g}")


class ProfileWindow:
    """Profiler of a run, in one window after the other. It observes the run's events.

    async with ProfileWindow(processes, run_directory, emit, since_first):
        …                                       # the pipeline runs, and tells the window what happens
    """

    def __init__(
        self,
        processes: Callable[[], Sequence[Profiled]],
        directory: RunDirectory,
        emit: Emit,
        since_first: Callable[[float], float],
        *,
        version: int = 0,
        remark: str | None = None,
    ) -> None:
        """Create the window.

        Args:
            processes: function that returns the processes to profile, when a window opens.
            directory: directory of the run, with the request and a folder for each window.
            emit: function that takes the events: `ProfileTaken`, and notes of what the window does.
            since_first: function from a time of the event loop to seconds since the record's first event.
            version: the version that the run begins with.
            remark: sentence on the processes that are not profiled; None if all are.
        """
        self._processes = processes
        self._request, self._folder, self._lock = directory.profile_request, directory.profiles, directory.lock
        self._emit = emit
        self._since_first = since_first
        self._version = version
        self._remark = remark
        self._last: int | None = None
        """Last version that the run trains; None if unknown."""
        self._over = False
        """True once training has ended."""
        self._changed = Signal()
        self._task: asyncio.Task[None] | None = None

    def on_event(self, event: Event) -> None:
        match event:
            case RunStarted(total_groups=int(total)):
                self._last = ceil(total / event.groups_per_version) - 1
            case VersionReached():
                self._version = event.version
                self._changed.changed()
                ends = self._last is not None and event.version > self._last
                if (self._task is None or self._task.done()) and not ends and self._request.exists():
                    self._task = asyncio.create_task(self._window())
            case RunFinished():
                self._over = True
                self._changed.changed()

    def close(self) -> None:
        """Do nothing: `__aexit__` closes an open window."""

    async def __aenter__(self) -> ProfileWindow:
        # A request older than the lock is a killed process's; a newer one came while this process started.
        with suppress(FileNotFoundError):
            if self._request.stat().st_mtime_ns < self._lock.stat().st_mtime_ns:
                self._request.unlink()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close the window, and wait until its traces are written; only shortly if the run failed."""
        self._over = True
        self._changed.changed()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=PROFILE_AT_END_S if kind is None else PROFILE_LEFT_S)
            await end([self._task])
        if self._request.exists():
            self._request.unlink(missing_ok=True)
            self._note("the run was over before the profile was written that it was asked for", "warning")

    # ------------------------------------------------------------------------------------------ the window

    async def _window(self) -> None:
        """Run a window to its end, and note a failure."""
        try:
            asked = json.loads(self._request.read_bytes())
            _check(asked["versions"], asked["seconds"])
            await self._take(asked["versions"], asked["seconds"])
        except Exception as cause:
            self._note(f"there is no profile: {_reason(cause)}", "warning")
        self._request.unlink(missing_ok=True)  # last: while the file exists no other window can be asked for

    async def _take(self, versions: int, seconds: float) -> None:
        opened_at, asked = now(), self._processes()
        if self._remark:
            self._note(self._remark)
        opened = await self._each(asked, "begin", lambda process: process.start(), PROFILE_BEGINS_S)
        first = self._version  # a later version if beginning took longer than one
        reason: str | None = None
        if opened:
            self._note(f"profiling version {first}: {', '.join(process.name for process in opened)}")
            reason = await self._until(first + versions, seconds)
        trained, closed_at = min(versions, self._version - first), now()
        # All processes: one that began late would otherwise record until its memory is full.
        stopped = await self._each(asked, "end", lambda process: process.stop(), PROFILE_ENDS_S)
        kept = [process for process in stopped if process in opened]
        folder = self._new_folder(first)
        files = await self._written(kept, folder)
        if files:
            self._emit(
                ProfileTaken(
                    time=closed_at,  # not now: the record's last event must not be after the run's end
                    version=first,
                    versions=trained,
                    span=(opened_at, closed_at),
                    folder=f"{folder.parent.name}/{folder.name}",
                    files=files,
                    reason=reason,
                )
            )
            self._note(f"profiled: {len(files)} trace{'s' * (len(files) > 1)} in {folder.parent.name}/{folder.name}")
        await self._forgotten([process for process in asked if process not in kept])
        if not files:
            raise RunError("no process of the run could be profiled")

    async def _forgotten(self, processes: Sequence[Profiled]) -> None:
        """Have processes drop their recordings, because those began or ended too late.

        A process that has recorded nothing refuses; that error is ignored.
        """

        async def forget(process: Profiled) -> None:
            with suppress(Exception):
                async with asyncio.timeout(PROFILE_TAKEN_S):
                    await process.take(time.time())

        await concurrently(forget(process) for process in processes)

    def _new_folder(self, version: int) -> Path:
        """Return a new folder for a window's traces; the same version may have one from before a resume."""
        names = chain([f"version-{version}"], (f"version-{version}-{number}" for number in count(2)))
        return next(folder for name in names if not (folder := self._folder / name).exists())

    async def _written(self, processes: Sequence[Profiled], folder: Path) -> list[str]:
        """Write the traces one after another, since each may be large. Returns the names of the written ones."""
        # The Unix time of the record's first event: traces and timeline begin at the same moment.
        origin = time.time() - self._since_first(now())
        files: list[str] = []

        async def write(process: Profiled) -> None:
            path = folder / f"{process.name}.json.gz"
            await asyncio.to_thread(_write_whole, path, await process.take(origin))
            files.append(path.name)

        for process in processes:
            await self._each([process], "write its trace", write, PROFILE_TAKEN_S)
        return files

    async def _until(self, version: int, seconds: float) -> str | None:
        """Wait for the boundary of ``version``. Returns why the wait was cut short; None if it was not."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.until(lambda: self._over or self._version >= version)
        except TimeoutError:
            return f"version {version - 1} was not trained within --seconds {seconds:g}"
        return None if self._version >= version else f"the run ended before version {version - 1} was trained"

    async def _each(
        self,
        processes: Sequence[Profiled],
        doing: str,
        act: Callable[[Profiled], Coroutine[Any, Any, None]],
        limit_s: float,
    ) -> list[Profiled]:
        """Do something with all processes concurrently. Returns those where it succeeded, and warns of the others."""

        async def attempt(process: Profiled) -> bool:
            try:
                async with asyncio.timeout(limit_s):
                    await act(process)
            except Exception as failure:
                late = isinstance(failure, TimeoutError)
                why = f"it did not {doing} within {limit_s:g} s" if late else _reason(failure)
                self._note(f"there is no profile of {process.name}: {why}", "warning")
                return False
            return True

        went_well = await concurrently(attempt(process) for process in processes)
        return list(compress(processes, went_well))

    def _note(self, text: str, level: str = "info") -> None:
        self._emit(Note(time=now(), level=level, text=text))


def _reason(failure: Exception) -> str:
    return str(failure) if isinstance(failure, HeadwayError) else said_by(failure)


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically. Raises `OSError`."""
    draft = path.with_name(f"{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
