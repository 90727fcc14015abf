"""Reward worker processes behind `interfaces.RewardFn`.

    score(prompt, responses) ─▶ one call per group ─▶ worker process ─▶ n floats, and each part's values
           ▲                          │ exception, time-out, nonsense, death of the worker
           └── retry, then ScoringFailed(reason) ◀─┘

A call that takes too long ends its process (`scorers.killed_after`), and the pool starts another. A second, longer
limit on the whole group catches what the first one missed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pebble import ProcessExpired, ProcessPool

from headway.errors import ScoringFailed, UserError, WorkerDied, said_by
from headway.interfaces import Scores
from headway.rewards import worker
from headway.rewards.request import RewardSpec, ScoreRequest

if TYPE_CHECKING:
    from headway.data.types import Prompt

START_TIMEOUT_S = 120.0
"""Seconds for a worker to start and to load the reward; ``reward.timeout_s`` where that is longer."""
STOP_TIMEOUT_S = 30.0
GRACE_S = 1.0
"""Seconds by which the pool's limit on a group exceeds the sum of its calls' limits."""
HOPELESS = 8
"""Time-outs before any answer after which what waits is not tried any more: it would take as long for each of them."""

R = TypeVar("R")


class _NoFurtherTry(ScoringFailed):
    """The reward has done nothing but time out so far."""


class RewardPool:
    """Scores groups in ``workers`` processes. Use from one event loop.

    Making one is free; `start` or the first `score` starts the processes.
    """

    def __init__(
        self,
        spec: RewardSpec,
        *,
        workers: int,
        retries: int,
        log_path: Path | None,
        on_timeout: Callable[[int], object] | None = None,
    ) -> None:
        """Make a pool whose workers' output goes to ``log_path`` (None: to this process's stderr). ``on_timeout`` is
        called at each try that took too long, with how many there were so far.
        """
        self._spec = spec
        self._workers = workers
        self._retries = retries
        self._log_path = log_path
        self._on_timeout = on_timeout
        self._timeouts = 0
        self._began: float | None = None
        """The time, on the event loop's clock, at which the first group was submitted; None before."""
        self._answered = False
        """Some try ended otherwise than by a time-out."""
        self._not_tried: set[asyncio.Future[Any]] = set()
        self._left_calls = False
        """The pool may hold calls whose results nobody awaits any more."""
        self._pool: ProcessPool | None = None
        self._awaited: set[asyncio.Future[Any]] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start the workers and have one of them load the reward.

        Raises:
            ConfigError: unknown reward or task, or parameters that it does not take.
            UserCodeError: the user's file does not import, lacks the function, or the function's parameters do not fit.
            WorkerDied: the process ended, or did not get ready in time.
        """
        limit = max(START_TIMEOUT_S, self._spec.timeout_s)
        try:
            await asyncio.wait_for(self._run(worker.check), limit)
        except UserError:
            raise
        except TimeoutError as cause:
            raise WorkerDied(
                f"no reward worker was ready within {limit:g} s: it was loading {self._spec.function}{self._see_log()}"
            ) from cause
        except (ProcessExpired, BrokenProcessPool) as cause:
            raise WorkerDied(f"a reward worker ended while it loaded {self._spec.function}{self._see_log()}") from cause

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> Scores:
        """The rewards, and what each part of them gave.

        Raises `ScoringFailed` with a short reason when every try failed: ``exception: ValueError: …``,
        ``timeout after 10 s``, ``returned nan for response 3, …``, ``worker ended with exit code 1``. Where there are
        several parts, the name of the one that failed comes first, if its worker lived to tell.

        Where the first `HOPELESS` tries of all, and every group's chance of a second one, end in time-outs, all groups
        that wait then fail without being tried.
        """
        if not responses:
            return Scores(np.zeros(0, np.float32), {part.name: [] for part in self._spec.parts})
        request = ScoreRequest(
            prompt.text,
            list(responses),
            prompt.answer,
            prompt.source,
            dict(prompt.extra),
            messages=prompt.messages,
        )
        for tries_left in range(self._retries, -1, -1):
            try:
                return await self._try(request)
            except _NoFurtherTry:
                raise
            except ScoringFailed:
                if not tries_left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    async def close(self) -> None:
        """End all workers, busy or not. Scores still awaited fail."""
        self._closed = True
        for result in self._awaited:  # pebble leaves the futures of a stopped pool pending for ever
            result.cancel()
        self._retire()
        if self._retiring:
            _, hanging = await asyncio.wait(self._retiring, timeout=STOP_TIMEOUT_S)
            if hanging:
                raise WorkerDied(f"reward workers did not end within {STOP_TIMEOUT_S:g} s{self._see_log()}")

    async def _try(self, request: ScoreRequest) -> Scores:
        timeout_s = self._spec.timeout_s
        calls = len(request.responses) * len(self._spec.parts)
        if self._began is None:
            self._began = asyncio.get_running_loop().time()
        try:
            scores = await self._run(worker.score, request, timeout_s=timeout_s * calls + GRACE_S)
            self._answered = True
            return scores
        except TimeoutError as cause:
            raise self._timed_out() from cause
        except ProcessExpired as cause:
            if cause.exitcode == -signal.SIGALRM:
                raise self._timed_out() from cause
            self._answered = True
            raise ScoringFailed(f"worker ended with {_exit_text(cause.exitcode)}") from cause
        except BrokenProcessPool as cause:
            raise ScoringFailed("worker ended") from cause
        except OSError as cause:  # the reward has closed what its process prints to, or answers through
            raise ScoringFailed(f"worker: {said_by(cause)}") from cause
        except ScoringFailed as failure:
            self._answered |= not isinstance(failure, _NoFurtherTry)
            raise

    def _timed_out(self) -> ScoringFailed:
        self._timeouts += 1
        if self._on_timeout is not None:
            self._on_timeout(self._timeouts)
        if not self._is_hopeless():
            return ScoringFailed(self._timeout_reason)
        self._not_tried.update(self._awaited)
        for result in self._awaited:
            result.cancel()
        self._left_calls = True
        return _NoFurtherTry(self._timeout_reason)

    def _is_hopeless(self) -> bool:
        """True if only time-outs came, for as long as all tries of a group take: a slow service may need to wake up."""
        took = asyncio.get_running_loop().time() - (self._began or 0.0)
        tries = 1 + self._retries
        return not self._answered and self._timeouts >= HOPELESS and took >= tries * self._spec.timeout_s

    @property
    def _timeout_reason(self) -> str:
        return f"timeout after {self._spec.timeout_s:g} s"

    async def _run(self, function: Callable[..., R], *args: object, timeout_s: float | None = None) -> R:
        """Run ``function`` in a worker; cancelling this ends the worker."""
        if self._closed:
            raise ScoringFailed("the reward pool is closed")
        if self._pool is not None and not self._pool.active:
            self._retire()  # pebble gives a pool up when it cannot tell whose work a dead worker had
        if self._left_calls and not self._awaited:
            self._retire()  # pebble begins each call that waits and was cancelled, and ends a worker over it
        if self._pool is None:
            self._pool = self._new_pool()
        with _interrupts_held_back():  # the first call starts the processes, and the threads that start others
            result = asyncio.wrap_future(self._pool.schedule(function, args=args, timeout=timeout_s))
        self._awaited.add(result)
        try:
            return await result
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                self._left_calls = True
                raise
            if result in self._not_tried:
                raise _NoFurtherTry(f"not tried, for all before had {self._timeout_reason}") from None
            raise ScoringFailed("the reward pool was closed") from None  # by `close`, not by the caller
        finally:
            self._awaited.discard(result)
            self._not_tried.discard(result)

    def _new_pool(self) -> ProcessPool:
        if self._log_path is not None:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
        return ProcessPool(
            max_workers=self._workers,
            initializer=worker.initialize,
            initargs=(self._spec, self._log_path),
            context=get_context("spawn"),
        )

    def _retire(self) -> None:
        """Stop the current pool, if any, in a thread: joining its processes blocks."""
        if self._pool is not None:
            stopping = asyncio.create_task(asyncio.to_thread(_stop, self._pool))
            self._retiring.add(stopping)
            stopping.add_done_callback(self._retiring.discard)
            self._pool = None
            self._left_calls = False

    def _see_log(self) -> str:
        return f"; see {self._log_path}" if self._log_path is not None else ""


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Threads and processes that are started within never hear of a terminal, not even before they leave its session.

    SIGTERM is not held back: it is how the pool ends workers, also such that are just starting.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, worker.HELD_BACK)
    try:
        resource_tracker.ensure_running()  # whose start lets interrupts through again
        signal.pthread_sigmask(signal.SIG_BLOCK, worker.HELD_BACK)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


def _exit_text(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
