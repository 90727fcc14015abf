"""Supervised warm-up of a made model: on a task's solutions until held-out greedy accuracy is in a window, or on
demonstrations for a fixed number of steps.

model ─▶ [ eval_every steps ─▶ greedy accuracy ]* ─▶ model, in its folder
                ▲                  │ above the window: back to the last weights not above it, with a quarter of the
                └──────────────────┘                   learning rate and of the steps between evaluations

The trainer's ranks make the steps, with the engine, packing and mesh of reinforcement learning:

examples ─▶ samples with advantage 1 ─▶ train_step with the loss −A·log π_θ, the mean over all trained tokens
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from headway.agents.chat.chat_template import answer_decoder
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.api.sft.sft_data import Example
from headway.cluster.backend import TrainerRanks, start_trainer
from headway.cluster.machine.token_files import carried
from headway.config.schema import Config, TaskConfig
from headway.config.sections.learning import AlgorithmConfig, OptimConfig, ParallelConfig
from headway.config.sections.losses import Gpg
from headway.config.sections.model_section import WarmupConfig
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.interfaces.training import StepContext, StepReport, TokenLoss
from headway.data.tasks import make_task
from headway.data.types import ColumnName, Prompt, TrainSample, TrajectoryId
from headway.engines.rollout.native.engine import NativeEngine
from headway.errors import ModelError, UserCodeError, boundary
from headway.models.pretrained import load_model
from headway.models.tokenizer import text_of


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
        self._separate = trainer.cluster.separate_processes

    async def step(self, number: int, batch: Sequence[Example]) -> StepReport:
        """Take the optimizer step ``number`` on a batch, and return its report; ``loss`` is in nats per token."""
        samples = self._samples(number, batch)
        await self.engine.begin_batch([samples])
        report = await self.engine.train_step(samples, StepContext())
        await self.engine.end_batch()
        return report

    async def loss(self, number: int, batch: Sequence[Example]) -> TokenLoss:
        """Return the loss of a batch under the current weights. ``number``: the batch's unique number."""
        return await self.engine.token_loss(self._samples(number, batch))

    def _samples(self, number: int, batch: Sequence[Example]) -> list[TrainSample]:
        samples: list[TrainSample] = []
        for place, rows in enumerate(batch):
            handle = carried(rows, f"sft/{number}/{place}") if self._separate else rows
            samples += [
                TrainSample(
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
        _supervised(config, optim), model_path=model_path, run_dir=run_dir, total_optimizer_steps=total_steps, tell=tell
    ) as trainer:
        yield SftSteps(trainer)


def _supervised(config: Config, optim: OptimConfig) -> Config:
    """Return ``config`` with the loss and optimizer of supervised steps. The mesh, devices and packing stay."""
    loss = {"ppo_epochs": 1, "loss_agg_mode": "token-mean", "entropy_coeff": 0.0, "use_kl_loss": False}
    changed = _changed(
        config,
        actor={"optim": optim, **loss},
        rollout={"temperature": 1.0},
        async_training={"use_rollout_log_probs": True, "trigger_parameter_sync_step": 1},
        cluster={"placement": "split"},
    )
    return changed.model_copy(update={"algorithm": AlgorithmConfig(policy_loss=Gpg())})


def _changed(config: Config, **sections: Mapping[str, Any]) -> Config:
    """Return ``config`` with new values in some sections. They are not checked."""
    update = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=update)


EVALUATION_SLOTS = 128
Evaluate = Callable[[Path], Awaitable[float]]
"""Function that returns the held-out accuracy of the model in a folder."""


@dataclass(frozen=True, slots=True)
class WarmupResult:
    accuracy: float | None
    """Held-out greedy accuracy; None if there is no evaluation."""
    steps: int


async def warm_up(
    path: Path,
    config: Config,
    warmup: WarmupConfig,
    examples: Iterator[Example],
    evaluate: Evaluate | None,
    report: Callable[[str], None],
    go_on: Callable[[], None] = lambda: None,
) -> WarmupResult:
    """Train the model at ``path`` on ``examples`` until its accuracy by ``evaluate`` lies in ``warmup.target``.

    If accuracy leaves that window and does not come back, the last weights inside count. Without ``evaluate`` training
    takes ``warmup.max_steps`` steps, and the loss is reported instead. ``go_on`` is called after each step.

    Raises:
        ModelError: accuracy was never in the window within ``warmup.max_steps`` steps.
    """
    low, high = warmup.target
    lr, interval, steps, accuracy = warmup.lr, warmup.eval_every, 0, 0.0
    tried, inside_folder = path.with_name(f".{path.name}.tried"), path.with_name(f".{path.name}.inside")
    inside: WarmupResult | None = None
    try:
        while steps < warmup.max_steps:
            left = warmup.max_steps - steps
            # The rate that one schedule over all steps has here: each new trainer has a schedule over the rest.
            async with _trainer(path, config, lr * left / warmup.max_steps, left) as trainer:
                above = False
                while steps < warmup.max_steps and not above:
                    losses = []
                    for _ in range(min(interval, warmup.max_steps - steps)):
                        batch = list(islice(examples, warmup.batch_size))
                        losses.append((await trainer.step(steps, batch)).metrics["loss"])
                        steps += 1
                        go_on()
                    if evaluate is None:
                        report(f"{steps} of {warmup.max_steps} supervised steps, loss {sum(losses) / len(losses):.3f}")
                        continue
                    await trainer.engine.export(tried)
                    accuracy = await evaluate(tried)
                    report(f"{steps} of at most {warmup.max_steps} supervised steps, held-out accuracy {accuracy:.3f}")
                    if above := accuracy > high:
                        continue
                    # Not if it is above: the next, smaller steps start from these weights
                    _move(tried, path)
                    if accuracy >= low:
                        inside = WarmupResult(accuracy, steps)
                        if steps >= warmup.min_steps:
                            return inside
                        rmtree(inside_folder, ignore_errors=True)
                        copytree(path, inside_folder)
                if evaluate is None:
                    await trainer.engine.export(path)
            lr, interval = lr / 4, max(1, interval // 4)
        if evaluate is None:
            return WarmupResult(None, steps)
        if inside is not None:
            _move(inside_folder, path)
            return inside
    finally:
        for folder in (tried, inside_folder):
            rmtree(folder, ignore_errors=True)
    raise ModelError(
        f"after model.warmup.max_steps={warmup.max_steps} supervised steps held-out accuracy is {accuracy:.3f}, "
        f"outside model.warmup.target=[{low}, {high}]: raise max_steps, change lr, or make the task easier"
    )


def _trainer(path: Path, config: Config, lr: float, steps: int) -> AbstractAsyncContextManager[SftSteps]:
    """Return a trainer in this process whose learning rate reaches zero after ``steps`` steps."""
    device = config.cluster.device if config.cluster.backend == "inline" else "cpu"  # the devices are the workers'
    alone = _changed(
        config,
        trainer={"nnodes": 1, "n_gpus_per_node": 1, "use_nodes_ratios": None},
        actor={"parallel": ParallelConfig(), "grad_clip": 1.0},
        cluster={"backend": "inline", "device": device, "address": None},
        model={"dtype": "float32"},
    )
    optim = OptimConfig(lr=lr, lr_scheduler_type="linear", betas=(0.9, 0.99))
    # One step more than are made: otherwise the last step's rate would be zero
    return trainer_of(alone, optim, model_path=str(path), run_dir=path.parent, total_steps=steps + 1)


def _move(folder: Path, path: Path) -> None:
    rmtree(path)
    folder.rename(path)


class WarmupEvaluation:
    """Greedy accuracy on the held-out problems, by the task's own verifier, through the native engine."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        task: TaskConfig,
        held_out: Sequence[Prompt],
        seed: int,
        max_response_length: int,
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare an evaluation. ``go_on`` is called after each answer, and may raise."""
        self._tokenizer = tokenizer
        self._task = make_task(task.name, task.params, seed=seed)
        self._held_out = held_out
        self._seed = seed
        self._go_on = go_on
        self._sampling = SamplingParams(max_response_length, temperature=0.0, stop_token_ids=(tokenizer.eos_token_id,))
        self._max_context = max(len(p.token_ids) for p in held_out) + max_response_length

    async def __call__(self, folder: Path) -> float:
        """Return the accuracy of the model in ``folder``, in [0, 1]."""
        decode = answer_decoder(self._tokenizer)
        engine = NativeEngine(
            load_model(str(folder), dtype=torch.float32),
            name="warm-up",
            seed=self._seed,
            slots=EVALUATION_SLOTS,
            max_context=self._max_context,
            max_batched_tokens=4096,
            decode=text_of(self._tokenizer),
        )
        right = 0.0
        requests = [Group(i, prompt, 1, self._sampling) for i, prompt in enumerate(self._held_out)]
        try:
            async with local_episode_worker(engine, decode=decode) as worker:
                async for finished in worker.generate(requests):
                    prompt = self._held_out[finished.number]
                    with boundary(f"{prompt.source}: its score()", UserCodeError):
                        right += self._task.score(finished.trajectories[0].text, prompt.answer, prompt.extra)
                    self._go_on()
        finally:
            await engine.close()
        return right / len(self._held_out)
