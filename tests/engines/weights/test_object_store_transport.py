from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.protocols import EndContext, open_receiver, open_sender
from headway.errors import UpdateFailed
from tests.engines.weights.ends import Site, arrival
from tests.engines.weights.versions import MANIFEST, assert_same, contents, stream, weights


class Unreachable:
    """A store that does not answer from the ``after``-th call on, until it is back."""

    def __init__(self, site: Site, after: int) -> None:
        self._site = site
        self.left = after

    def _call(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TimeoutError("no answer for 5 s")

    def put(self, value: Any) -> Any:
        self._call()
        return self._site.objects.put(value)

    def fetch(self, handles: Sequence[Any]) -> list[Any]:
        self._call()
        return self._site.objects.fetch(handles)


def test_a_store_that_takes_nothing_more_fails_the_send_and_the_next_one_works(site: Site) -> None:
    store = Unreachable(site, after=2)
    ends = site.meet("object_store", "a", here=EndContext(put=store.put, fetch=store.fetch))
    back = BackBuffer(MANIFEST)
    outcome = ends.update(1, stream(1), {"a": back})
    with pytest.raises(UpdateFailed, match=r"store .*bucket 2: TimeoutError: no answer"):
        raise outcome.sent or AssertionError
    store.left = 1000
    outcome = ends.update(1, stream(1), {"a": back})
    assert outcome.sent is None and not outcome.errors
    assert_same(contents(back), weights(1))


def test_a_store_that_gives_nothing_fails_the_receiver_that_asked_and_it_can_ask_again(site: Site) -> None:
    store = Unreachable(site, after=1)
    link = site.link("object_store", "a", "b")
    stored = open_sender(link, site.here).send(1, stream(1))
    cut_off, fine = open_receiver(link, "a", EndContext(fetch=store.fetch)), open_receiver(link, "b", site.here)
    back, other = BackBuffer(MANIFEST), BackBuffer(MANIFEST)
    with pytest.raises(UpdateFailed, match=r"version 1: a .*bucket 1 .*: TimeoutError: no answer"):
        back.fill(1, arrival(cut_off, 1, stored))
    assert back.version is None
    other.fill(1, arrival(fine, 1, stored))
    store.left = 1000
    back.fill(1, arrival(cut_off, 1, stored))
    assert_same(contents(back), contents(other))


def test_an_object_of_another_length_is_no_bucket(site: Site) -> None:
    ends = site.meet("object_store", "a", here=EndContext(put=site.objects.put, fetch=lambda handles: [b"short"]))
    outcome = ends.update(1, stream(1), {"a": BackBuffer(MANIFEST)})
    with pytest.raises(UpdateFailed, match=r"bucket 0 has 5 bytes .*512"):
        raise outcome.errors["a"]


def test_versions_that_somebody_still_holds_can_be_received_late(site: Site) -> None:
    ends = site.meet("object_store", "a")
    stored_versions = [ends.sender.send(version, stream(version)) for version in (1, 2)]
    for version, stored in zip((1, 2), stored_versions, strict=True):
        back = BackBuffer(MANIFEST)
        ends.fill("a", version, back, stored).result(60)
        assert_same(contents(back), weights(version))


def test_who_was_given_no_stored_version_is_told_so(site: Site) -> None:
    ends = site.meet("object_store", "a")
    with pytest.raises(UpdateFailed, match=r"\ba .*version 1, .*nothing was sent"):
        ends.fill("a", 1, BackBuffer(MANIFEST), None).result(60)
