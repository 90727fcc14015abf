"""Workers answer while they compute, and how long their ranks wait for each other has nothing to do with it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from headway.cluster.role_host import RoleHost
from headway.cluster.roles.training_roles import RefRole
from headway.config.schema import Config
from headway.engines.weights.transports import process_group
from headway.runtime.progress import Heartbeat, advance


class Busy:
    """A role whose step goes on as it is told."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)

    def train_step(self) -> None:
        for number in (1, 2):
            assert self.go_on.acquire(timeout=60)
            advance(f"{number} of 2")

    async def pause(self, until: asyncio.Event) -> None:
        await until.wait()

    async def generate(self, until: asyncio.Event) -> AsyncGenerator[int, None]:
        yield 0
        await until.wait()

    async def close(self) -> None: ...


async def doing(host: RoleHost, pattern: str) -> Heartbeat:
    async with asyncio.timeout(60):
        while not re.match(f"{pattern}$", (beat := await host.heartbeat()).doing):  # noqa: ASYNC110 - another thread moves on
            await asyncio.sleep(0.001)
    return beat


async def test_a_role_tells_of_its_thread_while_it_works_and_is_idle_afterwards() -> None:
    role = Busy()
    host = RoleHost(role, "actor-0")
    step = asyncio.create_task(host.call("train_step"))
    await doing(host, r"train_step for \d+ s, no progress for \d+ s")
    role.go_on.release()
    beat = await doing(host, r"train_step for \d+ s \(1 of 2\), no progress for \d+ s")
    assert beat.quiet_s < 30
    role.go_on.release()
    await step
    assert await host.heartbeat() == Heartbeat("")
    await host.end()


async def test_calls_that_wait_are_told_by_method_and_are_no_progress() -> None:
    """Else the question that a monitor asks each second would be a sign of life."""
    host, until = RoleHost(Busy(), "rollout-0"), asyncio.Event()
    stream = host.each("generate", until)
    await anext(stream)
    calls = [asyncio.create_task(host.call("pause", until)) for _ in range(3)]
    beat = await doing(host, r"1 × generate for \d+ s; 3 × pause for \d+ s")
    assert beat == Heartbeat(beat.doing)
    until.set()
    await asyncio.gather(*calls)
    assert [item async for item in stream] == []
    assert await host.heartbeat() == Heartbeat("")
    await host.end()


def test_a_rank_waits_for_another_longer_than_any_step_whatever_the_stall_detector_is_set_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: joined.append(settings))
    monkeypatch.setattr(process_group, "join_store", lambda *_: None)
    config = Config.model_validate({"cluster": {"stall_timeout_s": 5}})
    here: dict[str, Any] = {"fetch": list, "put": id, "threads": 1, "device": "cpu", "name": "ref-0"}
    role = RefRole(rank=0, world_size=2, config=config, model_path="m", **here)
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    role._join_ranks(("127.0.0.1", 1), "ref")
    assert joined[0]["timeout"] > timedelta(days=1)
