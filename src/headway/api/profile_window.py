"""A window in which the run's processes are profiled: from one version's boundary to another's.

    ask ─▶ WAITING ──boundary of the next version──▶ OPEN ──so many boundaries later, or a limit──▶ WRITING ─▶ IDLE

The window watches events alone, and nothing of the run waits for it: a process that does not begin in time, fails or is
lost meanwhile has no trace, and the run goes on. With no window asked for, nothing is done at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any

from headway.data.interfaces.training import Profiled
from headway.errors import ConfigError, HeadwayError, RunError, UserError, said_by
from headway.events import Emit, Event, Note, ProfileTaken, RunFinished, RunStarted, VersionReached
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.channel import Signal
from headway.runtime.task_groups import concurrently, end

MAX_VERSIONS = 1000
MAX_SECONDS = 120.0
"""Longest window in seconds. A process that computes small tensors records some 80 MB in ten of them, and stands still
for some seconds at the end of a million operations: one that does so for too long would be taken for lost."""
BEGIN_S = 60.0
"""Seconds for a process to begin to record: the first use of a GPU's counters takes some."""
END_S = 300.0
"""Seconds for a process to end it: torch goes through all that was recorded, which `MAX_SECONDS` limits."""
TAKE_S = 600.0
"""Seconds for a process to write its trace and send it. It has the operations of a window, and no weights."""
AT_THE_END_S = 120.0
"""Seconds for which a run that ends in order waits until the traces of an open window are written."""
LEAVING_S = 10.0
"""The same of a run that is left at once, or has failed."""


@dataclass(frozen=True, slots=True)
class WindowLines:
    """Progress lines for the requester of a window. They may stay unread."""

    _lines: asyncio.Queue[str | HeadwayError | None] = field(default_factory=asyncio.Queue)

    def say(self, line: str) -> None:
        self._lines.put_nowait(line)

    def end(self, failure: HeadwayError | None = None) -> None:
        self._lines.put_nowait(failure)

    async def lines(self) -> AsyncGenerator[str, None]:
        """Yield each line. Raises the error that the window ended with, if it did."""
        while (line := await self._lines.get()) is not None:
            if isinstance(line, HeadwayError):
                raise line
            yield line


class ProfileWindow:
    """Window of one run, an observer of its events. One is open at a time.

    async with ProfileWindow(processes, run_dir / "profiles", emit, since_first) as window:
        …                                       # the pipeline runs, and tells the window what happens
        async for line in window.ask(versions=1, seconds=60).lines(): …
    """

    def __init__(
        self,
        processes: Callable[[], Sequence[Profiled]],
        folder: Path,
        emit: Emit,
        since_first: Callable[[float], float],
        *,
        version: int = 0,
        remark: str | None = None,
    ) -> None:
        """Create the window.

        Args:
            processes: those to profile, as they are when a window opens.
            folder: the run's folder of profiles, in which each window makes one.
            emit: takes what is reported: `ProfileTaken`, and a warning for a process without a trace.
            since_first: seconds of the run's record at a moment on the event loop's clock.
            version: that the run begins with.
            remark: what is not profiled, for whoever asks.
        """
        self._processes = processes
        self._folder = folder
        self._emit = emit
        self._since_first = since_first
        self._version = version
        self._remark = remark
        self._last: int | None = None
        """Last version that the run trains; None where that is not known."""
        self._over = False
        """True once the run trains no more."""
        self._changed = Signal()
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------ the run's side

    def on_event(self, event: Event) -> None:
        match event:
            case RunStarted(total_groups=int(total)):
                self._last = ceil(total / event.groups_per_version) - 1
            case VersionReached():
                self._version = event.version
                self._changed.changed()
            case RunFinished():
                self._over = True
                self._changed.changed()

    def close(self) -> None:
        """Do nothing, as an observer: a window that is open ends with `__aexit__`."""

    async def __aenter__(self) -> ProfileWindow:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close the window, and wait until the traces of what was are written; not for long where the run failed."""
        self._over = True
        self._changed.changed()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=AT_THE_END_S if kind is None else LEAVING_S)
            await end([self._task])

    # ------------------------------------------------------------------------------------------ whoever asks

    def ask(self, *, versions: int, seconds: float) -> WindowLines:
        """Ask for a window of so many ``versions`` from the next one on, of at most so many ``seconds``.

        It opens and closes whether anybody reads what it tells or not. Raises `UserError` where that cannot be.
        """
        if not 1 <= versions <= MAX_VERSIONS:
            raise ConfigError(f"--versions: got {versions}, expected 1 to {MAX_VERSIONS}")
        if not 0 < seconds <= MAX_SECONDS:
            raise ConfigError(f"--seconds: got {seconds:g}, expected more than 0 and at most {MAX_SECONDS:g}")
        if self._task is not None and not self._task.done():
            raise UserError("this run has a profile under way; ask again when that is written")
        first = self._version + 1
        if self._over:
            raise UserError("this run is ending, and trains no more; there is nothing to profile")
        if self._last is not None and first > self._last:
            raise UserError(
                f"this run trains its last version, {self._version}, and a profile begins with a new one; ask a run "
                "that goes on for longer"
            )
        if not self._processes():
            raise UserError(f"this run has nothing to profile{f': {self._remark}' if self._remark else ''}")
        told = WindowLines()
        if self._remark:
            told.say(self._remark)
        told.say(f"the window opens with version {first}, when version {self._version} is trained")
        self._task = asyncio.create_task(self._end_told(self._take(first, versions, seconds, told), told))
        return told

    # ------------------------------------------------------------------------------------------ the window

    async def _end_told(self, taking: Coroutine[Any, Any, None], told: WindowLines) -> None:
        """Run a window to its end, and report success or failure."""
        failure: HeadwayError | None = RunError("the run was left before the profile was written")
        try:
            await taking
            failure = None
        except HeadwayError as cause:
            failure = cause
        except Exception as cause:
            failure = RunError(f"the profile failed: {said_by(cause)}")
            self._warn(str(failure))
        finally:
            told.end(failure)

    async def _take(self, first: int, versions: int, seconds: float, told: WindowLines) -> None:
        await self._changed.until(lambda: self._over or self._version >= first)
        if self._over:
            raise RunError(f"the run ended before version {first} began: there is no profile")
        opened_at, asked = now(), self._processes()
        opened = await self._each(asked, "begin", lambda process: process.start(), BEGIN_S)
        first = self._version  # a later one where beginning took longer than a whole version
        reason: str | None = None
        if opened:
            told.say(f"the window is open, with version {first}: {', '.join(process.name for process in opened)}")
            reason = await self._until(first + versions, seconds)
        trained, closed_at = min(versions, self._version - first), now()
        if opened:
            told.say(f"the window closes: {reason or f'version {first + trained - 1} is trained'}")
        # All of them: one that did not begin in time may have done so since, and would record until its memory ends.
        stopped = await self._each(asked, "end", lambda process: process.stop(), END_S)
        kept = [process for process in stopped if process in opened]
        folder = self._new_folder(first)
        files = await self._written(kept, folder, told)
        if files:
            self._emit(
                ProfileTaken(
                    time=closed_at,  # with the run's end, which no later event puts off
                    version=first,
                    versions=trained,
                    span=(opened_at, closed_at),
                    folder=f"{folder.parent.name}/{folder.name}",
                    files=files,
                    reason=reason,
                )
            )
        await self._forgotten([process for process in asked if process not in kept])
        if not opened:
            raise RunError("no process of the run could be profiled; the run's warnings say why")
        if not files:
            raise RunError("no trace could be written; the run's warnings say why")

    async def _forgotten(self, processes: Sequence[Profiled]) -> None:
        """Have processes drop their recordings, because those began or ended too late.

        A process that has recorded nothing refuses; that error is ignored.
        """

        async def forget(process: Profiled) -> None:
            with suppress(Exception):
                async with asyncio.timeout(TAKE_S):
                    await process.take(time.time())

        await concurrently(forget(process) for process in processes)

    def _new_folder(self, version: int) -> Path:
        """Return a folder for the traces of a window, other than that of a version that a resume has undone."""
        names = chain([f"version-{version}"], (f"version-{version}-{number}" for number in count(2)))
        return next(folder for name in names if not (folder := self._folder / name).exists())

    async def _written(self, processes: Sequence[Profiled], folder: Path, told: WindowLines) -> list[str]:
        """Write the traces, one after another, since each may be large. Returns the names of those that are there."""
        origin = time.time() - self._since_first(now())
        files: list[str] = []

        async def write(process: Profiled) -> None:
            path = folder / f"{process.name}.json.gz"
            await asyncio.to_thread(_write_whole, path, await process.take(origin))
            files.append(path.name)
            told.say(f"wrote {folder.parent.name}/{folder.name}/{path.name}")

        for process in processes:
            await self._each([process], "write its trace", write, TAKE_S)
        return files

    async def _until(self, version: int, seconds: float) -> str | None:
        """Wait for the boundary of ``version``. Returns why the wait was cut short; None where it was not."""
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
        """Do something with all processes side by side. Returns those with which it went well, and warns of others."""

        async def attempt(process: Profiled) -> str | None:
            try:
                async with asyncio.timeout(limit_s):
                    await act(process)
            except HeadwayError as failure:
                return str(failure)
            except TimeoutError:
                return f"it did not {doing} within {limit_s:g} s"
            except Exception as failure:
                return said_by(failure)
            return None

        failures = await concurrently(attempt(process) for process in processes)
        for process, failure in zip(processes, failures, strict=True):
            if failure is not None:
                self._warn(f"there is no profile of {process.name}: {failure}")
        return [process for process, failure in zip(processes, failures, strict=True) if failure is None]

    def _warn(self, text: str) -> None:
        self._emit(Note(time=now(), level="warning", text=text))


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all. Raises `OSError`."""
    draft = path.with_name(f"{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
