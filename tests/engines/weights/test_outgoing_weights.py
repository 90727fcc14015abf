"""Streams, and complete copies with deltas between versions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headway.engines.weights.digests import digest
from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.outgoing_version import Staged, Stream, Window
from headway.engines.weights.weight_layout import build_manifest, combined
from headway.errors import UpdateFailed
from tests.engines.weights.versions import BUCKET, MANIFEST, assert_same, contents, hand_over, stream, weights, windows


def staged(*versions: int) -> Staged:
    copy = Staged(MANIFEST, BUCKET, with_delta=True)
    for version in versions:
        copy.gather(version, windows(weights(version)))
    return copy


def test_a_stream_counts_its_bytes_and_time_and_knows_its_digests_at_the_end() -> None:
    outgoing = stream(1)
    chunks = [(chunk.header.index, chunk.header.offset, chunk.header.nbytes, chunk.header.base) for chunk in outgoing]
    assert [index for index, *_ in chunks] == list(range(len(chunks)))
    assert sum(nbytes for *_, nbytes, _ in chunks) == outgoing.nbytes == MANIFEST.nbytes
    assert {base for *_, base in chunks} == {-1}
    assert outgoing.gather_s > 0
    expected = [digest(weights(1)[slot.name].reshape(-1).view(torch.uint8)) for slot in MANIFEST.slots]
    assert list(outgoing.digests) == expected
    assert combined(expected) != combined(expected[::-1])


def test_the_digests_of_a_stream_are_not_to_be_had_before_its_end() -> None:
    outgoing = stream(1)
    next(iter(outgoing))
    with pytest.raises(UpdateFailed, match=r"ended after 512 of \d+ bytes"):
        _ = outgoing.digests


@pytest.mark.parametrize("kept", [[0, 2, 3], [0, 1]])
def test_windows_with_a_gap_or_a_missing_end_are_no_version(kept: list[int]) -> None:
    def some() -> Iterator[Window]:
        return (window for index, window in enumerate(windows(weights(1))) if index in kept)

    with pytest.raises(UpdateFailed, match=r"from 1024 .*from 512 .*due|ended after 1024\b"):
        list(Stream(MANIFEST, some()))
    copy = staged(1)
    with pytest.raises(UpdateFailed, match=r"from 1024 .*from 512 .*due|ended after 1024\b"):
        copy.gather(2, some())
    assert copy.version is None


def test_a_complete_copy_can_be_sent_any_number_of_times_and_only_as_the_version_that_it_is() -> None:
    copy = staged(1)
    for _ in range(2):
        back = BackBuffer(MANIFEST)
        back.fill(1, hand_over(copy.outgoing(1, to=None)))
        assert_same(contents(back), weights(1))
    with pytest.raises(UpdateFailed, match=r"version 2 .*holds version 1"):
        copy.outgoing(2, to=None)


def test_only_those_who_hold_the_version_before_get_a_delta() -> None:
    copy = staged(1, 2)
    assert {chunk.header.base for chunk in copy.outgoing(2, to=1)} == {1}
    for other in (None, 0, 2):
        assert {chunk.header.base for chunk in copy.outgoing(2, to=other)} == {-1}


def test_the_share_of_changed_units_is_reported_and_buckets_that_changed_too_much_go_whole() -> None:
    manifest = build_manifest([("a", (256,), torch.bfloat16), ("b", (256,), torch.bfloat16)])
    before = {"a": torch.zeros(256), "b": torch.zeros(256)}
    after = {"a": torch.ones(256), "b": torch.cat([torch.ones(16), torch.zeros(240)])}
    copy = Staged(manifest, BUCKET, with_delta=True)
    assert copy.gather(1, windows(before, manifest)).changed is None
    gathered = copy.gather(2, windows(after, manifest))
    assert gathered.changed == (256 + 16) / 512
    assert gathered.nbytes == manifest.nbytes and gathered.gather_s > 0
    assert [chunk.header.base for chunk in copy.outgoing(2, to=1)] == [-1, 1]


def test_without_deltas_nobody_looks_for_changes() -> None:
    copy = Staged(MANIFEST, BUCKET, with_delta=False)
    for version in (1, 2):
        assert copy.gather(version, windows(weights(version))).changed is None
    assert {chunk.header.base for chunk in copy.outgoing(2, to=1)} == {-1}


def test_when_a_gather_fails_half_way_the_copy_holds_nothing_and_the_next_version_goes_whole() -> None:
    def broken() -> Iterator[Window]:
        yield next(windows(weights(2)))
        raise RuntimeError("a rank died")

    copy = staged(1)
    with pytest.raises(RuntimeError, match="a rank died"):
        copy.gather(2, broken())
    with pytest.raises(UpdateFailed, match="holds version None"):
        copy.outgoing(2, to=1)
    assert copy.gather(3, windows(weights(3))).changed is None
    assert {chunk.header.base for chunk in copy.outgoing(3, to=1)} == {-1}
    back = BackBuffer(MANIFEST)
    back.fill(3, hand_over(copy.outgoing(3, to=1)))
    assert_same(contents(back), weights(3))
