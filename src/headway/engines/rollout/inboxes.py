"""Inboxes, at which clients wait: batches of finished calls come from another thread, or the engine's end does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from headway.data.interfaces.generation import FinishedCall
from headway.errors import ClientGone, HeadwayError, RunError


@dataclass(slots=True, eq=False)
class CallInbox:
    """The inbox of one client, made and read on its event loop ``loop``, and filled through it."""

    client: str
    loop: asyncio.AbstractEventLoop
    batches: asyncio.Queue[Sequence[FinishedCall] | HeadwayError] = field(default_factory=asyncio.Queue)

    async def next(self) -> Sequence[FinishedCall]:
        """All calls that are done by now, one at least. Raises what the engine ended with, once they are returned."""
        done: list[FinishedCall] = []
        while not done or not self.batches.empty():
            batch = await self.batches.get()
            if isinstance(batch, HeadwayError):
                if not done:
                    raise batch
                self.batches.put_nowait(batch)  # the last thing in the inbox, for the next time
                break
            done += batch
        return done


class Inboxes:
    """The inboxes of one engine, by client. Each is there from the client's first word until it leaves."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._of: dict[str, CallInbox] = {}
        self._read: set[str] = set()

    def __len__(self) -> int:
        return len(self._of)

    def of(self, client: str) -> CallInbox:
        """The inbox of ``client``; a new one, on the running loop, where it has none."""
        inbox = self._of.get(client)
        if inbox is None:
            inbox = self._of[client] = CallInbox(client, asyncio.get_running_loop())
        return inbox

    def end(self, client: str) -> CallInbox | None:
        """Remove the inbox of ``client``, which is gone, and return it, if any; its reader gets an error."""
        inbox = self._of.pop(client, None)
        if inbox is not None:
            inbox.batches.put_nowait(ClientGone(f"rollout engine {self._engine}: {client!r} is gone"))
        return inbox

    @contextmanager
    def reading(self, client: str) -> Iterator[CallInbox]:
        """Context in which the inbox of ``client`` is read; there is none behind it.

        Raises `RunError` where it is read already: each batch comes once.
        """
        if client in self._read:
            raise RunError(f"rollout engine {self._engine}: finished({client!r}) is iterated over already")
        inbox = self.of(client)
        self._read.add(client)
        try:
            yield inbox
        finally:
            self._read.discard(client)
            self._of.pop(client, None)
