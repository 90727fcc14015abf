"""Critic's turns: values of a fetch, then its training on them, fetch after fetch.

    values (f) ──▶ advantages, returns ──▶ train (f) ──▶ values (f + 1)

On ranks of its own the critic works beside the trainer. The order stays the same: which critic a value comes from does
not depend on which of them was faster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.training import CriticEngine
from headway.data.types import ColumnName, Sample
from headway.events import CriticStepped, Emit
from headway.pipeline.admission.fetches import Fetch, samples_of
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.channel import Signal
from headway.pipeline.observing.off_policy_guard import SkippedSteps


class Critic:
    def __init__(
        self,
        engine: CriticEngine,
        emit: Emit,
        *,
        mini_batch_size: int,
        epochs: int,
        mask_cut_off: bool = False,
        own_ranks: bool = False,
    ) -> None:
        """Create the critic. ``mini_batch_size``: groups per optimizer step; ``epochs``: passes over each fetch;
        ``mask_cut_off``: leave answers that did not end by themselves out of the loss; ``own_ranks``: nobody else
        begins and ends fetches on the engine's ranks.
        """
        self._engine = engine
        self._own_ranks = own_ranks
        self._emit = emit
        self._mini_batch_size = mini_batch_size
        self._epochs = epochs
        self._mask_cut_off = mask_cut_off
        self._skipped = SkippedSteps("critic.optim.lr")
        self._steps = 0
        self._handed = self._trained = 0
        """Number of fetches handed to the critic, and number of those that it was trained on."""
        self._changed = Signal()
        self._ranks = asyncio.Lock()
        """Lock held while the critic's ranks work: different stages request values and checkpoints."""

    async def add_values(self, fetch: Fetch) -> None:
        """Set the ``values`` column of ``fetch``, once the critic was trained on all fetches before it."""
        await self._changed.until(lambda: self._trained == fetch.index)
        async with self._ranks:
            if self._own_ranks:
                await self._engine.begin_fetch([samples_of(mini_batch) for mini_batch in self._mini_batches(fetch)])
            fetch.add(ColumnName.VALUES, await self._engine.forward_values(fetch.samples()))

    @property
    def behind(self) -> bool:
        """True while the critic was not trained on all fetches that the trainer was."""
        return self._trained != self._handed

    def hand(self, fetch: Fetch) -> None:
        """Announce that ``fetch`` has its returns and will be trained on."""
        self._handed = fetch.index + 1

    async def train(self, fetch: Fetch) -> None:
        """Make optimizer steps towards the fetch's ``returns``. Raises `NonFinite` after too many skips in a row."""
        for _ in range(self._epochs):
            for mini_batch in self._mini_batches(fetch):
                started = now()
                report = await self._engine.train_step(self._samples(mini_batch))
                self._emit(
                    CriticStepped(
                        time=now(),
                        step=self._steps,
                        fetch=fetch.index,
                        version=fetch.version,
                        skipped=report.skipped,
                        span=(started, now()),
                        metrics=report.metrics,
                    )
                )
                self._steps += 1
                self._skipped.count(report)
        if self._own_ranks:
            await self._engine.end_fetch()
        self._trained += 1
        self._changed.changed()

    def _mini_batches(self, fetch: Fetch) -> list[list[Group]]:
        size, groups = self._mini_batch_size, fetch.groups
        return [groups[i : i + size] for i in range(0, len(groups), size)]

    def _samples(self, groups: Sequence[Group]) -> list[Sample]:
        return samples_of(groups, (ColumnName.VALUES, ColumnName.RETURNS), mask_cut_off=self._mask_cut_off)

    def state(self) -> dict[str, Any]:
        """Return the critic's part of a checkpoint, once it was trained on all fetches that the trainer was."""
        return {"steps": self._steps, "skipped_in_row": self._skipped.state()}

    def restore(self, state: Mapping[str, Any], fetches: int) -> None:
        """Restore a checkpoint's ``state``, made after training on ``fetches`` fetches."""
        self._steps = state["steps"]
        self._skipped.restore(state["skipped_in_row"])
        self._handed = self._trained = fetches

    async def save(self, path: Path) -> None:
        """Save the critic's checkpoint, once it was trained on all fetches that the trainer was."""
        await self._changed.until(lambda: not self.behind)
        async with self._ranks:
            await self._engine.save(path)
