"""Processes of a run that can be profiled, one for all workers in it."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from headway.cluster.worker_group import PartOf, Worker, proxy
from headway.devices import kind_here
from headway.errors import RunError, boundary

COMPRESSION = 3
"""Level of gzip: it shrinks a trace to a fifteenth, in a third of the time of the best level."""
CHUNK_BYTES = 4 * 2**20
"""Number of bytes of a trace handled at once, as whole lines. The first chunk contains the trace's base time."""
BASE = re.compile(rb'"baseTimeNanoseconds": (\d+)')
TIMES = re.compile(rb'("ts": )(\d+(?:\.\d+)?)')
"""Times in a Chrome trace as Kineto writes it, in microseconds since its base, which is in Unix time."""
PROCESS_NAMES = re.compile(rb'("name": "process_name",[^}]*?"args": \{\s*"name": ")[^"]*(")')
THREAD_NAMES = re.compile(rb'("name": ")thread (\d+) \([^"]*\)(")')
SILENT = "99"
"""Level of Kineto's log at which it writes nothing: otherwise it writes to the driver's terminal, into the run's
view."""


class ProcessProfile:
    """Profile of this process by torch's profiler: the work of its threads on the CPU and on its GPU.

        start ─▶ Kineto, on all threads ─▶ stop ─▶ take: Chrome trace ─▶ times of the run's timeline, names ─▶ gzip

    Without a profile nothing is installed, at no cost. A profile changes times, but no bit of the results. ``name``:
    the worker's name, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._turn = threading.Lock()
        """Lock held while the profiler starts, stops or writes."""
        self._profiler: Any = None
        self._running = False

    async def start(self) -> None:
        """Start to record the work of all threads, as `Profiled.start` does.

        Begins on the event loop's thread, which takes milliseconds, and longer where a GPU is profiled the first time:
        the profiler complains of any other thread than the one that has imported torch.
        """
        with self._alone("start"):
            self._start()

    async def stop(self) -> None:
        """Stop recording. Does nothing if nothing is being recorded.

        All threads of the process stand still meanwhile: torch holds the interpreter for some microseconds per recorded
        operation.
        """
        await asyncio.to_thread(self._stop)

    async def take(self, origin: float, name: str) -> bytes:
        """Return the recorded trace, as `Profiled.take` does, and forget it. Raises `RunError` if nothing was recorded.

        ``name``: name of the process in the trace.
        """
        return await asyncio.to_thread(self._take, origin, name)

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)

        # Not `torch.profiler`, which adds only a schedule to this class and takes seconds to import.
        from torch._C._profiler import _ExperimentalConfig
        from torch.autograd.profiler import profile

        if self._running:  # left by a profile that the driver gave up
            self._running = False
            self._profiler.__exit__(None, None, None)
        self._profiler = profile(
            use_device=kind_here().profiled_as,
            # Computing threads exist already. By default torch profiles this thread and threads it starts, and crashes
            # if another thread stops the profile. A trace alone takes a third of the time to end.
            experimental_config=_ExperimentalConfig(profile_all_threads=True, trace_only=True),
        )
        self._profiler.__enter__()
        self._running = True

    def _stop(self) -> None:
        with self._alone("stop"):
            if self._running:
                self._running = False
                self._profiler.__exit__(None, None, None)

    def _take(self, origin: float, name: str) -> bytes:
        with self._alone("write its trace"):
            profiler, self._profiler = self._profiler, None
            if profiler is None or self._running:
                raise RunError(f"the profiler of {self.name} has recorded nothing")
            with tempfile.TemporaryDirectory(prefix="headway-profile-") as folder:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                del profiler  # frees the recorded events before the trace is read
                threads = {thread.native_id: thread.name for thread in threading.enumerate()}
                with path.open("rb") as trace:
                    return compressed(trace, origin, name, threads)

    @contextmanager
    def _alone(self, doing: str) -> Iterator[None]:
        """Use the profiler, exclusively. Raises `RunError` if it is busy or fails."""
        if not self._turn.acquire(blocking=False):  # `start` runs on the event loop's thread, which must not wait
            raise RunError(f"the profiler of {self.name} cannot {doing}: it is still busy with what it did before")
        try:
            with boundary(f"the profiler of {self.name} cannot {doing}", RunError):
                yield
        finally:
            self._turn.release()


def compressed(trace: BinaryIO, origin: float, name: str, threads: Mapping[int | None, str]) -> bytes:
    """Return a trace as Kineto writes it in gzip, with times since ``origin``, which is in Unix seconds.

    ``name``: name of the process in the trace. ``threads``: the system's thread id -> name. The trace is read in
    pieces, since as objects it may not fit in memory.

    Raises `RunError` if the trace is cut off: Kineto does not report a full disk.
    """
    pieces = iter(lambda: b"".join(trace.readlines(CHUNK_BYTES)), b"")
    head = next(pieces, b"")
    if (base := BASE.search(head)) is None:
        raise RunError(f"the trace of {name} is none that Kineto wrote: it does not say what its times refer to")
    shift = (int(base[1]) - round(origin * 1e9)) / 1e3
    process = name.encode()
    packed, end = io.BytesIO(), b""
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=COMPRESSION, mtime=0) as out:
        for piece in chain([head.replace(base[0], b'"baseTimeNanoseconds": 0')], pieces):
            placed = TIMES.sub(lambda found: b"%s%.3f" % (found[1], float(found[2]) + shift), piece)
            if b'_name"' in placed:
                placed = PROCESS_NAMES.sub(lambda found: found[1] + process + found[2], placed)
                placed = THREAD_NAMES.sub(lambda found: _named(found, threads), placed)
            out.write(placed)
            end = placed.rstrip()[-1:] or end
    if end != b"}":
        raise RunError(f"the trace of {name} is cut off: the disk of {tempfile.gettempdir()} has no room for it")
    return packed.getvalue()


def _named(found: re.Match[bytes], threads: Mapping[int | None, str]) -> bytes:
    """Return a thread's name in a trace: Python's name, if it has one, and the system's id."""
    name = threads.get(int(found[2]))
    return found[0] if name is None else found[1] + f"{name} ({found[2].decode()})".encode() + found[3]


class ProfiledProcess:
    """Implementation of `Profiled` over one of the workers in the process, each of which has a `ProcessProfile`."""

    def __init__(self, name: str, worker: Worker) -> None:
        self.name = name
        self._profile = profile = proxy(worker, ProcessProfile, part="profile")
        self.start, self.stop = profile.start, profile.stop

    async def take(self, origin: float) -> bytes:
        return await self._profile.take(origin, self.name)


def profiled(workers: Sequence[Worker], *, separate_processes: bool) -> list[ProfiledProcess]:
    """Return the processes of ``workers``, in order. Without ``separate_processes`` all of them are in one."""
    hosts = [worker.whole if isinstance(worker, PartOf) else worker for worker in workers]
    found: dict[str, tuple[Worker, list[str]]] = {}
    for worker, host in zip(workers, hosts, strict=True):
        _, names = found.setdefault(host.name if separate_processes else "", (host, []))
        names.append(worker.name)
    return [ProfiledProcess("_".join(dict.fromkeys(names)), host) for host, names in found.values()]
