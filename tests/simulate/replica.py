"""A simulated replica with scripted lengths, and what tests do with one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np

from headway.data.types import Prompt, Trajectory
from headway.interfaces import FinishedGroup, GenerateRequest, OnUpdate, Priority, ReceiveReport, SamplingParams
from headway.simulate.profile import RolloutProfile
from headway.simulate.rollout import Receive, SimulatedRollout

Lengths = Callable[[int, int], int]
"""(row, k) → tokens."""


async def arrives_at_once(name: str, version: int) -> ReceiveReport:
    return ReceiveReport(0.0, 0.0, nbytes=0, checksum=version)


def replica(
    lengths: Lengths | int = 16,
    *,
    slots: int = 2,
    step_s: float = 0.125,
    decode: Sequence[tuple[int, float]] | None = None,
    kv_token_s: float = 0.0,
    kv_tokens: int | None = None,
    prefill_s: float = 0.0,
    prefill_token_s: float = 0.0,
    load_s: float = 0.0,
    sleep_s: float = 0.0,
    wake_s: float = 0.0,
    receive: Receive = arrives_at_once,
) -> SimulatedRollout:
    """16 tokens take two seconds, if nothing else is said."""
    profile = RolloutProfile(
        slots=slots,
        decode=list(decode or [(1, step_s)]),
        kv_token_s=kv_token_s,
        kv_tokens=kv_tokens,
        prefill_s=prefill_s,
        prefill_token_s=prefill_token_s,
    )
    sampler = (lambda id, number: lengths) if isinstance(lengths, int) else (lambda id, number: lengths(id.row, id.k))
    return SimulatedRollout(
        "rollout-0", profile=profile, lengths=sampler, receive=receive, load_s=load_s, sleep_s=sleep_s, wake_s=wake_s
    )


def request(
    number: int,
    n: int = 1,
    *,
    priority: Priority = Priority.TRAINING,
    prompt_tokens: int = 4,
    max_tokens: int = 10_000,
    first: int = 0,
) -> GenerateRequest:
    prompt = Prompt(0, number, 0, "test", "", np.zeros(prompt_tokens, np.int32))
    return GenerateRequest(number, prompt, n, SamplingParams(max_tokens), priority, first)


async def generate(engine: SimulatedRollout, *requests: GenerateRequest) -> list[FinishedGroup]:
    return [finished async for finished in engine.generate(requests)]


def submit(engine: SimulatedRollout, *requests: GenerateRequest) -> asyncio.Task[list[FinishedGroup]]:
    return asyncio.ensure_future(generate(engine, *requests))


def trajectories(groups: Sequence[FinishedGroup]) -> list[Trajectory]:
    """In order of (number, k)."""
    return [t for group in sorted(groups, key=lambda group: group.number) for t in group.trajectories]


@asynccontextmanager
async def paused(engine: SimulatedRollout, policy: OnUpdate) -> AsyncIterator[int]:
    """Yields how many were interrupted; resumes at the end."""
    yield (await engine.pause(policy)).interrupted
    await engine.resume()


async def load(engine: SimulatedRollout, version: int) -> None:
    await engine.stage_weights(version)
    await engine.activate(version)


def now() -> float:
    return asyncio.get_running_loop().time()
