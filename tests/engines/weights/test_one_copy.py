"""One copy of new weights on a machine: one process receives into it, others load from where it lies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.data.interfaces.weights import ReceiveReport
from headway.engines.weights.buckets import Tensors, whole
from headway.engines.weights.incoming_version import NOTHING, BackBuffer, InPlace, Receive, SharedBytes, memory_domain
from headway.engines.weights.outgoing_version import Staged
from headway.engines.weights.protocols import HostCopy, IncomingWeights, OutgoingWeights
from headway.errors import UpdateFailed
from tests.engines.weights.versions import (
    BUCKET,
    MANIFEST,
    GivesUp,
    assert_same,
    contents,
    hand_over,
    stream,
    weights,
    windows,
)

OTHER = """
import mmap, os, sys
file = os.memfd_create("other")
os.ftruncate(file, 24)
mapped = mmap.mmap(file, 24)
mapped[:13], mapped[16:] = bytes(range(13)), (5).to_bytes(8, "little")
print(f"/proc/{os.getpid()}/fd/{file}", flush=True)
sys.stdin.readline()
print(mapped[0], int.from_bytes(mapped[16:], "little"), flush=True)
sys.stdin.readline()
"""
"""A process that has 13 bytes of version 5, and says what it sees of them when it is asked."""


@contextmanager
def another_process() -> Iterator[subprocess.Popen[str]]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-I", "-c", OTHER], **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_bytes_and_their_stamp_are_the_same_in_both_processes_and_stay_when_one_ends() -> None:
    with another_process() as process:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        mapped = SharedBytes.at(path, 13)
        assert mapped.is_at(path) and not mapped.is_at(str(SharedBytes.reserve(13).path))
        assert mapped.flat.tolist() == list(range(13)) and mapped.stamp == 5
        mapped.flat[0], mapped.stamp = 77, 6
        assert answer(process) == "77 6"
    assert mapped.flat[0] == 77 and mapped.stamp == 6
    assert not mapped.is_at(path)
    with pytest.raises(UpdateFailed, match=rf"{path} cannot be mapped \(.*may have ended\): "):
        SharedBytes.at(path, 13)


def test_new_memory_has_no_name_is_no_version_and_goes_with_those_who_map_it() -> None:
    made = SharedBytes.reserve(1001)
    path = str(made.path)
    assert made.stamp == NOTHING and made.flat.shape == (1001,)
    assert Path(path).stat().st_nlink == 0
    with pytest.raises(UpdateFailed, match=r"cannot be mapped .*: 1016 bytes .*2008"):
        SharedBytes.at(path, 2000)
    inode = Path(path).stat().st_ino
    del made
    assert not Path(path).exists() or Path(path).stat().st_ino != inode


def test_memory_that_is_short_is_an_error_before_anything_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    back = BackBuffer(MANIFEST)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UpdateFailed, match=rf"no shared memory for {MANIFEST.nbytes} bytes .*No space"):
        back.fill(1, hand_over(stream(1)))
    monkeypatch.undo()
    back.fill(1, hand_over(stream(1)))
    assert_same(contents(back), weights(1))


def test_processes_of_one_user_and_machine_share_memory() -> None:
    assert memory_domain() == memory_domain()
    assert memory_domain().endswith(f"/{os.getuid()}")


# ------------------------------------------------------------------------------------------ owners and followers


def found(copy: HostCopy) -> Receive:
    return lambda incoming: incoming.found(copy)


def copy_of(version: int, report: ReceiveReport) -> HostCopy:
    assert report.path is not None
    return HostCopy(version, report.path, report.checksum)


def received(back: BackBuffer, version: int, outgoing: OutgoingWeights | None = None) -> HostCopy:
    """The copy that ``back`` has once ``version`` has come, by default whole."""
    return copy_of(version, back.fill(version, hand_over(outgoing or stream(version))))


def delta(*versions: int) -> OutgoingWeights:
    """From the last but one of these versions to the last."""
    staged = Staged(MANIFEST, BUCKET, with_delta=True)
    for version in versions:
        staged.gather(version, windows(weights(version)))
    return staged.outgoing(versions[-1], to=versions[-2])


def test_of_four_on_a_machine_one_receives_and_all_load_from_its_memory() -> None:
    owner, *others = (BackBuffer(MANIFEST) for _ in range(4))
    memories = set()
    for version, outgoing in ((1, stream(1)), (2, stream(2)), (3, delta(2, 3))):
        report = owner.fill(version, hand_over(outgoing))
        assert report.nbytes > 0
        for other in others:
            mapped = other.fill(version, found(copy_of(version, report)))
            assert (mapped.nbytes, mapped.checksum) == (0, report.checksum)
        for back in (owner, *others):
            assert back.version == version
            assert_same(contents(back), weights(version))
            memories.add(Path(back.path).stat().st_ino)
        for back in (owner, *others):
            back.loaded()
            assert back.version is None
    assert len(memories) == 1


def test_memory_is_pinned_where_it_is_mapped_once_and_undone_when_another_takes_its_place() -> None:
    pinned: list[str] = []

    def pin(name: str) -> Callable[[torch.Tensor], Callable[[], None]]:
        def lock(memory: torch.Tensor) -> Callable[[], None]:
            assert memory.nbytes == MANIFEST.nbytes
            pinned.append(f"{name} pins")
            return lambda: pinned.append(f"{name} undoes that")

        return lock

    a, b = BackBuffer(MANIFEST, pin=pin("a")), BackBuffer(MANIFEST, pin=pin("b"))
    for version in (1, 2):
        b.fill(version, found(received(a, version)))
    assert pinned == ["a pins", "b pins"]
    received(b, 3)
    assert pinned[2:] == ["b undoes that", "b pins"]


@pytest.mark.parametrize("whole_version", [True, False])
def test_a_version_that_is_written_over_before_it_was_loaded_is_not_staged_any_more(whole_version: bool) -> None:
    owner, other = BackBuffer(MANIFEST), BackBuffer(MANIFEST)
    other.fill(1, found(received(owner, 1)))
    if whole_version:
        received(owner, 2)
    else:
        with pytest.raises(ValueError, match="no memory"):
            owner.fill(2, hand_over(GivesUp(stream(2), ValueError("no memory"))))
    assert other.version is None


def test_a_version_that_is_written_over_while_it_is_loaded_was_not_loaded() -> None:
    owner, other = BackBuffer(MANIFEST), BackBuffer(MANIFEST)
    other.fill(1, found(received(owner, 1)))
    loading = other.windows(BUCKET)
    next(loading)
    copy = received(owner, 2)
    list(loading)
    with pytest.raises(UpdateFailed, match="version 1 was written over"):
        other.loaded()
    assert other.version is None
    other.fill(2, found(copy))
    assert_same(contents(other), weights(2))
    other.loaded()


def test_a_copy_of_another_version_is_refused() -> None:
    owner, other = BackBuffer(MANIFEST), BackBuffer(MANIFEST)
    first = received(owner, 1)
    for copy in (first, HostCopy(2, first.path, first.checksum)):
        with pytest.raises(UpdateFailed, match=r"version 2 .*holds version"):
            other.fill(2, found(copy))
        assert other.version is None
    with pytest.raises(ValueError, match="no memory"):
        owner.fill(2, hand_over(GivesUp(stream(2), ValueError("no memory"))))
    with pytest.raises(UpdateFailed, match="which holds none"):
        other.fill(2, found(HostCopy(2, first.path, first.checksum)))


def test_who_received_may_load_from_others_and_receive_again_and_then_gets_everything() -> None:
    a, b = BackBuffer(MANIFEST), BackBuffer(MANIFEST)
    b.fill(1, found(received(a, 1)))
    a.fill(2, found(received(b, 2)))
    for version, outgoing in ((2, delta(1, 2)), (3, delta(2, 3))):
        with pytest.raises(UpdateFailed, match=r"nothing complete"):
            received(a, version, outgoing)
    b.fill(3, found(received(a, 3)))
    assert_same(contents(a), weights(3))
    assert_same(contents(b), weights(3))
    assert Path(a.path).stat().st_ino == Path(b.path).stat().st_ino
    b.fill(4, found(received(a, 4, delta(3, 4))))
    assert_same(contents(b), weights(4))


def test_who_receives_a_failed_version_does_not_write_over_what_another_process_has() -> None:
    a, b = BackBuffer(MANIFEST), BackBuffer(MANIFEST)
    b.fill(1, found(received(a, 1)))
    with pytest.raises(ValueError, match="no memory"):
        b.fill(2, hand_over(GivesUp(stream(2), ValueError("no memory"))))
    assert_same(contents(a), weights(1))


def test_tensors_in_place_cannot_be_read_from_a_copy() -> None:
    tensors = weights(0)
    target = InPlace(MANIFEST, Tensors(MANIFEST, whole(tensors)), window=128)

    def receive(incoming: IncomingWeights) -> None:
        incoming.found(received(BackBuffer(MANIFEST), 1))

    with pytest.raises(UpdateFailed, match=r"from a copy, .*rollout\.enable_dual_buffer"):
        target.fill(1, receive)
    assert not target.torn
    assert_same(tensors, weights(0))
