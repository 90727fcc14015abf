"""The keeper of groups: it makes their episodes with calls to replicas, and hands each group on when it is whole.

    generate ─▶ group ─▶ n episodes ─call─▶ Line ─▶ a replica
                  ▲            ▲                       │
      FinishedGroup            └────── FinishedCall ◀──┘

An episode of the program of one turn is one call with the prompt's ids. All of it runs on one event loop: the driver's
where roles run in its process, else that of an actor beside the replicas, so that tokens stay away from the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.concurrently import concurrently
from headway.data.types import FinishReason, GroupTokens, RowAt, RowTokens, SampledTokens, Trajectory, TrajectoryId
from headway.episodes.lines import CallEngine, Line
from headway.episodes.routing import Routes
from headway.errors import DataError, HeadwayError, WorkerDied
from headway.interfaces import Call, FinishedCall, FinishedGroup, GroupRequest, Priority, SamplingParams


@dataclass(slots=True, eq=False)
class _Group:
    """One group on its way."""

    request: GroupRequest
    inbox: asyncio.Queue[FinishedGroup | HeadwayError]
    """The queue of the `generate` call that asked for the group."""
    on: str | None
    """The one replica for all of its calls; None for any."""
    missing: int
    """Episodes that are not over."""
    home: str | None = None
    done: dict[int, tuple[Trajectory, FinishedCall]] = field(default_factory=dict)
    """Finished episodes by k."""
    aborted: bool = False

    def sampling(self, k: int) -> SamplingParams:
        """Sampling of episode ``k``: the baseline's is its own."""
        baseline = self.request.baseline
        return baseline if baseline is not None and k == self.request.n else self.request.sampling

    @property
    def oldest_version(self) -> int | None:
        """The oldest version in a finished call; None before the first token."""
        versions = [oldest for t, _ in self.done.values() if (oldest := t.oldest_version) is not None]
        return min(versions, default=None)


@dataclass(slots=True, eq=False)
class _Open:
    """A call that a replica has not finished."""

    group: _Group
    k: int
    call: Call
    replica: str


class GroupKeeper:
    """`headway.interfaces.Keeper` on the running event loop.

    Args:
        name: of the keeper, under which replicas know its calls.
        decode: token ids to text, the stop token included; None where tokens are only simulated.
    """

    def __init__(
        self,
        name: str,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.name = name
        self._decode = decode
        self._lines: dict[str, Line] = {}
        self._routes = Routes()
        self._groups: dict[_Group, None] = {}
        self._open: dict[int, _Open] = {}
        """Calls by number."""
        self._waiting: list[tuple[_Group, int]] = []
        """(group, k) of episodes whose call waits for a replica that takes calls."""
        self._calls = 0
        self._failures: asyncio.Queue[tuple[str, HeadwayError]] = asyncio.Queue()
        self._ended: HeadwayError | None = None

    # ------------------------------------------------------------------------------------- groups

    async def generate(
        self, requests: Sequence[GroupRequest], *, on: str | None = None
    ) -> AsyncGenerator[FinishedGroup, None]:
        """See `headway.interfaces.Keeper.generate`."""
        if self._ended is not None:
            raise self._ended
        if on is not None and on not in self._lines:
            raise WorkerDied(f"{on} is gone")
        inbox: asyncio.Queue[FinishedGroup | HeadwayError] = asyncio.Queue()
        groups = [_Group(request, inbox, on, request.episodes) for request in requests]
        missing = len(groups)
        for group in groups:
            self._start(group)
        try:
            while missing:
                finished = await inbox.get()
                if isinstance(finished, HeadwayError):
                    raise finished
                missing -= 1
                yield finished
        finally:
            self._drop(groups)

    async def abort(self, numbers: Sequence[int]) -> None:
        """See `headway.interfaces.Keeper.abort`."""
        wanted = frozenset(numbers)
        self._abort(group for group in self._groups if _trains(group) and group.request.number in wanted)

    async def abort_older_than(self, version: int) -> None:
        """See `headway.interfaces.Keeper.abort_older_than`."""
        self._abort(
            group
            for group in self._groups
            if _trains(group) and (oldest := group.oldest_version) is not None and oldest < version
        )

    # ------------------------------------------------------------------------------------- replicas

    async def join(self, replica: CallEngine) -> None:
        """See `headway.interfaces.Keeper.join`."""
        self._routes.add(replica.name, replica.slots)
        self._lines[replica.name] = Line(
            self.name,
            replica,
            on_finished=self._on_finished,
            on_refused=self._on_refused,
            on_failed=lambda name, error: self._failures.put_nowait((name, error)),
        )

    async def leave(self, replica: str) -> None:
        """See `headway.interfaces.Keeper.leave`."""
        if (line := self._lines.pop(replica, None)) is None:
            return
        self._routes.remove(replica)
        lost = [one for one in self._open.values() if one.replica == replica]
        for one in lost:
            del self._open[one.call.number]
        pinned = dict.fromkeys(one.group for one in lost if one.group.on == replica)
        for group in pinned:
            group.inbox.put_nowait(WorkerDied(f"{replica} is gone"))
        self._drop(pinned)
        for one in lost:
            if one.group in self._groups:
                self._ask(one.group, one.k)
        await line.close()

    async def route(self, replicas: Sequence[str]) -> None:
        """See `headway.interfaces.Keeper.route`."""
        self._routes.open(replicas)
        if self._routes.any:
            waiting, self._waiting = self._waiting, []
            for group, k in waiting:
                self._ask(group, k)

    async def failures(self) -> AsyncGenerator[tuple[str, HeadwayError], None]:
        """See `headway.interfaces.Keeper.failures`."""
        while True:
            yield await self._failures.get()

    def end(self, error: HeadwayError) -> None:
        """Raise ``error`` from `generate` from now on, calls under way included."""
        self._ended = error
        for inbox in dict.fromkeys(group.inbox for group in self._groups):
            inbox.put_nowait(error)
        self._drop(list(self._groups))

    async def close(self) -> None:
        """Leave all replicas."""
        lines, self._lines = self._lines, {}
        await concurrently(line.close() for line in lines.values())

    # ------------------------------------------------------------------------------------- episodes

    def _start(self, group: _Group) -> None:
        self._groups[group] = None
        for k in range(group.request.episodes):
            self._ask(group, k)

    def _ask(self, group: _Group, k: int) -> None:
        """Call the policy for episode ``k``, once some replica takes calls."""
        if group.aborted:
            self._over(group, k, None)
            return
        replica = self._replica_for(group)
        if replica is None:
            self._waiting.append((group, k))
            return
        self._calls += 1
        request = group.request
        call = Call(
            number=self._calls,
            trajectory=request.prompt.trajectory_id(k),
            input_ids=request.prompt.token_ids,
            sampling=group.sampling(k),
            priority=request.priority,
        )
        self._open[call.number] = _Open(group, k, call, replica)
        self._lines[replica].submit(call)

    def _replica_for(self, group: _Group) -> str | None:
        if group.on is not None:
            self._routes.count(group.on)
            return group.on
        if not self._routes.any:
            return None
        if group.home is None:
            group.home = self._routes.home()
        return self._routes.choose(group.home)

    def _on_finished(self, replica: str, batch: Sequence[FinishedCall]) -> None:
        for finished in batch:
            if (one := self._open.pop(finished.number, None)) is None:
                continue  # its group was dropped
            self._routes.finished(replica)
            if finished.finish_reason is FinishReason.ABORTED and not one.group.aborted:
                self._abort([one.group])
            self._over(one.group, one.k, finished, replica)

    def _on_refused(self, replica: str, calls: Sequence[Call], error: DataError) -> None:
        """Fail the groups of calls that an engine did not take: those of one message, which it takes whole or not."""
        groups = []
        for call in calls:
            if (one := self._open.pop(call.number, None)) is not None:
                self._routes.finished(replica)
                groups.append(one.group)
        for inbox in dict.fromkeys(group.inbox for group in groups):
            inbox.put_nowait(error)
        self._drop(groups)

    def _over(self, group: _Group, k: int, finished: FinishedCall | None, replica: str = "") -> None:
        """End episode ``k`` with its call, or without one where it was aborted before."""
        if group not in self._groups:
            return
        finished = _nothing() if finished is None else finished
        group.done[k] = (self._trajectory(group.request.prompt.trajectory_id(k), group, finished, replica), finished)
        group.missing -= 1
        if group.missing == 0:
            del self._groups[group]
            group.inbox.put_nowait(_finished_group(group))

    def _trajectory(self, id: TrajectoryId, group: _Group, finished: FinishedCall, replica: str) -> Trajectory:
        tokens, prompt_length = finished.tokens, len(group.request.prompt.token_ids)
        return Trajectory(
            id=id,
            replica=replica,
            text="" if tokens is None or self._decode is None else self._decode(tokens.ids.tolist()),
            prompt_length=prompt_length,
            length=finished.length,
            finish_reason=finished.finish_reason,
            version_spans=finished.version_spans,
            started=finished.started,
            finished=finished.finished,
            rows=(RowAt(id.k, prompt_length, finished.length),),
        )

    def _abort(self, groups: Iterable[_Group]) -> None:
        """End ``groups`` as they are: what replicas have of them comes back."""
        ending = {group for group in groups if not group.aborted}
        if not ending:
            return
        for group in ending:
            group.aborted = True
        waiting = [(group, k) for group, k in self._waiting if group in ending]
        self._waiting = [(group, k) for group, k in self._waiting if group not in ending]
        for one in self._open.values():
            if one.group in ending:
                self._lines[one.replica].abort(one.call.number)
        for group, k in waiting:
            self._over(group, k, None)

    def _drop(self, groups: Iterable[_Group]) -> None:
        """Forget ``groups``: nobody waits for them any more."""
        dropped = {group for group in groups if self._groups.pop(group, self) is not self}
        if not dropped:
            return
        self._waiting = [(group, k) for group, k in self._waiting if group not in dropped]
        for one in [one for one in self._open.values() if one.group in dropped]:
            del self._open[one.call.number]
            self._routes.finished(one.replica)
            if (line := self._lines.get(one.replica)) is not None:
                line.abort(one.call.number)


def _trains(group: _Group) -> bool:
    return group.request.priority is Priority.TRAINING


def _nothing() -> FinishedCall:
    """Result of an episode that was aborted before any replica had its call."""
    now = asyncio.get_running_loop().time()
    return FinishedCall(0, 0, [], FinishReason.ABORTED, now, now)


def _finished_group(group: _Group) -> FinishedGroup:
    trajectories, calls = zip(*(group.done[k] for k in range(group.request.episodes)), strict=True)
    prompt_ids = np.asarray(group.request.prompt.token_ids, np.int32)
    simulated = all(call.tokens is None for call in calls)
    return FinishedGroup(
        number=group.request.number,
        trajectories=trajectories,
        tokens=None if simulated else GroupTokens(tuple(_row(prompt_ids, call) for call in calls)),
    )


def _row(prompt_ids: NDArray[np.int32], call: FinishedCall) -> RowTokens:
    return RowTokens.answer(prompt_ids, call.tokens if call.tokens is not None else SampledTokens.nothing())
