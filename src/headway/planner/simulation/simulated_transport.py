"""Bringing weights from a simulated trainer to simulated replicas: who waits for whom, and how long each phase takes.

    trainer    send(v, [a, b]) ──waits──┐                     ┌─ max(send, recv) ─▶ seconds of the send phase
    replica a  receive(a, v) ──waits────┼── all have come ──▶ ├─ max(send, recv) ── register ─▶ ReceiveReport
    replica b  receive(b, v) ──waits────┘                     └─ max(send, recv) ── register ─▶ ReceiveReport

Like a collective: whoever comes first waits for the others, and both ends of a transfer are held for the slower one.
A call that is cancelled while it waits leaves nothing behind. The other side goes on waiting, for a later call or until
its caller gives up: the time-out is the caller's.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from headway.data.interfaces.weights import ReceiveReport
from headway.errors import RunError
from headway.planner.profiles.costs import phase_seconds
from headway.planner.profiles.job_profile import UpdateProfile

Address = tuple[str, int]
"""Name of a replica, and the version that is sent to it."""


@dataclass(slots=True, eq=False)
class _SendCall:
    """A call of `send` whose receivers have not all come."""

    addresses: Sequence[Address]
    absent: int
    complete: asyncio.Future[None]


class SimulatedTransport:
    """A simulated transport from one trainer to any number of replicas; transfers to several may run at once."""

    def __init__(self, update: UpdateProfile) -> None:
        self.corrupted: set[Address] = set()
        """Transfers that arrive with a wrong checksum: a fault that is injected."""
        self._nbytes = update.nbytes
        self._send_s = phase_seconds(update.send, update.nbytes)
        self._recv_s = phase_seconds(update.recv, update.nbytes)
        self._register_s = phase_seconds(update.register_, update.nbytes)
        self._calls: dict[Address, _SendCall] = {}
        """Calls that wait for a receiver, by its address."""
        self._arrived: dict[Address, asyncio.Future[None]] = {}
        """Receivers that wait for a transfer which has not begun."""

    async def send(self, version: int, receivers: Sequence[str]) -> float:
        """Meet all ``receivers`` and send to them. Returns the seconds of the send phase, without the waiting.

        Raises `RunError` while another call offers the same version to one of them.
        """
        addresses = [(name, version) for name in receivers]
        if taken := [address for address in addresses if self._call_of(address)]:
            raise RunError(f"version {version} is being sent to {taken[0][0]} already; each transfer has one sender")
        absent = sum(address not in self._arrived for address in addresses)
        call = _SendCall(addresses, absent, asyncio.get_running_loop().create_future())
        self._calls.update(dict.fromkeys(addresses, call))
        self._begin_if_complete(call)
        try:
            await call.complete
        except asyncio.CancelledError:
            self._withdraw(call)
            raise
        await asyncio.sleep(max(self._send_s, self._recv_s))
        return self._send_s

    async def receive(self, name: str, version: int) -> ReceiveReport:
        """Meet the call that sends ``version`` to ``name``; receive and register.

        Raises `RunError` while ``name`` waits for the same version already.
        """
        address = (name, version)
        if address in self._arrived and not self._arrived[address].cancelled():
            raise RunError(f"{name} waits for version {version} already; each transfer has one receiver")
        begun = asyncio.get_running_loop().create_future()
        self._arrive(address, begun)
        try:
            await begun
        except asyncio.CancelledError:
            self._leave(address, begun)
            raise
        await asyncio.sleep(max(self._send_s, self._recv_s) + self._register_s)
        arrived = checksum(version) ^ (address in self.corrupted)
        return ReceiveReport(self._recv_s, self._register_s, self._nbytes, arrived)

    # A cancelled task learns of it one turn of the loop after its future: until it withdraws or leaves, the future
    # alone says that it is gone.

    def _call_of(self, address: Address) -> _SendCall | None:
        call = self._calls.get(address)
        if call is not None and call.complete.cancelled():
            self._withdraw(call)
            return None
        return call

    def _withdraw(self, call: _SendCall) -> None:
        for address in call.addresses:
            if self._calls.get(address) is call:
                del self._calls[address]

    def _arrive(self, address: Address, begun: asyncio.Future[None]) -> None:
        is_new = address not in self._arrived
        self._arrived[address] = begun
        if (call := self._call_of(address)) is not None:
            call.absent -= is_new
            self._begin_if_complete(call)

    def _leave(self, address: Address, begun: asyncio.Future[None]) -> None:
        if self._arrived.get(address) is not begun:
            return  # its transfer had begun, or another call took its place
        del self._arrived[address]
        if (call := self._calls.get(address)) is not None:
            call.absent += 1

    def _begin_if_complete(self, call: _SendCall) -> None:
        if call.absent:
            return
        for address in call.addresses:
            if self._arrived[address].cancelled():
                self._leave(address, self._arrived[address])
        if call.absent:
            return
        self._withdraw(call)
        call.complete.set_result(None)
        for address in call.addresses:
            self._arrived.pop(address).set_result(None)


def checksum(version: int) -> int:
    """Checksum of ``version``, the same at both ends as it depends on the number alone."""
    return zlib.crc32(b"weights of version %d" % version)
