from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

import pytest
import torch

from headway.data.interfaces.weights import ReceiveReport
from headway.engines.weights.incoming_version import BackBuffer, Receive
from headway.engines.weights.protocols import Chunk, EndContext, OutgoingWeights, open_receiver
from headway.engines.weights.weight_layout import build_manifest
from headway.errors import UpdateFailed
from tests.engines.weights.ends import Site
from tests.engines.weights.versions import MANIFEST, assert_same, contents, stream, weights


def targets(*names: str) -> dict[str, BackBuffer]:
    return {name: BackBuffer(MANIFEST) for name in names}


@dataclass(frozen=True)
class Held:
    """An `OutgoingWeights` that says when it was begun, and waits before its second chunk."""

    inner: OutgoingWeights
    begun: Event
    go_on: Event

    def __iter__(self) -> Iterator[Chunk]:
        for index, chunk in enumerate(self.inner):
            if index == 1:
                self.begun.set()
                assert self.go_on.wait(20)
            yield chunk

    @property
    def digests(self) -> tuple[int, ...]:
        return self.inner.digests


def test_a_missing_receiver_is_named_when_the_time_is_over(site: Site) -> None:
    ends = site.meet("local", "a", "b", timeout_s=0.3)
    outcome = ends.update(1, stream(1), targets("a"))
    with pytest.raises(UpdateFailed, match=r"waited for b .*0\.3 s"):
        raise outcome.sent or AssertionError
    assert isinstance(outcome.errors["a"], UpdateFailed)


def test_who_has_come_is_told_when_the_sender_waits_for_another_no_longer(site: Site) -> None:
    ends = site.meet("local", "a", "b", timeout_s=1.0)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(ends.sender.send, 1, stream(1))
        Event().wait(0.5)
        with pytest.raises(UpdateFailed, match="sender of version 1 waited for b"):
            ends.fill("a", 1, BackBuffer(MANIFEST), None).result(20)
        assert isinstance(sent.exception(20), UpdateFailed)


@pytest.mark.parametrize("closed", [False, True], ids=["late", "closed"])
def test_a_sender_held_between_buckets_does_not_hold_its_receivers_nor_writes_to_them_afterwards(
    site: Site, closed: bool
) -> None:
    ends = site.meet("local", "a", "b", timeout_s=60 if closed else 0.5)
    begun, go_on, filled = Event(), Event(), targets("a", "b")
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(ends.sender.send, 1, Held(stream(1), begun, go_on))
        waiting = [ends.fill(name, 1, back, None) for name, back in filled.items()]
        assert begun.wait(20)
        if closed:
            ends.receivers["b"].close()
        for one in waiting:
            with pytest.raises(UpdateFailed, match="an end was closed" if closed else "waited .*sender of version"):
                one.result(20)
        go_on.set()
        with pytest.raises(UpdateFailed, match="an end was closed" if closed else "bucket 1: receiver [ab] gave up"):
            sent.result(20)
    assert not any(back.version for back in filled.values())


def test_a_missing_sender_is_named_when_the_time_is_over(site: Site) -> None:
    ends = site.meet("local", "a", timeout_s=0.05)
    with pytest.raises(UpdateFailed, match=r"receiver a waited .*version 4"):
        ends.fill("a", 4, BackBuffer(MANIFEST), None).result(20)


def test_the_time_is_that_of_one_wait_and_not_of_a_whole_update(site: Site) -> None:
    """Each bucket takes most of the time-out to gather; all of them take several."""

    @dataclass(frozen=True)
    class Slow:
        inner: OutgoingWeights

        def __iter__(self) -> Iterator[Chunk]:
            for chunk in self.inner:
                Event().wait(0.25)
                yield chunk

        @property
        def digests(self) -> tuple[int, ...]:
            return self.inner.digests

    ends = site.meet("local", "a", timeout_s=1.2)
    outcome = ends.update(1, Slow(stream(1)), targets("a"))
    assert outcome.sent is None and not outcome.errors


def test_when_a_receiver_gives_up_sender_and_other_receivers_fail_at_once_and_the_next_update_works(site: Site) -> None:
    ends = site.meet("local", "a", "b", timeout_s=60)
    wrong = BackBuffer(build_manifest([("other", (1,), torch.float32)]))
    outcome = ends.update(1, stream(1), {"a": wrong, "b": BackBuffer(MANIFEST)})
    with pytest.raises(UpdateFailed, match="version 1 stopped at bucket 0: receiver a gave up"):
        raise outcome.sent or AssertionError
    assert "bucket 0 has 512 bytes" in str(outcome.errors["a"])
    assert "receiver a gave up" in str(outcome.errors["b"])
    good = targets("a", "b")
    outcome = ends.update(2, stream(2), good)
    assert outcome.sent is None and not outcome.errors
    for back in good.values():
        assert_same(contents(back), weights(2))


def test_closing_any_end_ends_every_wait_at_once(site: Site) -> None:
    ends = site.meet("local", "a", "b", timeout_s=60)
    begun = Event()

    class Noticed(BackBuffer):
        def fill(self, version: int, receive: Receive) -> ReceiveReport:
            begun.set()
            return super().fill(version, receive)

    with ThreadPoolExecutor(1) as pool:
        waiting = ends.fill("a", 1, Noticed(MANIFEST), None)
        sent = pool.submit(ends.sender.send, 1, stream(1))
        assert begun.wait(20)
        ends.receivers["b"].close()
        with pytest.raises(UpdateFailed, match=r"when an end was closed"):
            sent.result(20)
        with pytest.raises(UpdateFailed):
            waiting.result(20)
    with pytest.raises(UpdateFailed, match="closed"):
        ends.sender.send(2, stream(2))


def test_a_receiver_that_the_meeting_is_not_for_is_told_so(site: Site) -> None:
    link = site.link("local", "a")
    with pytest.raises(UpdateFailed, match=r"\bb .*link reaches: a;"):
        open_receiver(link, "b", EndContext())
