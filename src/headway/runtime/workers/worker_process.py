"""A worker's or a fork server's process, as its host sees it: started, connected, watched until it is gone."""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from headway.errors import RunnerLost
from headway.runtime.frames import Frame, FrameChannel
from headway.runtime.process_tree import END_S, python_command
from headway.runtime.workers.wire import FrameKind, raised, unpickled
from headway.runtime.workers.worker_main import BOOT, HELD_BACK, SHOWS_WHERE, WorkerStart

SHOWN_S = 0.2
"""Seconds for a process to print where its threads stand."""
CUT_S = 1.0
"""Seconds that a process may outlive its connection."""
TOLD_S = END_S + 10.0
"""Seconds for a fork server to fork a worker, or to say how one ended, once it has killed what that one has left."""
WITH_FORK_SERVER = "the process that forked it"
"""End of a worker whose fork server has ended: all of its workers end with it."""


class WorkerProcess:
    """A process with user code, on the host's event loop.

    loaded    what it describes, once it has loaded the user's code: a result, `UserError` or `RunnerLost`
    ended     how it ended, such as ``exit code 3`` or ``SIGKILL``, once it is gone
    """

    def __init__(
        self,
        pid: int,
        sock: socket.socket,
        on_frame: Callable[[Frame], object],
        end_of: Callable[[int], Awaitable[str]],
        *,
        guarded: bool = False,
    ) -> None:
        """Watch ``pid``, which stays unreaped until ``end_of`` is awaited: it returns how the process ended.

        ``guarded``: it is the process's guard (`headway.runtime.process_tree`).
        """
        loop = asyncio.get_running_loop()
        self.pid = pid
        self.loaded: asyncio.Future[Any] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._on_frame = on_frame
        self._end_of = end_of
        self._ending: asyncio.Task[None] | None = None
        self.channel = FrameChannel(sock, self._receive, self._on_cut)
        self._pidfd = os.pidfd_open(pid)
        self._ends_by = signal.SIGTERM if guarded else signal.SIGKILL
        loop.add_reader(self._pidfd, self._on_gone)

    def kill(self, *, shown_first: bool = False) -> None:
        """Kill the process. ``shown_first``: a moment after it has printed where it stands."""
        if self._ending is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, SHOWS_WHERE if shown_first else self._ends_by)
            if shown_first:
                asyncio.get_running_loop().call_later(SHOWN_S, self.kill)

    def leave(self, within_s: float) -> None:
        """Let the process end by itself, by closing its connection. It is killed ``within_s`` seconds from now."""
        if self.channel.is_open:
            self.channel.close()
            asyncio.get_running_loop().call_later(within_s, self.kill)

    def _receive(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.LOADED:
                try:
                    self.loaded.set_result(unpickled(frame.payload, "what the user's code describes itself as"))
                except Exception as error:
                    self.loaded.set_exception(error)
            case FrameKind.FAILED:
                self.loaded.set_exception(raised(frame.payload))
            case _:
                self._on_frame(frame)

    def _on_cut(self) -> None:
        """Give a process without a connection a moment to end by itself, which tells more."""
        asyncio.get_running_loop().call_later(CUT_S, self.kill)

    def _on_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.channel.drain()  # what it said before it ended counts
        self.channel.close()
        os.close(self._pidfd)
        self._ending = asyncio.create_task(self._find_out())

    async def _find_out(self) -> None:
        end = await self._end_of(self.pid)
        if not self.loaded.done():
            self.loaded.set_exception(RunnerLost(f"ended with {end}", end=end, culprit=False))
        self.loaded.exception()  # it is seen even where nobody waits for it any more
        self.ended.set_result(end)


@dataclass(frozen=True, slots=True)
class Launch:
    """Launcher of processes for one piece of user code."""

    name: str
    start: WorkerStart
    env: Mapping[str, str]
    """Their whole environment."""
    output: int
    """Descriptor of what they print to."""

    def spawn(self, on_frame: Callable[[Frame], object], note: StepNote | None = None) -> WorkerProcess:
        """Start a new process, which notes in ``note`` whose steps it makes. Raises `OSError` where that fails."""
        here, there = socket.socketpair()
        with there:
            passed = [there.fileno(), *([note.descriptor] if note is not None else [])]
            command = python_command(BOOT, self.name, *map(str, [*passed, *([] if note is not None else [-1])]))
            try:
                with _interrupts_held_back():
                    popen = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=self.output,
                        stderr=self.output,
                        env=self.env,
                        pass_fds=passed,
                        start_new_session=True,
                    )
            except OSError:
                here.close()
                raise
            finally:
                if note is not None:
                    os.close(note.descriptor)  # the worker has it by now

        async def end_of(_pid: int) -> str:
            return end_text(popen.wait())

        process = WorkerProcess(popen.pid, here, on_frame, end_of, guarded=True)
        process.channel.send(Frame(FrameKind.START, payload=pickle.dumps(self.start)))
        return process


class ForkServer:
    """A process that forks workers."""

    def __init__(self, launch: Launch) -> None:
        """Start it. Raises `OSError` where the system refuses."""
        self.process = launch.spawn(self._on_frame)
        self.lost = False
        """It forks no more."""
        self.process.ended.add_done_callback(self._on_end)
        self._orders: dict[int, asyncio.Future[int]] = {}
        self._last = 0

    async def fork(self, on_frame: Callable[[Frame], object]) -> WorkerProcess:
        """Fork a worker. Raises `RunnerLost` where the fork server does not do it; it is ended then."""
        here, there = socket.socketpair()
        try:
            with there:
                pid = await self._ordered(Frame(FrameKind.FORK), there.fileno())
            if pid < 0:
                here.close()
                raise RunnerLost(f"could not be forked: {os.strerror(-pid)}", culprit=False)
            process = WorkerProcess(pid, here, on_frame, self._end_of)
        except OSError as cause:
            here.close()  # a worker that was forked nevertheless ends at that
            self.lost = True
            self.process.kill()
            raise RunnerLost(f"could not be forked: {cause}", culprit=False) from cause
        process.loaded.set_result(None)
        return process

    async def _end_of(self, pid: int) -> str:
        try:
            return end_text(await self._ordered(Frame(FrameKind.REAP, detail=pid)))
        except OSError:
            return WITH_FORK_SERVER

    async def _ordered(self, order: Frame, descriptor: int | None = None) -> int:
        """Send an order, and return what comes back. Raises `OSError` where nothing does."""
        self._last += 1
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._orders[self._last] = told
        order = order._replace(number=self._last)
        try:
            if descriptor is None:
                self.process.channel.send(order)
            else:
                self.process.channel.send_with(order, descriptor)
            waited: list[asyncio.Future[Any]] = [told, self.process.ended]
            await asyncio.wait(waited, timeout=TOLD_S, return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                how = "has ended" if self.process.ended.done() else f"did not answer within {TOLD_S:g} s"
                raise ConnectionError(f"the process that forks them {how}")
            return told.result()
        finally:
            del self._orders[order.number]

    def _on_end(self, _: asyncio.Future[str]) -> None:
        self.lost = True

    def _on_frame(self, frame: Frame) -> None:
        told = self._orders.get(frame.number)
        if told is not None and not told.done():
            told.set_result(frame.detail)


class StepNote:
    """The file in which a worker notes whose step its event loop is making."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("headway-worker")
        os.truncate(self.descriptor, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._view = memoryview(self._memory).cast("Q")

    def close(self) -> None:
        """Give the memory back. Nothing can be read any more."""
        self._view.release()
        self._memory.close()

    @property
    def whose(self) -> int:
        """Number of the job whose step is being made; 0 where it is none's, or not known."""
        return int(self._view[0])

    @property
    def steps(self) -> int:
        """Number of steps made so far."""
        return int(self._view[1])


def end_text(exit_code: int) -> str:
    """Say how a process ended: its exit code, or the signal where the code is negative."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Start processes that never hear of a terminal, not even before they leave its session.

    SIGTERM is not held back, so that one to the host's group ends what is just starting.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
