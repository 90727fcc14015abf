"""When vLLM dies, or the engine is closed, whoever waits gets the reason. Over a vLLM that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from headway.engines.rollout.vllm.activity import Activity
from headway.engines.rollout.vllm.core import VllmCore
from headway.errors import HeadwayError, NonFinite, RunError, WorkerDied
from headway.interfaces import FinishedGroup, OnUpdate
from tests.engines.rollout.support import VOCABULARY, make_request

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
    return SimpleNamespace(outputs=[answer])


@asynccontextmanager
async def core_over(llm: Scripted, delivered: list[FinishedGroup | HeadwayError]) -> AsyncIterator[VllmCore]:
    def deliver(owner: Hashable, what: FinishedGroup | HeadwayError) -> None:
        delivered.append(what)

    clock = asyncio.get_running_loop().time
    core = VllmCore(
        llm,
        deliver,
        name="replica",
        seed=0,
        slots=2,
        max_context=32,
        decode=str,
        clock=clock,
        activity=Activity(clock),
        temperature=1.0,
        can_sleep=True,
    )
    await core.begin()
    yield core
    await core.close(RunError("closed"))


async def blocked(call: Awaitable[object]) -> asyncio.Task[object]:
    """``call``, once it waits for something that will not come by itself."""
    task = asyncio.ensure_future(call)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    return task  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["closed", "ended"])
async def test_a_drain_that_is_waited_for_ends_with_the_engine(how: str) -> None:
    llm = Scripted()
    delivered: list[FinishedGroup | HeadwayError] = []
    async with core_over(llm, delivered) as core, asyncio.timeout(SOON_S):
        await core.submit([make_request(1, n=2)], "owner")
        draining = await blocked(core.pause(OnUpdate.DRAIN))
        if how == "closed":
            await core.close(RunError("closed"))
        else:
            llm.die()
        with pytest.raises(RunError if how == "closed" else WorkerDied, match=how):
            await draining
        assert [type(what) for what in delivered] == [RunError if how == "closed" else WorkerDied]


ORDERS: dict[str, Callable[[VllmCore], Awaitable[object]]] = {
    "keep": lambda core: core.pause(OnUpdate.KEEP),
    "interrupt": lambda core: core.pause(OnUpdate.INTERRUPT),
    "drain": lambda core: core.pause(OnUpdate.DRAIN),  # of nothing
    "probe": lambda core: core.probe(),
    "activate": lambda core: core.activate(1, lambda into_workers: into_workers()),
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
    delivered: list[FinishedGroup | HeadwayError] = []
    async with core_over(llm, delivered) as core:
        await core.pause(OnUpdate.INTERRUPT)
        await core.submit([make_request(1, n=2)], "owner")
        llm.die()
        for _ in range(20):
            await asyncio.sleep(0)
        assert [type(what) for what in delivered] == [WorkerDied]
        with pytest.raises(WorkerDied):
            await core.in_flight()


async def test_what_still_finishes_behind_a_failure_is_nobodys() -> None:
    llm = Scripted()
    delivered: list[FinishedGroup | HeadwayError] = []
    async with core_over(llm, delivered) as core:
        llm.logprobs = [float("nan"), -0.5]
        await core.submit([make_request(1, n=1), make_request(2, n=1)], "owner")
        tasks = list(core._following.values())
        await asyncio.wait(tasks)
        assert [task.exception() for task in tasks] == [None, None]
        assert [type(what) for what in delivered] == [NonFinite]
        with pytest.raises(NonFinite):
            await core.stats()
