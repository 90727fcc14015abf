"""The scheduler, which says who decodes next, and the open calls of an engine. No tensor, no thread, no clock.

    RUNNING ──pause(drain)──▶ DRAINING ──nothing left──▶ PAUSED ──resume──▶ RUNNING
       └────pause(interrupt | keep)──────────────────────▶┘

Waiting calls start in order of submission, validation before training; those that were decoding before resume first.
While draining, what is submitted is held back; it joins the queue when the drain is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import StrEnum

from headway.data.interfaces.rollout import GenerateRequest, OnUpdate, Priority
from headway.engines.rollout.call_run import CallRun
from headway.errors import DataError


class Mode(StrEnum):
    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


class Scheduler:
    """The waiting queues and the pause state.

    Example:
        >>> scheduler = Scheduler()
        >>> scheduler.pause(OnUpdate.DRAIN)  # what decodes may finish, nothing else starts
        >>> scheduler.mode.value
        'draining'
        >>> scheduler.drained()
        >>> scheduler.resume()
        >>> scheduler.mode.value
        'running'
    """

    def __init__(self) -> None:
        self.mode = Mode.RUNNING
        self._queues: dict[Priority, deque[CallRun]] = {Priority.VALIDATION: deque(), Priority.TRAINING: deque()}
        self._held: list[CallRun] = []

    def submit(self, runs: Iterable[CallRun]) -> None:
        """Queue ``runs``, in order."""
        if self.mode is Mode.DRAINING:
            self._held.extend(runs)
        else:
            self._enqueue(runs)

    def take(self, free: int, admits: Callable[[CallRun], bool] = lambda _: True) -> list[CallRun]:
        """Remove and return the next calls to start: at most ``free``, and until one is not admitted.

        No call overtakes another: where the next one has to wait, so do those behind it.
        """
        taken: list[CallRun] = []
        for queue in () if self.mode is Mode.PAUSED else self._queues.values():
            while queue and len(taken) < free:
                if not admits(queue[0]):
                    return taken
                taken.append(queue.popleft())
        return taken

    def put_back(self, runs: Iterable[CallRun]) -> None:
        """Park calls that were decoding, ahead of everything that has not started."""
        for run in sorted(runs, key=lambda run: -run.serial):
            self._queues[run.call.priority].appendleft(run)

    def remove(self, runs: Collection[CallRun]) -> list[CallRun]:
        """Take out those of ``runs`` that wait, and return them in order of submission."""
        wanted = frozenset(runs)
        removed: list[CallRun] = []
        for queue in (*self._queues.values(), self._held) if wanted else ():
            if waiting := [run for run in queue if run in wanted]:
                removed.extend(waiting)
                kept = [run for run in queue if run not in wanted]
                queue.clear()
                queue.extend(kept)
        return sorted(removed, key=lambda run: run.serial)

    @property
    def waiting(self) -> int:
        """Number of calls yet to start or resume, held ones included."""
        return self.queued + len(self._held)

    @property
    def queued(self) -> int:
        """Calls that may start as soon as a slot is free."""
        return sum(map(len, self._queues.values()))

    def pause(self, policy: OnUpdate) -> None:
        """Start draining, or stop at once. A pause never weakens one that is in force."""
        if policy is not OnUpdate.DRAIN:
            self._change(Mode.PAUSED)
        elif self.mode is Mode.RUNNING:
            self._change(Mode.DRAINING)

    def drained(self) -> None:
        """End the drain, once its last call has finished: from now on the scheduler is paused."""
        self._change(Mode.PAUSED)

    def resume(self) -> None:
        self._change(Mode.RUNNING)

    def _change(self, mode: Mode) -> None:
        self.mode = mode
        if mode is not Mode.DRAINING:
            held, self._held = self._held, []
            self._enqueue(held)

    def _enqueue(self, runs: Iterable[CallRun]) -> None:
        for run in runs:
            self._queues[run.call.priority].append(run)


class OpenCalls:
    """The open calls of an engine, by their client and its number for them."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int, CallRun]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[CallRun]:
        return (run for runs in self._of.values() for run in runs.values())

    def submit(
        self, client: str, calls: Sequence[GenerateRequest], check: Callable[[GenerateRequest, int], CallRun]
    ) -> list[CallRun]:
        """Take all of ``calls``, or none if ``check`` raises.

        ``check(call, serial)`` sets up the ``serial``-th call of the engine. Raises `DataError` for a number that an
        open call of ``client`` has.
        """
        opened = self._of.get(client, {})
        runs = {call.number: check(call, serial) for serial, call in enumerate(calls, self._serial)}
        if len(runs) < len(calls) or not opened.keys().isdisjoint(runs):
            raise DataError(f"client {client} submitted a call under a number that another of its open calls has")
        self._serial += len(calls)
        self._of.setdefault(client, opened).update(runs)
        return list(runs.values())

    def remove(self, run: CallRun) -> None:
        """Forget a call that is finished."""
        del self._of[run.client][run.call.number]

    def find(self, client: str, numbers: Iterable[int]) -> list[CallRun]:
        """Calls of ``client`` with one of ``numbers``; unknown numbers are ignored."""
        opened = self._of.get(client, {})
        return [opened[number] for number in dict.fromkeys(numbers) if number in opened]

    def of(self, client: str) -> list[CallRun]:
        """Calls of ``client``, in order of submission."""
        return list(self._of.get(client, {}).values())

    def older_than(self, version: int) -> list[CallRun]:
        """Training calls with a token of an older version."""
        return [run for run in self if run.trains and run.oldest_version is not None and run.oldest_version < version]

    def forget(self, client: str) -> None:
        """Forget all calls of ``client``, which has left."""
        self._of.pop(client, None)

    def clear(self) -> None:
        """Forget all calls: none will be finished any more."""
        self._of.clear()
