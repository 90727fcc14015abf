"""The code inside a worker process: its start, and the serving of jobs.

Jobs served one at a time need no event loop, so that synchronous user code may run its own. Concurrent jobs share one,
which notes the job of its current step in a file that the host reads.

A fork server may have forked the process. A fork server loads the user's code once, so that its workers have it from
the start. It has one thread and no event loop, and runs no more of the user's code. It reaps an ended worker only when
the host asks how that one ended: until then the system does not reuse its process id.

Everything imported here is imported in each worker: keep it light.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import io
import mmap
import os
import pickle
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from headway.errors import HeadwayError, RunError, UserCodeError, UserCodeFailed, said_by
from headway.runtime.frames import HEADER, Frame, FrameChannel
from headway.runtime.process_tree import GUARDED, adopt_orphans, children, descendants, die_with, end_children
from headway.runtime.workers.redaction import Redaction
from headway.runtime.workers.user_code_boundary import (
    BlockingChannel,
    FrameKind,
    Hosted,
    HostedSpec,
    answer_in,
    closed,
    closed_in_children,
    pickled_error,
    print_traceback,
    said_without_secrets,
)

HELD_BACK = {signal.SIGINT, signal.SIGHUP}
"""Signals of a terminal, blocked while workers start."""
SHOWS_WHERE = signal.SIGUSR2
"""Signal at which a worker prints its threads' tracebacks, even while C code holds the interpreter's lock."""
BOOT = f"{GUARDED}from headway.runtime.workers.worker_main import main; main(*map(int, sys.argv[2:]))"
"""Program of a worker process. Its arguments are a display name, and those of `main`."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The first message to a worker process."""

    spec: bytes
    """The pickled `HostedSpec`. It is pickled separately, so that a failure to unpickle is reported as one to load."""
    shown: str
    forks: bool
    """True for a fork server, which only forks workers."""
    alone: bool
    """True if jobs run one at a time, without an event loop."""
    secrets: tuple[str, ...]
    prints: bool
    """True if tracebacks of failures to load are printed."""


def main(descriptor: int, note: int = -1) -> None:
    """Run a worker process on the connection ``descriptor`` to its host.

    ``note``: descriptor of the file in which an event loop notes the job of its current step; -1: none.
    """
    _leave_signals_to_the_host()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A print with characters that its encoding lacks must not fail; output before a kill must not be lost.
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    with suppress(OSError, RuntimeError):  # stderr may be closed
        faulthandler.register(SHOWS_WHERE, all_threads=True)
    # Otherwise child processes of user code would hold the connection open, and the host not see this process end.
    os.set_inheritable(descriptor, False)
    # Before user code is loaded: it may fork while it is imported.
    channel = BlockingChannel(closed_in_children(socket.socket(fileno=descriptor)))
    first = channel.receive()
    if first is None:
        return
    start: WorkerStart = pickle.loads(first.payload)
    redaction = Redaction(start.secrets)
    hosted = _loaded(start, channel, redaction)
    if hosted is None:
        return
    if start.forks:
        channel = fork_workers(channel.sock, partial(close_alone, hosted))  # goes on in each of the forked processes
    if start.alone:
        serve_alone(channel, hosted, redaction)
    else:
        steps = memoryview(mmap.mmap(note, mmap.PAGESIZE)).cast("Q")
        asyncio.run(_Shared(hosted, redaction, steps).serve(channel.sock))


def _loaded(start: WorkerStart, channel: BlockingChannel, redaction: Redaction) -> Hosted | None:
    """Load the user's code, and send the host its description, or the error."""
    try:
        spec: HostedSpec = pickle.loads(start.spec)
        # The description is pickled inside the try: it may not pickle.
        hosted = spec.load()
        told = Frame(FrameKind.LOADED, detail=os.getpid(), payload=pickle.dumps(hosted.describe()))
    except BaseException as error:
        if not isinstance(error, HeadwayError):
            if start.prints:
                print_traceback()
            error = UserCodeError(f"{start.shown} cannot be loaded: {said_without_secrets(error, redaction)}")
        hosted, told = None, Frame(FrameKind.FAILED, payload=pickled_error(error, redaction))
    channel.send(told)
    return hosted


def _leave_signals_to_the_host() -> None:
    """Ignore SIGINT, and drop a SIGHUP that came during the start. This process leads a new session.

    A SIGTERM to the host's group would have ended it before it left the group. That does no harm: a host that is
    starting ends by it, too, and otherwise another worker replaces this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)  # blocked while the process started
    signal.signal(signal.SIGHUP, before)


def serve_alone(channel: BlockingChannel, hosted: Hosted, redaction: Redaction) -> None:
    """Serve jobs, one at a time, until the host closes the connection."""
    while (frame := channel.receive()) is not None:
        try:
            ended = Frame(FrameKind.RESULT, frame.number, 0, pickle.dumps(_done(channel, hosted, frame)))
        except BaseException as error:  # also an interrupt: workers ignore Ctrl-C, so user code raised it
            if not isinstance(error, HeadwayError):
                print_traceback()
            ended = Frame(FrameKind.ERROR, frame.number, 0, pickled_error(error, redaction))
        channel.send(ended)
    close_alone(hosted)


def _done(channel: BlockingChannel, hosted: Hosted, frame: Frame) -> Any:
    """Run a job's coroutine in one step. It waits only for the host."""
    asks = count(1)

    async def ask(message: Any) -> Any:
        channel.send(Frame(FrameKind.ASK, frame.number, next(asks), pickle.dumps(message)))
        answer = channel.receive()
        if answer is None:  # the host is gone
            os._exit(1)
        return answer_in(answer)

    coroutine: Any = hosted.serve(pickle.loads(frame.payload), ask)
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    # Closed now: its finally blocks run before the next job begins, not at some later garbage collection.
    coroutine.close()
    raise UserCodeFailed(
        "synchronous code has awaited something; it runs without an event loop: make it async, or use asyncio.run"
    )


def close_alone(hosted: Hosted) -> None:
    """Close the user's code, in one step."""
    with suppress(StopIteration):
        closed(hosted).send(None)


def fork_workers(sock: socket.socket, close: Callable[[], object]) -> BlockingChannel:
    """Fork workers as the host orders on ``sock``. Returns only in the workers, with the worker's connection.

    ``close`` is called before the fork server ends.
    """
    if threading.active_count() > 1:
        print("the user's code started threads when it was imported; forked processes lack them", file=sys.stderr)
    fork_server = os.getpid()
    adopt_orphans()
    kept = set(descendants(os.getpid()))  # workers, and processes that the user's code started when it was imported
    with suppress(OSError, ValueError):
        sys.stdout.flush()  # otherwise each worker would print it again
    # In this order: garbage that is frozen stays, and a collection in each worker would copy pages that all share.
    gc.collect()
    gc.freeze()  # pages stay shared if the collector does not write to them
    sock.setblocking(True)
    while True:
        # From the socket, not by the channel: its buffered reader would read past a header, and lose the descriptor.
        data, descriptors, *_ = socket.recv_fds(sock, HEADER.size, 1)
        if not data:
            close()
            os._exit(0)
        _, kind, order, detail = HEADER.unpack(data)
        if kind == FrameKind.REAP:
            # Only now: until it is reaped its id is not reused, and the host may still signal it.
            end = os.waitstatus_to_exitcode(os.waitpid(detail, 0)[1])
            kept.discard(detail)
            if not kept.issuperset(children()):  # children of an ended worker: a live one adopts its own descendants
                end_children(kept)
            sock.sendall(Frame(FrameKind.REAPED, order, end).packed())
            continue
        try:
            pid = os.fork()
        except OSError as error:  # no memory or process id is free now; other workers go on
            pid = -(error.errno or 1)
        if pid == 0:
            # Before user code runs: a signal to the server's group must not reach it.
            os.setsid()
            die_with(fork_server)
            # Again: children do not inherit this.
            adopt_orphans()
            return BlockingChannel(closed_in_children(socket.socket(fileno=descriptors[0])))
        # The worker has it: if it were held here, too, the connection would outlive the worker.
        os.close(descriptors[0])
        kept.add(pid)
        sock.sendall(Frame(FrameKind.FORKED, order, pid).packed())


MOST_THREADS = 256
"""Maximum number of threads for `asyncio.to_thread`: episodes wait in them for a network, more than for a processor."""
LEAVES_S = 3.0
"""Seconds at the process's end for cancelled jobs to end, before the user's code closes their resources."""
NOBODY = 0
_whose: ContextVar[int] = ContextVar("job", default=NOBODY)
"""Number of the job that a task belongs to. Tasks started by user code inherit it."""


class TaskExited(Exception):
    """Error of a task that raised `SystemExit` or an interrupt, which would stop the event loop."""


class _Shared:
    """Jobs that share an event loop. ``note`` gets the number of the current step's job, 0 for none, and the count of
    all steps.
    """

    def __init__(self, hosted: Hosted, redaction: Redaction, note: memoryview) -> None:
        self._hosted, self._redaction, self._note = hosted, redaction, note
        self._pid = os.getpid()
        self._jobs: dict[int, asyncio.Task[Frame]] = {}
        self._asks: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._numbers = count(1)

    async def serve(self, sock: socket.socket) -> None:
        """Serve jobs until the host closes the connection."""
        loop = asyncio.get_running_loop()
        # Before any task: an earlier one would not note the job of its steps.
        loop.set_task_factory(self._task)
        # asyncio's own has at most 32 threads: episodes in them would hold up all others that wait for a thread.
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="job"))
        ended = asyncio.Event()
        self._channel = FrameChannel(sock, self._on_frame, ended.set)
        await ended.wait()
        try:
            for job in self._jobs.values():
                job.cancel()
            if self._jobs:
                # Without a limit, a job that swallowed its cancellation got this process killed, with its environments
                # open.
                await asyncio.wait(self._jobs.values(), timeout=LEAVES_S)
            # After the jobs, which use these resources.
            await closed(self._hosted)
        finally:
            os._exit(0)  # threads that are still busy would keep the process alive

    def _on_frame(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.JOB:
                # A context for each job: tasks that its code starts inherit the number.
                context = copy_context()
                context.run(_whose.set, frame.number)
                job = asyncio.get_running_loop().create_task(self._job(frame.number, frame.payload), context=context)
                job.add_done_callback(partial(self._on_job_end, frame.number))
                self._jobs[frame.number] = job
            case FrameKind.CANCEL if frame.number in self._jobs:
                self._jobs[frame.number].cancel()
            case FrameKind.ANSWER | FrameKind.REFUSAL:
                answered = self._asks.get((frame.number, frame.detail))
                if answered is not None and not answered.done():
                    answered.set_result(frame)
            case FrameKind.PING:
                self._channel.send(Frame(FrameKind.PONG))
            case _:
                pass

    async def _job(self, number: int, payload: bytes) -> Frame:
        """Run a job, and return the frame with its result or error."""
        try:
            result = await self._hosted.serve(pickle.loads(payload), partial(self._ask, number))
            return Frame(FrameKind.RESULT, number, 0, pickle.dumps(result))
        except BaseException as error:
            if not isinstance(error, HeadwayError | asyncio.CancelledError):
                print_traceback()
            return Frame(FrameKind.ERROR, number, 0, pickled_error(error, self._redaction))

    def _on_job_end(self, number: int, job: asyncio.Task[Frame]) -> None:
        del self._jobs[number]
        if job.cancelled():  # before its first step
            self._channel.send(
                Frame(FrameKind.ERROR, number, 0, pickled_error(asyncio.CancelledError(), self._redaction))
            )
        else:
            self._channel.send(job.result())

    async def _ask(self, number: int, message: Any) -> Any:
        # Pickled first: a message that does not pickle fails here, before anything is sent.
        payload = pickle.dumps(message)
        if number not in self._jobs:
            raise RunError("the job that asks has ended")
        key = number, next(self._numbers)
        self._asks[key] = asyncio.get_running_loop().create_future()
        self._channel.send(Frame(FrameKind.ASK, *key, payload))
        try:
            answer: Frame = await self._asks[key]
        except asyncio.CancelledError:
            self._channel.send(Frame(FrameKind.WITHDRAWN, *key))
            raise
        finally:
            del self._asks[key]
        return answer_in(answer)

    def _task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: Context | None = None, **others: Any
    ) -> asyncio.Task[Any]:
        """Make a task that notes its job at each step."""
        if not asyncio.iscoroutine(coroutine):
            raise TypeError(f"a coroutine was expected, got {coroutine!r}")
        number = _whose.get() if context is None else context.get(_whose, NOBODY)
        return asyncio.Task(self._noting(coroutine, number), loop=loop, context=context, **others)

    async def _noting(self, coroutine: Coroutine[Any, Any, Any], number: int) -> Any:
        # A coroutine around the generator: from Python 3.12 on asyncio makes no task of a generator.
        return await self._steps(coroutine, number)

    @types.coroutine
    def _steps(self, coroutine: Coroutine[Any, Any, Any], number: int) -> Generator[Any, Any, Any]:
        """Step through ``coroutine``, and yield its awaited futures to the task."""
        note, pid = self._note, self._pid
        value, error = None, None
        while True:
            # Set before each step, cleared after it: the host reads it when the loop is blocked, or has ended.
            note[0] = number
            note[1] += 1
            try:
                awaited = coroutine.send(value) if error is None else coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            except (SystemExit, KeyboardInterrupt) as end:
                raise TaskExited(said_by(end)) from end
            finally:
                note[0], error = NOBODY, None
                # A forked child of user code returns: it would run the steps of all other jobs, too.
                if os.getpid() != pid:
                    os._exit(0)
            value = None
            try:
                value = yield awaited
            except BaseException as thrown:
                error = thrown
