"""No output mixes two versions, whichever way they come: 200 updates by each transport, schedule and encoding.

The trainer's outbox, the transport's two ends and the engine are the real ones; they share this process. For the model,
whose every weight is a function of the version, see `tests.engines.rollout.test_tearing`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from headway.cluster.roles.weight_roles import Send, Sent, WeightSendRole
from headway.config.schema import Config
from headway.config.transport_facts import TRANSPORTS
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import OnUpdate
from headway.engines.weights.buckets import pack, whole
from headway.engines.weights.outgoing_version import Window
from headway.engines.weights.protocols import (
    EndContext,
    IncomingWeights,
    Link,
    WeightReceiver,
    open_receiver,
)
from headway.engines.weights.transports.process_group import open_store
from headway.engines.weights.weight_layout import Manifest, buckets
from tests.engines.rollout.serving import WAIT_S, Source, collect, serving
from tests.engines.rollout.support import make_request
from tests.engines.rollout.test_tearing import UPDATES, Watching, assert_from_the_table, model
from tests.tiers import mostly_slow

BUCKET_MB = 0.0005
"""Most tensors lie across several buckets, and most buckets hold parts of several tensors."""
WAYS = [
    (transport, schedule, encoding, UPDATES)
    for transport, facts in TRANSPORTS.items()
    for schedule in ("synchronous", "overlapped")
    for encoding in ("full", "delta")
    if encoding == "full" or facts.carries_delta
]

FEW_UPDATES = 12
QUICK = [
    ("broadcast", "overlapped", "delta", FEW_UPDATES),
    ("local", "synchronous", "full", FEW_UPDATES),
    ("object_store", "synchronous", "full", FEW_UPDATES),
    ("shared_memory", "synchronous", "delta", FEW_UPDATES),
    ("disk", "overlapped", "full", FEW_UPDATES),
]
"""Each transport, and each schedule with each encoding."""


class Trainer:
    """Gathers one model's weights after the other's and sends them, by the outbox of a training rank."""

    def __init__(self, transport: str, schedule: str, encoding: str, manifest: Manifest, directory: Path) -> None:
        self._overlapped = schedule == "overlapped"
        self._streamed = TRANSPORTS[transport].streamed
        self._base: int | None = None
        self._outbox = WeightSendRole(
            Config.model_validate(
                {
                    "param_update": {"schedule": schedule, "encoding": encoding},
                    "rollout": {"param_update_preduce_bucket_size_mb": BUCKET_MB},
                }
            ),
            0,
            EndContext("127.0.0.1", fetch=list),
        )
        self._outbox.open_route("float32", manifest, pinned=False)
        self._store, port = open_store("127.0.0.1", WAIT_S)
        address = ("127.0.0.1", port)
        link = Link(transport, manifest, ("replica",), WAIT_S, address=address, directory=directory)
        here = EndContext("127.0.0.1", fetch=list)
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(open_receiver, link, "replica", here)
            self._outbox.open_link("all", link)
            self._receiver: WeightReceiver = opening.result(WAIT_S)
        self._sent: asyncio.Future[Sent | None] | None = None
        self._loop = asyncio.get_running_loop()

    def receive(self, version: int, incoming: IncomingWeights) -> None:
        """The replica's end, on the engine's thread: a stored transport's waits for the stored version first."""
        stored = None
        if not self._streamed:
            sent = asyncio.run_coroutine_threadsafe(self._stored(), self._loop).result(WAIT_S)
            stored = sent.stored_versions[0] if sent else None
        (sink,) = incoming.expect([incoming.manifest])
        self._receiver.receive(version, sink, stored)

    async def send(self, version: int) -> Sent | None:
        self._sent = self._loop.create_future()
        send = Send("float32", "all", self._base)
        gather = partial(gathered, version)
        if self._overlapped:
            await asyncio.to_thread(self._outbox.gather, version, gather)
            sent: Sent | None = await self._outbox.send_gathered(version, send)
        else:
            sent = await asyncio.to_thread(self._outbox.send, version, send, gather)
        self._base = version
        self._sent.set_result(sent)
        return sent

    def close(self) -> None:
        self._receiver.close()
        self._outbox.close()

    async def _stored(self) -> Sent | None:
        assert self._sent is not None
        return await self._sent


def gathered(version: int, manifest: Manifest, bucket_bytes: int) -> Iterator[Window]:
    return pack(manifest, whole(dict(model(version).named_parameters())), buckets(manifest.nbytes, bucket_bytes))


@mostly_slow(("transport", "schedule", "encoding", "updates"), [*QUICK, *WAYS], quick=QUICK)
async def test_no_output_mixes_two_versions(
    transport: str, schedule: str, encoding: str, updates: int, tmp_path: Path
) -> None:
    """Up to two hundred updates of a model that decodes meanwhile, and a look at every pass."""
    manifest = Source(model(0)).manifest
    trainer = Trainer(transport, schedule, encoding, manifest, tmp_path)
    groups: list[Group] = []
    over = False
    settings: dict[str, Any] = {"receive": trainer.receive, "manifest": manifest, "slots": 6}

    async with serving(model=model(0), **settings) as engine:
        engine._core._runner._forward = watching = Watching(engine._core, engine._core._runner._forward)

        async def keep_it_busy() -> None:
            while not over:
                groups.extend(await collect(engine, [make_request(0, max_tokens=8, stop_token_ids=())]))

        async def update(version: int) -> None:
            sent, received = await asyncio.gather(trainer.send(version), engine.stage_weights(version))
            assert sent is not None
            assert sent.report.checksum == received.checksum
            policy = list(OnUpdate)[version % 3]
            await engine.pause(policy)
            await engine.activate(version)
            await engine.resume()

        async with asyncio.timeout(3 * WAIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(keep_it_busy())
            for version in range(1, updates + 1):
                while not (await engine.stats()).generated_tokens:
                    pass  # each version samples something
                await update(version)
            over = True

    trainer.close()
    assert watching.forwards > updates
    assert len(assert_from_the_table(groups)) > updates * 0.9
