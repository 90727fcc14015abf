"""Boundaries between versions: what a checkpoint of each would hold, and saving it.

    ActorTrain consumed all of version k−1 ──reached(k)──▶ taken ──save(k)──▶ checkpoint, once k is published

What the driver knows is taken at the boundary itself. When the checkpoint is written, groups of the next version may
have been admitted and even finished: nothing of them is in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.training import TrainEngine
from headway.errors import RunError, boundary
from headway.events import CheckpointSaved, Note, VersionReached
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.recovery.driver_state import DriverState, Taken


class CheckpointManager:
    """Version boundaries of one run, and the checkpoints of some of them."""

    def __init__(self, driver: DriverState, trainer: TrainEngine, checkpoints: Path, timeouts: Timeouts) -> None:
        self._driver = driver
        self._timeouts = timeouts
        self.writing = asyncio.Lock()
        """Lock held while a checkpoint is written."""
        self._took_s: float | None = None
        """Seconds that the last checkpoint took; None before the first one."""
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._taken: Taken | None = None
        """Driver's state at the last boundary."""
        self.saved: int | None = None
        """Version of the newest checkpoint."""

    def reached(self, version: int, trainer: Mapping[str, Any]) -> None:
        """Take the state at the boundary to ``version``: all before it is consumed, and nothing of it has begun.

        ``trainer``: what `ActorTrain.counters` returned there. Raises `LedgerImbalance`.
        """
        run = self._driver.run
        run.check_balance()
        self._taken = self._driver.take(trainer)
        groups, episodes = run.ledger.counts(), run.ledger.episode_counts()
        run.emit(VersionReached(time=now(), version=version, groups=groups, episodes=episodes))

    def restore(self, taken: Taken) -> None:
        """Begin at the boundary of a checkpoint, which is known to be saved. Raises `DataError` for other data."""
        self._driver.restore(taken)
        self.saved = self._driver.run.version

    @property
    def takes(self) -> str:
        """Describe how long a checkpoint takes: as long as the last one, or what its bytes take on the slowest disk."""
        if self._took_s is not None:
            return f"about {self._took_s:.0f} s, as the last one did"
        return f"{self._timeouts.checkpoint_s:.0f} s at most, on the slowest disk"

    @property
    def can_save(self) -> bool:
        """True where the models are those of the last boundary."""
        critic = self._driver.critic
        return not self._driver.run.unfinished and (critic is None or not critic.behind)

    async def save(self, version: int) -> None:
        """Save all that a resumed run needs: the state at the last boundary, and the models, not trained since.

        Does nothing where that is saved already. Raises `RunError` when it cannot be written.
        """
        async with self.writing:
            await self._save(version)

    async def _save(self, version: int) -> None:
        run, critic = self._driver.run, self._driver.critic
        run.check_balance()
        if self.saved == version:
            return
        if self._taken is None:
            raise RunError(f"version {version} cannot be saved: no version boundary was reached before")
        path = self._checkpoints / f"version_{version}"
        started, taken = now(), self._taken
        if run.hurried:
            text = f"writing the checkpoint of version {version}, which takes {self.takes}"
            run.emit(Note(time=started, level="info", text=text))
        with boundary(f"could not write the checkpoint {path}", RunError):
            if critic is not None:  # first: a checkpoint whose own folder is there is complete
                await critic.save(self._checkpoints / "critic" / path.name)
            await self._trainer.save(path, self._driver.with_critic(taken))
        self.saved, self._took_s = version, now() - started
        run.emit(CheckpointSaved(time=now(), version=version, path=str(path), span=(started, now())))
