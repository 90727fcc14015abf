"""A process group made from a store, by and for its members alone: torch.distributed's default group is not touched.

    rank 0 (the sender) hosts the store ─┐
    every rank: connect(address, prefix, rank) ─▶ Gloo or NCCL group of ``size`` ranks

A group in which a collective failed stays broken; a new one is made under another prefix (``generation``).

A member may cut its group's connections (`cut`). Gloo ends a collective that is under way only when its time is up,
whatever it is told meanwhile: a member whose machine lost its power, and says nothing more, keeps all the others
waiting for that long. A connection that was cut fails at once, at both ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from headway.devices import kind_of
from headway.engines.weights.protocols import Link
from headway.errors import UpdateFailed, boundary

Endpoint = tuple[str, int]
"""IP address and port of one end of a connection."""
DESCRIPTORS = Path("/proc/self/fd")
"""The folder of this process's file descriptors, on Linux."""
_making = Lock()
"""Lock that is held while a device is made: two made at once could not tell their listeners apart."""


def device_and_listener(host: str | None) -> tuple[Any, Endpoint | None]:
    """Make a Gloo device at the address ``host``, and find where it listens for the group's other members.

    None where that cannot be told.
    """
    # One at a time: with another thread's listener beside it this one's could not be told, and `cut` would miss it.
    with _making:
        before = _listeners()
        if host is None:
            device = ProcessGroupGloo.create_default_device()
        else:
            device = ProcessGroupGloo.create_device(hostname=host)
        new = _listeners() - before
    return device, new.pop() if len(new) == 1 else None


def cut(own: Endpoint, others: set[Endpoint]) -> None:
    """Shut down every connection of this process that came in at ``own``, or went to one of ``others``."""
    for connection in _tcp_sockets():
        with suppress(OSError):  # it is not connected, or not any more
            peer = connection.getpeername()[:2]  # a listener has none, and Gloo ends the process without it
            if peer in others or connection.getsockname()[:2] == own:
                connection.shutdown(socket.SHUT_RDWR)


def _listeners() -> set[Endpoint]:
    return {
        connection.getsockname()[:2]
        for connection in _tcp_sockets()
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _tcp_sockets() -> Iterator[socket.socket]:
    """TCP sockets of this process, each as a duplicate that is closed before the next one is yielded."""
    entries = DESCRIPTORS.iterdir() if DESCRIPTORS.is_dir() else ()  # there are none on other systems than Linux
    for descriptor in (int(entry.name) for entry in entries if entry.is_socket()):
        # As a duplicate: the number itself may be closed meanwhile, and become another connection's.
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6):
                yield found


def prefix_of(link: Link) -> str:
    """Prefix of the store's keys: no other group of a run has the same."""
    return f"weights/{link.generation}/{'+'.join(link.receivers)}"


class StoreGroup:
    """One rank's membership in a new process group of a link's sender (rank 0) and its receivers, in their order.

    Collectives block and raise torch's errors. The link's device chooses the backend: NCCL for ``cuda``, Gloo for
    ``cpu``.
    """

    def __init__(self, link: Link, rank: int, host: str | None = None) -> None:
        """Join as ``rank``; blocks until all have joined.

        ``host``: the address under which the other members reach this one (Gloo only; None: this machine's own choice).
        """
        assert link.address is not None
        self.members = (link.sender, *link.receivers)
        self.rank = rank
        self.device = torch.device(link.device)
        self._kind = kind_of(link.device)
        self._timeout = timedelta(seconds=link.timeout_s)
        self._listens: Endpoint | None = None
        """The endpoint at which the others connect to this rank (Gloo only), as far as it is known."""
        at = f"{link.address[0]}:{link.address[1]}"
        with boundary(f"{self.members[rank]} cannot reach the store at {at}", UpdateFailed):
            self._store = join_store(link.address, prefix_of(link), link.timeout_s)
        self._group = self._form(host)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast from rank 0 to all others, in place; returns when this rank's part is done."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._finish(self._alive().broadcast([tensor], options))

    def meet(self) -> None:
        """Wait until every member has called this."""
        self._finish(self._alive().allreduce([torch.ones(1, dtype=torch.int64, device=self.device)]))

    def note(self, progress: str) -> None:
        """Store in ``progress`` how far this rank is, for `behind`."""
        self._store.set(f"progress/{self.rank}", progress)

    def behind(self, progress: str) -> list[str]:
        """Names of the members that have not noted ``progress``, as far as is known; rank 0 asks, after a failure."""
        there = progress.encode()
        return [n for rank, n in enumerate(self.members) if rank > 0 and self._read(f"progress/{rank}") != there]

    def close(self) -> None:
        """Leave the group: collectives that others have in flight fail at once."""
        group, self._group = self._group, None
        if group is not None:
            self._cut()  # or a collective of its own that is under way would hold `abort` until its time is up
            group.abort()

    def _form(self, host: str | None) -> Any:
        size = len(self.members)
        until = monotonic() + self._timeout.total_seconds()
        self._store.set(f"joined/{self.rank}", "")
        try:
            # NCCL's members wait for each other without a limit: none goes there before all said that they come.
            self._store.wait([f"joined/{rank}" for rank in range(size)], self._timeout)
            if (group := self._kind.own_group(self._store, self.rank, size, self._timeout)) is not None:
                self._prove(group, until - monotonic())
                return group
            device, self._listens = device_and_listener(host)
            # Before the group forms: where a member hangs, the others cut their connections to these addresses.
            self._store.set(f"listens/{self.rank}", " ".join(map(str, self._listens or ())))
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout, options._threads, options._devices = self._timeout, 1, [device]
            return ProcessGroupGloo(self._store, self.rank, size, options)
        except RuntimeError as cause:
            missing = [name for rank, name in enumerate(self.members) if self._read(f"joined/{rank}") is None]
            raise UpdateFailed(
                f"{self.members[self.rank]} waited {self._timeout.total_seconds():g} s for "
                f"{', '.join(missing) or 'the others'} to join the group that carries weights: {cause}"
            ) from cause

    def _prove(self, group: Any, limit_s: float) -> None:
        """Make one collective, of which NCCL's members connect. Raises the failure.

        The connecting call takes no time-out and does not return before all are there. It is left behind in a thread
        when a member died meanwhile.
        """
        failed: list[BaseException] = []
        token = torch.ones(1, dtype=torch.int64, device=self.device)

        def meet() -> None:
            try:
                group.allreduce([token]).wait(self._timeout)
            except BaseException as cause:  # raised below, in the thread that asked
                failed.append(cause)

        # Not in this thread: NCCL's call takes no time limit, and for a dead member it never returns.
        thread = Thread(target=meet, name="headway-weights-join", daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            failed.append(RuntimeError("one of them joined and does not answer"))
        if failed:
            group.abort()
            raise failed[0]

    def _cut(self) -> None:
        """Cut the group's connections, as far as they are known."""
        if self._listens is None:
            return
        others: set[Endpoint] = set()
        with suppress(RuntimeError):  # the store is gone with its machine; then what came in here is cut alone
            for rank in range(len(self.members)):
                if rank != self.rank and (said := self._read(f"listens/{rank}")):
                    address, _, port = said.decode().partition(" ")
                    others.add((address, int(port)))
        cut(self._listens, others)

    def _alive(self) -> Any:
        if self._group is None:
            raise UpdateFailed("the group that carries weights was left after a failure; connect a new generation")
        return self._group

    def _finish(self, work: dist.Work) -> None:
        # Gloo ends every operation itself when the group's time-out is over. A time-out given to `wait` would return
        # while the operation still reads or writes the tensor. NCCL's `wait` returns at once unless it is given one.
        if self._kind.collectives == "gloo":
            work.wait()
        else:
            work.wait(self._timeout)

    def _read(self, key: str) -> bytes | None:
        value: bytes | None = self._store.get(key) if self._store.check([key]) else None
        return value


def open_store(host: str, timeout_s: float) -> tuple[Any, int]:
    """Host a store on a free port of ``host``, for as long as the object lives: ``(store, port)``."""
    # Without waiting for others: they are given its address only when this has returned.
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return store, int(store.port)


def join_store(address: tuple[str, int], prefix: str, timeout_s: float) -> Any:
    """Open a client of the store at ``address``, with keys under ``prefix``."""
    host, port = address
    return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s)))
