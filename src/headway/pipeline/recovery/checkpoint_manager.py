"""Checkpoints: the driver's state is taken at a boundary between versions, and saved with the trainer's and critic's.

    ActorTrain consumed all of version k−1 ──reached(k)──▶ taken, as JSON ──save(k), once k is published──▶ checkpoint
    checkpoint ──restore()──▶ version k; the groups that were open: made again under their numbers

A boundary is the instant at which version k−1 is consumed and nothing of version k has begun: the update to k comes
after it. When the checkpoint is written, groups of the next version may have been admitted and even finished: nothing
of them is in it. So a resumed run begins with that update, and admits nothing before it. What is not listed in
`CheckpointManager` is either configuration, or made anew at every start (docs/resume.md lists it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.episode_groups import PromptSource
from headway.data.types import Prompt
from headway.errors import DataError, RunError, boundary
from headway.events import CheckpointSaved, Note, VersionReached
from headway.pipeline.actor_critic import Actor
from headway.pipeline.admission.ledger import Fate, Ledger
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.admission.train_batches import TrainBatches

Taken = Mapping[str, Any]
"""State of the driver as JSON values."""


def balance(taken: Taken) -> dict[str, int]:
    """Return the ledger's counts in the checkpoint ``taken``, as in the `VersionReached` event of that boundary."""
    ledger = Ledger()
    ledger.restore(taken["ledger"], {})
    return ledger.counts() | {Fate.IN_FLIGHT.value: len(taken["ledger"]["open"])}


class CheckpointManager:
    """Version boundaries of one run, and the checkpoints of some of them.

    It knows every part of the pipeline with a state that a resumed run cannot know by itself.
    """

    def __init__(
        self,
        state: RunState,
        source: PromptSource,
        batches: TrainBatches,
        actor: Actor,
        checkpoints: Path,
        timeouts: Timeouts,
        save_freq: int,
    ) -> None:
        """Set up. ``save_freq``: number of versions from one checkpoint to the next; -1 for none before the end."""
        self.writing = asyncio.Lock()
        """Lock held while a checkpoint is written."""
        self.saved: int | None = None
        """Version of the newest checkpoint."""
        self._state = state
        self._source = source
        self._batches = batches
        self._actor = actor
        self._checkpoints = checkpoints
        self._timeouts = timeouts
        self._save_freq = save_freq
        self._took_s: float | None = None
        """Seconds that the last checkpoint took; None before the first one."""
        self._taken: Taken | None = None
        """Driver's state at the last boundary."""

    def reached(self, version: int) -> None:
        """Take the state at the boundary to ``version``: all before it is consumed, and nothing of it has begun.

        The critic may still be training: `save` adds its state. Raises `LedgerImbalance`.
        """
        state = self._state
        state.check_balance()
        self._taken = {
            **state.state(),
            "source": self._source.state(),
            "fetches": self._batches.taken,
            "trainer": self._actor.state(),
            "guard": self._actor.guard.state(),
        }
        if state.journal is not None:
            state.journal.boundary(version, min(state.ledger.open_numbers, default=state.ledger.admitted))
        groups, episodes = state.ledger.counts(), state.ledger.episode_counts()
        state.emit(VersionReached(time=now(), version=version, groups=groups, episodes=episodes))

    def restore(self, taken: Taken) -> None:
        """Begin at the boundary of a checkpoint, before anything runs. Emits the fates of the groups that were open.

        Raises `DataError` when the data are not those of the checkpoint.
        """
        state, actor = self._state, self._actor
        self._source.restore(taken["source"])
        again = [self._found(*one) for one in taken["again"]]
        lost = [self._found(*one) for _, *one in taken["ledger"]["open"]]
        eta_now = Fraction(taken["eta_now"]) if actor.guard.lowers_eta else state.staleness.eta
        state.restore(taken, again=again, open_prompts=lost, eta_now=eta_now)
        self._batches.taken = taken["fetches"]
        actor.restore(taken["trainer"])
        actor.guard.restore(taken["guard"])
        if actor.critic is not None:
            actor.critic.restore(taken["critic"], taken["fetches"])
        self.saved = state.version

    def _found(self, epoch: int, row: int, attempt: int) -> Prompt:
        """The prompt of an unfinished group; where changed data do not have it any more, the next one in its place."""
        prompt = self._source.find(epoch, row)
        if prompt is not None:
            return replace(prompt, attempt=attempt)
        if (following := self._source.next()) is None:
            raise DataError(
                f"the checkpoint waits for row {row} of epoch {epoch}, which the data do not have, and they have no "
                "further one in its place. Resume with the same data"
            )
        return following

    @property
    def takes(self) -> str:
        """Describe how long a checkpoint takes: as long as the last one, or what its bytes take on the slowest disk."""
        if self._took_s is not None:
            return f"about {self._took_s:.0f} s, as the last one did"
        return f"{self._timeouts.checkpoint_s:.0f} s at most, on the slowest disk"

    @property
    def can_save(self) -> bool:
        """True where the models are those of the last boundary."""
        critic = self._actor.critic
        return not self._state.unfinished and (critic is None or not critic.behind)

    async def save_if_due(self, version: int) -> None:
        """Save the checkpoint of ``version`` every ``save_freq`` versions, except the last, which `save` writes."""
        if self._save_freq > 0 and version % self._save_freq == 0 and self._state.trains_more:
            await self.save(version)

    async def save(self, version: int) -> None:
        """Save all that a resumed run needs: the state at the last boundary, and the models, not trained since.

        Does nothing where that is saved already. Raises `RunError` when it cannot be written.
        """
        async with self.writing:
            self._state.check_balance()
            if self.saved != version:
                await self._save(version)

    async def _save(self, version: int) -> None:
        state, critic = self._state, self._actor.critic
        if self._taken is None:
            raise RunError(f"version {version} cannot be saved: no version boundary was reached before")
        path = self._checkpoints / f"version_{version}"
        started, taken = now(), self._taken
        if state.hurried:
            text = f"writing the checkpoint of version {version}, which takes {self.takes}"
            state.emit(Note(time=started, level="info", text=text))
        with boundary(f"could not write the checkpoint {path}", RunError):
            if critic is not None:  # first: a checkpoint whose own folder is there is complete
                await critic.save(self._checkpoints / "critic" / path.name)
                taken = {**taken, "critic": critic.state()}
            await self._actor.trainer.save(path, taken)
        self.saved, self._took_s = version, now() - started
        state.emit(CheckpointSaved(time=now(), version=version, path=str(path), span=(started, now())))
