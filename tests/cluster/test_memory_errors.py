from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from headway.cluster.role_host import RoleHost
from headway.errors import ConfigError, RunError, WorkerDied

NOBODY_HAS = 1 << 50
"""Bytes: more than a process can address on any machine."""


def on_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.50 GiB free.")


def by_the_runtime() -> None:
    raise RuntimeError("CUDA error: out of memory")


def by_the_system() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


class Hungry:
    """Its methods do what they are given."""

    def step(self, action: Callable[[], object]) -> object:
        return action()

    async def serve(self, action: Callable[[], object]) -> object:
        return action()

    async def generate(self, action: Callable[[], object]) -> AsyncIterator[object]:
        yield action()

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("method", ["step", "serve"])
@pytest.mark.parametrize(
    ("takes", "says"),
    [
        (lambda: bytearray(NOBODY_HAS), r"MemoryError"),
        (
            lambda: torch.empty(NOBODY_HAS, dtype=torch.uint8),
            r"RuntimeError: .*tried to allocate 1125899906842624 bytes",
        ),
        (on_a_gpu, r"OutOfMemoryError: CUDA out of memory\. Tried to allocate 2\.00 GiB"),
        (by_the_runtime, r"RuntimeError: CUDA error: out of memory"),
        (by_the_system, r"OSError: \[Errno 12\] Cannot allocate memory"),
    ],
    ids=["python", "torch on the CPU", "torch on a GPU", "CUDA's runtime", "the system"],
)
async def test_a_worker_whose_memory_is_not_enough_says_so_and_what_needs_less(
    method: str, takes: Callable[[], object], says: str
) -> None:
    host = RoleHost(Hungry(), "actor-0")
    try:
        with pytest.raises(RunError, match=f"^worker actor-0 ran out of memory in '{method}': .*{says}") as raised:
            await host.call(method, takes)
    finally:
        await host.end()
    assert "lower actor.ppo_max_token_len_per_gpu" in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_an_engine_that_ended_over_its_memory_says_what_needs_less() -> None:
    def ended() -> None:
        raise WorkerDied(
            "the decoding thread of rollout engine rollout-0 ended: OutOfMemoryError: CUDA out of memory."
        ) from (torch.OutOfMemoryError("CUDA out of memory."))

    host = RoleHost(Hungry(), "rollout-0")
    try:
        with pytest.raises(WorkerDied, match=r"ended: OutOfMemoryError: CUDA out of memory\. "):
            await anext(host.each("generate", ended))
    finally:
        await host.end()


@pytest.mark.parametrize("error", [RuntimeError("boom"), OSError(errno.ENOSPC, "No space left"), ConfigError("no")])
async def test_what_else_a_role_raises_arrives_as_it_was_raised(error: Exception) -> None:
    def fail() -> None:
        raise error

    host = RoleHost(Hungry(), "actor-0")
    try:
        with pytest.raises(type(error)) as raised:
            await host.call("step", fail)
    finally:
        await host.end()
    assert raised.value is error
