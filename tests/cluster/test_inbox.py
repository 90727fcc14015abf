"""The receiver's ends of links: the last meeting counts, however late an earlier one ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from headway.cluster.roles import weight_roles
from headway.cluster.roles.weight_roles import WeightInbox
from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.outgoing_version import Stream
from headway.engines.weights.protocols import EndContext, HostCopy, Link, StoredVersion, WeightSink
from headway.engines.weights.weight_layout import Manifest
from headway.errors import UpdateFailed
from tests.engines.weights.versions import MANIFEST, assert_same, contents, hand_over, put, weights, windows

MEETING = Link("first", MANIFEST, ("rollout-0",), 1.0)


class End:
    def __init__(self, link: Link) -> None:
        self.link = link
        self.closed = False

    def close(self) -> None:
        self.closed = True


async def test_a_meeting_that_hangs_holds_no_later_one_up_and_takes_no_place_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: dict[str, End] = {}
    began, goes_on = threading.Event(), threading.Event()

    def open_receiver(link: Link, name: str, here: EndContext) -> Any:
        ends[link.transport] = End(link)
        if link.transport == "first":
            began.set()
            assert goes_on.wait(60)
        return ends[link.transport]

    monkeypatch.setattr(weight_roles, "open_receiver", open_receiver)
    box = WeightInbox("rollout-0", EndContext())
    first = asyncio.create_task(box.connect([MEETING]))
    assert await asyncio.to_thread(began.wait, 10)
    await asyncio.wait_for(box.connect([replace(MEETING, transport="second")]), 60)
    goes_on.set()
    await first
    assert ends["first"].closed and not ends["second"].closed
    box.close()
    assert ends["second"].closed


# ------------------------------------------------------------------------------------------ several senders

VALUES = weights(1)
LAYOUT = replace(MANIFEST, senders=3)


class Handing:
    """An end that hands over one share when all others are asked for theirs, too; or fails."""

    def __init__(self, share: Manifest, all_there: threading.Barrier, failure: Exception | None) -> None:
        self._share = share
        self._all_there = all_there
        self._failure = failure
        self.stored: StoredVersion | None = None
        self.closed = False

    def receive(self, version: int, sink: WeightSink, stored: StoredVersion | None) -> None:
        self.stored = stored
        self._all_there.wait(60)
        if self._failure is not None:
            raise self._failure
        put(Stream(self._share, windows(VALUES, self._share)), sink)

    def close(self) -> None:
        self.closed = True


async def opened(
    monkeypatch: pytest.MonkeyPatch, failures: Sequence[Exception | None] = (None,) * 3
) -> tuple[WeightInbox, list[Handing]]:
    """An inbox of three links, whose ends meet while they receive: they do so side by side."""
    together, shares = threading.Barrier(3), LAYOUT.shares()
    ends: list[Handing] = []

    def open_receiver(link: Link, name: str, here: EndContext) -> Any:
        ends.append(Handing(shares[len(ends)], together, failures[len(ends)]))
        return ends[-1]

    monkeypatch.setattr(weight_roles, "open_receiver", open_receiver)
    box = WeightInbox("rollout-0", EndContext())
    await box.connect([replace(MEETING, transport=str(number), manifest=share) for number, share in enumerate(shares)])
    return box, ends


async def test_shares_are_received_side_by_side_each_with_its_stored_version(monkeypatch: pytest.MonkeyPatch) -> None:
    box, ends = await opened(monkeypatch)
    stored_versions = tuple(StoredVersion(1, (), (), (f"actor-{number}",)) for number in range(3))
    back = BackBuffer(LAYOUT)
    with box.holding(1, stored_versions):
        report = back.fill(1, partial(box.receive, 1))
    assert report.nbytes == LAYOUT.nbytes
    assert_same(contents(back), VALUES)
    assert tuple(end.stored for end in ends) == stored_versions
    box.close()
    assert all(end.closed for end in ends)


@pytest.mark.parametrize("which", range(3))
async def test_a_version_of_which_one_share_fails_is_not_staged(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    failures = [UpdateFailed("a sender died") if number == which else None for number in range(3)]
    box, _ = await opened(monkeypatch, failures)
    back = BackBuffer(LAYOUT)
    with pytest.raises(UpdateFailed, match="a sender died"):
        back.fill(1, partial(box.receive, 1))
    assert back.version is None


async def test_what_another_process_has_is_mapped_and_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    box, ends = await opened(monkeypatch)
    owner, back = BackBuffer(LAYOUT), BackBuffer(LAYOUT)
    report = owner.fill(1, hand_over(*(Stream(share, windows(VALUES, share)) for share in LAYOUT.shares())))
    assert report.path is not None
    never_connected = WeightInbox("rollout-1", EndContext())
    for number, each in enumerate((box, never_connected)):
        with each.holding(1 + number, HostCopy(1, report.path, report.checksum)):
            if number:
                with pytest.raises(UpdateFailed, match="holds version 1"):
                    back.fill(2, partial(each.receive, 2))
            else:
                assert back.fill(1, partial(each.receive, 1)).nbytes == 0
                assert_same(contents(back), VALUES)
    assert [end.stored for end in ends] == [None] * 3
    with pytest.raises(UpdateFailed, match=r"rollout-1 .*version 3 before it was connected"):
        back.fill(3, partial(never_connected.receive, 3))


async def test_of_links_one_of_which_cannot_be_opened_none_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[End] = []

    def open_receiver(link: Link, name: str, here: EndContext) -> Any:
        if len(ends) == 2:
            raise UpdateFailed("nobody came")
        ends.append(End(link))
        return ends[-1]

    monkeypatch.setattr(weight_roles, "open_receiver", open_receiver)
    with pytest.raises(UpdateFailed, match="nobody came"):
        await WeightInbox("rollout-0", EndContext()).connect(
            [replace(MEETING, transport=str(number)) for number in range(3)]
        )
    assert [end.closed for end in ends] == [True, True]
