from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headway.errors import ConfigError, UpdateFailed
from headway.weights.buckets import BackBuffer, build_manifest, pack
from headway.weights.transports.factory import make_receiver, make_sender
from headway.weights.transports.links import make_link
from headway.weights.transports.local import LocalExchange

MANIFEST = build_manifest([(f"w{i}", (32,), torch.float32) for i in range(5)], bucket_bytes=256)


def weights(version: int) -> Iterator[torch.Tensor]:
    return pack(MANIFEST, lambda name: torch.full((32,), float(version * 10 + int(name[1:]))))


def exchange(*receivers: str, timeout_s: float = 10.0) -> LocalExchange:
    link = make_link("local", receivers=receivers, timeout_s=timeout_s)
    assert isinstance(link, LocalExchange)
    return link


def test_every_receiver_gets_every_version_through_one_reused_buffer() -> None:
    link = exchange("a", "b")
    buffers = {name: BackBuffer(MANIFEST) for name in ("a", "b")}

    def receiver(name: str) -> list[int]:
        end = make_receiver(link, name)
        return [buffers[name].fill(version, end.receive(version)).checksum for version in (1, 2, 3)]

    with ThreadPoolExecutor(2) as pool:
        checksums = [pool.submit(receiver, name) for name in ("a", "b")]
        for version in (1, 2, 3):
            make_sender(link).send(version, weights(version))
        assert checksums[0].result() == checksums[1].result()
    for back in buffers.values():
        assert back.version == 3
        assert {name: float(t[0]) for name, t in back.items()} == {f"w{i}": 30.0 + i for i in range(5)}


def test_a_missing_receiver_is_named_when_the_time_is_over() -> None:
    link = exchange("a", "b", timeout_s=0.3)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lambda: list(make_receiver(link, "a").receive(1)))
        with pytest.raises(UpdateFailed, match=r"wait(s|ed) for b to take"):
            make_sender(link).send(1, weights(1))
        with pytest.raises(UpdateFailed):
            taken.result()


def test_a_missing_sender_is_named_when_the_time_is_over() -> None:
    with pytest.raises(UpdateFailed, match="receiver a waited for the sender to begin version 4"):
        list(make_receiver(exchange("a", timeout_s=0.05), "a").receive(4))


def test_when_the_sender_gives_up_the_receivers_fail_at_once_and_the_next_update_works() -> None:
    link = exchange("a", timeout_s=30)

    def broken() -> Iterator[torch.Tensor]:
        yield next(weights(1))
        raise ValueError("no memory")

    back = BackBuffer(MANIFEST)
    with ThreadPoolExecutor(1) as pool:
        filled = pool.submit(back.fill, 1, make_receiver(link, "a").receive(1))
        with pytest.raises(ValueError, match="no memory"):
            make_sender(link).send(1, broken())
        with pytest.raises(UpdateFailed, match="the sender gave up: ValueError: no memory"):
            filled.result()
        assert back.version is None
        filled = pool.submit(back.fill, 2, make_receiver(link, "a").receive(2))
        make_sender(link).send(2, weights(2))
        filled.result()
    assert back.version == 2


def test_when_a_receiver_gives_up_sender_and_other_receivers_fail_at_once() -> None:
    link = exchange("a", "b", timeout_s=30)
    wrong = BackBuffer(build_manifest([("other", (1,), torch.float32)], bucket_bytes=64))
    with ThreadPoolExecutor(2) as pool:
        filled = pool.submit(lambda: wrong.fill(1, make_receiver(link, "a").receive(1)))
        other = pool.submit(BackBuffer(MANIFEST).fill, 1, make_receiver(link, "b").receive(1))
        with pytest.raises(UpdateFailed, match="version 1 stopped at bucket 0: receiver a gave up"):
            make_sender(link).send(1, weights(1))
        with pytest.raises(UpdateFailed, match="bucket 0 of version 1"):
            filled.result()
        with pytest.raises(UpdateFailed, match="receiver a gave up"):
            other.result()


def test_a_receiver_that_asks_for_another_version_ends_the_update_on_both_sides() -> None:
    link = exchange("a", timeout_s=30)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lambda: list(make_receiver(link, "a").receive(5)))
        with pytest.raises(UpdateFailed, match="asked for version 5, the sender sends 4"):
            make_sender(link).send(4, weights(4))
        with pytest.raises(UpdateFailed, match="asked for version 5"):
            taken.result()


def test_a_receiver_that_comes_after_the_sender_gave_up_is_told_at_once_and_only_once() -> None:
    link = exchange("a", timeout_s=30)

    def broken() -> Iterator[torch.Tensor]:
        raise ValueError("no memory")
        yield

    with pytest.raises(ValueError, match="no memory"):
        make_sender(link).send(1, broken())
    with pytest.raises(UpdateFailed, match="stopped before receiver a came: the sender gave up: ValueError: no memory"):
        list(make_receiver(link, "a").receive(1))
    back = BackBuffer(MANIFEST)
    with ThreadPoolExecutor(1) as pool:
        filled = pool.submit(lambda: back.fill(1, make_receiver(link, "a").receive(1)))
        make_sender(link).send(1, weights(1))
        filled.result()
    assert back.version == 1


def test_closing_any_end_ends_every_wait_at_once() -> None:
    link = exchange("a", "b", timeout_s=30)
    receiving = make_receiver(link, "a").receive(1)
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(make_sender(link).send, 1, weights(1))
        assert next(receiving).numel() == 256
        waiting = pool.submit(next, receiving)
        make_receiver(link, "b").close()
        with pytest.raises(UpdateFailed, match=r"the sender of version 1 waited for .*b to take bucket 0 when an end"):
            sent.result(timeout=10)
        with pytest.raises(UpdateFailed):
            waiting.result(timeout=10)
    with pytest.raises(UpdateFailed, match="closed"):
        make_sender(link).send(2, weights(2))


def test_an_unknown_transport_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'pigeon'.*'local' and 'broadcast'"):
        make_link("pigeon", receivers=("a",), timeout_s=1)
