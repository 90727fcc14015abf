"""Inboxes, at which `generate` calls wait: groups come from another thread, each once, or the engine's end does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headway.errors import HeadwayError
from headway.interfaces import FinishedGroup


@dataclass(slots=True, eq=False)
class GroupInbox:
    """The inbox of one `generate` call. Made and read on its event loop; whoever fills it goes through ``loop``."""

    loop: asyncio.AbstractEventLoop
    missing: int
    """Groups that are yet to come."""
    groups: asyncio.Queue[FinishedGroup | HeadwayError] = field(default_factory=asyncio.Queue)

    @classmethod
    def of(cls, groups: int) -> GroupInbox:
        """Make an inbox for so many groups, on the running loop."""
        return cls(asyncio.get_running_loop(), groups)

    async def next(self) -> FinishedGroup:
        """The next group that is done. Raises what the engine ended with, if that comes instead."""
        group = await self.groups.get()
        if isinstance(group, HeadwayError):
            raise group
        self.missing -= 1
        return group
