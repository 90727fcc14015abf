"""A trainer that takes the time of a real one. Nothing is computed: a step is a wait of known length.

ranks      train_step | forward_logprobs | gather | copy_state  one at a time
beside     send_gathered to any number of replicas, from the copy that gather made; save

The driver's own work for a batch counts as part of its first step.

`SimulatedTransport` brings weights to replicas:

    trainer    send(v, [a, b]) ──waits──┐                     ┌─ max(send, recv) ─▶ seconds of the send phase
    replica a  receive(a, v) ──waits────┼── all have come ──▶ ├─ max(send, recv) ── register ─▶ ReceiveReport
    replica b  receive(b, v) ──waits────┘                     └─ max(send, recv) ── register ─▶ ReceiveReport

Like a collective: the first to arrive waits for the others, and both ends of a transfer take as long as the slower.
A call that is cancelled while it waits leaves nothing behind. The other side goes on waiting, for a later call or until
its caller gives up: the time-out is the caller's.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from headway.data.interfaces.training import StepContext, StepReport
from headway.data.interfaces.weights import GatherReport, ReceiveReport, SendReport
from headway.data.types import Column, TrainSample
from headway.errors import RunError
from headway.planner.profiles.costs import Contention, Division, phase_seconds
from headway.planner.profiles.job_profile import TrainPoint, UpdateProfile
from headway.runtime.progress import Heartbeat

Address = tuple[str, int]
"""Name of a replica, and the version that is sent to it."""


class SimulatedTransport:
    """A simulated transport from one trainer to any number of replicas; transfers to several may run at once."""

    def __init__(self, update: UpdateProfile) -> None:
        self.corrupted: set[Address] = set()
        """Transfers that arrive with a wrong checksum: a fault that is injected."""
        self._nbytes = update.nbytes
        self._send_s = phase_seconds(update.send, update.nbytes)
        self._recv_s = phase_seconds(update.recv, update.nbytes)
        self._register_s = phase_seconds(update.register_, update.nbytes)
        # A call that is over, met or cancelled, counts as one that has not come.
        self._sends: dict[Address, tuple[asyncio.Future[None], Sequence[Address]]] = {}
        """Calls of `send` with all of their addresses, by each."""
        self._receives: dict[Address, asyncio.Future[None]] = {}

    async def send(self, version: int, receivers: Sequence[str]) -> float:
        """Meet all ``receivers`` and send to them. Returns the seconds of the send phase, without the waiting.

        Raises `RunError` while another call offers the same version to one of them.
        """
        addresses = [(name, version) for name in receivers]
        if taken := [address for address in addresses if address in self._sends and not self._sends[address][0].done()]:
            raise RunError(f"version {version} is being sent to {taken[0][0]} already; each transfer has one sender")
        complete = asyncio.get_running_loop().create_future()
        self._sends.update(dict.fromkeys(addresses, (complete, addresses)))
        self._begin_if_complete(complete, addresses)
        await complete
        await asyncio.sleep(max(self._send_s, self._recv_s))
        return self._send_s

    async def receive(self, name: str, version: int) -> ReceiveReport:
        """Meet the call that sends ``version`` to ``name``; receive and register.

        Raises `RunError` while ``name`` waits for the same version already.
        """
        address = (name, version)
        if address in self._receives and not self._receives[address].done():
            raise RunError(f"{name} waits for version {version} already; each transfer has one receiver")
        begun = self._receives[address] = asyncio.get_running_loop().create_future()
        if address in self._sends:
            self._begin_if_complete(*self._sends[address])
        await begun
        await asyncio.sleep(max(self._send_s, self._recv_s) + self._register_s)
        arrived = checksum(version) ^ (address in self.corrupted)
        return ReceiveReport(self._recv_s, self._register_s, self._nbytes, arrived)

    def _begin_if_complete(self, complete: asyncio.Future[None], addresses: Sequence[Address]) -> None:
        calls = [complete, *(self._receives[address] for address in addresses if address in self._receives)]
        if len(calls) == len(addresses) + 1 and not any(call.done() for call in calls):
            for call in calls:
                call.set_result(None)
            for address in addresses:
                del self._sends[address], self._receives[address]


def checksum(version: int) -> int:
    """Checksum of ``version``, the same at both ends as it depends on the number alone."""
    return zlib.crc32(b"weights of version %d" % version)


_STEP = StepReport(skipped=False, metrics={})
_COLUMN = Column(handle=None, index=0)
"""Placeholder for log-probs that nothing reads."""


@dataclass(eq=False, repr=False)
class SimulatedTrainer:
    """A simulated trainer: a worker and a `TrainEngine` that takes the time of a real one.

    Asked for two things at once, its ranks raise `RunError`; real ones would hang.
    """

    name = "trainer"

    cost: TrainPoint
    update: UpdateProfile
    transport: SimulatedTransport
    _: KW_ONLY
    ranks: int = 1
    """Number of data ranks that wait for the one with most of a step's work."""
    fetch_s: float = 0.0
    contention: Contention | None = None
    _owed_s: float = 0.0
    """Latency, in seconds, of a batch whose first step is still to come; 0 after that step."""
    _doing: str | None = None
    _computes: bool = False
    """True while the trainer computes, and does not wait for another process."""
    _copy: int | None = None
    """The version that the copy in host memory holds; None while it is being written, or before."""
    _sending: int = 0
    """Number of transfers of the copy that are under way."""

    def __post_init__(self) -> None:
        self._division = Division(self.ranks)
        self._gather_s = phase_seconds(self.update.gather, self.update.nbytes)

    async def begin_batch(self, mini_batches: Sequence[Sequence[TrainSample]]) -> None:
        """Divide the batch over the data ranks. They have no tokens, and hold none."""
        self._division.begin(mini_batches)
        self._owed_s = self.fetch_s

    async def end_batch(self) -> None:
        self._division.end()

    async def forward_logprobs(self, samples: Sequence[TrainSample]) -> list[Column]:
        seconds = self.cost.forward_token_s * self._division.tokens(samples)
        await self._compute("a forward pass", seconds, self.contention)
        return [_COLUMN] * len(samples)

    async def proximal_logprobs(self, samples: Sequence[TrainSample], version: int) -> list[Column]:
        return await self.forward_logprobs(samples)

    async def train_step(self, samples: Sequence[TrainSample], context: StepContext) -> StepReport:
        latency_s, self._owed_s = self._owed_s, 0.0
        step_s = self.cost.step_s + self.cost.token_s * self._division.tokens(samples)
        await self._compute("an optimizer step", latency_s + step_s, self.contention)
        return _STEP

    async def reach(self, receivers: Sequence[str]) -> None:
        """Do nothing: every receiver can be reached at any time."""

    async def send_weights(self, version: int, receivers: Sequence[str]) -> SendReport:
        await self._compute("gather", self._gather_s)
        with self._ranks("send"):  # not `computes`: it may wait for a receiver that hangs
            send_s = await self.transport.send(version, receivers)
        return SendReport(self._gather_s, send_s, self.update.nbytes, checksum(version))

    async def gather_weights(self, version: int) -> GatherReport:
        if self._sending:
            raise RunError(
                f"gather of version {version} would overwrite version {self._copy}, which is being sent to "
                f"{self._sending} replica(s); wait for them first"
            )
        self._copy = None  # before the wait: nothing may be sent from a copy that is half of each version
        await self._compute("gather", self._gather_s)
        self._copy = version
        return GatherReport(self._gather_s, self.update.nbytes)

    async def send_gathered(self, version: int, receivers: Sequence[str]) -> SendReport:
        if version != self._copy:
            names = ", ".join(receivers)
            raise RunError(f"version {version} cannot be sent to {names}: the copy holds version {self._copy}")
        self._sending += 1
        try:
            send_s = await self.transport.send(version, receivers)
        finally:
            self._sending -= 1
        return SendReport(0.0, send_s, self.update.nbytes, checksum(version))

    async def copy_state(self) -> None: ...

    async def save(self, path: Path, driver_state: Mapping[str, Any]) -> None:
        """Write nothing: no simulated run is resumed."""

    async def load(self, path: Path) -> dict[str, Any]:
        raise NotImplementedError

    async def export(self, path: Path) -> None:
        """Write nothing: a simulated trainer has no weights."""

    async def heartbeat(self) -> Heartbeat:
        """The trainer's heartbeat: work that takes time moves all the while, as a simulated clock passes."""
        return Heartbeat(self._doing or "", 0.0 if self._computes else math.inf)

    async def _compute(self, doing: str, seconds: float, contention: Contention | None = None) -> None:
        """Take ``seconds``, or longer while engines compute that are in ``contention`` with the trainer."""
        with self._ranks(doing, computes=True):
            await (asyncio.sleep(seconds) if contention is None else contention.train(seconds))

    @contextmanager
    def _ranks(self, doing: str, *, computes: bool = False) -> Iterator[None]:
        if self._doing is not None:
            raise RunError(f"the trainer's ranks were asked for {doing} during {self._doing}; they do one at a time")
        self._doing, self._computes = doing, computes
        try:
            yield
        finally:
            self._doing, self._computes = None, False
