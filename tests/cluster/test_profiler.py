"""The profile of a process: threads that were there before, times since the run's first event, names."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headway.cluster import profiled_processes
from headway.cluster.profiled_processes import ProcessProfile, compressed
from headway.errors import RunError


class Busy:
    """A thread that multiplies matrices from before a profile to after it."""

    def __init__(self) -> None:
        self._over, self._done = threading.Event(), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._work, name="a-decoding-thread")
        self.thread.start()

    def _work(self) -> None:
        a = torch.ones(8, 8)
        while not self._over.wait(0.001):
            torch.mm(a, a)
            self._done.release()

    async def goes_on(self) -> None:
        """Return when it has begun and ended six more products."""
        while self._done.acquire(blocking=False):
            """What it did before does not count."""
        for _ in range(7):  # the first one may have begun before
            assert await asyncio.to_thread(self._done.acquire, timeout=60)

    def end(self) -> None:
        self._over.set()
        self.thread.join()


@pytest.fixture
def busy() -> Iterator[Busy]:
    thread = Busy()
    yield thread
    thread.end()


def opened(trace: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace))["traceEvents"]
    return events


async def test_a_thread_that_was_there_before_is_recorded_by_its_name_and_on_the_runs_clock(busy: Busy):
    profile = ProcessProfile("actor-0")
    origin = time.time() - 100.0  # the run began 100 s ago
    await profile.start()
    started = time.time()
    torch.relu(torch.ones(3))
    await busy.goes_on()
    await profile.stop()
    stopped = time.time()
    torch.sigmoid(torch.ones(3))
    events = opened(await profile.take(origin, "actor-0_rollout-0"))
    calls = [event for event in events if event["name"] == "aten::mm"]
    assert {event["tid"] for event in calls} == {busy.thread.native_id}
    assert len(calls) >= 5
    for event in calls:
        assert (started - origin) * 1e6 - 2e4 <= event["ts"] <= (stopped - origin) * 1e6 + 2e4
    names = {event["name"] for event in events}
    assert "aten::relu" in names and "aten::sigmoid" not in names
    called = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert called == {"actor-0_rollout-0"}
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert f"a-decoding-thread ({busy.thread.native_id})" in threads


async def test_a_second_profile_begins_empty_also_after_one_that_was_given_up(busy: Busy):
    profile = ProcessProfile("actor-0")
    await profile.start()
    torch.relu(torch.ones(3))
    await profile.start()  # its driver did not stop the first one
    torch.tanh(torch.ones(3))
    await profile.stop()
    names = {event["name"] for event in opened(await profile.take(0.0, "actor-0"))}
    assert "aten::tanh" in names and "aten::relu" not in names
    with pytest.raises(RunError, match="has recorded nothing"):
        await profile.take(0.0, "actor-0")


async def test_a_stop_without_a_start_does_nothing_and_leaves_nothing_to_take():
    profile = ProcessProfile("actor-0")
    await profile.stop()
    with pytest.raises(RunError, match="actor-0 has recorded nothing"):
        await profile.take(0.0, "actor-0")


async def test_what_is_computed_is_the_same_to_the_bit():
    torch.manual_seed(0)
    model, data = torch.nn.Linear(16, 16), torch.randn(4, 16)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(data).square().sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    alone = gradient()
    profile = ProcessProfile("actor-0")
    await profile.start()
    profiled = gradient()
    await profile.stop()
    await profile.take(0.0, "actor-0")
    assert torch.equal(alone, profiled)


def trace(events: int) -> bytes:
    """A trace as Kineto writes it."""
    lines = ['{\n  "baseTimeNanoseconds": 1000000000000000000,\n  "traceEvents": [']
    lines += [f'  {{\n    "ph": "X", "name": "aten::mm",\n    "ts": {n}.250, "dur": 1.5\n  }},' for n in range(events)]
    lines += ['  {"ph": "i", "name": "end", "ts": 7.5}\n  ],"traceName": "x" }\n']
    return "\n".join(lines).encode()


@pytest.mark.parametrize("chunk", [100, 4096])
def test_times_are_moved_to_the_origin_however_the_file_is_cut(monkeypatch: pytest.MonkeyPatch, chunk: int):
    monkeypatch.setattr(profiled_processes, "CHUNK_BYTES", chunk)
    events = opened(compressed(io.BytesIO(trace(100)), 999_999_999.0, "actor-0", {}))
    assert [event["ts"] for event in events] == [1e6 + n + 0.25 for n in range(100)] + [1e6 + 7.5]


def test_a_trace_that_is_cut_off_is_refused():
    with pytest.raises(RunError, match="cut off: the disk of"):
        compressed(io.BytesIO(trace(100)[:-40]), 0.0, "actor-0", {})
    with pytest.raises(RunError, match="none that Kineto wrote"):
        compressed(io.BytesIO(b""), 0.0, "actor-0", {})
