"""Snapshots: the state of each training rank, as in a checkpoint, in the memory of an episode worker.

    rank: its copy in host memory ──chunks──▶ episode worker ──chunks──▶ the rank that was started in its place

If possible, the episode worker is on another machine than the rank; otherwise the snapshot outlives processes, but not
the machine. A rank has at most two snapshots: the older is dropped when the newer is complete for every rank.
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
"""Number of bytes sent at once: an episode worker's event loop handles them in milliseconds."""


class SnapshotMemory:
    """Episode worker's end: stores chunks of ranks' snapshots.

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
        """Return chunk ``index`` of a rank's snapshot; None if it is not stored here."""
        return self._chunks.get((rank, version, index))

    async def keep_only(self, versions: Sequence[int]) -> None:
        """Forget all snapshots but those of ``versions``."""
        self._chunks = {key: data for key, data in self._chunks.items() if key[1] in versions}


class RankSnapshot:
    """Rank's end: sends the copy of its state, and fetches it back. Raises `RunError` if that fails."""

    def __init__(self) -> None:
        self.learners: list[Learner] = []

    async def send(self, rank: int, version: int, holder: Peer) -> None:
        """Send the copy."""
        # As bytes: a memoryview cannot be pickled, and in the same process the next copy would overwrite it.
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
        except HeadwayError as error:  # a holder's death must not look like this rank's
            raise RunError(said_by(error)) from None
        finally:
            holder.close()


class Snapshots:
    """Driver's end: `headway.pipeline.recovery.checkpoint_manager.SnapshotStore` over ranks and episode workers."""

    def __init__(self, ranks: WorkerGroup, holders: Callable[[], Sequence[Worker]]) -> None:
        """Create the store. ``holders``: function that returns the current episode workers."""
        self._ranks = ranks
        self._holders = holders
        self._kept: list[Worker] = []
        """Episode worker that holds each rank's snapshot."""
        self._versions: list[int] = []
        """Version of the complete snapshot; empty without one."""

    async def keep(self, version: int) -> bool:
        machines = await self._make_room()
        here = await concurrently(rank.call("lookout.place") for rank in self._ranks.workers)
        kept: list[Worker] = []
        for index, machine in enumerate(here):
            others = [holder for holder, there in machines.items() if there != machine] or list(machines)
            kept.append(others[index % len(others)])
        await self._on_all("send", version, kept)
        # Only after all ranks have sent: until then the previous snapshot is the only complete one.
        self._versions, self._kept = [version], kept
        await self._make_room()
        return all(machines[holder] != machine for holder, machine in zip(kept, here, strict=True))

    async def load(self, version: int) -> None:
        if len(self._kept) != len(self._ranks.workers):
            raise RunError(f"it is of {len(self._kept)} ranks")
        await self._on_all("fetch", version, self._kept)
        await concurrently(rank.call("snapshot.restore") for rank in self._ranks.workers)

    async def _on_all(self, step: str, version: int, holders: Sequence[Worker]) -> None:
        """Run a step on all ranks and wait for all: a rank that is still sending its copy cannot make another one."""
        at = enumerate(zip(self._ranks.workers, holders, strict=True))
        calls = [rank.call(f"snapshot.{step}", index, version, holder.peer()) for index, (rank, holder) in at]
        failures = [failure for failure in await asyncio.gather(*calls, return_exceptions=True) if failure is not None]
        # `WorkerDied` first: it restarts the ranks, and may have caused the other failures.
        for failure in sorted(failures, key=lambda failure: not isinstance(failure, WorkerDied)):
            raise failure

    async def _make_room(self) -> dict[Worker, str]:
        """Make holders forget all but the complete snapshot. Returns each answering holder -> its machine."""

        async def room(holder: Worker) -> str:
            async with asyncio.timeout(SNAPSHOT_S):
                await holder.call("snapshots.keep_only", self._versions)
                machine: str = await holder.call("lookout.place")
                return machine

        holders = self._holders()
        answers = await asyncio.gather(*map(room, holders), return_exceptions=True)  # failing holders are skipped
        found = {holder: answer for holder, answer in zip(holders, answers, strict=True) if isinstance(answer, str)}
        if not found:
            raise RunError("no episode worker answers")
        return found
