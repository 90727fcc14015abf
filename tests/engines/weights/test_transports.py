"""What every transport promises, each over the same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event

import pytest
import torch

from headway.config.transport_facts import TRANSPORTS
from headway.data.interfaces.weights import ReceiveReport
from headway.engines.weights.buckets import Tensors, whole
from headway.engines.weights.incoming_version import BackBuffer, InPlace, Receive
from headway.engines.weights.outgoing_version import Staged, Stream
from headway.engines.weights.protocols import Header, WeightSink, open_receiver
from headway.engines.weights.weight_layout import Manifest, combined
from headway.errors import UpdateFailed
from tests.engines.weights.ends import ALL, STORED, Site
from tests.engines.weights.versions import (
    BUCKET,
    MANIFEST,
    Change,
    GivesUp,
    Spoilt,
    Wrapped,
    assert_same,
    contents,
    cut_off,
    flipped,
    lost,
    overtaken,
    shifted,
    stream,
    twice,
    weights,
    windows,
)

every_transport = pytest.mark.parametrize("transport", ALL)
delta_transports = pytest.mark.parametrize("transport", [name for name in ALL if TRANSPORTS[name].carries_delta])


def served() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}


@pytest.mark.parametrize("transport", STORED)
def test_what_is_stored_is_for_a_receiver_that_was_not_there_when_the_ends_met(site: Site, transport: str) -> None:
    """Replacements and other owners of a machine's copy open the link of the first ones."""
    ends = site.meet(transport, "rollout-0")
    stored = ends.sender.send(1, stream(1))
    back = BackBuffer(MANIFEST)
    ends.receivers["rollout-0+1"] = open_receiver(ends.link, "rollout-0+1", site.here)
    ends.fill("rollout-0+1", 1, back, stored).result(60)
    assert_same(contents(back), weights(1))


@every_transport
def test_version_after_version_reaches_a_back_buffer_and_tensors_in_place_bit_by_bit(
    site: Site, transport: str
) -> None:
    ends = site.meet(transport, "a", "b")
    back, tensors = BackBuffer(MANIFEST), served()
    in_place = InPlace(MANIFEST, Tensors(MANIFEST, whole(tensors)), window=192)
    for version in (1, 2, 3):
        outgoing = stream(version)
        outcome = ends.update(version, outgoing, {"a": back, "b": in_place})
        assert outcome.sent is None and not outcome.errors
        assert back.version == version and not in_place.torn
        assert_same(contents(back), weights(version))
        assert_same(tensors, weights(version))
        for report in outcome.reports.values():
            assert report.checksum == combined(outgoing.digests)
            assert report.nbytes == outgoing.nbytes == MANIFEST.nbytes
        back.loaded()


@delta_transports
def test_deltas_reach_those_who_hold_the_version_before_and_are_smaller(site: Site, transport: str) -> None:
    ends = site.meet(transport, "a", "b")
    staged = Staged(MANIFEST, BUCKET, with_delta=True)
    targets = {"a": BackBuffer(MANIFEST), "b": BackBuffer(MANIFEST)}
    held = None
    for version in (1, 2, 3):
        staged.gather(version, windows(weights(version)))
        outgoing = staged.outgoing(version, to=held)
        outcome = ends.update(version, outgoing, targets)
        assert outcome.sent is None and not outcome.errors
        for name, back in targets.items():
            assert back.version == version
            assert_same(contents(back), weights(version))
            assert outcome.reports[name].checksum == combined(outgoing.digests)
            came = outcome.reports[name].nbytes
            assert came == MANIFEST.nbytes if held is None else came < MANIFEST.nbytes / 10
        held = version


@every_transport
def test_weights_without_any_bytes_are_a_version_too(site: Site, transport: str) -> None:
    nothing = Manifest(())
    ends = site.meet(transport, "a", manifest=nothing)
    back = BackBuffer(nothing)
    staged = Staged(nothing, BUCKET, with_delta=False)
    staged.gather(1, [])
    outcome = ends.update(1, staged.outgoing(1, to=None), {"a": back})
    assert outcome.sent is None and not outcome.errors and back.version == 1


FAULTS: dict[Change, str] = {
    flipped: "the bytes of 'embed' are not those that the trainer sent",
    lost: "bucket 2 ",
    twice: "bucket 1 ",
    overtaken: "bucket 2 ",
    shifted: "bucket 1 came with the bytes from 576 on, but bucket 1, from 512 on, is due",
    cut_off: r"ended after \d+ of \d+ bytes",
}


@every_transport
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_spoilt_version_is_never_staged_and_the_next_one_works(site: Site, transport: str, fault: Change) -> None:
    ends = site.meet(transport, "a")
    back = BackBuffer(MANIFEST)
    assert not ends.update(1, stream(1), {"a": back}).errors
    outcome = ends.update(2, Spoilt(stream(2), fault), {"a": back})
    with pytest.raises(UpdateFailed, match=FAULTS[fault]):
        raise outcome.errors["a"]
    assert outcome.sent is None or isinstance(outcome.sent, UpdateFailed)
    assert back.version is None
    if transport == "broadcast":
        ends = site.meet(transport, "a")
    assert not ends.update(3, stream(3), {"a": back}).errors
    assert_same(contents(back), weights(3))


@every_transport
def test_a_sender_that_gives_up_midway_tells_the_receivers_and_the_next_update_works(
    site: Site, transport: str
) -> None:
    ends = site.meet(transport, "a", "b", timeout_s=60)
    targets = {"a": BackBuffer(MANIFEST), "b": BackBuffer(MANIFEST)}
    assert not ends.update(1, stream(1), targets).errors
    outcome = ends.update(2, GivesUp(stream(2), ValueError("no memory")), targets)
    assert isinstance(outcome.sent, ValueError)
    if transport in STORED:
        assert all(back.version == 1 for back in targets.values()), "nobody was told to receive"
    else:
        for name, back in targets.items():
            assert isinstance(outcome.errors[name], UpdateFailed) and "gave up" in str(outcome.errors[name])
            assert back.version is None
    outcome = ends.update(2, stream(2), targets)
    assert outcome.sent is None and not outcome.errors
    for back in targets.values():
        assert_same(contents(back), weights(2))


@every_transport
def test_weights_that_end_too_early_are_the_senders_own_error(site: Site, transport: str) -> None:
    ends = site.meet(transport, "a")
    short = Stream(MANIFEST, list(windows(weights(1)))[:2])
    outcome = ends.update(1, short, {"a": BackBuffer(MANIFEST)})
    with pytest.raises(UpdateFailed, match="ended after 1024 of"):
        raise outcome.sent or AssertionError


@every_transport
def test_a_receiver_that_asks_for_another_version_is_told_which_one_came(site: Site, transport: str) -> None:
    ends = site.meet(transport, "a")
    if transport in STORED:
        stored = ends.sender.send(8, stream(8))
        asked = ends.fill("a", 9, BackBuffer(MANIFEST), stored)
    else:
        asked = ends.fill("a", 9, BackBuffer(MANIFEST), None)
        with pytest.raises(UpdateFailed, match="version 8"):
            ends.sender.send(8, stream(8))
    with pytest.raises(UpdateFailed, match=r"version 9.*8"):
        asked.result(60)


@every_transport
def test_an_error_of_the_receivers_own_passes_through_and_the_next_update_works(site: Site, transport: str) -> None:
    ends = site.meet(transport, "a", timeout_s=60)
    outcome = ends.update(1, stream(1), {"a": _Full(MANIFEST)})
    assert isinstance(outcome.errors["a"], RuntimeError) and str(outcome.errors["a"]) == "out of memory"
    assert outcome.sent is None if transport in STORED else isinstance(outcome.sent, UpdateFailed)
    if transport == "broadcast":
        ends = site.meet(transport, "a")
    back = BackBuffer(MANIFEST)
    assert not ends.update(1, stream(1), {"a": back}).errors
    assert_same(contents(back), weights(1))


def test_a_receiver_that_stops_answering_is_named_in_bounded_time_and_the_rest_go_on(site: Site) -> None:
    """Receiver b is stuck in its first bucket, until everything else is over."""
    go_on = Event()
    ends = site.meet_within(1.5, "broadcast", "a", "b")
    stuck, back = _Stuck(MANIFEST, go_on), BackBuffer(MANIFEST)
    never = ends.fill("b", 1, stuck, None)
    started = time.monotonic()
    outcome = ends.update(1, stream(1), {"a": back})
    assert time.monotonic() - started < 30, "as long as the stuck bucket, were it not for the limit"
    with pytest.raises(UpdateFailed, match=r"version 1.*\bb\b"):
        raise outcome.sent or AssertionError
    assert isinstance(outcome.errors["a"], UpdateFailed) and back.version is None

    outcome = site.meet("broadcast", "a").update(1, stream(1), {"a": back})
    assert outcome.sent is None and back.version == 1
    go_on.set()
    with pytest.raises(UpdateFailed):
        never.result(60)
    assert stuck.version is None


class _Stuck(BackBuffer):
    """Takes the first bucket only when it is told to go on."""

    def __init__(self, manifest: Manifest, go_on: Event) -> None:
        super().__init__(manifest)
        self._go_on = go_on

    def fill(self, version: int, receive: Receive) -> ReceiveReport:
        return super().fill(version, lambda it: receive(Wrapped(it, lambda sink: _Waiting(sink, self._go_on))))


class _Full(BackBuffer):
    """Has no room for the second bucket."""

    def fill(self, version: int, receive: Receive) -> ReceiveReport:
        return super().fill(version, lambda incoming: receive(Wrapped(incoming, _NoRoom)))


@dataclass
class _Through:
    """A sink in front of another."""

    sink: WeightSink

    def room(self, header: Header, device: torch.device | str = "cpu") -> torch.Tensor:
        return self.sink.room(header)

    def filled(self, header: Header) -> None:
        self.sink.filled(header)

    def ended(self, digests: Sequence[int]) -> None:
        self.sink.ended(digests)


class _NoRoom(_Through):
    def room(self, header: Header, device: torch.device | str = "cpu") -> torch.Tensor:
        if header.index == 1:
            raise RuntimeError("out of memory")
        return super().room(header)


@dataclass
class _Waiting(_Through):
    go_on: Event

    def filled(self, header: Header) -> None:
        assert self.go_on.wait(60)
        super().filled(header)
