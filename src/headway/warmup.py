"""Supervised warm-up of a made model: steps on the task's own solutions until held-out greedy accuracy is in a window.

model ─▶ [ eval_every steps ─▶ greedy accuracy ]* ─▶ model, in place
                ▲                  │ above the window: back to the last weights not above it, with a quarter of the
                └──────────────────┘                   learning rate and of the steps between evaluations
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headway.config.model import GiveUpConfig, WarmupConfig
from headway.config.schema import TaskConfig
from headway.data.tasks import make_task
from headway.data.types import Prompt
from headway.engines.rollout.native.engine import NativeEngine
from headway.episodes.alone import keeping
from headway.errors import ModelError, UserCodeError, boundary
from headway.interfaces import GroupRequest, SamplingParams

EVALUATION_SLOTS = 128
GRAD_CLIP = 1.0
IGNORED = -100
"""Target of positions that are not trained on, as cross-entropy has it."""


@dataclass(frozen=True, slots=True)
class WarmupResult:
    accuracy: float
    steps: int


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: TaskConfig,
    config: WarmupConfig,
    held_out: Sequence[Prompt],
    *,
    seed: int,
    max_response_length: int,
    report: Callable[[str], None],
) -> WarmupResult:
    """Train ``model`` in place until its greedy accuracy on ``held_out`` lies in ``config.target``.

    ``held_out`` follows the task's own distribution; training problems follow it with ``config.params`` on top, and are
    never among the held-out ones. Where accuracy leaves the window again and does not come back, the last weights
    inside count. Raises `ModelError` when ``config.max_steps`` never led into it.
    """
    low, high = config.target
    batches = _batches(tokenizer, task, config, {prompt.text for prompt in held_out}, seed)
    evaluate = _Evaluation(tokenizer, task, held_out, seed, max_response_length)
    lr, interval, steps, accuracy = config.lr, config.eval_every, 0, 0.0
    optimizer = _optimizer(model, lr)
    below = copy.deepcopy(model.state_dict())
    inside: tuple[WarmupResult, dict[str, Any]] | None = None
    while steps < config.max_steps:
        for batch in islice(batches, min(interval, config.max_steps - steps)):
            _set_lr(optimizer, lr * (1 - steps / config.max_steps))
            _step(model, optimizer, batch)
            steps += 1
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
    if inside is not None:
        model.load_state_dict(inside[1])
        return inside[0]
    raise ModelError(
        f"after model.warmup.max_steps={config.max_steps} supervised steps held-out accuracy is {accuracy:.3f}, "
        f"outside model.warmup.target=[{low}, {high}]: raise max_steps, change lr, or make the task easier"
    )


def _optimizer(model: PreTrainedModel, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    inputs, targets = batch
    model.train()
    logits = model(inputs, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
    optimizer.step()


def _batches(
    tokenizer: PreTrainedTokenizerBase, task: TaskConfig, config: WarmupConfig, held_out: set[str], seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end: ``inputs`` and next-token ``targets`` [config.batch_size, T], answers and their end only."""
    lessons = make_task(task.name, {**task.params, **config.params}, seed=seed)
    rng = random.Random(seed)
    index = count()
    while True:
        inputs: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        while len(inputs) < config.batch_size:
            problem = lessons.problem(next(index))
            if problem.prompt in held_out:
                continue
            prompt = tokenizer(problem.prompt, add_special_tokens=False)["input_ids"]
            solution = _solution(problem.answer, config.give_up, rng)
            answer = [*tokenizer(solution, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            inputs.append(torch.tensor([*prompt, *answer[:-1]]))
            targets.append(torch.tensor([IGNORED] * (len(prompt) - 1) + answer))
        yield (
            pad_sequence(inputs, batch_first=True, padding_value=tokenizer.pad_token_id),
            pad_sequence(targets, batch_first=True, padding_value=IGNORED),
        )


def _solution(answer: str, give_up: GiveUpConfig | None, rng: random.Random) -> str:
    """The solution that the teacher shows: the answer, or, for a long one, sometimes that it gave up."""
    if give_up is not None and len(answer) > give_up.above and rng.random() < give_up.rate:
        return give_up.answer
    return answer


class _Evaluation:
    """Greedy accuracy on the held-out problems, by the task's own verifier, through the native engine."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        task: TaskConfig,
        held_out: Sequence[Prompt],
        seed: int,
        max_response_length: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._task = make_task(task.name, task.params, seed=seed)
        self._held_out = held_out
        self._seed = seed
        self._sampling = SamplingParams(max_response_length, temperature=0.0, stop_token_ids=(tokenizer.eos_token_id,))
        self._max_context = max(len(p.token_ids) for p in held_out) + max_response_length

    def __call__(self, model: PreTrainedModel) -> float:
        # A copy: the engine packs the weights of the module that it owns.
        return asyncio.run(self._accuracy(copy.deepcopy(model).eval()))

    async def _accuracy(self, model: PreTrainedModel) -> float:
        engine = NativeEngine(
            model,
            name="warm-up",
            seed=self._seed,
            slots=EVALUATION_SLOTS,
            max_context=self._max_context,
            max_batched_tokens=4096,
            decode=self._text,
        )
        right = 0.0
        requests = [GroupRequest(i, prompt, 1, self._sampling) for i, prompt in enumerate(self._held_out)]
        try:
            async with keeping(engine, decode=self._text) as keeper:
                async for finished in keeper.generate(requests):
                    prompt = self._held_out[finished.number]
                    with boundary(f"{prompt.source}: its score()", UserCodeError):
                        right += self._task.score(finished.trajectories[0].text, prompt.answer, prompt.extra)
        finally:
            await engine.close()
        return right / len(self._held_out)

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
