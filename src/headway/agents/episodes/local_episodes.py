"""An episode worker over engines of this process, without a pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from headway.agents.episodes.episode_worker import EpisodeWorker
from headway.agents.episodes.program_episode import Hosting
from headway.agents.episodes.replica_clients import CallEngine


@asynccontextmanager
async def keeping(
    *engines: CallEngine,
    decode: Callable[[Sequence[int]], str] | None = None,
    hosting: Hosting | None = None,
    name: str = "keeper",
) -> AsyncIterator[EpisodeWorker]:
    """A keeper of ``engines``, all of which take calls. An engine that fails ends every `EpisodeWorker.generate`.

    async with keeping(engine, decode=tokenizer.decode) as keeper:
        async for group in keeper.generate(requests):
            ...
    """
    keeper = EpisodeWorker(name, decode, hosting)
    for engine in engines:
        await keeper.join(engine)
    await keeper.route([engine.name for engine in engines])

    async def watch() -> None:
        async for _, error in keeper.failures():
            keeper.end(error)

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        yield keeper
    finally:
        watching.cancel()
        await keeper.close()
