"""What a back buffer and tensors in place accept, and what state they are in when something was wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
import torch

from headway.engines.weights.buckets import Tensors, whole
from headway.engines.weights.incoming_version import BackBuffer, InPlace, Receive
from headway.engines.weights.outgoing_version import Staged, Stream
from headway.engines.weights.protocols import Chunk, IncomingWeights, OutgoingWeights
from headway.errors import UpdateFailed
from tests.engines.weights.versions import (
    BUCKET,
    MANIFEST,
    Change,
    Spoilt,
    assert_same,
    contents,
    cut_off,
    flipped,
    hand_over,
    lost,
    overtaken,
    put,
    shifted,
    stream,
    twice,
    weights,
    windows,
)


def in_place() -> tuple[InPlace, dict[str, torch.Tensor]]:
    tensors = weights(0)
    return InPlace(MANIFEST, Tensors(MANIFEST, whole(tensors)), window=128), tensors


def header(number: int, /, **changes: int) -> Change:
    def change(chunks: list[Chunk]) -> list[Chunk]:
        chunks[number] = Chunk(replace(chunks[number].header, **changes), chunks[number].payload)
        return chunks

    return change


def longer(chunks: list[Chunk]) -> list[Chunk]:
    last = chunks[-1]
    more = replace(last.header, index=last.header.index + 1, offset=last.header.offset + last.header.nbytes)
    return [*chunks, Chunk(more, last.payload)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lost, "bucket 2 came with the bytes from 1024 on, but bucket 1, from 512 on, is due: one was lost"),
        (twice, "bucket 1 came with the bytes from 512 on, but bucket 2"),
        (overtaken, "bucket 2 came with the bytes from 1024 on, but bucket 1"),
        (shifted, "bucket 1 came with the bytes from 576 on"),
        (cut_off, r"ended after \d+ of \d+ bytes"),
        (longer, "expected a multiple of 64, or all that are left"),
        (
            header(0, nbytes=500, payload_nbytes=500),
            "bucket 0 has 500 bytes from 0 on, of which 500 came; expected a multiple of 64",
        ),
        (header(0, nbytes=0, payload_nbytes=0), "bucket 0 has 0 bytes"),
        (header(0, nbytes=2**40, payload_nbytes=2**40), "bucket 0 has 1099511627776 bytes"),
        (header(0, payload_nbytes=64), "bucket 0 has 512 bytes from 0 on, of which 64 came"),
        (header(0, payload_nbytes=2**40, base=1), "bucket 0 has 512 bytes from 0 on, of which 1099511627776 came"),
        (flipped, "the bytes of 'embed' are not those"),
    ],
)
def test_an_incomplete_or_wrong_version_is_never_staged(change: Change, message: str) -> None:
    back = BackBuffer(MANIFEST)
    back.fill(1, hand_over(stream(1)))
    with pytest.raises(UpdateFailed, match=f"version 2: .*{message}"):
        back.fill(2, hand_over(Spoilt(stream(2), change)))
    assert back.version is None
    with pytest.raises(UpdateFailed, match="no version is staged"):
        _ = back.path
    with pytest.raises(UpdateFailed, match="no version is staged"):
        next(back.windows(64))
    back.fill(2, hand_over(stream(2)))
    assert_same(contents(back), weights(2))


@pytest.mark.parametrize(
    ("change", "torn"), [(header(0, index=1), False), (lost, True), (cut_off, True), (flipped, True)]
)
def test_tensors_written_in_place_are_torn_from_the_first_byte_to_the_end_of_a_whole_version(
    change: Change, torn: bool
) -> None:
    target, tensors = in_place()
    with pytest.raises(UpdateFailed, match="version 2"):
        target.fill(2, hand_over(Spoilt(stream(2), change)))
    assert target.torn is torn
    target.fill(3, hand_over(stream(3)))
    assert not target.torn
    assert_same(tensors, weights(3))


def test_a_mismatch_counts_the_tensors_behind_the_one_it_names() -> None:
    def change(chunks: list[Chunk]) -> list[Chunk]:
        for chunk in chunks:
            chunk.payload[-1] ^= 1
        return chunks

    with pytest.raises(UpdateFailed, match=r"'embed' \(.*\b2 more"):
        BackBuffer(MANIFEST).fill(2, hand_over(Spoilt(stream(2), change)))


def test_digests_for_another_number_of_tensors_are_refused() -> None:
    def receive(incoming: IncomingWeights) -> None:
        (sink,) = incoming.expect([incoming.manifest])
        put(stream(1), sink)
        sink.ended([1, 2])

    with pytest.raises(UpdateFailed, match="came with 2 digests for 7 tensors"):
        BackBuffer(MANIFEST).fill(1, receive)


def test_versions_come_from_other_numbers_of_senders_and_are_refused_unless_whole() -> None:
    back = BackBuffer(MANIFEST)

    def sent_by(senders: int, *, left_out: int = 0) -> Receive:
        shares = replace(MANIFEST, senders=senders).shares()[left_out:]

        def receive(incoming: IncomingWeights) -> None:
            for share, sink in zip(shares, incoming.expect(shares), strict=True):
                put(Stream(share, windows(weights(senders), share)), sink)

        return receive

    for senders in (3, 2, 1, 3):
        report = back.fill(senders, sent_by(senders))
        assert report.nbytes == MANIFEST.nbytes
        assert_same(contents(back), weights(senders))
    with pytest.raises(UpdateFailed, match=r"version 4: .*\d tensors; expected all 7\b"):
        back.fill(4, sent_by(3, left_out=1))


def test_an_error_of_the_transport_passes_through_and_leaves_nothing_staged() -> None:
    def broken(incoming: IncomingWeights) -> None:
        raise UpdateFailed("the sender went away")

    back = BackBuffer(MANIFEST)
    back.fill(1, hand_over(stream(1)))
    with pytest.raises(UpdateFailed, match="went away"):
        back.fill(2, broken)
    assert back.version is None


def test_a_buffer_that_was_loaded_has_nothing_staged_and_can_be_filled_again() -> None:
    back = BackBuffer(MANIFEST)
    back.fill(1, hand_over(stream(1)))
    back.loaded()
    assert back.version is None
    back.fill(2, hand_over(stream(2)))
    assert back.version == 2


@pytest.mark.parametrize("make", [lambda: BackBuffer(MANIFEST), lambda: in_place()[0]], ids=["buffer", "in place"])
def test_of_two_updates_that_race_the_second_is_refused_and_the_first_completes(
    make: Callable[[], BackBuffer | InPlace],
) -> None:
    target = make()
    begun, go_on = Event(), Event()

    def slow(incoming: IncomingWeights) -> None:
        begun.set()
        assert go_on.wait(60)
        hand_over(stream(1))(incoming)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(target.fill, 1, slow)
        assert begun.wait(60)
        with pytest.raises(UpdateFailed, match="still receiving version 1; receiving version 2"):
            target.fill(2, hand_over(stream(2)))
        go_on.set()
        report = first.result(60)
    assert report.nbytes == MANIFEST.nbytes
    assert target.fill(2, hand_over(stream(2))).nbytes == MANIFEST.nbytes


class TestDeltas:
    """Version 1 is held; version 2 comes as a delta to it."""

    def held(self) -> BackBuffer:
        back = BackBuffer(MANIFEST)
        back.fill(1, hand_over(stream(1)))
        back.loaded()
        return back

    def delta(self, *versions: int) -> OutgoingWeights:
        """From the last but one of these versions to the last."""
        staged = Staged(MANIFEST, BUCKET, with_delta=True)
        for version in versions:
            staged.gather(version, windows(weights(version)))
        return staged.outgoing(versions[-1], to=versions[-2])

    def assert_refused(self, back: BackBuffer, version: int, outgoing: OutgoingWeights, message: str) -> None:
        with pytest.raises(UpdateFailed, match=message):
            back.fill(version, hand_over(outgoing))
        assert back.version is None
        with pytest.raises(UpdateFailed, match="nothing complete"):
            back.fill(version, hand_over(self.delta(1, 2)))
        back.fill(version, hand_over(stream(version)))
        assert_same(contents(back), weights(version))

    def test_a_delta_to_what_is_held_makes_the_new_version(self) -> None:
        back = self.held()
        report = back.fill(2, hand_over(self.delta(1, 2)))
        assert report.nbytes < MANIFEST.nbytes / 10
        assert_same(contents(back), weights(2))
        back.fill(3, hand_over(self.delta(2, 3)))
        assert_same(contents(back), weights(3))

    def test_a_delta_to_a_version_that_is_not_held_is_refused_until_it_comes_whole(self) -> None:
        message = "version 3: came as a delta to version 2, but what is here is version 1; send it whole"
        self.assert_refused(self.held(), 3, self.delta(2, 3), message)

    def test_a_delta_that_was_corrupted_is_refused_until_it_comes_whole(self) -> None:
        def corrupted(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
            chunks[1].payload[-1] ^= 1
            return chunks

        outgoing = Spoilt(self.delta(1, 2), corrupted)
        self.assert_refused(self.held(), 2, outgoing, "version 2: the delta of bucket 1 is not what the trainer sent")

    def test_a_delta_to_bytes_that_are_not_what_they_should_be_names_the_tensor(self) -> None:
        back = BackBuffer(MANIFEST)
        other = {**weights(1), "head": weights(1)["head"] + 1}
        staged = Staged(MANIFEST, BUCKET, with_delta=False)
        staged.gather(1, windows(other))
        back.fill(1, hand_over(staged.outgoing(1, to=None)))
        self.assert_refused(back, 2, self.delta(1, 2), "the bytes of 'head' are not those that the trainer sent")

    def test_tensors_in_place_cannot_take_a_delta(self) -> None:
        target, _ = in_place()
        with pytest.raises(UpdateFailed, match=r"as a delta, .*rollout\.enable_dual_buffer"):
            target.fill(2, hand_over(self.delta(1, 2)))
        assert not target.torn
