"""Inboxes of clients: what finished meanwhile comes in one batch."""

from __future__ import annotations

import asyncio

import pytest

from headway.data.interfaces.rollout import Completion
from headway.data.types import FinishReason
from headway.engines.rollout.engine_base import ClientInbox
from headway.errors import RunError


def call(number: int) -> Completion:
    return Completion(number, 1, [], FinishReason.STOP, 0.0, 0.0)


async def test_batches_that_gathered_come_as_one():
    inbox = ClientInbox("episode-worker-0", asyncio.get_running_loop())
    for batch in ([call(1)], [call(2), call(3)]):
        inbox.batches.put_nowait(batch)
    assert [done.number for done in await inbox.next()] == [1, 2, 3]


async def test_the_end_of_the_engine_is_told_when_the_calls_before_it_have_come():
    inbox = ClientInbox("episode-worker-0", asyncio.get_running_loop())
    inbox.batches.put_nowait([call(1)])
    inbox.batches.put_nowait(RunError("over"))
    assert [done.number for done in await inbox.next()] == [1]
    with pytest.raises(RunError, match="over"):
        await inbox.next()
