"""Supervised warm-up of a made model, on one loop: on a task's solutions until held-out greedy accuracy is in a window,
or on demonstrations for a fixed number of steps.

model ─▶ [ eval_every steps ─▶ greedy accuracy ]* ─▶ model, in place
                ▲                  │ above the window: back to the last weights not above it, with a quarter of the
                └──────────────────┘                   learning rate and of the steps between evaluations
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headway.config.model import WarmupConfig
from headway.config.schema import TaskConfig
from headway.data.tasks import make_task
from headway.data.types import Prompt
from headway.engines.rollout.native.engine import NativeEngine
from headway.episodes.alone import keeping
from headway.episodes.rendering import answer_decoder
from headway.errors import ModelError, UserCodeError, boundary
from headway.interfaces.calls import SamplingParams
from headway.interfaces.keeper import GroupRequest
from headway.lessons import IGNORED, Batch
from headway.models.packable import use_packed_attention
from headway.models.tokenizer import text_of

EVALUATION_SLOTS = 128
GRAD_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class WarmupResult:
    accuracy: float | None
    """Held-out greedy accuracy; None where there is no evaluation."""
    steps: int


def warm_up(
    model: PreTrainedModel,
    batches: Iterator[Batch],
    config: WarmupConfig,
    evaluate: Callable[[PreTrainedModel], float] | None,
    report: Callable[[str], None],
) -> WarmupResult:
    """Train ``model`` in place on ``batches`` until what ``evaluate`` says of it lies in ``config.target``.

    Where accuracy leaves the window again and does not come back, the last weights inside count. Without ``evaluate``
    it trains for ``config.max_steps`` steps, and the loss is reported instead.

    Raises:
        ModelError: ``config.max_steps`` never led into the window.
    """
    if (why := use_packed_attention(model)) is not None:
        raise AssertionError(f"unreachable: attention of every made model can be packed, but {why}")
    low, high = config.target
    lr, interval, steps, accuracy = config.lr, config.eval_every, 0, 0.0
    optimizer = _optimizer(model, lr)
    below = copy.deepcopy(model.state_dict())
    inside: tuple[WarmupResult, dict[str, Any]] | None = None
    while steps < config.max_steps:
        losses = []
        for batch in islice(batches, min(interval, config.max_steps - steps)):
            _set_lr(optimizer, lr * (1 - steps / config.max_steps))
            losses.append(_step(model, optimizer, batch))
            steps += 1
        if evaluate is None:
            report(f"{steps} supervised steps, loss {sum(losses) / len(losses):.3f}")
            continue
        accuracy = evaluate(model)
        report(f"{steps} supervised steps, held-out accuracy {accuracy:.3f}")
        if accuracy > high:
            model.load_state_dict(below)
            lr, interval = lr / 4, max(1, interval // 4)
            optimizer = _optimizer(model, lr)
            continue
        below = copy.deepcopy(model.state_dict())
        if accuracy >= low:
            inside = WarmupResult(accuracy, steps), below
            if steps >= config.min_steps:
                return inside[0]
    if evaluate is None:
        return WarmupResult(None, steps)
    if inside is not None:
        model.load_state_dict(inside[1])
        return inside[0]
    raise ModelError(
        f"after model.warmup.max_steps={config.max_steps} supervised steps held-out accuracy is {accuracy:.3f}, "
        f"outside model.warmup.target=[{low}, {high}]: raise max_steps, change lr, or make the task easier"
    )


def _optimizer(model: PreTrainedModel, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Make one step; returns the mean loss of a learned token in nats."""
    model.train()
    positions = torch.from_numpy(batch.layout.positions[None])
    logits = model(batch.inputs, position_ids=positions, layout=batch.layout, use_cache=False).logits
    loss = cross_entropy(logits[0].float(), batch.targets, ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
    optimizer.step()
    return loss.item()


class Evaluation:
    """Evaluation of greedy accuracy on the held-out problems, by the task's own verifier, through the native engine."""

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

    def __call__(self, model: PreTrainedModel) -> float:
        # A copy: the engine packs the weights of the module that it owns.
        return asyncio.run(self._accuracy(copy.deepcopy(model).eval()))

    async def _accuracy(self, model: PreTrainedModel) -> float:
        decode = answer_decoder(self._tokenizer)
        engine = NativeEngine(
            model,
            name="warm-up",
            seed=self._seed,
            slots=EVALUATION_SLOTS,
            max_context=self._max_context,
            max_batched_tokens=4096,
            decode=text_of(self._tokenizer),
        )
        right = 0.0
        requests = [GroupRequest(i, prompt, 1, self._sampling) for i, prompt in enumerate(self._held_out)]
        try:
            async with keeping(engine, decode=decode) as keeper:
                async for finished in keeper.generate(requests):
                    prompt = self._held_out[finished.number]
                    with boundary(f"{prompt.source}: its score()", UserCodeError):
                        right += self._task.score(finished.trajectories[0].text, prompt.answer, prompt.extra)
                    self._go_on()
        finally:
            await engine.close()
        return right / len(self._held_out)
