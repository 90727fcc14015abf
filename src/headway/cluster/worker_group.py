"""Worker groups: one role on several ranks, driven as one.

    @register(Dispatch.SPLIT)                    group.train_step(samples)
    def train_step(self, samples): …             ├─ rank 0: its share ─▶ result   (this one is returned)
                                                 └─ rank 1: its share ─▶ result

A role is a plain class. `register` marks a method as callable from outside, and declares how a call spreads over the
ranks. The `Worker` brings calls to a rank: by Ray, or by a thread of this process.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol, TypeVar, cast

from headway.cluster.machine.batch_cache import BatchShare
from headway.config.sizing.timeouts import END_KNOWN_S, FILE_QUIET_S, FILE_RATE, file_quiet_s
from headway.data.assignment import Cost, assign, by_group, split
from headway.data.interfaces.rollout import Completion, GenerateRequest
from headway.data.types import Column, Handle, TrainSample, TrajectoryId
from headway.errors import RunError, StallError
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.recovery.liveness import WorkerAnswers, ask
from headway.pipeline.recovery.run_monitor import SHORTEST_S
from headway.runtime.progress import Heartbeat, Living
from headway.runtime.task_groups import both, concurrently, failure_ignored

F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P")
T = TypeVar("T")
BETWEEN_BATCHES_S = 0.02
"""Smallest time between two batches, in seconds: an engine finishes calls in every step, and a process that wakes up
for each call takes cores from the next step."""
_REGISTRATION = "__headway_registration__"


class Dispatch(StrEnum):
    """Way in which a call's arguments are distributed over the ranks."""

    ONE_TO_ALL = "one_to_all"
    """Pass the same arguments to every rank."""
    RANK_ZERO = "rank_zero"
    """Call rank zero alone."""
    SPLIT = "split"
    """Divide the first argument, a list of samples, over the data ranks: by the assignment of the open batch, or on its
    own without one. See `headway.data.assignment`. The ranks of an inner mesh get the same samples."""


class Collect(StrEnum):
    """Way in which the caller gets the result of a call."""

    RANK_ZERO = "rank_zero"
    """Return rank zero's result: the ranks agree, or only rank zero's counts."""
    JOINED = "joined"
    """Return rank zero's result combined with those of the other ranks with a share: ``first.joined(others)``."""
    COLUMNS = "columns"
    """Return one `Column` per sample of the first argument, in order. Arrays stay on the ranks, with one handle per
    group, so that readers fetch single groups. Not for ``Dispatch.ONE_TO_ALL``."""


@dataclass(frozen=True, slots=True)
class Registration:
    dispatch: Dispatch
    collect: Collect
    files: str | None


def register(dispatch: Dispatch, collect: Collect = Collect.RANK_ZERO, *, files: str | None = None) -> Callable[[F], F]:
    """Make a role's method callable through its `WorkerGroup`. The method may be a coroutine function.

    ``files`` describes the work of a method that takes the path of files; None for other methods. Its call fails when
    bytes no longer move (see `while_bytes_move`).
    """

    def mark(method: F) -> F:
        setattr(method, _REGISTRATION, Registration(dispatch, collect, files))
        return method

    return mark


def registered(role: type) -> dict[str, Registration]:
    """Return name -> registration of every method that `register` marked, including inherited ones."""
    marked = {name: getattr(getattr(role, name), _REGISTRATION, None) for name in dir(role)}
    return {name: registration for name, registration in marked.items() if registration is not None}


class Peer(Protocol):
    """Fast client of a worker, for many calls per second: each call costs tens of microseconds.

    Can be pickled if callers are in other processes.
    """

    async def call(self, method: str, *args: Any) -> Any:
        """Call the method and return its result."""

    def each(self, method: str, *args: Any, apart_s: float = 0.0) -> AsyncGenerator[Any, None]:
        """Yield the items of the method, an asynchronous generator. Closing this generator closes it in the worker.

        ``apart_s``: smallest time between two items from another process, in seconds; the generator can gather a batch
        in between.
        """

    def close(self) -> None:
        """Close the client. Open calls fail."""


class PeerPart:
    """Peer for one role of a peer that has several roles."""

    def __init__(self, peer: Peer, part: str) -> None:
        self._peer = peer
        self._part = part

    async def call(self, method: str, *args: Any) -> Any:
        return await self._peer.call(f"{self._part}.{method}", *args)

    def each(self, method: str, *args: Any, apart_s: float = 0.0) -> AsyncGenerator[Any, None]:
        return self._peer.each(f"{self._part}.{method}", *args, apart_s=apart_s)

    def close(self) -> None:
        self._peer.close()


class Worker(Protocol):
    """Worker, local or remote. Calls raise `WorkerDied` when its process ends, and otherwise the role's own errors."""

    name: str

    async def up(self) -> None:
        """Wait until the worker can be called."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call the role's method and return its result."""

    async def keep(self, method: str, parts: Sequence[Sequence[int]], *args: Any) -> list[Handle[Any]]:
        """Run the role's method to its end. Its result, a list, stays with the worker. Returns a handle for each of
        ``parts``, which are lists of indices into the result.
        """

    def peer(self) -> Peer:
        """Return a fast client of the worker, for other workers and the driver."""

    async def heartbeat(self) -> Heartbeat:
        """Return a description of the worker's current work. It answers at once, also while it computes."""

    async def died(self) -> NoReturn:
        """Wait until the worker's process ends, and raise `WorkerDied`."""

    async def lost(self) -> NoReturn:
        """Wait like `died`; also raise when the worker is given up, because its machine does not answer or by
        `headway.pipeline.recovery.liveness`.
        """

    async def kill(self) -> None:
        """End the worker at once, and return when it is gone. Pending calls fail."""


class PartOf:
    """Worker for one ``part`` of another worker that runs several roles."""

    def __init__(self, worker: Worker, part: str, name: str) -> None:
        self.name = name
        self.whole = worker
        """Worker with several roles that this is a part of. It is one process, with one heartbeat."""
        self._part = part
        self.up, self.heartbeat = worker.up, worker.heartbeat
        self.died, self.lost, self.kill = worker.died, worker.lost, worker.kill

    async def call(self, method: str, *args: Any) -> Any:
        return await self.whole.call(f"{self._part}.{method}", *args)

    async def keep(self, method: str, parts: Sequence[Sequence[int]], *args: Any) -> list[Handle[Any]]:
        return await self.whole.keep(f"{self._part}.{method}", parts, *args)

    def peer(self) -> Peer:
        return PeerPart(self.whole.peer(), self._part)


class ReplicaCalls:
    """Calls to the engine of one replica: `headway.agents.episodes.request_dispatcher.CallEngine` over a `Peer`. Can be
    pickled."""

    def __init__(self, name: str, slots: int, peer: Peer) -> None:
        self.name = name
        self.slots = slots
        self._peer = peer

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        await self._peer.call("engine.submit", client, list(calls))

    def finished(self, client: str) -> AsyncGenerator[Sequence[Completion], None]:
        # In batches: a message for each step cost the episode worker and the engine more than its answers.
        return self._peer.each("engine.finished", client, apart_s=BETWEEN_BATCHES_S)

    async def abort(self, client: str, numbers: Sequence[int]) -> None:
        await self._peer.call("engine.abort", client, list(numbers))

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None:
        await self._peer.call("engine.release", list(trajectories))


def proxy(callee: Worker | Peer | WorkerGroup, protocol: type[P], *, part: str | None = None, **names: str) -> P:
    """Return ``callee`` as a ``protocol``, a class or a Protocol: each of its coroutine methods is a call, by position.

        engine = proxy(worker, RolloutEngine, part="engine")
        await engine.pause(OnUpdate.DRAIN)                      # worker.call("engine.pause", OnUpdate.DRAIN)
        critic = proxy(ranks, CriticEngine, train_step="critic_step")
        await critic.train_step(samples)                        # ranks.call("critic_step", samples)

    mypy checks names and arguments of the calls. Attributes and other methods are not available.

    Args:
        part: name of the part of the role that has the methods; None for the role itself.
        names: the protocol's name of a method -> the role's name, where they differ.
    """
    methods = [name for name, _ in inspect.getmembers(protocol, inspect.iscoroutinefunction)]
    prefix = f"{part}." if part else ""
    calls = {name: partial(callee.call, prefix + names.get(name, name)) for name in methods}
    return cast(P, SimpleNamespace(**calls))


class WorkerGroup:
    """Ranks of one role. Each registered method is an attribute here. Calling it starts the work on the ranks at once
    and returns a task: await it to block, or keep it as a future. The first rank that fails fails the call. Paths are
    sent absolute: workers may run in another directory.

    Between `begin_batch` and `end_batch`, calls must pass samples of that batch: in every call each rank gets the
    samples of the episodes assigned to it, and caches the rows that it has read.

    With an inner mesh of k ranks, k neighbouring ranks are one data rank: they compute the same samples, and the first
    of them returns the results.
    """

    def __init__(self, role: type, workers: Sequence[Worker], cost: Cost | None = None, *, inner: int = 1) -> None:
        """Create the group. ``cost``: cost by which samples are balanced; ``inner``: number of ranks of an inner
        mesh.
        """
        self._inner = inner
        self._role = role
        self._methods = registered(role)
        self._cost = cost or Cost()
        self._owners: dict[TrajectoryId, int] | None = None
        """Episode -> data rank in the open batch; None without an open batch."""
        self._batch = 0
        """Number of batches begun so far."""
        self.consist_of(workers)

    def consist_of(self, workers: Sequence[Worker]) -> None:
        """Replace the workers by ``workers``, with no batch open."""
        self.workers = tuple(workers)
        self._meshes = [self.workers[first : first + self._inner] for first in range(0, len(workers), self._inner)]
        self._owners = None

    @property
    def name(self) -> str:
        return ", ".join(worker.name for worker in self.workers)

    def __getattr__(self, name: str) -> Callable[..., asyncio.Task[Any]]:
        # By `__dict__`: before `__init__` has run, as in a copy, `self._methods` would recurse without end.
        registration = self.__dict__.get("_methods", {}).get(name)
        if registration is None:
            raise AttributeError(f"{name!r} is not a registered method of {self.__dict__.get('_role')}")
        return partial(self._start, name, registration)

    def call(self, method: str, *args: Any) -> Awaitable[Any]:
        """Call the ``method`` by its name, as a `proxy` does."""
        called: Awaitable[Any] = getattr(self, method)(*args)
        return called

    async def begin_batch(self, mini_batches: Sequence[Sequence[TrainSample]]) -> None:
        """Assign a batch to the data ranks, which cache the rows they read until a call about another batch."""
        self._owners = await self._assigned(mini_batches)
        self._batch += 1

    async def end_batch(self) -> None:
        """Forget the batch's assignment: later calls are about other samples."""
        self._owners = None

    def _start(self, method: str, registration: Registration, *args: Any) -> asyncio.Task[Any]:
        # Made absolute here, since a worker may have another working directory.
        args = tuple(argument.absolute() if isinstance(argument, Path) else argument for argument in args)
        call = self._run(method, registration, args)
        if registration.files is not None:
            path = next(argument for argument in args if isinstance(argument, Path))
            call = while_bytes_move(call, self.workers, f"{registration.files} {path}")
        return asyncio.create_task(call, name=f"{self._role.__name__}.{method}")

    async def _run(self, method: str, registration: Registration, args: tuple[Any, ...]) -> Any:
        """Run a call. Raises `WorkerDied` if a rank's process has ended: in a collective the other ranks fail, too, and
        may report it before that end is known.
        """
        try:
            match registration.dispatch:
                case Dispatch.RANK_ZERO if registration.collect is Collect.COLUMNS:
                    return await self._columns(method, [range(len(args[0]))], *args)
                case Dispatch.RANK_ZERO:
                    return await self.workers[0].call(method, *args)
                case Dispatch.ONE_TO_ALL:
                    first, *others = await concurrently(worker.call(method, *args) for worker in self.workers)
                    return first.joined(others) if registration.collect is Collect.JOINED else first
                case Dispatch.SPLIT:
                    return await self._split(method, registration.collect, *args)
        except RunError as failure:
            if type(failure) is RunError and failure.__cause__ is not None:  # not an error of Headway
                # When a rank dies, collectives fail on the others: their error came first, and named the wrong rank.
                with suppress(TimeoutError):
                    # If a process has ended, this raises its death instead of the failure.
                    await asyncio.wait_for(concurrently(worker.died() for worker in self.workers), END_KNOWN_S)
            raise

    async def _split(self, method: str, collect: Collect, samples: Sequence[TrainSample], *args: Any) -> Any:
        shares = await self._shares(samples)
        if collect is Collect.COLUMNS:
            return await self._columns(method, shares, samples, *args)
        own = self._own(samples, shares)
        firsts = (mesh[0].call(method, share, *args) for mesh, share in zip(self._meshes, own, strict=True))
        (first, *others), _ = await both(concurrently(firsts), self._beside(method, own, *args))
        return first.joined(others) if others and collect is Collect.JOINED else first

    def _own(self, samples: Sequence[TrainSample], shares: Sequence[Sequence[int]]) -> list[list[TrainSample]]:
        """Return the samples of each share, as a `BatchShare` if a batch is open."""
        own = [[samples[i] for i in share] for share in shares]
        return own if self._owners is None else [BatchShare(share, self._batch) for share in own]

    async def _beside(self, method: str, shares: Sequence[Sequence[TrainSample]], *args: Any) -> None:
        """Call all but the first rank of each inner mesh, with the same ``shares``. Their results equal those of the
        first ranks, and are not returned.
        """
        await concurrently(
            worker.keep(method, [], share, *args)
            for mesh, share in zip(self._meshes, shares, strict=False)
            for worker in mesh[1:]
        )

    async def _columns(
        self, method: str, shares: Sequence[Sequence[int]], samples: Sequence[TrainSample], *args: Any
    ) -> list[Column]:
        """Call the data ranks with their ``shares`` of the samples, and return the columns of all samples."""
        own = self._own(samples, shares)
        parts = [by_group(of_rank) for of_rank in own]
        calls = (
            mesh[0].keep(method, of_parts, of_rank, *args)
            for mesh, of_parts, of_rank in zip(self._meshes, parts, own, strict=False)  # rank zero alone has one part
        )
        if self._methods[method].dispatch is Dispatch.SPLIT:
            kept, _ = await both(concurrently(calls), self._beside(method, own, *args))
        else:  # rank zero alone
            kept = await concurrently(calls)
        columns: dict[int, Column] = {}
        for share, of_parts, handles in zip(shares, parts, kept, strict=True):
            for part, handle in zip(of_parts, handles, strict=True):
                columns.update((share[at], Column(handle, place)) for place, at in enumerate(part))
        # Back in the order of the samples.
        return [columns[index] for index in range(len(samples))]

    async def _assigned(self, mini_batches: Sequence[Sequence[TrainSample]]) -> dict[TrajectoryId, int]:
        """Assign ``mini_batches`` in a thread: thousands of samples on a hundred ranks would block the event loop."""
        return await asyncio.to_thread(assign, mini_batches, len(self._meshes), self._cost)

    async def _shares(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        owners = await self._assigned([samples]) if self._owners is None else self._owners
        return split(samples, owners, len(self._meshes))  # a KeyError means samples of another batch


async def while_bytes_move(work: Coroutine[Any, Any, T], ranks: Sequence[Living], what: str) -> T:
    """Return the result of ``work`` with files by ``ranks``. ``what``: description of the work, with the path.

    Raises:
        StallError: no rank made progress for the longest time allowed. The ranks are not stopped.

    Work may take any time while bytes move. It may stand still for at most two minutes plus the time that a disk of 20
    MB/s takes for the bytes so far (`file_quiet_s`), since all of these may have to leave the system's cache before the
    next byte moves.
    """

    def stuck(answers: WorkerAnswers) -> str:
        return (
            f"{what} is stuck: nothing was read or written for longer than {FILE_QUIET_S:g} s and 1 s for "
            f"each {FILE_RATE / 1e6:g} MB of it ({answers}). Look at the disk, or the file system of the "
            "path, and at whether it answers on the worker's machine"
        )

    return await while_ranks_move(work, ranks, FILE_QUIET_S, file_quiet_s, stuck)


async def while_ranks_move(
    work: Coroutine[Any, Any, T],
    ranks: Sequence[Living],
    quiet_s: float,
    with_files_s: Callable[[int], float],
    stuck: Callable[[WorkerAnswers], str],
) -> T:
    """Return the result of ``work`` by ``ranks``, which may stand still until `WorkerAnswers.deadline`.

    Raises `StallError` after that, with the message of ``stuck`` for the ranks' answers. The ranks are not stopped.
    """
    task = failure_ignored(asyncio.ensure_future(work))
    deadline = now() + quiet_s
    try:
        while not task.done():
            await asyncio.wait([task], timeout=max(SHORTEST_S, deadline - now()))
            if not task.done() and now() >= deadline:
                answers = await ask(ranks)
                deadline = answers.deadline(quiet_s, with_files_s)
                if not task.done() and now() >= deadline:  # checked again: it may have ended meanwhile
                    raise StallError(stuck(answers))
        return task.result()
    finally:
        task.cancel()
