"""What a made model learns from before a run: a task's own solutions, or conversations that a function makes.

    solutions(…)       ─▶ lessons without end ─┐
    demonstrations(…)  ─▶ lessons without end ─┴▶ batches ─▶ `headway.warmup`

A lesson is a stretch of tokens, and which of them are learned. Neither source ever teaches a held-out prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headway.config.model import GiveUpConfig, WarmupConfig
from headway.config.schema import TaskConfig
from headway.data.files import Record
from headway.data.left_out import LeftOut
from headway.data.tasks import COLLISION_TRIES, make_task
from headway.data.tokenize import PromptTokenizer
from headway.data.trees import grow
from headway.data.types import RowTokens
from headway.episodes.demonstrations import demonstrated
from headway.episodes.record import Chats
from headway.errors import UserCodeError, boundary, shown
from headway.models.layout import Layout
from headway.programs.messages import ToolSchema
from headway.user_code import load_function

IGNORED = -100
"""Target of positions that are not learned, as for cross-entropy in torch."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A stretch of tokens to learn from."""

    ids: NDArray[np.int32]
    """[L]"""
    learned: NDArray[np.bool_]
    """True at the tokens whose prediction is learned, [L]; never at the first."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Lessons one behind the other, in one packed line of L tokens."""

    inputs: Int[Tensor, "1 L"]
    targets: Int[Tensor, " L"]
    """Token that follows each one; `IGNORED` where it is not learned."""
    layout: Layout
    """Tokens that see each other: those of one lesson."""


def batches(lessons: Iterator[Lesson], size: int) -> Iterator[Batch]:
    """Yield batches of ``size`` lessons, for as long as there are lessons."""
    while chunk := list(islice(lessons, size)):
        chunk.sort(key=lambda lesson: len(lesson.ids))  # those of about one length are attended to in one call
        targets = [np.where(lesson.learned[1:], lesson.ids[1:], IGNORED) for lesson in chunk]
        yield Batch(
            torch.from_numpy(np.concatenate([lesson.ids[:-1] for lesson in chunk]).astype(np.int64)[None]),
            torch.from_numpy(np.concatenate(targets).astype(np.int64)),
            Layout.of([grow([lesson.ids[:-1]]) for lesson in chunk], torch.device("cpu")),
        )


# ---------------------------------------------------------------------------------------------- a task's solutions


def solutions(
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptTokenizer,
    task: TaskConfig,
    config: WarmupConfig,
    held_out: Set[str],
    seed: int,
) -> Iterator[Lesson]:
    """Yield the task's problems, with ``config.params`` on top of its own, and the answers that a teacher gives.

    ``held_out``: texts of prompts that are left out.
    """
    lessons = make_task(task.name, {**task.params, **config.params}, seed=seed)
    rng = random.Random(seed)
    for index in count():
        problem = lessons.problem(index)
        [rendered] = prompts([Record(problem.prompt, problem.answer, task.name)])
        if isinstance(rendered, LeftOut) or rendered[0] in held_out:
            continue
        prompt = rendered[1]
        solution = _solution(problem.answer, config.give_up, rng)
        answer = [*tokenizer(solution, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids = np.concatenate([prompt, np.array(answer, np.int32)])
        yield Lesson(ids, np.arange(len(ids)) >= len(prompt))


def _solution(answer: str, give_up: GiveUpConfig | None, rng: random.Random) -> str:
    """Return the solution that the model is to learn: the answer or, for a long one, sometimes that it gives up."""
    if give_up is not None and len(answer) > give_up.above and rng.random() < give_up.rate:
        return give_up.answer
    return answer


# ---------------------------------------------------------------------------------------------- demonstrations


def demonstrations(
    chats: Chats,
    spec: str,
    tools: Sequence[ToolSchema],
    held_out: Set[str],
    *,
    seed: int,
    conversations: int,
    longest: int,
) -> Iterator[Lesson]:
    """Yield the rows of ``conversations`` that the function ``spec`` makes, each when it is asked for, and then again
    and again, each time in another order.

    Args:
        chats: renders them, and makes rows of them as of an episode's.
        tools: what the assistant may call.
        held_out: texts of prompts that are left out.
        longest: most tokens of a row.

    Raises:
        UserCodeError: the function fails, or what it returns is no conversation, is too long, or is always held out.
    """
    function, rng = load_function(spec), random.Random(seed)
    lessons: list[Lesson] = []
    for _ in range(conversations):
        for row in _conversation(chats, spec, function, tools, held_out, rng):
            ids = np.concatenate([row.prompt_ids, row.ids])
            if len(ids) > longest:
                raise UserCodeError(
                    f"{spec}: a conversation has {len(ids)} tokens, more than the model's {longest} positions; make it "
                    "shorter, or raise model.make.max_position_embeddings"
                )
            lessons.append(Lesson(ids, np.concatenate([np.zeros(len(row.prompt_ids), np.bool_), row.loss_mask])))
            yield lessons[-1]
    while True:
        rng.shuffle(lessons)
        yield from lessons


def _conversation(
    chats: Chats,
    spec: str,
    function: Callable[[random.Random], Any],
    tools: Sequence[ToolSchema],
    held_out: Set[str],
    rng: random.Random,
) -> list[RowTokens]:
    """The rows of the next conversation that ``function`` makes whose first prompt is not ``held_out``."""
    for _ in range(COLLISION_TRIES):
        with boundary(f"{spec} failed", UserCodeError):
            messages = function(rng)
        if not isinstance(messages, list | tuple):
            raise UserCodeError(f"{spec} returned {shown(messages)}, expected a list of chat messages")
        with boundary(f"{spec}: a conversation that it returned cannot be learned from", UserCodeError):
            rows = demonstrated(chats, messages, tools)
        if held_out.isdisjoint(_first_prompt(chats, messages)):
            return rows
    raise UserCodeError(
        f"{spec}: {COLLISION_TRIES} conversations in a row began with a held-out prompt; draw from more prompts"
    )


def _first_prompt(chats: Chats, messages: Sequence[Any]) -> set[str]:
    """The spellings that a held-out prompt like the conversation's first one may have: rendered, or its text alone."""
    first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
    alone = {str(messages[0]["content"])} if first == 1 else set()
    return {chats.renderer.render(messages[:first])} | alone
