"""The scheduler, which says who decodes next. Policy only: no tensor, no thread, no clock.

    RUNNING ──pause(drain)──▶ DRAINING ──nothing left──▶ PAUSED ──resume──▶ RUNNING
       └────pause(interrupt | keep)──────────────────────▶┘

Waiting trajectories start in order of submission, validation before training; those that were decoding before go on
first. While draining, what is submitted is held back; it joins the queue when the drain is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum

from headway.engines.rollout.work import GroupRun, TrajectoryRun
from headway.interfaces import OnUpdate, Priority


class Mode(StrEnum):
    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


class Scheduler:
    """The waiting queues and the pause state."""

    def __init__(self) -> None:
        self.mode = Mode.RUNNING
        self._queues: dict[Priority, deque[TrajectoryRun]] = {Priority.VALIDATION: deque(), Priority.TRAINING: deque()}
        self._held: list[TrajectoryRun] = []

    def submit(self, groups: Iterable[GroupRun]) -> None:
        """Queue all trajectories of ``groups``, in order."""
        runs = [run for group in groups for run in group.runs]
        if self.mode is Mode.DRAINING:
            self._held.extend(runs)
        else:
            self._enqueue(runs)

    def take(self, free: int, admits: Callable[[TrajectoryRun], bool] = lambda _: True) -> list[TrajectoryRun]:
        """Remove and return the next trajectories to start: at most ``free``, and until one is not admitted.

        Nobody is passed over: where the next one has to wait, those behind it do, too.
        """
        taken: list[TrajectoryRun] = []
        for queue in () if self.mode is Mode.PAUSED else self._queues.values():
            while queue and len(taken) < free:
                if not admits(queue[0]):
                    return taken
                taken.append(queue.popleft())
        return taken

    def put_back(self, runs: Iterable[TrajectoryRun]) -> None:
        """Park trajectories that were decoding, ahead of everything that has not started."""
        for run in sorted(runs, key=lambda s: -s.serial):
            self._queues[run.group.request.priority].appendleft(run)

    def remove(self, belongs: Callable[[GroupRun], bool]) -> list[TrajectoryRun]:
        """Take out the waiting trajectories of the groups that ``belongs`` names, in order of submission."""
        removed: list[TrajectoryRun] = []
        for queue in (*self._queues.values(), self._held):
            removed.extend(run for run in queue if belongs(run.group))
            kept = [run for run in queue if not belongs(run.group)]
            queue.clear()
            queue.extend(kept)
        return sorted(removed, key=lambda s: s.serial)

    @property
    def waiting(self) -> int:
        """Sequences that have yet to start or go on, those held back included."""
        return self.queued + len(self._held)

    @property
    def queued(self) -> int:
        """Sequences that may start as soon as a slot is free."""
        return sum(map(len, self._queues.values()))

    def pause(self, policy: OnUpdate) -> None:
        """Start draining, or stop at once. A pause never weakens one that is in force."""
        if policy is not OnUpdate.DRAIN:
            self._change(Mode.PAUSED)
        elif self.mode is Mode.RUNNING:
            self._change(Mode.DRAINING)

    def drained(self) -> None:
        """End the drain, once its last trajectory has finished: from now on the scheduler is paused."""
        self._change(Mode.PAUSED)

    def resume(self) -> None:
        self._change(Mode.RUNNING)

    def _change(self, mode: Mode) -> None:
        self.mode = mode
        if mode is not Mode.DRAINING:
            held, self._held = self._held, []
            self._enqueue(held)

    def _enqueue(self, runs: Iterable[TrajectoryRun]) -> None:
        for run in runs:
            self._queues[run.group.request.priority].append(run)
