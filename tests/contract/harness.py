"""What the contract needs to know about an engine, and what its tests do with one.

A binding (``test_native.py``, …) gives `Contract` a `Harness`: how to start a replica, on which clock its tests run,
and which `Feature`s it has. What an engine cannot do is skipped by name, never silently.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Any, Protocol

import numpy as np
import pytest
from transformers import PreTrainedModel

from headway.data.types import Prompt, ResponseTokens, Trajectory
from headway.interfaces import Capabilities, FinishedGroup, GenerateRequest, OnUpdate, Priority, SamplingParams
from headway.interfaces import RolloutEngine as Engine

CONTEXT = 192
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+="
"""One token each, behind ``<pad>`` and ``<eos>``: all that the models know."""
VOCABULARY = len(CHARACTERS) + 2
STOP = 1


class Feature(Enum):
    """What not every engine has, beside its `Capabilities`."""

    TOKENS = "token ids, log-probs and texts"
    SEVERAL = "a replica that starts in no time"
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
        """What it still remembers or occupies for requests; empty when nothing."""


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
    """Requests for a test with as many as possible."""
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


# ------------------------------------------------------------------------------------------ requests


def make_request(
    number: int,
    *,
    n: int = 4,
    length: int | None = None,
    first: int = 0,
    priority: Priority = Priority.TRAINING,
    epoch: int = 0,
    attempt: int = 0,
    **sampling: Any,
) -> GenerateRequest:
    """A random prompt, the same for the same number and length; 16 tokens if nothing else is said."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(2, VOCABULARY, length or int(rng.integers(3, 14))).astype(np.int32)
    prompt = Prompt(epoch, number, attempt, "test", text_of(tokens), tokens)
    return GenerateRequest(number, prompt, n, SamplingParams(**{"max_tokens": 16, **sampling}), priority, first)


def endless(number: int, **changes: Any) -> GenerateRequest:
    """As long as the context allows."""
    request = make_request(number, **changes)
    return make_request(number, **{"max_tokens": CONTEXT - len(request.prompt.token_ids), **changes})


def text_of(ids: Sequence[int]) -> str:
    """What the models' tokenizer decodes ``ids`` to."""
    return "".join(CHARACTERS[i - 2] for i in ids if i >= 2)


# ------------------------------------------------------------------------------------------ doing


async def collect(replica: Replica, requests: Sequence[GenerateRequest]) -> list[FinishedGroup]:
    """In the order in which they finish."""
    return [group async for group in replica.engine.generate(requests)]


def submit(replica: Replica, *requests: GenerateRequest) -> asyncio.Task[list[FinishedGroup]]:
    return asyncio.create_task(collect(replica, requests))


async def until(replica: Replica, condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask between steps."""
    while not await condition():
        await replica.tick()


async def taken(replica: Replica, *numbers: int) -> None:
    """Wait until just these training groups are in flight."""

    async def there() -> bool:
        return await replica.engine.in_flight() == list(numbers)

    await until(replica, there)


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
    """All that an update does to a replica; how many trajectories it interrupted."""
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
        return (stats.running, stats.waiting, await replica.engine.in_flight()) == (0, 0, [])

    await until(replica, idle)
    assert not replica.holds()


# ------------------------------------------------------------------------------------------ looking


def trajectories(groups: Sequence[FinishedGroup]) -> list[Trajectory]:
    """In order of number and k."""
    return sorted((t for group in groups for t in group.trajectories), key=lambda t: t.id)


def responses(groups: Sequence[FinishedGroup]) -> list[ResponseTokens]:
    return [response for group in groups for response in group.tokens.responses]


def tokens_of(groups: Sequence[FinishedGroup]) -> dict[tuple[int, ...], list[int]]:
    """Every trajectory's token ids, by its id."""
    return {
        trajectory.id: response.ids.tolist()
        for group in groups
        for trajectory, response in zip(group.trajectories, group.tokens.responses, strict=True)
    }


def versions_of(groups: Sequence[FinishedGroup]) -> set[int]:
    return {version for t in trajectories(groups) for _, version in t.version_spans}


def tokens_by_version(groups: Sequence[FinishedGroup]) -> dict[int, int]:
    """Version → tokens that are stamped with it."""
    counts: dict[int, int] = {}
    for t in trajectories(groups):
        ends = [start for start, _ in t.version_spans[1:]] + [t.length]
        for (start, version), end in zip(t.version_spans, ends, strict=True):
            counts[version] = counts.get(version, 0) + end - start
    return counts
