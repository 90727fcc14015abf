"""An engine behind its asyncio face, and an in-process source of weights for it."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from transformers import PreTrainedModel

from headway.agents.episodes.episode_worker import local_episode_worker
from headway.data.interfaces.episode_groups import Group
from headway.engines.rollout.native.engine import NativeEngine
from headway.engines.weights.buckets import pack, whole
from headway.engines.weights.outgoing_version import Stream
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.weight_layout import Manifest, buckets, build_manifest
from tests.engines.rollout.support import CONTEXT, decode, make_model, make_request, tensors_of_files

MODEL = make_model()
WAIT_S = 200.0
"""No wait of these tests comes near it."""
BUCKET = 4096
_WORKERS = count()


def manifest_of(model: PreTrainedModel) -> Manifest:
    return build_manifest((name, tuple(of.shape), of.dtype) for name, of in tensors_of_files(model).items())


def outgoing(model: PreTrainedModel, manifest: Manifest) -> Stream:
    return Stream(manifest, pack(manifest, whole(tensors_of_files(model)), buckets(manifest.nbytes, BUCKET)))


class Source:
    """A receiver's end that hands out one model's weights, and can be held back or broken half-way."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.manifest = manifest_of(model)
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.break_after: int | None = None

    def receive(self, version: int, incoming: IncomingWeights) -> None:
        (sink,) = incoming.expect([incoming.manifest])
        self.entered.set()
        assert self.go.wait(WAIT_S)
        weights = outgoing(self.model, self.manifest)
        for index, chunk in enumerate(weights):
            if index == self.break_after:
                raise ConnectionError("the sender is gone")
            sink.room(chunk.header).copy_(chunk.payload)
            sink.filled(chunk.header)
        sink.ended(weights.digests)


@asynccontextmanager
async def serving(
    source: Source | None = None, model: PreTrainedModel | None = None, **changes: Any
) -> AsyncIterator[NativeEngine]:
    """An engine over a copy of ``model``, by default `MODEL`."""
    settings: dict[str, Any] = {
        "name": "replica",
        "seed": 7,
        "slots": 8,
        "max_context": CONTEXT,
        "max_batched_tokens": 64,
        "decode": decode,
        "receive": source.receive if source else None,
        "manifest": source.manifest if source else None,
        "consume_bucket_bytes": 1024,
    }
    engine = NativeEngine(copy.deepcopy(model or MODEL), **{**settings, **changes})
    try:
        yield engine
    finally:
        await engine.close()


async def collect(engine: NativeEngine, requests: list[Group]) -> list[Group]:
    """The groups in the order in which they are done, by an episode worker of their own."""
    name = f"episode-worker-{next(_WORKERS)}"
    async with asyncio.timeout(WAIT_S), local_episode_worker(engine, decode=decode, name=name) as worker:
        return [group async for group in worker.generate(requests)]


async def until_asked(engine: NativeEngine, calls: int = 1) -> None:
    """Wait until the engine has so many calls."""
    async with asyncio.timeout(WAIT_S):
        while (stats := await engine.stats()).running + stats.waiting < calls:
            pass


def endless(number: int, **changes: Any) -> Group:
    """As long as the context allows."""
    return make_request(number, max_tokens=CONTEXT, stop_token_ids=(), **changes)
