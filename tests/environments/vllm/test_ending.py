"""When vLLM dies, or the engine is closed, whoever waits gets the reason. Over a vLLM that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from headway.data.interfaces.rollout import Completion, OnUpdate
from headway.engines.rollout.engine_activity import VllmActivity
from headway.engines.rollout.vllm.vllm_core import VllmCore
from headway.engines.weights.receiver_state import ReceiverState
from headway.errors import HeadwayError, NonFinite, RunError, WorkerDied
from tests.engines.contract.harness import VOCABULARY, make_calls, numbers_of

Told = list[tuple[str, Sequence[Completion]] | HeadwayError]
"""Batches of clients, and the engine's end."""

SOON_S = 60.0
"""Nothing here takes any time but the import of vLLM: what is not there by then never comes."""


class Scripted:
    """What `VllmCore` needs of an ``AsyncLLM``: it answers unless it is ``deaf``.

    It gives each request one token, as long as there are ``logprobs`` for them; others never finish.
    """

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
        self.output_handler: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deaf = False
        self.logprobs: list[float] = []

    def die(self) -> None:
        self.output_handler.set_result(None)

    @property
    def errored(self) -> bool:
        return self.output_handler.done()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def answer(*_: Any, **__: Any) -> Any:
            if self.deaf:
                await asyncio.get_running_loop().create_future()
            return [[0.0]]

        return answer

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        if self.logprobs:
            yield _one_token(self.logprobs.pop(0))
            return
        await asyncio.shield(self.output_handler)
        raise RuntimeError("EngineCore died")


def _one_token(logprob: float) -> Any:
    answer = SimpleNamespace(
        token_ids=[3],
        logprobs=SimpleNamespace(logprobs=[logprob]),
        weight_versions=[SimpleNamespace(start=0, end=1, version="0")],
        finish_reason="length",
    )
    return SimpleNamespace(outputs=[answer], num_cached_tokens=0)


@asynccontextmanager
async def core_over(llm: Scripted, told: Told) -> AsyncIterator[VllmCore]:
    clock = asyncio.get_running_loop().time
    core = VllmCore(
        llm,
        lambda client, batch: told.append((client, batch)),
        told.append,
        name="replica",
        seed=0,
        slots=2,
        max_context=32,
        activity=VllmActivity(clock),
        temperature=1.0,
        can_sleep=True,
        weights=ReceiverState("rollout engine replica"),
    )
    await core.state.begin()
    yield core
    await core.close(RunError("closed"))


async def blocked(call: Awaitable[object]) -> asyncio.Task[object]:
    """``call``, once it waits for something that will not come by itself."""
    task = asyncio.ensure_future(call)
    await ticks()
    assert not task.done()
    return task  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["closed", "ended"])
async def test_a_drain_that_is_waited_for_ends_with_the_engine(how: str) -> None:
    llm = Scripted()
    told: Told = []
    async with core_over(llm, told) as core, asyncio.timeout(SOON_S):
        await core.submit("me", make_calls(1, n=2))
        draining = await blocked(core.pause(OnUpdate.DRAIN))
        if how == "closed":
            await core.close(RunError("closed"))
        else:
            llm.die()
        with pytest.raises(RunError if how == "closed" else WorkerDied, match=how):
            await draining
        assert [type(what) for what in told] == [RunError if how == "closed" else WorkerDied]


ORDERS: dict[str, Callable[[VllmCore], Awaitable[object]]] = {
    "keep": lambda core: core.pause(OnUpdate.KEEP),
    "interrupt": lambda core: core.pause(OnUpdate.INTERRUPT),
    "drain": lambda core: core.pause(OnUpdate.DRAIN),  # of nothing
    "probe": lambda core: core.probe(),
    "activate": lambda core: core.activate(1, lambda into_workers: into_workers(SimpleNamespace(path="buffer"))),
}


@pytest.mark.parametrize("how", ["closed", "ended"])
@pytest.mark.parametrize("order", ORDERS)
async def test_an_order_that_vllm_never_answers_ends_with_the_engine(order: str, how: str) -> None:
    """A dead vLLM leaves the calls unanswered that were under way."""
    llm = Scripted()
    async with core_over(llm, []) as core, asyncio.timeout(SOON_S):
        llm.deaf = True
        first = await blocked(ORDERS[order](core))
        behind = await blocked(core.resume())  # has to wait for the other
        if how == "closed":
            await core.close(RunError("closed"))
        else:
            llm.die()
        for call in (first, behind):
            with pytest.raises(RunError if how == "closed" else WorkerDied, match=how):
                await call


async def test_a_death_that_nobody_asks_about_reaches_those_who_wait_for_answers() -> None:
    """Paused, with a request that vLLM has not been told of: none of its own calls would fail."""
    llm = Scripted()
    told: Told = []
    async with core_over(llm, told) as core:
        await core.pause(OnUpdate.INTERRUPT)
        await core.submit("me", make_calls(1, n=2))
        llm.die()
        await ticks()
        assert [type(what) for what in told] == [WorkerDied]
        with pytest.raises(WorkerDied):
            await core.stats()


async def test_what_still_finishes_behind_a_failure_is_nobodys() -> None:
    llm = Scripted()
    told: Told = []
    async with core_over(llm, told) as core:
        llm.logprobs = [float("nan"), -0.5]
        await core.submit("me", make_calls(1, n=2))
        tasks = list(core._following.values())
        await asyncio.wait(tasks)
        assert [task.exception() for task in tasks] == [None, None]
        assert [type(what) for what in told] == [NonFinite]
        with pytest.raises(NonFinite):
            await core.stats()


async def test_what_vllm_tells_at_once_comes_in_one_batch_for_each_client() -> None:
    llm = Scripted()
    told: Told = []
    async with core_over(llm, told) as core:
        llm.logprobs = [-0.5, -0.25]
        await core.submit("me", make_calls(1, n=1))
        await core.submit("another", make_calls(1, n=1))
        await ticks()
        llm.logprobs = [-0.5, -0.25]
        await core.submit("me", make_calls(2, n=2))
        await ticks()
        batches = [(what[0], numbers_of(what[1])) for what in told if isinstance(what, tuple)]
        first, second, *_ = numbers_of(make_calls(2))
        assert batches == [("me", [10_000]), ("another", [10_000]), ("me", [first, second])]


async def test_of_a_client_that_left_and_came_back_only_the_new_calls_count() -> None:
    llm = Scripted()
    told: Told = []
    async with core_over(llm, told) as core:
        await core.pause(OnUpdate.INTERRUPT)
        await core.submit("me", make_calls(1, n=2))
        await core.forget("me")
        llm.logprobs = [-0.5]
        await core.submit("me", make_calls(1, n=1))
        await core.resume()
        await ticks()
        assert [numbers_of(what[1]) for what in told if isinstance(what, tuple)] == [[10_000]]


async def ticks() -> None:
    """Turns of the loop in which all that comes by itself comes."""
    for _ in range(20):
        await asyncio.sleep(0)
