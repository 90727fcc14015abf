from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Barrier, Event
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headway.data.interfaces.weights import ReceiveReport
from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.protocols import (
    Chunk,
    EndContext,
    Link,
    OutgoingWeights,
    WeightSink,
    open_receiver,
    open_sender,
)
from headway.engines.weights.transports import broadcast, process_group
from headway.engines.weights.transports.process_group import StoreGroup, open_store
from headway.engines.weights.weight_layout import build_manifest, combined
from headway.errors import UpdateFailed
from tests.engines.weights.ends import HOST, PROCESSES, Site, arrival
from tests.engines.weights.versions import MANIFEST, GivesUp, Wrapped, assert_same, contents, stream, weights
from tests.tiers import mostly_slow

HERE = EndContext(HOST)


def process(target: Callable[..., None], *args: Any) -> BaseProcess:
    started = PROCESSES.Process(target=target, args=args, daemon=True)
    started.start()
    return started


def fill(link: Link, name: str, version: int, back: BackBuffer) -> ReceiveReport:
    receiver = open_receiver(link, name, HERE)
    try:
        return back.fill(version, arrival(receiver, version, None))
    finally:
        receiver.close()


@dataclass(frozen=True)
class DoneBefore:
    """An `OutgoingWeights` that calls ``action`` before its second chunk."""

    inner: OutgoingWeights
    action: Callable[[], object]

    def __iter__(self) -> Iterator[Chunk]:
        for index, chunk in enumerate(self.inner):
            if index == 1:
                self.action()
            yield chunk

    @property
    def digests(self) -> tuple[int, ...]:
        return self.inner.digests


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def receive_versions(link: Link, name: str, versions: list[int], results: Connection) -> None:
    receiver = open_receiver(link, name, HERE)
    back = BackBuffer(MANIFEST)
    for version in versions:
        report = back.fill(version, arrival(receiver, version, None))
        assert_same(contents(back), weights(version))
        results.send((version, report.checksum))
    results.send(dist.is_initialized())
    receiver.close()


def receive_and_die(link: Link, name: str) -> None:
    class Deadly(BackBuffer):
        def fill(self, version: int, receive: Callable[[WeightSink], None]) -> ReceiveReport:
            return super().fill(version, lambda incoming: receive(Wrapped(incoming, _DiesAtTheSecond)))

    fill(link, name, 1, Deadly(MANIFEST))


@dataclass
class _DiesAtTheSecond:
    sink: WeightSink

    def room(self, header: Any, device: Any = "cpu") -> torch.Tensor:
        if header.index == 1:
            die()
        return self.sink.room(header)

    def filled(self, header: Any) -> None:
        self.sink.filled(header)

    def ended(self, digests: Any) -> None:
        self.sink.ended(digests)


def host_send_and_die(told: Connection) -> None:
    """The trainer's process: it hosts the store, and is killed in the middle of a version."""
    _store, port = open_store(HOST, 20.0)
    link = Link("broadcast", MANIFEST, ("a", "b"), 20.0, address=(HOST, port))
    told.send(link)
    open_sender(link, HERE).send(1, DoneBefore(stream(1), die))


def test_two_processes_receive_the_same_bytes_and_the_default_group_is_untouched(site: Site) -> None:
    """Starts two processes that import torch."""
    link = site.link("broadcast", "a", "b", timeout_s=60)
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(2)]
    processes = [
        process(receive_versions, link, name, [1, 2], told) for name, (_, told) in zip("ab", pipes, strict=True)
    ]
    sender = open_sender(link, HERE)
    for version in (1, 2):
        outgoing = stream(version)
        sender.send(version, outgoing)
        for results, _ in pipes:
            assert results.poll(60)
            assert results.recv() == (version, combined(outgoing.digests))
    for (results, _), ended in zip(pipes, processes, strict=True):
        assert results.poll(60)
        assert results.recv() is False
        ended.join(60)
        assert ended.exitcode == 0
    assert not dist.is_initialized()
    sender.close()


def test_a_receiver_killed_in_recv_is_named_in_bounded_time_and_the_rest_go_on_in_a_new_generation(site: Site) -> None:
    link = site.link("broadcast", "a", "b", timeout_s=30)
    dying = process(receive_and_die, link, "b")
    survivor = BackBuffer(MANIFEST)
    cut_short = site.pool.submit(fill, link, "a", 1, survivor)
    sender = open_sender(link, HERE)
    started = time.monotonic()
    with pytest.raises(UpdateFailed, match=r"version 1: .*b did not answer"):
        sender.send(1, stream(1))
    with pytest.raises(UpdateFailed, match=r"version 1: a waited for bucket \d+ from trainer"):
        cut_short.result(60)
    assert time.monotonic() - started < 35
    assert survivor.version is None
    dying.join(60)
    with pytest.raises(UpdateFailed, match="connect a new generation"):
        sender.send(2, stream(2))

    fewer = site.meet("broadcast", "a")
    outcome = fewer.update(2, stream(2), {"a": survivor})
    assert outcome.sent is None and not outcome.errors
    assert_same(contents(survivor), weights(2))


def test_a_sender_killed_in_send_is_named_by_every_receiver_in_bounded_time_and_the_next_one_works(site: Site) -> None:
    """Starts a process that imports torch, and waits for what it will not send."""
    hears, told = PROCESSES.Pipe(duplex=False)
    dying = process(host_send_and_die, told)
    assert hears.poll(60)
    link = hears.recv()
    targets = {"a": BackBuffer(MANIFEST), "b": BackBuffer(MANIFEST)}
    started = time.monotonic()
    fills = [site.pool.submit(fill, link, name, 1, back) for name, back in targets.items()]
    for name, cut_short in zip(targets, fills, strict=True):
        with pytest.raises(UpdateFailed, match=rf"version 1: {name} waited for bucket [01] from trainer"):
            cut_short.result(60)
        assert targets[name].version is None
    assert time.monotonic() - started < 30
    dying.join(60)

    outcome = site.meet("broadcast", "a", "b").update(2, stream(2), targets)
    assert outcome.sent is None and not outcome.errors


def test_a_receiver_that_never_joins_is_named(site: Site) -> None:
    link = site.link("broadcast", "a", timeout_s=1.0)
    with pytest.raises(UpdateFailed, match=r"trainer waited 1 s for a to join"):
        open_sender(link, HERE)


@mostly_slow("phase", ["the first bucket", "a later bucket", "the end"], quick=["a later bucket"])
def test_a_receiver_that_falls_silent_is_given_up_and_the_others_fail_at_once(site: Site, phase: str) -> None:
    """It stops before it takes part in the phase's collective, as a process that was stopped does."""
    ends = site.meet_within(1.0, "broadcast", "well", "silent")
    woken = Event()

    @dataclass
    class FallsSilent:
        sink: WeightSink

        def room(self, header: Any, device: Any = "cpu") -> torch.Tensor:
            if header.index == {"the first bucket": 0, "a later bucket": 1}.get(phase):
                woken.wait(60)
            return self.sink.room(header)

        def filled(self, header: Any) -> None:
            self.sink.filled(header)
            if phase == "the end" and header.index == len(list(stream(1))) - 1:
                woken.wait(60)

        def ended(self, digests: Any) -> None:
            self.sink.ended(digests)

    class Silent(BackBuffer):
        def fill(self, version: int, receive: Callable[[WeightSink], None]) -> ReceiveReport:
            return super().fill(version, lambda incoming: receive(Wrapped(incoming, FallsSilent)))

    survivor = BackBuffer(MANIFEST)
    well = ends.fill("well", 1, survivor, None)
    silent = ends.fill("silent", 1, Silent(MANIFEST), None)
    try:
        with pytest.raises(UpdateFailed, match=r"version 1: .*silent did not answer"):
            ends.sender.send(1, stream(1))
        with pytest.raises(UpdateFailed, match="version 1: well waited"):
            well.result(20)  # long before the silent one wakes
        assert survivor.version is None
    finally:
        woken.set()
    with pytest.raises(UpdateFailed):
        silent.result(60)


def test_a_sender_leaves_the_group_before_it_asks_who_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Recorded:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def broadcast(self, tensor: torch.Tensor) -> None:
            raise RuntimeError("connection reset by peer")

        def close(self) -> None:
            calls.append("left")

        def behind(self, progress: str) -> list[str]:
            calls.append(f"who is behind {progress}")
            return ["b"]

    monkeypatch.setattr(broadcast, "StoreGroup", Recorded)
    sender = broadcast.BroadcastSender(Link("broadcast", MANIFEST, ("a", "b"), 1.0, address=(HOST, 1)), HERE)
    with pytest.raises(UpdateFailed, match="b did not answer"):
        sender.send(1, stream(1))
    assert calls == ["left", "who is behind 1:0"]


def test_a_group_that_connects_at_its_first_collective_is_joined_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As NCCL's, whose connecting call waits without a limit for a member that died after it had joined."""
    left = Event()

    class Connecting:
        def allreduce(self, tensors: list[torch.Tensor]) -> Any:
            left.wait(60)
            raise RuntimeError("aborted")

        def abort(self) -> None:
            left.set()

    @dataclass
    class Kind:
        collectives: str = "nccl"

        def own_group(self, *_: Any) -> Connecting:
            return Connecting()

    monkeypatch.setattr(process_group, "kind_of", lambda device: Kind())
    store, port = open_store(HOST, 20.0)
    with pytest.raises(UpdateFailed, match=r"waited 0\.3 s .*join.*: one of them joined"):
        StoreGroup(Link("broadcast", MANIFEST, (), 0.3, address=(HOST, port)), 0)
    assert left.is_set()
    del store


def test_a_store_that_does_not_answer_is_named() -> None:
    link = Link("broadcast", MANIFEST, ("a",), 1.0, address=(HOST, 1))
    with pytest.raises(UpdateFailed, match=r"\ba .*store at 127\.0\.0\.1:1\b"):
        open_receiver(link, "a", HERE)


def test_who_was_fenced_off_cannot_join_the_new_generation(site: Site) -> None:
    with pytest.raises(UpdateFailed, match=r"\bb .*link reaches: a\b"):
        open_receiver(site.link("broadcast", "a"), "b", HERE)


def test_when_the_sender_gives_up_the_group_stays_good(site: Site) -> None:
    ends = site.meet("broadcast", "a", timeout_s=60)
    back = BackBuffer(MANIFEST)
    outcome = ends.update(1, GivesUp(stream(1), ValueError("no memory")), {"a": back})
    assert isinstance(outcome.sent, ValueError)
    with pytest.raises(UpdateFailed, match="trainer gave up at bucket 1"):
        raise outcome.errors["a"]
    assert not ends.update(2, stream(2), {"a": back}).errors
    assert back.version == 2


def test_after_a_receiver_gave_up_a_new_generation_works(site: Site) -> None:
    ends = site.meet("broadcast", "a", timeout_s=60)
    wrong = BackBuffer(build_manifest([("other", (1,), torch.float32)]))
    started = time.monotonic()
    outcome = ends.update(1, stream(1), {"a": wrong})
    with pytest.raises(UpdateFailed, match="version 1"):
        raise outcome.sent or AssertionError
    assert "bucket 0 has 512 bytes" in str(outcome.errors["a"])
    assert time.monotonic() - started < 30
    with pytest.raises(UpdateFailed, match="connect a new generation"):
        ends.fill("a", 2, BackBuffer(MANIFEST), None).result(60)
    back = BackBuffer(MANIFEST)
    assert not site.meet("broadcast", "a").update(2, stream(2), {"a": back}).errors
    assert back.version == 2


def test_groups_of_one_receiver_each_carry_different_versions_at_the_same_time(site: Site) -> None:
    """Each sender waits, in the middle of its version, until the other is there, too."""
    both = Barrier(2)
    links = {name: site.link("broadcast", name, same=True) for name in ("a", "b")}
    versions = {"a": 1, "b": 2}
    targets = {name: BackBuffer(MANIFEST) for name in links}

    def send(name: str) -> None:
        sender = open_sender(links[name], HERE)
        sender.send(versions[name], DoneBefore(stream(versions[name]), lambda: both.wait(60)))
        sender.close()

    with ThreadPoolExecutor(2) as senders:
        fills = [site.pool.submit(fill, links[name], name, versions[name], targets[name]) for name in links]
        for sent in [senders.submit(send, name) for name in links]:
            sent.result(60)
        for filled in fills:
            filled.result(60)
    for name, back in targets.items():
        assert_same(contents(back), weights(versions[name]))


def test_every_meeting_of_a_run_has_keys_of_its_own() -> None:
    def prefix(*receivers: str, generation: int = 0) -> str:
        return process_group.prefix_of(Link("broadcast", MANIFEST, receivers, 1.0, generation=generation))

    meetings = [prefix("a", "b"), prefix("a"), prefix("b"), prefix("a", "b", generation=1), prefix("a", generation=1)]
    assert len(set(meetings)) == len(meetings)


def test_leaving_ends_a_collective_that_waits_for_one_who_is_silent() -> None:
    """As after a machine lost its power: no connection breaks, and Gloo by itself waits until its time is up."""
    store, port = open_store(HOST, 30.0)
    members = Link("broadcast", MANIFEST, ("rollout-0", "rollout-1"), 30.0, address=(HOST, port))

    def join(rank: int) -> StoreGroup:
        return StoreGroup(members, rank, HOST)

    with ThreadPoolExecutor(5) as pool:
        groups = list(pool.map(join, range(3)))
        waiting = [pool.submit(group.meet) for group in groups[:2]]  # the third one does not come
        time.sleep(0.2)
        began = time.monotonic()
        for group in groups[:2]:
            group.close()
        for meeting in waiting:
            with pytest.raises(RuntimeError):
                meeting.result(20.0)
        assert time.monotonic() - began < 20.0
        groups[2].close()
    del store
