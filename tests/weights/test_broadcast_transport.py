from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from headway.errors import ConfigError, UpdateFailed
from headway.weights.buckets import BackBuffer, build_manifest, pack
from headway.weights.transports.broadcast import BroadcastReceiver, BroadcastSender
from headway.weights.transports.links import BroadcastLink, make_link

MANIFEST = build_manifest([(f"w{i}", (1000,), torch.float32) for i in range(8)], bucket_bytes=8192)


def weights(version: int) -> Iterator[torch.Tensor]:
    return pack(MANIFEST, lambda name: torch.arange(1000) + float(version * 100 + int(name[1:])))


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def link_to(store: dist.TCPStore, *receivers: str, timeout_s: float = 20.0) -> BroadcastLink:
    return BroadcastLink(("127.0.0.1", store.port), "trainer", receivers, timeout_s)


def join(link: BroadcastLink, pool: ThreadPoolExecutor) -> tuple[BroadcastSender, list[BroadcastReceiver]]:
    receivers = [pool.submit(BroadcastReceiver, link, i, "127.0.0.1") for i in range(len(link.receivers))]
    return BroadcastSender(link, "127.0.0.1"), [receiver.result() for receiver in receivers]


def receive_versions(link: BroadcastLink, index: int, versions: list[int], results: Connection) -> None:
    receiver = BroadcastReceiver(link, index, "127.0.0.1")
    back = BackBuffer(MANIFEST)
    for version in versions:
        report = back.fill(version, receiver.receive(version))
        results.send((version, report.checksum, {name: float(t[7]) for name, t in back.items()}))
    results.send(dist.is_initialized())
    receiver.close()


def receive_and_die(link: BroadcastLink, index: int) -> None:
    next(BroadcastReceiver(link, index, "127.0.0.1").receive(1))
    os.kill(os.getpid(), signal.SIGKILL)


def test_two_processes_receive_the_same_bytes_and_the_default_group_is_untouched(store: dist.TCPStore) -> None:
    link = link_to(store, "rollout-0", "rollout-1")
    context = mp.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=receive_versions, args=(link, i, [1, 2], pipes[i][1]), daemon=True) for i in range(2)
    ]
    for process in processes:
        process.start()
    sender = BroadcastSender(link, "127.0.0.1")
    sent = BackBuffer(MANIFEST)
    for version in (1, 2):
        sender.send(version, weights(version))
        checksum = sent.fill(version, weights(version)).checksum
        for results, _ in pipes:
            expected = {f"w{i}": 7.0 + version * 100 + i for i in range(8)}
            assert results.poll(20)
            assert results.recv() == (version, checksum, expected)
    for (results, _), process in zip(pipes, processes, strict=True):
        assert results.poll(20)
        assert results.recv() is False
        process.join(20)
        assert process.exitcode == 0
    assert not dist.is_initialized()
    sender.close()


def test_a_receiver_killed_in_the_middle_of_an_update_is_named_in_bounded_time(store: dist.TCPStore) -> None:
    link = link_to(store, "rollout-0")
    process = mp.get_context("spawn").Process(target=receive_and_die, args=(link, 0), daemon=True)
    process.start()
    sender = BroadcastSender(link, "127.0.0.1")
    started = time.monotonic()
    with pytest.raises(UpdateFailed, match=r"version 1: .*rollout-0 did not answer"):
        sender.send(1, weights(1))
    assert time.monotonic() - started < 25
    process.join(20)
    with pytest.raises(UpdateFailed, match="connect a new generation"):
        sender.send(2, weights(2))


def test_a_receiver_that_never_joins_is_named(store: dist.TCPStore) -> None:
    with pytest.raises(UpdateFailed, match=r"trainer waited 1 s for rollout-0 to join"):
        BroadcastSender(link_to(store, "rollout-0", timeout_s=1.0), "127.0.0.1")


def test_a_store_that_does_not_answer_is_named() -> None:
    link = BroadcastLink(("127.0.0.1", 1), "trainer", ("rollout-0",), timeout_s=1.0)
    with pytest.raises(UpdateFailed, match=r"rollout-0 cannot reach the store at 127\.0\.0\.1:1"):
        BroadcastReceiver(link, 0, "127.0.0.1")


def test_when_the_sender_gives_up_receivers_fail_at_once_and_the_group_stays_good(store: dist.TCPStore) -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield next(weights(1))
        raise ValueError("no memory")

    with ThreadPoolExecutor(2) as pool:
        sender, (receiver,) = join(link_to(store, "rollout-0"), pool)
        back = BackBuffer(MANIFEST)
        filled = pool.submit(lambda: back.fill(1, receiver.receive(1)))
        with pytest.raises(ValueError, match="no memory"):
            sender.send(1, broken())
        with pytest.raises(UpdateFailed, match="trainer gave up at bucket 1"):
            filled.result()
        assert back.version is None
        filled = pool.submit(lambda: back.fill(2, receiver.receive(2)))
        sender.send(2, weights(2))
        filled.result()
        assert back.version == 2


def test_after_a_receiver_gave_up_a_new_generation_works(store: dist.TCPStore) -> None:
    wrong = BackBuffer(build_manifest([("other", (1,), torch.float32)], bucket_bytes=64))
    with ThreadPoolExecutor(2) as pool:
        sender, (receiver,) = join(link_to(store, "rollout-0"), pool)
        filled = pool.submit(lambda: wrong.fill(1, receiver.receive(1)))
        started = time.monotonic()
        with pytest.raises(UpdateFailed, match="version 1"):
            sender.send(1, weights(1))
        assert time.monotonic() - started < 10
        with pytest.raises(UpdateFailed, match="bucket 0 of version 1"):
            filled.result()

        again = pool.submit(receiver.reconnect, 1)
        sender.reconnect(1)
        again.result()
        back = BackBuffer(MANIFEST)
        refilled = pool.submit(lambda: back.fill(2, receiver.receive(2)))
        sender.send(2, weights(2))
        refilled.result()
        assert back.version == 2


def test_a_receiver_that_asks_for_another_version_ends_the_update_on_both_sides(store: dist.TCPStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        sender, (receiver,) = join(link_to(store, "rollout-0"), pool)
        taken = pool.submit(lambda: list(receiver.receive(9)))
        with pytest.raises(UpdateFailed, match="version 8"):
            sender.send(8, weights(8))
        with pytest.raises(UpdateFailed, match=r"asked for bucket 0 of version 9.*version 8"):
            taken.result()


def test_broadcast_needs_the_address_of_a_store() -> None:
    with pytest.raises(ConfigError, match="needs the address"):
        make_link("broadcast", receivers=("rollout-0",), timeout_s=1)
