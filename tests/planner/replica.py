"""A simulated replica with scripted lengths, and what tests do with one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count

from headway.data.interfaces.rollout import Completion, GenerateRequest, OnUpdate, Priority, SamplingParams
from headway.data.interfaces.weights import ReceiveReport
from headway.data.types import TrajectoryId
from headway.planner.profiles.job_profile import RolloutProfile
from headway.planner.simulation.simulated_prompts import same_ids
from headway.planner.simulation.simulated_rollout import Receive, SimulatedRollout

Lengths = Callable[[int, int], int]
"""(row, k) → tokens."""
OF_ROW = 100
"""Numbers of calls that belong to each row."""

_strangers = map("client {}".format, count())


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
    sampler = (lambda id: lengths) if isinstance(lengths, int) else (lambda id: lengths(id.row, id.k))
    return SimulatedRollout(
        "rollout-0", profile=profile, lengths=sampler, receive=receive, load_s=load_s, sleep_s=sleep_s, wake_s=wake_s
    )


def calls(
    row: int,
    n: int = 1,
    *,
    priority: Priority = Priority.TRAINING,
    prompt_tokens: int = 4,
    max_tokens: int = 10_000,
    key: int = 0,
    goes_on: bool = False,
) -> list[GenerateRequest]:
    """Calls of the episodes k = 0 … n − 1 of one prompt; their numbers are `OF_ROW` · ``row`` + k."""
    return [
        GenerateRequest(
            number=OF_ROW * row + k,
            trajectory=TrajectoryId(0, row, 0, k),
            input_ids=same_ids(prompt_tokens),
            sampling=SamplingParams(max_tokens),
            key=key,
            priority=priority,
            goes_on=goes_on,
        )
        for k in range(n)
    ]


async def generate(
    engine: SimulatedRollout,
    *calls: Sequence[GenerateRequest],
    client: str | None = None,
    into: list[Completion] | None = None,
) -> list[Completion]:
    """The finished calls in the order in which they come, as one that leaves when it has all. ``into``: take this list
    for them."""
    client, got = client or next(_strangers), [] if into is None else into
    missing = sum(map(len, calls))
    await engine.submit(client, [call for part in calls for call in part])
    if missing:
        async with aclosing(engine.finished(client)) as batches:
            async for batch in batches:
                got += batch
                missing -= len(batch)
                if not missing:
                    break
    return got


def submit(
    engine: SimulatedRollout, *calls: Sequence[GenerateRequest], client: str | None = None
) -> asyncio.Task[list[Completion]]:
    return asyncio.ensure_future(generate(engine, *calls, client=client))


def in_order(done: Sequence[Completion]) -> list[Completion]:
    """In order of number."""
    return sorted(done, key=lambda call: call.number)


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
