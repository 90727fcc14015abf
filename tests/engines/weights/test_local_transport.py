from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition, Event, get_ident
from typing import Any

import pytest
import torch

from headway.data.interfaces.weights import ReceiveReport
from headway.engines.weights.incoming_version import BackBuffer, Receive
from headway.engines.weights.protocols import Chunk, EndContext, OutgoingWeights, open_receiver
from headway.engines.weights.weight_layout import build_manifest
from headway.errors import UpdateFailed
from tests.engines.weights.ends import Ends, Site
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
                assert self.go_on.wait(60)
            yield chunk

    @property
    def digests(self) -> tuple[int, ...]:
        return self.inner.digests


class Clock(Condition):
    """The condition of an exchange, whose waits are as long as the test lets time pass."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._now = 0.0
        self._waits: dict[int, tuple[float, Callable[[], bool]]] = {}
        """By thread: when a wait's time is over, and what it waits for."""

    @classmethod
    def of(cls, ends: Ends) -> Clock:
        """A clock for the exchange of ``ends``, at which nobody waits yet."""
        exchange: Any = ends.sender
        exchange._changed = clock = cls(exchange._timeout_s)
        return clock

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        assert timeout == self._timeout_s, "each wait has the whole time"
        until = self._now + timeout
        self._waits[get_ident()] = until, predicate
        self.notify_all()
        while not (met := predicate()) and self._now < until:
            self.wait()
        del self._waits[get_ident()]
        self.notify_all()
        return met

    def until_waiting(self, number: int) -> None:
        """Return when so many threads wait for what has not come."""

        def waiting() -> bool:
            return len(self._waits) == number and not any(comes() for _, comes in self._waits.values())

        with self:
            assert super().wait_for(waiting, 60), f"{len(self._waits)} wait, expected {number}"

    def advance(self, seconds: float) -> None:
        """Let time pass, and return when nobody waits any more whose time is over by then."""
        with self:
            self._now += seconds
            self.notify_all()
            assert super().wait_for(lambda: all(until > self._now for until, _ in self._waits.values()), 60)


def test_a_missing_receiver_is_named_when_the_time_is_over(site: Site) -> None:
    ends = site.meet("local", "a", "b", timeout_s=0.3)
    clock = Clock.of(ends)
    with ThreadPoolExecutor(1) as pool:
        updated = pool.submit(ends.update, 1, stream(1), targets("a"))
        clock.until_waiting(2)
        clock.advance(0.3)
        outcome = updated.result(60)
    with pytest.raises(UpdateFailed, match=r"waited for b .*0\.3 s"):
        raise outcome.sent or AssertionError
    assert isinstance(outcome.errors["a"], UpdateFailed)


def test_who_has_come_is_told_when_the_sender_waits_for_another_no_longer(site: Site) -> None:
    ends = site.meet("local", "a", "b", timeout_s=1.0)
    clock = Clock.of(ends)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(ends.sender.send, 1, stream(1))
        clock.until_waiting(1)
        clock.advance(0.5)
        came = ends.fill("a", 1, BackBuffer(MANIFEST), None)
        clock.until_waiting(2)
        clock.advance(0.5)
        with pytest.raises(UpdateFailed, match="sender of version 1 waited for b"):
            came.result(60)
        assert isinstance(sent.exception(60), UpdateFailed)


@pytest.mark.parametrize("closed", [False, True], ids=["late", "closed"])
def test_a_sender_held_between_buckets_does_not_hold_its_receivers_nor_writes_to_them_afterwards(
    site: Site, closed: bool
) -> None:
    ends = site.meet("local", "a", "b", timeout_s=60)
    clock = Clock.of(ends)
    begun, go_on, filled = Event(), Event(), targets("a", "b")
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(ends.sender.send, 1, Held(stream(1), begun, go_on))
        waiting = [ends.fill(name, 1, back, None) for name, back in filled.items()]
        assert begun.wait(60)
        if closed:
            ends.receivers["b"].close()
        else:
            clock.until_waiting(2)
            clock.advance(60)
        for one in waiting:
            with pytest.raises(UpdateFailed, match="an end was closed" if closed else "waited .*sender of version"):
                one.result(60)
        go_on.set()
        with pytest.raises(UpdateFailed, match="an end was closed" if closed else "bucket 1: receiver [ab] gave up"):
            sent.result(60)
    assert not any(back.version for back in filled.values())


def test_a_missing_sender_is_named_when_the_time_is_over(site: Site) -> None:
    ends = site.meet("local", "a", timeout_s=0.05)  # by the wall's clock
    with pytest.raises(UpdateFailed, match=r"receiver a waited .*version 4"):
        ends.fill("a", 4, BackBuffer(MANIFEST), None).result(60)


def test_the_time_is_that_of_one_wait_and_not_of_a_whole_update(site: Site) -> None:
    """Each bucket takes most of the time-out to gather; all of them take several."""

    ends = site.meet("local", "a", timeout_s=1.2)
    clock = Clock.of(ends)

    @dataclass(frozen=True)
    class Slow:
        inner: OutgoingWeights

        def __iter__(self) -> Iterator[Chunk]:
            for chunk in self.inner:
                clock.advance(1.0)
                yield chunk

        @property
        def digests(self) -> tuple[int, ...]:
            return self.inner.digests

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
        assert begun.wait(60)
        ends.receivers["b"].close()
        with pytest.raises(UpdateFailed, match=r"when an end was closed"):
            sent.result(60)
        with pytest.raises(UpdateFailed):
            waiting.result(60)
    with pytest.raises(UpdateFailed, match="closed"):
        ends.sender.send(2, stream(2))


def test_a_receiver_that_the_meeting_is_not_for_is_told_so(site: Site) -> None:
    link = site.link("local", "a")
    with pytest.raises(UpdateFailed, match=r"\bb .*link reaches: a;"):
        open_receiver(link, "b", EndContext())
