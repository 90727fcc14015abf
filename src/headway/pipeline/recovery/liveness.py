"""Heartbeats: asking workers whether they are alive, all at once, and what follows from their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.config.sizing.timeouts import HEARTBEAT_S
from headway.errors import HeadwayError, WorkerDied
from headway.pipeline.admission.pipeline_state import now
from headway.runtime.progress import Heartbeat, Living
from headway.runtime.task_groups import concurrently

SHORTEST_S = 1e-3
"""Shortest wait for a deadline, in seconds. Rounding may end an earlier wait just short of its deadline."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of the workers at ``time``, on the event clock. None: no answer within ``within_s``."""

    time: float
    within_s: float
    by_worker: dict[str, Heartbeat | None]

    def deadline(self, quiet_s: float, with_files_s: Callable[[int], float]) -> float:
        """Return the time, on the event clock, at which all of the workers will have been quiet for too long.

        A worker may be quiet for ``quiet_s``; while it works with files, for what ``with_files_s`` returns for their
        bytes where that is longer.
        """

        def limit_s(beat: Heartbeat) -> float:
            return quiet_s if beat.file_nbytes is None else max(quiet_s, with_files_s(beat.file_nbytes))

        beats = (beat for beat in self.by_worker.values() if beat is not None)
        return self.time + max((limit_s(beat) - beat.quiet_s for beat in beats), default=-float("inf"))

    def __str__(self) -> str:
        """Describe all answers: ``actor-0: train_step for 412 s (micro-batch 3 of 8), …; rollout-0: idle``."""
        return "; ".join(f"{name}: {self._said(beat)}" for name, beat in self.by_worker.items())

    def _said(self, beat: Heartbeat | None) -> str:
        if beat is None:
            return f"no answer to its heartbeat within {self.within_s:g} s"
        return beat.doing or "idle"


async def ask(workers: Sequence[Living], within_s: float = HEARTBEAT_S) -> Answers:
    """Ask all workers for their heartbeats. Never raises: supervision handles and reports the death of a worker."""
    beats = await concurrently(_ask(worker, within_s) for worker in workers)
    return Answers(now(), within_s, {worker.name: beat for worker, beat in zip(workers, beats, strict=True)})


async def _ask(worker: Living, within_s: float) -> Heartbeat | None:
    try:
        async with asyncio.timeout(within_s):
            return await worker.heartbeat()
    except TimeoutError:
        return None
    except WorkerDied:
        return Heartbeat("its process has ended")
    except HeadwayError as failure:  # the monitor's question must not end the run: who needs the worker will be told
        return Heartbeat(f"it cannot be asked: {failure}")
