"""Host of one role inside a process, on both backends alike.

event loop ──coroutine methods──▶ role          (a rollout engine, which has a thread of its own)
    └──────blocking methods──▶ the role's one thread, in the order called     (a trainer's rank)

Out-of-memory errors are explained to the user, with settings that need less memory. They have several classes:
Python's, torch's on a GPU, and on the CPU a plain `RuntimeError` with a known text.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from headway.errors import HeadwayError, RunError, said_by
from headway.runtime.progress import Heartbeat, Progress, count_for, counting

SAID = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""Texts of a `RuntimeError` about memory: from torch's CPU allocator, CUDA's runtime (``CUDA error: out of memory``),
and its libraries (``CUBLAS_STATUS_ALLOC_FAILED``)."""
ADVICE = (
    "Training needs less with a lower actor.ppo_max_token_len_per_gpu, generation with a lower rollout.max_concurrent, "
    "both with shorter data.max_response_length or more devices"
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` means that memory could not be allocated."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    torch = sys.modules.get("torch")  # if torch was never imported, none of its errors was raised
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in SAID)


def explained(error: Exception, who: str, doing: str) -> Exception:
    """Return the error to raise for ``error``. An out-of-memory error names the worker and its work, and gives advice.

    An error of Headway caused by a memory error keeps its text, and the advice is added.
    """
    if isinstance(error, HeadwayError):
        if error.__cause__ is None or not ran_out_of_memory(error.__cause__):
            return error
        return type(error)(f"{str(error).rstrip('.')}. {ADVICE}")
    if not ran_out_of_memory(error):
        return error
    return RunError(f"worker {who} ran out of memory in {doing!r}: {said_by(error).rstrip('.')}. {ADVICE}")


logger = logging.getLogger(__name__)
LONG_S = 1.0
"""Duration in seconds at which a call is logged."""


class RoleHost:
    """Host of a role (any object). Coroutines run on the event loop's thread, other methods on the role's thread."""

    def __init__(self, role: Any, name: str) -> None:
        self._role = role
        self.name = name
        self._progress = Progress()
        """Progress of the role's thread, where a rank computes. An engine reports its own in `RolloutEngine.stats`."""
        # `count_for` runs in the thread itself: a ContextVar that is set here is not seen there.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=count_for, initargs=(self._progress,))
        self._open: dict[Progress, tuple[str, float]] = {}
        """Progress -> method and start time of each open coroutine call. Calls that work with files beside the role's
        thread report their progress here."""
        self._closing = False
        self._log = logging.LoggerAdapter(logger, {"worker": name})
        self._log.info("started in process %d", os.getpid())

    async def call(self, method: str, *args: Any) -> Any:
        """Call the role's method (``name``, or ``part.name`` of a part): await it, or run it on the role's thread.

        Raises the method's errors, and `RunError` if memory ran out.
        """
        function = attrgetter(method)(self._role)
        with self._failures_told(method):
            if inspect.iscoroutinefunction(function):
                with self._call(method) as progress, counting(progress, method):
                    return await function(*args)
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, partial(self._run, method, function, args)
            )

    async def each(self, method: str, *args: Any, apart_s: float = 0.0) -> AsyncGenerator[Any, None]:
        """Yield the items of the role's asynchronous generator at once; ``apart_s`` only counts between processes.
        Raises like `call`.
        """
        with self._failures_told(method), self._call(method):
            async with aclosing(attrgetter(method)(self._role)(*args)) as items:
                async for item in items:
                    yield item

    async def heartbeat(self) -> Heartbeat:
        """Return a description of the role's current work. Runs on the event loop's thread, while the role's thread
        computes.
        """
        beat = self._progress.heartbeat()
        counts = Counter(method for method, _ in self._open.values())
        first = dict(reversed(self._open.values()))  # the oldest call of each method counts
        now = time.monotonic()
        calls = [f"{n} × {method} for {now - first[method]:.0f} s" for method, n in counts.items()]
        beat = replace(beat, doing="; ".join(filter(None, [beat.doing, *calls])))
        for other in [progress.heartbeat() for progress in self._open]:
            if other.file_nbytes is not None:
                quiet_s, doing = min(beat.quiet_s, other.quiet_s), f"{beat.doing}; {other.doing}"
                beat = Heartbeat(doing, quiet_s, max(beat.file_nbytes or 0, other.file_nbytes))
        return beat

    def _run(self, method: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        began = time.monotonic()
        with self._progress.working(method):
            result = function(*args)
        if (seconds := time.monotonic() - began) >= LONG_S:
            self._log.info("%s took %.1f s", method, seconds)
        return result

    @contextmanager
    def _failures_told(self, method: str) -> Iterator[None]:
        """Log a failure of a call with its traceback. The caller gets only the message."""
        try:
            yield
        except Exception as failure:
            self._log.exception("%s failed", method)
            if (told := explained(failure, self.name, method)) is failure:
                raise
            raise told from failure.__cause__ if isinstance(failure, HeadwayError) else failure

    @contextmanager
    def _call(self, method: str) -> Iterator[Progress]:
        progress = Progress()
        self._open[progress] = method, time.monotonic()
        try:
            yield progress
        finally:
            del self._open[progress]

    async def end(self) -> None:
        """Close the role once its current work is done, and end its thread. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        # After the step under way: closing an engine during a step crashes the process.
        await asyncio.get_running_loop().run_in_executor(self._thread, lambda: None)
        try:
            await self.call("close")
        finally:
            self._thread.shutdown(wait=False)  # waiting would block the event loop
