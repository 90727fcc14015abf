"""What of vLLM's memory is told to wake, and what a hung one says of itself. Over stand-ins: vLLM need not be there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.data.interfaces.rollout import OnUpdate
from headway.engines.rollout.engine_activity import VllmActivity
from headway.engines.rollout.vllm.vllm_core import VllmCore
from headway.engines.weights.receiver_state import ReceiverState
from headway.errors import RunError
from tests.engines.rollout.support import make_call, make_request


class Noting:
    """What `VllmCore` needs of an ``AsyncLLM``."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 40)
        self.errored = False
        self.woken: list[list[str]] = []

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.woken.append(["everything"] if tags is None else list(tags))

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name == "output_handler":
            raise AttributeError(name)

        async def answer(*_: Any, **__: Any) -> Any:
            return [[0.0]]

        return answer


def core_over(llm: Noting) -> VllmCore:
    clock = asyncio.get_running_loop().time
    return VllmCore(
        llm,
        lambda client, batch: None,
        lambda error: None,
        name="replica",
        seed=0,
        slots=2,
        max_context=32,
        activity=VllmActivity(clock),
        temperature=1.0,
        can_sleep=True,
        weights=ReceiverState("rollout engine replica"),
    )


def load_buffer(core: VllmCore, into_workers: Callable[[Any], None]) -> None:
    into_workers(SimpleNamespace(path="buffer"))
    core.state.weights.loaded()


@pytest.mark.parametrize(
    ("keep", "loads", "expected"),
    [
        (True, False, [["weights", "kv_cache"]]),
        (False, True, [["weights"], ["kv_cache"]]),
        (True, True, [["weights"], ["kv_cache"]]),
    ],
)
async def test_only_what_sleeps_is_woken(
    keep: bool, loads: bool, expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ModuleType("vllm.distributed.weight_transfer.base")
    base.WeightTransferUpdateRequest = lambda values: values  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    llm = Noting()
    core = core_over(llm)
    await core.state.begin()
    await core.pause(OnUpdate.INTERRUPT)
    await core.sleep(keep_weights=keep)
    if loads:
        for version in (1, 2):
            await core.activate(version, partial(load_buffer, core))
    await core.wake()
    await core.resume()
    assert llm.woken == expected


class Hanging(Noting):
    """A front end that takes requests; its core computes nothing of them."""

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None


async def test_a_vllm_whose_core_hangs_answers_that_calls_are_open_and_that_it_computed_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This is what it is fenced off by: its answer comes from another process than its tokens."""
    monkeypatch.setattr("headway.engines.rollout.vllm.vllm_core.prompt_of", lambda run, version: run)
    monkeypatch.setattr("headway.engines.rollout.vllm.vllm_core.sampling_of", lambda run: None)
    core = core_over(Hanging())
    await core.state.begin()
    await core.submit("episode-worker", [make_call(make_request(0), number=number) for number in range(3)])
    for _ in range(5):
        await asyncio.sleep(0)
    stats = await core.stats()
    assert (stats.running, stats.waiting) == (2, 1)
    assert (stats.generated_tokens, stats.prefilled_tokens) == (0, 0)
    await core.close(RunError("over"))
