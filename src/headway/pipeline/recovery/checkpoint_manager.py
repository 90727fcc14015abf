"""Boundaries between versions: what a checkpoint of each would hold, and saving it.

    ActorTrain consumed all of version k−1 ──reached(k)──▶ taken ──save(k)──▶ checkpoint, once k is published

What the driver knows is taken at the boundary itself. When the checkpoint is written, groups of the next version may
have been admitted and even finished: nothing of them is in it.

Also here: the driver's part of a checkpoint: what the pipeline knows at a version boundary, taken there and put back.

    boundary of version k ──take()──▶ JSON ──saved with the trainer's state, in one rename──▶ restore() ──▶ version k
                                                  └──▶ the groups that were open: dropped(resume), their prompts again

A boundary is the instant at which version k−1 is consumed and nothing of version k has begun: the update to k comes
after it. So a resumed run begins with that update, and admits nothing before it. Every part that has a state is listed
here; whatever is not here is either configuration, or made anew at every start (docs/resume.md lists it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.episode_groups import PromptSource
from headway.data.interfaces.training import TrainEngine
from headway.data.types import Prompt
from headway.errors import DataError, RunError, boundary
from headway.events import CheckpointSaved, Note, VersionReached
from headway.pipeline.admission.fetches import Fetches
from headway.pipeline.admission.ledger import Fate, Ledger
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.critic_turns import Critic
from headway.pipeline.observing.off_policy_guard import Guard

Taken = Mapping[str, Any]
"""State of the driver as JSON values."""


def balance(taken: Taken) -> dict[str, int]:
    """Return the ledger's counts in the checkpoint ``taken``, as in the `VersionReached` event of that boundary."""
    ledger = Ledger()
    ledger.restore(taken["ledger"], {})
    return ledger.counts() | {Fate.IN_FLIGHT.value: len(taken["ledger"]["open"])}


@dataclass(frozen=True, slots=True)
class DriverState:
    """Parts of the pipeline with a state that a resumed run cannot know by itself."""

    run: RunState
    source: PromptSource
    fetches: Fetches
    guard: Guard
    lowers_eta: bool
    """True where the guard may reduce the η that limits admission."""
    critic: Critic | None

    def take(self, trainer: Mapping[str, Any]) -> Taken:
        """Take the state at a boundary, before anything is awaited; ``trainer``: `ActorTrain.counters` there.

        The critic may still be training: see `with_critic`.
        """
        return {
            **self.run.state(),
            "source": self.source.state(),
            "fetches": self.fetches.taken,
            "trainer": trainer,
            "guard": self.guard.state(),
        }

    def with_critic(self, taken: Taken) -> Taken:
        """Add the critic's state to ``taken``, once the critic was trained on all that the trainer was, and saved."""
        return taken if self.critic is None else {**taken, "critic": self.critic.state()}

    def restore(self, taken: Taken) -> None:
        """Restore the state ``taken``, before anything runs. Emits the fates of the groups that were open.

        Raises `DataError` when the data are not those of the checkpoint.
        """
        self.source.restore(taken["source"])
        again = [self._found(*one) for one in taken["again"]]
        lost = [self._found(*one) for _, *one in taken["ledger"]["open"]]
        eta_now = Fraction(taken["eta_now"]) if self.lowers_eta else self.run.staleness.eta
        self.run.restore(taken, again=again, open_prompts=lost, eta_now=eta_now)
        self.fetches.restore(taken["fetches"])
        self.guard.restore(taken["guard"])
        if self.critic is not None:
            self.critic.restore(taken["critic"], taken["fetches"])

    def _found(self, epoch: int, row: int, attempt: int) -> Prompt:
        """The prompt of an unfinished group; where changed data do not have it any more, the next one in its place."""
        prompt = self.source.find(epoch, row)
        if prompt is not None:
            return replace(prompt, attempt=attempt)
        if (following := self.source.next()) is None:
            raise DataError(
                f"the checkpoint waits for row {row} of epoch {epoch}, which the data do not have, and they have no "
                "further one in its place. Resume with the same data"
            )
        return following


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
