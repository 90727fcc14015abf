from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest

from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.protocols import EndContext, Link, StoredVersion, open_receiver, open_sender
from headway.errors import UpdateFailed
from tests.engines.weights.ends import PROCESSES, Site, arrival
from tests.engines.weights.versions import MANIFEST, GivesUp, assert_same, contents, stream, weights


@pytest.fixture(scope="module", autouse=True)
def _older_objects_are_not_looked_through() -> None:
    """By each collection of `mapped`: there are a million of them, modules' and other tests'."""
    gc.collect()
    gc.freeze()


def mapped() -> int:
    """How much memory for weights this process maps: the same twice counts twice."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:headway-weights")


def test_when_there_is_no_room_nothing_stays_and_the_next_update_works(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ends = site.meet("shared_memory", "a")
    back, before = BackBuffer(MANIFEST), mapped()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        outcome = ends.update(1, stream(1), {"a": back})
    with pytest.raises(UpdateFailed, match=rf"no shared memory for {MANIFEST.nbytes} bytes .*No space left"):
        raise outcome.sent or AssertionError
    assert mapped() == before
    assert not ends.update(1, stream(1), {"a": back}).errors
    assert_same(contents(back), weights(1))


def test_all_versions_use_one_memory_and_closing_lets_go_of_it(site: Site) -> None:
    before, ends = mapped(), site.meet("shared_memory", "a")
    for version in (1, 2, 3):
        assert not ends.update(version, stream(version), {"a": BackBuffer(MANIFEST)}).errors
        assert mapped() == before + 2, "each end maps it"
    ends.sender.close()
    ends.receivers["a"].close()
    assert mapped() == before


def test_a_version_that_is_sent_again_leaves_what_is_still_being_read_alone(site: Site) -> None:
    ends = site.meet("shared_memory", "a")
    first = ends.sender.send(1, stream(1))
    with pytest.raises(ValueError, match="no memory"):
        ends.sender.send(1, GivesUp(stream(5), ValueError("no memory")))
    late = BackBuffer(MANIFEST)
    ends.fill("a", 1, late, first).result(60)
    assert_same(contents(late), weights(1))
    assert not ends.update(1, stream(1), {"a": late}).errors


def test_who_reads_a_version_that_the_next_one_has_overwritten_is_told_by_the_digests(site: Site) -> None:
    ends = site.meet("shared_memory", "a")
    first = ends.sender.send(1, stream(1))
    ends.sender.send(2, stream(2))
    back = BackBuffer(MANIFEST)
    with pytest.raises(UpdateFailed, match="not those that the trainer sent"):
        ends.fill("a", 1, back, first).result(60)
    assert back.version is None


def test_memory_that_its_sender_gave_up_is_not_read(site: Site) -> None:
    ends = site.meet("shared_memory", "a")
    stored = ends.sender.send(1, stream(1))
    ends.sender.close()
    with pytest.raises(UpdateFailed, match=r"/proc/\d+/fd/\d+ cannot be mapped|not those that the trainer"):
        ends.fill("a", 1, BackBuffer(MANIFEST), stored).result(60)


def test_two_senders_of_one_meeting_do_not_touch_each_others_files(site: Site) -> None:
    ends = site.meet("shared_memory", "a")
    first = ends.sender.send(1, stream(1))
    again = open_sender(ends.link, EndContext())
    assert again.send(2, stream(2)) is not None
    back = BackBuffer(MANIFEST)
    ends.fill("a", 1, back, first).result(60)
    assert_same(contents(back), weights(1))
    again.close()


def test_a_receiver_lets_go_of_what_earlier_senders_have_given_up(site: Site) -> None:
    before, ends = mapped(), site.meet("shared_memory", "a")
    for version in (1, 2):
        assert not ends.update(version, stream(version), {"a": BackBuffer(MANIFEST)}).errors
        ends.sender.close()
        ends.sender = open_sender(ends.link, EndContext())
    assert mapped() == before + 1


def _receive(link: Link, stored: StoredVersion) -> None:
    back = BackBuffer(MANIFEST)
    receiver = open_receiver(link, "a", EndContext())
    back.fill(1, arrival(receiver, 1, stored))
    assert_same(contents(back), weights(1))


def test_another_process_reads_what_was_sent_here(site: Site) -> None:
    """Starts a process that imports torch."""
    ends = site.meet("shared_memory", "a")
    stored = ends.sender.send(1, stream(1))
    process = PROCESSES.Process(target=_receive, args=(ends.link, stored), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0
