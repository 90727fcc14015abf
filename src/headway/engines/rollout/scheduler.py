"""The scheduler, which says who decodes next. Policy only: no tensor, no thread, no clock.

    RUNNING ──pause(drain)──▶ DRAINING ──nothing left──▶ PAUSED ──resume──▶ RUNNING
       └────pause(interrupt | keep)──────────────────────▶┘

Waiting calls start in order of submission, validation before training; those that were decoding before go on first.
While draining, what is submitted is held back; it joins the queue when the drain is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum

from headway.data.interfaces.generation import Priority
from headway.data.interfaces.rollout import OnUpdate
from headway.engines.rollout.call_run import CallRun


class Mode(StrEnum):
    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


class Scheduler:
    """The waiting queues and the pause state."""

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

        Nobody is passed over: where the next one has to wait, those behind it do, too.
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
