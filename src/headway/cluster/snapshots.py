"""Snapshots: the state of each training rank, as in a checkpoint, in the memory of an episode worker.

    rank: its copy in host memory ──chunks──▶ episode worker ──chunks──▶ the rank that was started in its place

If possible that is on another machine than the rank; else the snapshot outlives processes, but not the machine. There
are two snapshots of a rank at most: the older one goes when the newer one of every rank is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from headway.cluster.worker_group import Peer, Worker, WorkerGroup
from headway.config.sizing.timeouts import SNAPSHOT_S
from headway.errors import HeadwayError, RunError, WorkerDied, said_by
from headway.runtime.task_groups import concurrently

if TYPE_CHECKING:
    from headway.engines.train.fsdp.learner import Learner

CHUNK = 2**20
"""Number of bytes that are sent at once: an episode worker's event loop takes them in milliseconds."""


class SnapshotMemory:
    """The episode worker's end: chunks of ranks' snapshots.

    Example:
        >>> memory = SnapshotMemory()
        >>> asyncio.run(memory.put(0, 3, 0, b"weights"))
        >>> asyncio.run(memory.keep_only([3]))
        >>> asyncio.run(memory.get(0, 3, 0))
        b'weights'
    """

    def __init__(self) -> None:
        self._chunks: dict[tuple[int, int, int], bytes] = {}

    async def put(self, rank: int, version: int, index: int, data: bytes) -> None:
        """Keep chunk ``index`` of a rank's snapshot."""
        self._chunks[rank, version, index] = data

    async def get(self, rank: int, version: int, index: int) -> bytes | None:
        """Return chunk ``index`` of a rank's snapshot; None where it is not here."""
        return self._chunks.get((rank, version, index))

    async def keep_only(self, versions: Sequence[int]) -> None:
        """Forget all snapshots but those of ``versions``."""
        self._chunks = {key: data for key, data in self._chunks.items() if key[1] in versions}


class RankSnapshot:
    """Rank's end: sends the copy of its state, and brings it back. Raises `RunError` where that fails."""

    def __init__(self) -> None:
        self.learners: list[Learner] = []

    async def send(self, rank: int, version: int, holder: Peer) -> None:
        """Send the copy."""
        # As bytes: a memoryview cannot be pickled, and a holder in this process would see the next copy in it.
        await self._each(holder, lambda i, chunk: holder.call("snapshots.put", rank, version, i, bytes(chunk)))

    async def fetch(self, rank: int, version: int, holder: Peer) -> None:
        """Set the copy to a snapshot."""

        async def get(index: int, chunk: memoryview) -> None:
            data: bytes | None = await holder.call("snapshots.get", rank, version, index)
            if data is None or len(data) != len(chunk):
                raise RunError("its episode worker does not have it")
            chunk[:] = data

        for learner in self.learners:
            await asyncio.to_thread(learner.copy_state)  # makes the memory that the chunks are written into
        await self._each(holder, get)

    def restore(self) -> None:
        """Set the state to the copy."""
        for learner in self.learners:
            learner.restore_copy()

    async def _each(self, holder: Peer, do: Callable[[int, memoryview], Awaitable[object]]) -> None:
        try:
            with ExitStack() as copies:
                views = [view for one in self.learners for view in copies.enter_context(one.copy_bytes())]
                chunks = (view[start : start + CHUNK] for view in views for start in range(0, len(view), CHUNK))
                for index, chunk in enumerate(chunks):
                    async with asyncio.timeout(SNAPSHOT_S):
                        await do(index, chunk)
        except TimeoutError:
            raise RunError(f"a megabyte was not through within {SNAPSHOT_S:g} s") from None
        except HeadwayError as error:  # a holder's death must not pass for this rank's
            raise RunError(said_by(error)) from None
        finally:
            holder.close()


class Snapshots:
    """Driver's end: `headway.pipeline.recovery.checkpoint_manager.SnapshotStore` over ranks and episode workers."""

    def __init__(self, ranks: WorkerGroup, holders: Callable[[], Sequence[Worker]]) -> None:
        """Set up. ``holders``: returns the present episode workers."""
        self._ranks = ranks
        self._holders = holders
        self._kept: list[Worker] = []
        """Episode worker that holds each rank's snapshot."""
        self._versions: list[int] = []
        """Version of the snapshot that is complete, if there is one."""

    async def keep(self, version: int) -> bool:
        machines = await self._make_room()
        here = await concurrently(rank.call("lookout.place") for rank in self._ranks.workers)
        kept: list[Worker] = []
        for index, machine in enumerate(here):
            others = [holder for holder, there in machines.items() if there != machine] or list(machines)
            kept.append(others[index % len(others)])
        await self._on_all("send", version, kept)
        # Not before all ranks have sent: until then the snapshot before is the only whole one.
        self._versions, self._kept = [version], kept
        await self._make_room()
        return all(machines[holder] != machine for holder, machine in zip(kept, here, strict=True))

    async def load(self, version: int) -> None:
        if len(self._kept) != len(self._ranks.workers):
            raise RunError(f"it is of {len(self._kept)} ranks")
        await self._on_all("fetch", version, self._kept)
        await concurrently(rank.call("snapshot.restore") for rank in self._ranks.workers)

    async def _on_all(self, step: str, version: int, holders: Sequence[Worker]) -> None:
        """Take a step on all ranks, to its end: one whose copy is still being sent could make no other one."""
        at = enumerate(zip(self._ranks.workers, holders, strict=True))
        calls = [rank.call(f"snapshot.{step}", index, version, holder.peer()) for index, (rank, holder) in at]
        failures = [failure for failure in await asyncio.gather(*calls, return_exceptions=True) if failure is not None]
        # A death first: by it ranks are started again, and other failures may be its doing.
        for failure in sorted(failures, key=lambda failure: not isinstance(failure, WorkerDied)):
            raise failure

    async def _make_room(self) -> dict[Worker, str]:
        """Have holders forget all but the complete snapshot. Returns the machines of those that answer."""

        async def room(holder: Worker) -> str:
            async with asyncio.timeout(SNAPSHOT_S):
                await holder.call("snapshots.keep_only", self._versions)
                machine: str = await holder.call("lookout.place")
                return machine

        holders = self._holders()
        answers = await asyncio.gather(*map(room, holders), return_exceptions=True)  # those that fail are passed over
        found = {holder: answer for holder, answer in zip(holders, answers, strict=True) if isinstance(answer, str)}
        if not found:
            raise RunError("no episode worker answers")
        return found
