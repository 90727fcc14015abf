"""What the contract needs to know about an engine, and what its tests do with one.

A binding (``test_native.py``, …) gives `Contract` a `Harness`: how to start a replica, on which clock its tests run,
and which `Feature`s it has. What an engine cannot do is skipped by name, never silently.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.data.interfaces.rollout import (
    Capabilities,
    Completion,
    GenerateRequest,
    OnUpdate,
    Priority,
    SamplingParams,
)
from headway.data.interfaces.rollout import RolloutEngine as Engine
from headway.data.types import FinishReason, SampledTokens, TrajectoryId
from headway.models.made_model import EOS, PAD

CONTEXT = 192
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+="
"""One token each, behind ``<pad>`` and ``<eos>``: all that the models know."""
VOCABULARY = len(CHARACTERS) + 2
STOP = 1
BLOCK = 32
"""Tokens that an engine may compute again although it has them, since its cache holds whole blocks: the fewest in one
that vLLM takes on a CPU."""
OF_ROW = 10_000
"""Numbers of calls that belong to each row."""

_strangers = map("client {}".format, count())


class Feature(Enum):
    """What not every engine has, beside its `Capabilities`."""

    TOKENS = "token ids, log-probs and texts"
    JOINING = "contexts that are found while another call decodes from them"
    SEVERAL = "a replica that starts in no time"
    TOGETHER = "calls that start in one step when they were submitted in one"
    SLEEP = "sleep"
    BESIDE = "receiving weights while it decodes"
    IN_PLACE = "receiving weights over those that it serves"
    REPRODUCIBLE = "reproducible sampling"
    SHORT_MEMORY = "memory of a chosen size for keys and values"


def features_of(capabilities: Capabilities) -> frozenset[Feature]:
    """Those that an engine declares itself."""
    declared = {
        Feature.SLEEP: capabilities.sleep,
        Feature.BESIDE: capabilities.double_buffered,
        Feature.IN_PLACE: not capabilities.double_buffered,
        Feature.REPRODUCIBLE: capabilities.reproducible,
    }
    return frozenset(feature for feature, has in declared.items() if has)


class Replica(Protocol):
    """One engine under test, with a way for new weights to reach it."""

    engine: Engine
    version: int
    """That was activated last, or 0."""

    def model(self, version: int) -> PreTrainedModel:
        """Whose weights are ``version``. Only with `Feature.TOKENS`."""

    async def stage(self) -> int:
        """Bring the weights of the next version, and return its number."""

    def break_transfers(self, broken: bool) -> None:
        """From now on transfers fail half-way, or no longer."""

    async def tick(self) -> None:
        """Give the engine the time for a step, about."""

    def holds(self) -> str:
        """What it still remembers or occupies for calls; empty when nothing."""


class Harness(Protocol):
    """How to test one kind of engine."""

    name: str
    features: frozenset[Feature]
    seed: int
    """Of the run."""
    slots: int
    crowd: int
    """Slots where there is much to do."""
    tolerance: float
    """Of log-probs in float32, nats."""
    samples: int
    """Answers for a test of a distribution."""
    many: int
    """Calls for a test with as many as possible."""
    arrival_s: float
    """Between two of them, on average."""
    step_s: float
    """About what a step takes. Both on the clock of the event loop."""

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """To its end, on a loop of its own; raises `TimeoutError` for a test that does not come to one."""

    def serve(
        self, *, slots: int | None = None, fresh: bool = False, short_memory: bool = False
    ) -> AbstractAsyncContextManager[Replica]:
        """A replica at rest; other ``slots`` than its own and `crowd` only with `Feature.SEVERAL`.

        ``fresh``: one that no other test has used, or will. ``short_memory``: one of three times as many slots, with
        memory for keys and values for a whole context in each third one. Only with `Feature.SHORT_MEMORY`.
        """


class OfEngine:
    """What the parts of the contract have in common."""

    harness: Harness


def scenario(*needed: Feature) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Make a test of a coroutine method: on the clock of the harness, and only where it has what is ``needed``."""

    def test_of(body: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(self: OfEngine, **arguments: Any) -> None:
            if missing := [feature.value for feature in needed if feature not in self.harness.features]:
                pytest.skip(f"not applicable: {self.harness.name} has no {' and no '.join(missing)}")
            self.harness.run(body(self, **arguments))

        return test

    return test_of


# ------------------------------------------------------------------------------------------ calls


def make_calls(
    row: int,
    *,
    n: int = 4,
    first: int = 0,
    length: int | None = None,
    priority: Priority = Priority.TRAINING,
    epoch: int = 0,
    attempt: int = 0,
    key: int = 0,
    goes_on: bool = False,
    **sampling: Any,
) -> list[GenerateRequest]:
    """The calls of ``n`` episodes of one prompt, from the ``first`` on, under the numbers `OF_ROW` · ``row`` + k.

    The prompt is random, the same for the same row and length; answers have 16 tokens if nothing else is said.
    """
    rng = np.random.default_rng(row)
    tokens = rng.integers(2, VOCABULARY, length or int(rng.integers(3, 14))).astype(np.int32)
    return [
        GenerateRequest(
            number=OF_ROW * row + k,
            trajectory=TrajectoryId(epoch, row, attempt, k),
            input_ids=tokens,
            sampling=SamplingParams(**{"max_tokens": 16, **sampling}),
            key=key,
            priority=priority,
            goes_on=goes_on,
        )
        for k in range(first, first + n)
    ]


def endless(row: int, **changes: Any) -> list[GenerateRequest]:
    """Longer than what a test does meanwhile, or as long as the context allows."""
    (call,) = make_calls(row, **{**changes, "n": 1})
    return make_calls(row, **{"max_tokens": min(100, CONTEXT - len(call.input_ids)), **changes})


def numbers_of(calls: Iterable[GenerateRequest]) -> list[int]:
    return [call.number for call in calls]


def text_of(ids: Sequence[int]) -> str:
    """What the models' tokenizer decodes ``ids`` to, special tokens included, as stop strings see them."""
    return "".join((PAD, EOS, *CHARACTERS)[i] for i in ids)


@dataclass(frozen=True, slots=True)
class Answer:
    """A call, and what came of it."""

    call: GenerateRequest
    done: Completion

    @property
    def id(self) -> TrajectoryId:
        return self.call.trajectory

    @property
    def row(self) -> int:
        return self.call.trajectory.row

    @property
    def prompt(self) -> NDArray[np.int32]:
        """[P]"""
        return self.call.input_ids

    @property
    def tokens(self) -> SampledTokens:
        """Only with `Feature.TOKENS`."""
        assert self.done.tokens is not None
        return self.done.tokens

    @property
    def ids(self) -> list[int]:
        """Of `tokens`."""
        ids: list[int] = self.tokens.ids.tolist()
        return ids

    @property
    def length(self) -> int:
        return self.done.length

    @property
    def whole(self) -> bool:
        """It has all tokens that it was to have, and says so."""
        limit = min(self.call.sampling.max_tokens, CONTEXT - len(self.prompt))
        return (self.length, self.done.finish_reason) == (limit, FinishReason.LENGTH)

    @property
    def aborted(self) -> bool:
        return self.done.finish_reason is FinishReason.ABORTED

    @property
    def versions(self) -> list[int]:
        """One for each span of tokens."""
        return [version for _, version in self.done.version_spans]


# ------------------------------------------------------------------------------------------ doing


async def submit(
    replica: Replica, *parts: Sequence[GenerateRequest], client: str | None = None
) -> asyncio.Task[list[Answer]]:
    """Have the calls taken, in one step, by a client of their own if none is named; the task is done when all are
    finished, and drops those that are not when it is cancelled."""
    client, calls = client or next(_strangers), {call.number: call for part in parts for call in part}
    await replica.engine.submit(client, list(calls.values()))
    task = asyncio.create_task(_collect(replica, client, calls))
    await asyncio.sleep(0)  # it listens from now on
    return task


async def _collect(replica: Replica, client: str, calls: dict[int, GenerateRequest]) -> list[Answer]:
    missing, answers = dict(calls), list[Answer]()
    async with aclosing(replica.engine.finished(client)) as batches:  # type: ignore[type-var]
        while missing:
            answers += [Answer(missing.pop(done.number), done) for done in await anext(batches)]
    return answers


async def collect(replica: Replica, *parts: Sequence[GenerateRequest]) -> list[Answer]:
    """The calls of one client, in the order in which they finish."""
    return await (await submit(replica, *parts))


async def until(replica: Replica, condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask between steps."""
    while not await condition():
        await replica.tick()


async def sampled(replica: Replica, tokens: int) -> int:
    """Wait until so many more tokens were sampled, at least; how many there are since the last report."""
    before = (await replica.engine.stats()).generated_tokens
    total = 0

    async def enough() -> bool:
        nonlocal total
        total += (await replica.engine.stats()).generated_tokens
        return total >= tokens

    await until(replica, enough)
    return before + total


async def swap(replica: Replica) -> None:
    """New weights for a paused engine."""
    version = await replica.stage()
    await replica.engine.activate(version)
    replica.version = version


async def update(replica: Replica, policy: OnUpdate) -> int:
    """All that an update does to a replica; how many calls it interrupted."""
    engine = replica.engine
    if engine.capabilities.double_buffered:
        version = await replica.stage()
        paused = await engine.pause(policy)
        await engine.activate(version)
        replica.version = version
    else:
        paused = await engine.pause(policy)
        await swap(replica)
    await engine.resume()
    return paused.interrupted


async def at_rest(replica: Replica) -> None:
    """Wait until nothing runs or waits. Then nothing may be occupied any more."""

    async def idle() -> bool:
        stats = await replica.engine.stats()
        return (stats.running, stats.waiting) == (0, 0)

    await until(replica, idle)
    assert not replica.holds()


# ------------------------------------------------------------------------------------------ looking


def in_order(answers: Iterable[Answer]) -> list[Answer]:
    """By episode."""
    return sorted(answers, key=lambda answer: answer.id)


def of_row(answers: Iterable[Answer], row: int) -> list[Answer]:
    """Of one prompt, in order of k."""
    return in_order(answer for answer in answers if answer.row == row)


def tokens_of(answers: Iterable[Answer]) -> dict[TrajectoryId, list[int]]:
    """Every answer's token ids, by its episode."""
    return {answer.id: answer.ids for answer in answers}


def versions_of(answers: Iterable[Answer]) -> set[int]:
    return {version for answer in answers for version in answer.versions}


def tokens_by_version(answers: Iterable[Answer]) -> dict[int, int]:
    """Version → tokens that are stamped with it."""
    counts: dict[int, int] = {}
    for answer in answers:
        ends = [start for start, _ in answer.done.version_spans[1:]] + [answer.length]
        for (start, version), end in zip(answer.done.version_spans, ends, strict=True):
            counts[version] = counts.get(version, 0) + end - start
    return counts
