"""Weights on their way: every transport, both ways in, whole versions and deltas, from a device and onto a device.

    a model's weights ─▶ Stream or Staged ─▶ transport ─▶ BackBuffer or InPlace ─▶ another model's tensors
    (on the device)      (pinned, on a GPU)               (pinned, on a GPU)       (on the device)

Both ends are threads of one process here. The process group that ``broadcast`` is made of is looked at by itself, over
NCCL with one rank; between two GPUs it is `broadcast`'s check.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.gpu_checks.models import HALF_BILLION, LIKE_HALF_BILLION, manifest_of, on_device, peaked_model, windows
from benchmarks.gpu_checks.setting import Finding, Findings, Setting, Skipped, require
from benchmarks.runner import timed
from benchmarks.shapes import Shape
from headway.config.transport_facts import TRANSPORTS, WITHIN_PROCESS
from headway.data.interfaces.weights import ReceiveReport
from headway.devices import kind_of
from headway.engines.weights.incoming_version import BackBuffer, InPlace
from headway.engines.weights.outgoing_version import Staged, Stream
from headway.engines.weights.protocols import (
    EndContext,
    IncomingWeights,
    Link,
    OutgoingWeights,
    StoredVersion,
    WeightReceiver,
    WeightSender,
    open_receiver,
    open_sender,
)
from headway.engines.weights.served_weights import ServedWeights
from headway.engines.weights.transports.broadcast import BroadcastReceiver, BroadcastSender
from headway.engines.weights.transports.process_group import StoreGroup, open_store
from headway.engines.weights.weight_layout import Manifest, buckets, build_manifest

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
TIMEOUT_S = 30.0
BUCKET = 65_536
"""Bytes; the models' weights are many of them."""
LARGE_BUCKET = 64 * 2**20
RECEIVER = "receiver"
PEER_LOADS_S = 60.0
SEVEN_BILLION = Shape("7b", 152_064, 3584, 28, heads=28, kv_heads=4, intermediate=18_944)
"""The shape of Qwen2.5-7B, its embeddings tied."""
VERSIONS = (1, 2, 3)
"""Versions of `broadcast`, of which the first opens the connections, and the quicker of the others counts."""
SLOWER = 5.0
"""Times as long as plain collectives of its bytes that a version may take: it has headers, notes and digests, too."""
UPDATES = 2
"""Of each kind, the last of which is measured; the first takes memory."""


@dataclass(slots=True)
class Ends:
    """Both ends of a transport, and threads for the receiver's."""

    sender: WeightSender
    receiver: WeightReceiver
    streamed: bool
    pool: ThreadPoolExecutor
    limit_s: float

    def carry(self, version: int, weights: OutgoingWeights, into: BackBuffer | InPlace) -> ReceiveReport:
        """Returns when ``into`` has ``version``, complete and checked."""

        def receive(stored: StoredVersion | None, incoming: IncomingWeights) -> None:
            (sink,) = incoming.expect([incoming.manifest])
            self.receiver.receive(version, sink, stored)

        if self.streamed:
            filling = self.pool.submit(into.fill, version, partial(receive, None))
            self.sender.send(version, weights)
            return filling.result(self.limit_s)
        return into.fill(version, partial(receive, self.sender.send(version, weights)))


def transports(setting: Setting) -> Findings:
    """Each transport in each way that it can be used, onto the device that serves."""
    folders = [peaked_model(setting, seed=seed) for seed in range(3)]
    sources = [on_device(folder, setting, torch.bfloat16) for folder in folders]
    served = on_device(folders[0], setting, torch.bfloat16)
    manifest = manifest_of(served)
    for name, facts in TRANSPORTS.items():
        with meeting(name, setting, manifest) as ends:
            carried = carry_all(setting, ends, sources, served, manifest, delta=facts.carries_delta, name=name)
            yield Finding("transports", f"{name}: {carried} versions, bit by bit")
    group_of_one(setting)
    backend = "NCCL" if setting.on_gpu else "Gloo"
    yield Finding("process group", f"of its own over {backend}, one rank: formed, used, left")


def carry_all(
    setting: Setting,
    ends: Ends,
    sources: Sequence[PreTrainedModel],
    served: PreTrainedModel,
    manifest: Manifest,
    *,
    delta: bool,
    name: str,
) -> int:
    """Version after version, streamed and from a copy, into a back buffer and in place. Returns how many."""
    target = ServedWeights.of(served, "check").target(manifest)
    pinned, here, pin = setting.on_gpu, torch.device(setting.device), kind_of(setting.device).pin
    back, beside = BackBuffer(manifest, pin=pin), BackBuffer(manifest, pin=pin, device=here)
    copy = Staged(manifest, BUCKET, with_delta=delta, pinned=pinned)
    if pinned and not copy._copy.is_pinned():
        log.warning("the copy for sending from a GPU is not page-locked: the system refused")

    def through_back_buffer(version: int, weights: OutgoingWeights) -> None:
        ends.carry(version, weights, back)
        for offset, data in back.windows(BUCKET):
            if pinned and not data.is_pinned():
                log.warning("the back buffer for a GPU is not page-locked: the system refused")
            target.write(offset, data)
        back.loaded()

    def onto_device(version: int, weights: OutgoingWeights) -> None:
        ends.carry(version, weights, beside)  # in host memory where buckets come through it
        for offset, data in beside.windows(BUCKET):
            target.write(offset, data)
        beside.loaded()

    def in_place(version: int, weights: OutgoingWeights) -> None:
        ends.carry(version, weights, InPlace(manifest, target, window=BUCKET, pinned=pinned, device=here))

    def streamed(model: PreTrainedModel, version: int) -> OutgoingWeights:
        return Stream(manifest, windows(dict(model.named_parameters()), manifest, BUCKET))

    def copied(model: PreTrainedModel, version: int) -> OutgoingWeights:
        copy.gather(version, windows(dict(model.named_parameters()), manifest, BUCKET))
        return copy.outgoing(version, to=version - 1 if delta else None)

    ways = [(streamed, through_back_buffer), (streamed, onto_device), (streamed, in_place)]
    ways += [(copied, through_back_buffer)]
    ways += [(copied, through_back_buffer)] if delta else []  # the second copy is a delta to the first
    for version, (out, into) in enumerate(ways, 1):
        source = sources[version % len(sources)]
        into(version, out(source, version))
        setting.wait()
        wrong = different(source, served)
        require(not wrong, f"{name}: version {version} ({out.__name__}, {into.__name__}) came with other bits: {wrong}")
    return len(ways)


def different(source: PreTrainedModel, served: PreTrainedModel) -> str:
    """Names of the tensors that are not the same, bit by bit; "" for none."""
    theirs = dict(source.named_parameters())
    names = [name for name, p in served.named_parameters() if not torch.equal(p.cpu(), theirs[name].cpu())]
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names)


def group_of_one(setting: Setting) -> None:
    """A group made from a store, of one rank: what NCCL asks for where there is one GPU only."""
    store, port = open_store(HOST, TIMEOUT_S)
    alone = Link("broadcast", _flat_manifest(0), (), TIMEOUT_S, address=(HOST, port), device=setting.device)
    group = StoreGroup(alone, 0, HOST)
    sent = torch.arange(1024, device=setting.device)
    group.broadcast(sent)
    group.meet()
    setting.wait()
    group.close()
    require(torch.equal(sent.cpu(), torch.arange(1024)), "a broadcast in a group of one rank changed what was sent")
    del store


@contextmanager
def meeting(name: str, setting: Setting, manifest: Manifest, limit_s: float = TIMEOUT_S) -> Iterator[Ends]:
    directory = setting.scratch / f"transport-{name}"
    directory.mkdir(exist_ok=True)
    store, port = open_store(HOST, limit_s)
    objects: dict[int, Any] = {}

    def put(value: Any) -> int:
        objects[len(objects)] = value
        return len(objects) - 1

    here = EndContext(HOST, put, lambda handles: [objects[handle] for handle in handles])
    link = Link(name, manifest, (RECEIVER,), limit_s, address=(HOST, port), directory=directory)
    with ThreadPoolExecutor(2) as pool:
        opening = pool.submit(open_receiver, link, RECEIVER, here)
        sender = open_sender(link, here)
        ends = Ends(sender, opening.result(limit_s), TRANSPORTS[name].streamed, pool, limit_s)
        try:
            yield ends
        finally:
            sender.close()
            ends.receiver.close()
    del store


# ---------------------------------------------------------------------------------------- between two devices


def broadcast(setting: Setting) -> Findings:
    """``broadcast`` between two processes: over NCCL from one GPU to another; on a CPU over Gloo."""
    if setting.on_gpu and (count := setting.kind.count()) < 2:
        raise Skipped(f"NCCL has a GPU for each process, and there is {count} here; two are needed")
    nbytes = 2**26 if setting.small else 2**30
    store, port = open_store(HOST, PEER_LOADS_S)
    address = (HOST, port)
    link = Link("broadcast", _flat_manifest(nbytes), ("peer",), PEER_LOADS_S, address=address, device=setting.device)
    with ProcessPoolExecutor(1, get_context("spawn")) as peers:
        receiving = peers.submit(_peer, link, nbytes)
        sender = BroadcastSender(link, EndContext(HOST))
        sent = min([_send(sender, version, nbytes, setting) for version in VERSIONS][1:])
        plain = min([timed(partial(_collectives, sender, nbytes, setting.device)) for _ in VERSIONS][1:])
        received = receiving.result(PEER_LOADS_S)
        sender.close()
    del store
    require(received == "the same bits", f"the other process received {received}")
    rates = f"{nbytes / sent / 1e9:.2f} GB/s, plain collectives {nbytes / plain / 1e9:.2f}"
    require(sent < SLOWER * plain, f"versions were sent at {rates}, expected at least a {SLOWER:g}th of that")
    yield Finding("rate", f"2 processes, {nbytes / 2**20:.0f} MiB: {rates}")


def payload(version: int, nbytes: int, device: str) -> torch.Tensor:
    """The bytes of a version: the same at both ends."""
    return (torch.arange(nbytes // 8, device=device) * 2_654_435_761 * version).view(torch.uint8)


def _collectives(end: BroadcastSender | BroadcastReceiver, nbytes: int, device: str) -> None:
    """Broadcast so many bytes in buckets of a version's size, and nothing else."""
    bucket = torch.empty(_bucket(nbytes), dtype=torch.uint8, device=device)
    for _ in buckets(nbytes, len(bucket)):
        end._group.broadcast(bucket)
    end._group.meet()


def _bucket(nbytes: int) -> int:
    return min(LARGE_BUCKET, nbytes // 4)


def _send(sender: BroadcastSender, version: int, nbytes: int, setting: Setting) -> float:
    """Seconds, less what making digests took. The first version opens the connections."""
    data, size = payload(version, nbytes, setting.device), _bucket(nbytes)
    stream = Stream(_flat_manifest(nbytes), ((start, data[start:stop]) for start, stop in buckets(nbytes, size)))
    sender._group.meet()  # the other process has compared the bytes of the version before
    return timed(lambda: sender.send(version, stream)) - stream.gather_s


def _peer(link: Link, nbytes: int) -> str:
    """Receive in another process; returns what came."""
    kind = kind_of(link.device)
    kind.make_current(torch.device(link.device, 1))
    receiver = BroadcastReceiver(link, "peer", EndContext(HOST))
    buffer = BackBuffer(_flat_manifest(nbytes), pin=kind.pin, device=torch.device(link.device, 1))
    answer = "the same bits"

    def receive(version: int, incoming: IncomingWeights) -> None:
        (sink,) = incoming.expect([incoming.manifest])
        receiver.receive(version, sink)

    for version in VERSIONS:
        receiver._group.meet()
        buffer.fill(version, partial(receive, version))
        ((_, arrived),) = buffer.windows(nbytes)
        if not torch.equal(arrived.cpu(), payload(version, nbytes, "cpu")):
            answer = f"other bytes than were sent as version {version}"
        buffer.loaded()
    for _ in VERSIONS:
        _collectives(receiver, nbytes, link.device)
    receiver.close()
    return answer


def _flat_manifest(nbytes: int) -> Manifest:
    return build_manifest([("weights", (nbytes // 4,), torch.float32)])


# ---------------------------------------------------------------------------------------- seconds of an update


def updating_speed(setting: Setting) -> Findings:
    """Update 0.5 B and 7 B, beside decoding and over the weights, by the transport of one process."""
    small = {"0.5 B": LIKE_HALF_BILLION, "7 B": replace(LIKE_HALF_BILLION, layers=4)}
    for name, shape in (small if setting.small else {"0.5 B": HALF_BILLION, "7 B": SEVEN_BILLION}).items():
        yield from _updated(setting, name, shape)
        setting.give_back()


def _updated(setting: Setting, name: str, shape: Shape) -> Findings:
    with torch.device("meta"):
        model = shape.random("qwen2")
    served = model.to(torch.bfloat16).to_empty(device=setting.device)
    served.tie_weights()
    manifest = manifest_of(served)
    noise = torch.Generator(setting.device).manual_seed(0)
    trained = {slot.name: torch.randn(slot.shape, generator=noise, device=setting.device) for slot in manifest.slots}
    target = ServedWeights.of(served, "check").target(manifest)
    here, bucket = torch.device(setting.device), LARGE_BUCKET if setting.on_gpu else 65_536
    ways = {
        "beside decoding": BackBuffer(manifest, pin=kind_of(setting.device).pin, device=here),
        "over the weights": InPlace(manifest, target, window=bucket, pinned=setting.on_gpu, device=here),
    }
    with meeting(WITHIN_PROCESS, setting, manifest, 40.0) as ends:
        for version in range(1, 1 + UPDATES * len(ways)):
            way, into = list(ways.items())[(version - 1) // UPDATES]
            started = time.perf_counter()
            stream = Stream(manifest, windows(trained, manifest, bucket))
            ends.carry(version, stream, into)
            arrived = time.perf_counter()
            if isinstance(into, BackBuffer):
                for offset, data in into.windows(bucket):
                    target.write(offset, data)
                into.loaded()
            setting.wait()
            ended = time.perf_counter()
            if version % UPDATES:
                continue
            wrong = [n for n, p in served.named_parameters() if not torch.equal(p, trained[n].to(torch.bfloat16))]
            require(not wrong, f"{name}, {way}: {len(wrong)} tensors have other bits, among them {wrong[:1]}")
            text = f"{way} {ended - started:.2f} s (gather and digests {stream.gather_s:.2f}, loading "
            yield Finding(name, f"{text}{ended - arrived:.2f}), {manifest.nbytes / 1e9:.1f} GB")
