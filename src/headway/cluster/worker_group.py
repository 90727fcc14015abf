"""Worker groups: one role on several ranks, driven as one.

    @register(Dispatch.SPLIT)                    group.train_step(samples)
    def train_step(self, samples): …             ├─ rank 0: its share ─▶ result   (this one is returned)
                                                 └─ rank 1: its share ─▶ result

A role is a plain class; which methods can be called from outside, and how a call spreads over the ranks, is declared
where the method is written. How a call reaches a rank is the `Worker`'s business: Ray, or a thread of this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from headway.cluster.file_work import while_bytes_move
from headway.concurrently import concurrently
from headway.data.collate import split_by_tokens
from headway.data.types import Column, Handle, Sample
from headway.progress import Heartbeat

F = TypeVar("F", bound=Callable[..., Any])
_REGISTRATION = "__headway_registration__"


class Dispatch(StrEnum):
    """Way in which a call's arguments are distributed over the ranks."""

    ONE_TO_ALL = "one_to_all"
    """Pass the same arguments to every rank."""
    RANK_ZERO = "rank_zero"
    """Call rank zero alone."""
    SPLIT = "split"
    """Divide the first argument, a list of samples, over the ranks by token count."""


class Collect(StrEnum):
    """Way in which the caller gets the result of a call."""

    RANK_ZERO = "rank_zero"
    """Return rank zero's result: the ranks agree, or only rank zero's counts."""
    HANDLE = "handle"
    """Return a handle of rank zero's result; the value stays with the worker. For ``Dispatch.RANK_ZERO``."""
    COLUMNS = "columns"
    """Return one `Column` per sample, in order; each rank's arrays stay where they are. For ``Dispatch.SPLIT``."""


@dataclass(frozen=True, slots=True)
class Registration:
    dispatch: Dispatch
    collect: Collect
    files: str | None


def register(dispatch: Dispatch, collect: Collect = Collect.RANK_ZERO, *, files: str | None = None) -> Callable[[F], F]:
    """Make a role's method callable through its `WorkerGroup`. The method may be a coroutine function.

    ``files`` describes a method's work with files, of which it gets the path. The call of such a method fails when
    bytes no longer move (see `file_work.while_bytes_move`).
    """
    if collect is Collect.COLUMNS and dispatch is not Dispatch.SPLIT:
        raise ValueError(f"columns are collected from split samples only, not with dispatch {dispatch!r}")
    if collect is Collect.HANDLE and dispatch is not Dispatch.RANK_ZERO:
        raise ValueError(f"a handle is that of rank zero's result alone, not with dispatch {dispatch!r}")

    def mark(method: F) -> F:
        setattr(method, _REGISTRATION, Registration(dispatch, collect, files))
        return method

    return mark


def registered(role: type) -> dict[str, Registration]:
    """Return the registration of every method that `register` marked, by name, inherited ones included."""
    marked = {name: getattr(getattr(role, name), _REGISTRATION, None) for name in dir(role)}
    return {name: registration for name, registration in marked.items() if registration is not None}


class Peer(Protocol):
    """A worker as others call it many times a second, wherever they run: each call costs tens of microseconds.

    Can be pickled where they are different processes.
    """

    async def call(self, method: str, *args: Any) -> Any:
        """Call the method and bring its result here."""

    def each(self, method: str, *args: Any, apart_s: float = 0.0) -> AsyncGenerator[Any, None]:
        """Yield what the method, an asynchronous generator, yields. Leaving it ends it where it runs.

        ``apart_s``: least seconds between two items of another process; an iterator that batches gathers meanwhile.
        """

    def close(self) -> None:
        """Call no more. Open calls fail."""


class PeerPart:
    """One of the roles of a peer that runs several, as a peer of its own."""

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
    """Worker, wherever it runs. Calls raise `WorkerDied` when its process ends, and otherwise what the role raised."""

    name: str

    async def up(self) -> None:
        """Wait until the worker can be called."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call the role's method and return its result."""

    async def keep(self, method: str, *args: Any) -> Handle[Any]:
        """Run the role's method to its end and return a handle of its result, which stays with the worker."""

    def peer(self) -> Peer:
        """Return the worker as it is called many times a second, by other workers or by the driver."""

    async def heartbeat(self) -> Heartbeat:
        """Return a description of what the worker does, at once, also while it computes."""

    async def died(self) -> NoReturn:
        """Wait until the worker's process ends, and raise `WorkerDied`."""

    async def lost(self) -> NoReturn:
        """Wait like `died`; raise also when the worker's machine stops answering, which other signs may show later."""

    async def kill(self) -> None:
        """End the worker whatever it is doing, and return when it is gone. Pending calls fail."""


class PartOf:
    """Worker for one ``part`` of another worker that runs several roles."""

    def __init__(self, worker: Worker, part: str, name: str) -> None:
        self.name = name
        self._worker = worker
        self._part = part

    async def up(self) -> None:
        await self._worker.up()

    async def call(self, method: str, *args: Any) -> Any:
        return await self._worker.call(f"{self._part}.{method}", *args)

    async def keep(self, method: str, *args: Any) -> Handle[Any]:
        return await self._worker.keep(f"{self._part}.{method}", *args)

    def peer(self) -> Peer:
        return PeerPart(self._worker.peer(), self._part)

    async def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of the whole worker, not of this part alone."""
        return await self._worker.heartbeat()

    async def died(self) -> NoReturn:
        await self._worker.died()

    async def lost(self) -> NoReturn:
        await self._worker.lost()

    async def kill(self) -> None:
        await self._worker.kill()


class WorkerGroup:
    """Ranks of one role. Each registered method is an attribute here; calling it starts the work on the ranks at once
    and returns a task: await it to block, or keep it as a future. The first rank that fails fails the call. Paths are
    sent absolute: workers may run in another directory.
    """

    def __init__(self, role: type, workers: Sequence[Worker]) -> None:
        if not workers:
            raise ValueError(f"a group of {role.__name__} needs at least one worker")
        self.workers = tuple(workers)
        self._role = role
        self._methods = registered(role)

    @property
    def name(self) -> str:
        return ", ".join(worker.name for worker in self.workers)

    def __getattr__(self, name: str) -> Callable[..., asyncio.Task[Any]]:
        registration = self.__dict__.get("_methods", {}).get(name)
        if registration is None:
            raise AttributeError(f"{name!r} is not a registered method of {self.__dict__.get('_role')}")
        return partial(self._start, name, registration)

    def call(self, method: str, *args: Any) -> asyncio.Task[Any]:
        """Call the registered ``method`` by its name, as a `proxy` does."""
        task: asyncio.Task[Any] = getattr(self, method)(*args)
        return task

    def _start(self, method: str, registration: Registration, *args: Any) -> asyncio.Task[Any]:
        args = tuple(argument.absolute() if isinstance(argument, Path) else argument for argument in args)
        call = self._run(method, registration, args)
        if registration.files is not None:
            path = next(argument for argument in args if isinstance(argument, Path))
            call = while_bytes_move(call, self.workers, f"{registration.files} {path}")
        return asyncio.create_task(call, name=f"{self._role.__name__}.{method}")

    async def _run(self, method: str, registration: Registration, args: tuple[Any, ...]) -> Any:
        match registration.dispatch:
            case Dispatch.RANK_ZERO:
                first = self.workers[0]
                on_rank = first.keep if registration.collect is Collect.HANDLE else first.call
                return await on_rank(method, *args)
            case Dispatch.ONE_TO_ALL:
                return (await concurrently(worker.call(method, *args) for worker in self.workers))[0]
            case Dispatch.SPLIT:
                return await self._split(method, registration.collect, *args)

    async def _split(self, method: str, collect: Collect, samples: Sequence[Sample], *args: Any) -> Any:
        shares = split_by_tokens(samples, len(self.workers))
        calls: list[Coroutine[Any, Any, Any]] = []
        for worker, share in zip(self.workers, shares, strict=True):
            on_rank = worker.keep if collect is Collect.COLUMNS else worker.call
            calls.append(on_rank(method, [samples[i] for i in share], *args))
        results = await concurrently(calls)
        if collect is Collect.RANK_ZERO:
            return results[0]
        columns: dict[int, Column] = {}
        for handle, share in zip(results, shares, strict=True):
            columns.update((index, Column(handle, place)) for place, index in enumerate(share))
        return [columns[index] for index in range(len(samples))]
