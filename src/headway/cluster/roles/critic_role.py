"""Role of the critic, on separate ranks or the trainer's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.roles.role import Role
from headway.cluster.worker_group import Collect, Dispatch, register
from headway.data.interfaces.training import StepReport
from headway.data.types import TrainSample
from headway.engines.weights.protocols import Address
from headway.errors import RunError

if TYPE_CHECKING:
    from headway.engines.train.fsdp.column_engines import FsdpCritic


class WithCritic(Role):
    """Base of roles whose ranks hold the critic, once it is built. Registered methods are collective over the ranks."""

    _critic: FsdpCritic | None = None

    def _build_critic(self, total_optimizer_steps: int) -> None:
        from headway.engines.train.fsdp.column_engines import FsdpCritic

        self._critic = FsdpCritic(
            model_path=self._model_path,
            config=self._config,
            total_optimizer_steps=total_optimizer_steps,
            mesh=self._mesh,
        )

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def forward_values(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        return self._the_critic.forward_values(self.batch.rows(samples))

    @register(Dispatch.SPLIT)
    def critic_step(self, samples: Sequence[TrainSample]) -> StepReport:
        return self._the_critic.train_step(self.batch.rows(samples))

    @register(Dispatch.ONE_TO_ALL)
    def copy_critic(self) -> None:
        self._the_critic.copy_state()

    @register(Dispatch.ONE_TO_ALL, files="saving the critic's checkpoint")
    async def save_critic(self, path: Path) -> None:
        """Write the copy in a thread, so that the rank can train meanwhile."""
        await asyncio.to_thread(self._the_critic.save, path)

    @register(Dispatch.ONE_TO_ALL, files="loading the critic's checkpoint")
    def load_critic(self, path: Path) -> None:
        self._the_critic.load(path)

    @property
    def _the_critic(self) -> FsdpCritic:
        if self._critic is None:
            raise RunError("this run has no critic: nothing in its algorithm asks for one")
        return self._critic


class CriticRole(WithCritic):
    """Role of one rank of a critic on separate ranks."""

    def __init__(self, *, total_critic_steps: int, **common: Any) -> None:
        super().__init__(**common)
        self._total_critic_steps = total_critic_steps

    @register(Dispatch.ONE_TO_ALL)
    def build(self, store: Address | None) -> None:
        """Join the ranks that meet at ``store``, and load the critic's model."""
        self._join_ranks(store, "critic")
        self._build_critic(self._total_critic_steps)
