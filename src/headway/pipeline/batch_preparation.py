"""Preparation of a fetch: what is computed once, before its first optimizer step, and kept for all its mini-batches and
epochs.

    [reference] ▶ [π_prox] ▶ [critic's values]  on the trainer's own ranks, one after the other
                                    └──────────▶ advantages, returns

A role with ranks of its own has set its column already (RefLogProb, LogProb, Values).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from headway.data.interfaces.training import AdvantageFn, LogProbEngine, ProximalEngine
from headway.data.types import ColumnName
from headway.pipeline.admission.fetches import Fetch, outcomes
from headway.pipeline.critic_turns import Critic

Busy = Callable[[str], AbstractContextManager[None]]
"""Function whose context, while it is open, reports what the trainer's ranks compute."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """Preparation of a fetch on the trainer's ranks. An engine that is None is elsewhere, or is not used."""

    advantages: AdvantageFn
    reference: LogProbEngine | None = None
    proximal: ProximalEngine | None = None
    critic: Critic | None = None

    async def prepare(self, fetch: Fetch, busy: Busy) -> None:
        """Set the fetch's missing columns, ``advantages`` last."""
        if self.reference is not None:
            with busy("forward"):
                fetch.add(ColumnName.REF_LOGPROBS, await self.reference.forward_logprobs(fetch.samples()))
        if self.proximal is not None:
            with busy("forward"):
                fetch.add(
                    ColumnName.PROX_LOGPROBS, await self.proximal.proximal_logprobs(fetch.samples(), fetch.version)
                )
        if self.critic is not None:
            with busy("critic"):
                await self.critic.add_values(fetch)
        samples = fetch.samples((ColumnName.REF_LOGPROBS, ColumnName.PROX_LOGPROBS, ColumnName.VALUES))
        for name, columns in (await self.advantages(samples, outcomes(fetch.groups))).items():
            fetch.add(name, columns)
