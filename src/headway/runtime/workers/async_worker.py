"""Serving many jobs at once on one event loop, which notes in a file that the host reads whose step it is making."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import types
from collections.abc import Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from functools import partial
from itertools import count
from typing import Any

from headway.errors import HeadwayError, RunError, said_by
from headway.runtime.frames import Frame, FrameChannel
from headway.runtime.workers.redaction import Redaction
from headway.runtime.workers.user_code_boundary import (
    FrameKind,
    Hosted,
    answer_in,
    closed,
    pickled_error,
    print_traceback,
)

MOST_THREADS = 256
"""Most threads for `asyncio.to_thread`: episodes wait in them for a network, more than for a processor."""
LEAVES_S = 3.0
"""Seconds for jobs to end that are cancelled when the process ends, before the user's code closes what they use."""
NOBODY = 0
_whose: ContextVar[int] = ContextVar("job", default=NOBODY)
"""Number of the job that a task belongs to: tasks that user code starts inherit it."""


def serve_shared(sock: socket.socket, hosted: Hosted, redaction: Redaction, note: memoryview) -> None:
    """Serve jobs until the host closes the connection. ``note`` gets the number of the job whose step is being made,
    0 where it is none's, and the count of all steps.
    """
    asyncio.run(_Shared(hosted, redaction, note).serve(sock))


class TaskExited(Exception):
    """Exception for a task that raised `SystemExit` or an interrupt, which would stop the event loop."""


class _Shared:
    def __init__(self, hosted: Hosted, redaction: Redaction, note: memoryview) -> None:
        self._hosted, self._redaction, self._note = hosted, redaction, note
        self._pid = os.getpid()
        self._jobs: dict[int, asyncio.Task[Frame]] = {}
        self._asks: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._numbers = count(1)

    async def serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # Before any task: one made earlier would not tell whose steps it makes.
        loop.set_task_factory(self._task)
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="job"))
        ended = asyncio.Event()
        self._channel = FrameChannel(sock, self._on_frame, ended.set)
        await ended.wait()
        try:
            for job in self._jobs.values():
                job.cancel()
            if self._jobs:
                await asyncio.wait(self._jobs.values(), timeout=LEAVES_S)
            # After the jobs: they use what this closes.
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
        """Do a job, and return what to tell the host of its end."""
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
        # Pickled first: a message that does not pickle fails here, with nothing half sent.
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
        """Make a task that notes whose steps it makes."""
        if not asyncio.iscoroutine(coroutine):
            raise TypeError(f"a coroutine was expected, got {coroutine!r}")
        number = _whose.get() if context is None else context.get(_whose, NOBODY)
        return asyncio.Task(self._noting(coroutine, number), loop=loop, context=context, **others)

    async def _noting(self, coroutine: Coroutine[Any, Any, Any], number: int) -> Any:
        # A coroutine around the generator: from Python 3.12 on asyncio makes no task of a generator.
        return await self._steps(coroutine, number)

    @types.coroutine
    def _steps(self, coroutine: Coroutine[Any, Any, Any], number: int) -> Generator[Any, Any, Any]:
        """Step through ``coroutine``; what it waits for is the task's to wait for."""
        note, pid = self._note, self._pid
        value, error = None, None
        while True:
            # Set before each step, cleared after it: the host reads it once the loop stands still, or has ended.
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
                # A child that user code has forked returns: it would make the steps of all other jobs, too.
                if os.getpid() != pid:
                    os._exit(0)
            value = None
            try:
                value = yield awaited
            except BaseException as thrown:
                error = thrown
