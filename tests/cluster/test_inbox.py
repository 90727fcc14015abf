"""The receiver's end of a link: the last meeting counts, however late an earlier one ends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from headway.cluster.roles import inbox
from headway.cluster.roles.inbox import WeightInbox
from headway.weights.transports.links import EndContext, Link


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
            assert goes_on.wait(10)
        return ends[link.transport]

    monkeypatch.setattr(inbox, "open_receiver", open_receiver)
    box = WeightInbox("rollout-0")
    first = asyncio.create_task(box.connect(Link("first", Path()), EndContext()))
    assert await asyncio.to_thread(began.wait, 10)
    await asyncio.wait_for(box.connect(Link("second", Path()), EndContext()), 60)
    goes_on.set()
    await first
    assert ends["first"].closed and not ends["second"].closed
    box.close()
    assert ends["second"].closed
