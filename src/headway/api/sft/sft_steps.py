"""Supervised optimizer steps of the trainer's ranks: the same engine, packing and mesh as reinforcement learning has.

examples ─▶ samples with advantage 1 ─▶ train_step with the loss −A·log π_θ, the mean over all trained tokens
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from headway.api.sft.sft_data import Example
from headway.cluster.backend import TrainerRanks, start_trainer
from headway.cluster.machine.token_files import carried
from headway.config.schema import Config, PlacementConfig
from headway.config.sections.learning import AlgorithmConfig, OptimConfig
from headway.config.sections.losses import Gpg
from headway.data.interfaces.training import StepContext, StepReport, TokenLoss
from headway.data.types import ColumnName, GroupTokens, Sample, TrajectoryId


class SftSteps:
    """Drives the trainer's ranks over batches of examples.

    Example:
        async with trainer_of(config, optim, model_path="model", run_dir=run, total_steps=100) as steps:
            report = await steps.step(0, examples)
            await steps.engine.export(Path("tuned"))
    """

    def __init__(self, trainer: TrainerRanks) -> None:
        self.engine = trainer.engine
        self.watch, self.workers, self.timeouts = trainer.watch, trainer.workers, trainer.timeouts
        self._separate = trainer.separate_processes

    async def step(self, number: int, batch: Sequence[Example]) -> StepReport:
        """Take the optimizer step ``number`` on a batch, and return its report; ``loss`` is in nats per token."""
        samples = self._samples(number, batch)
        await self.engine.begin_fetch([samples])
        report = await self.engine.train_step(samples, StepContext())
        await self.engine.end_fetch()
        return report

    async def loss(self, number: int, batch: Sequence[Example]) -> TokenLoss:
        """Return the loss of a batch under the current weights. ``number``: one that no other batch has."""
        return await self.engine.token_loss(self._samples(number, batch))

    def _samples(self, number: int, batch: Sequence[Example]) -> list[Sample]:
        samples: list[Sample] = []
        for place, rows in enumerate(batch):
            tokens = GroupTokens(rows)
            handle = carried(tokens, f"sft/{number}/{place}") if self._separate else tokens
            samples += [
                Sample(
                    tokens=handle,
                    index=index,
                    prompt_length=len(row.prompt_ids),
                    length=len(row.ids),
                    episode=TrajectoryId(number, place, 0, 0),
                    columns={ColumnName.ADVANTAGES: 1.0},
                )
                for index, row in enumerate(rows)
            ]
        return samples


@asynccontextmanager
async def trainer_of(
    config: Config,
    optim: OptimConfig,
    *,
    model_path: str,
    run_dir: Path,
    total_steps: int,
    tell: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[SftSteps]:
    """Start the training ranks of ``config`` for supervised steps, until the block ends.

    ``total_steps``: where the schedule of ``optim`` ends. Raises as `headway.cluster.backend.start_trainer` does.
    """
    async with start_trainer(
        _supervised(config, optim),
        model_path=model_path,
        run_dir=run_dir,
        total_optimizer_steps=total_steps,
        tell=tell,
    ) as trainer:
        yield SftSteps(trainer)


def _supervised(config: Config, optim: OptimConfig) -> Config:
    """Return ``config`` with the loss and optimizer of supervised steps. The mesh, devices and packing stay."""
    actor = config.actor.model_copy(
        update={
            "optim": optim,
            "ppo_epochs": 1,
            "loss_agg_mode": "token-mean",
            "entropy_coeff": 0.0,
            "use_kl_loss": False,
        }
    )
    on_policy = {"use_rollout_log_probs": True, "trigger_parameter_sync_step": 1}
    return config.model_copy(
        update={
            "actor": actor,
            "algorithm": AlgorithmConfig(policy_loss=Gpg()),
            "rollout": config.rollout.model_copy(update={"temperature": 1.0}),
            "async_training": config.async_training.model_copy(update=on_policy),
            "placement": PlacementConfig(kind="split"),
        }
    )
