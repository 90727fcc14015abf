"""Loading of weights: makes a received version the served one.

    double-buffered    stage │ halt ▶ activate ▶ probe ▶ serve ▶ release          paused for the swap alone
    one copy           halt ▶ stage ▶ activate ▶ probe ▶ serve ▶ release          paused for the transfer, too
    generates nothing  stage │ activate ▶ probe

A replica that receives into its only copy has no complete version until the transfer ends, and is not released before.
A replica that does not load within `Timeouts.load_s` is lost (`ReplicaPool.losing`). A probe is the log-probs of a few
fixed sequences. A checksum proves which bytes arrived; only a probe proves that an engine, which may fuse, pack and tie
weights, serves them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headway.errors import UpdateFailed
from headway.events import UpdatePhase
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.remote_workers import ReceiverClient, Replica, by_copy
from headway.pipeline.stage import WaitingFor
from headway.pipeline.update.pause_controller import ReplicaPause
from headway.pipeline.update.replica_pool import ReplicaPool
from headway.runtime.task_groups import concurrently

Probe = NDArray[np.float32]
"""Log-probs [N] of the probe's sequences, in nats."""


@dataclass(eq=False)
class WeightLoading:
    state: RunState
    pool: ReplicaPool
    waiting_for: WaitingFor
    on_loaded: Callable[[Replica, int], Awaitable[None]]
    """Coroutine function called with each replica that has loaded a version, before it serves the version."""

    _stopped: dict[str, ReplicaPause] = field(default_factory=dict, init=False)
    """Name -> pause of each replica that is halted for new weights."""

    async def make_ready(self, receivers: Sequence[ReceiverClient]) -> None:
        """Halt the replicas among ``receivers`` that receive weights into the memory from which they serve."""
        await concurrently(self._make_ready(receiver) for receiver in receivers)

    async def stand_down(self, receiver: ReceiverClient) -> None:
        """Undo `make_ready` for ``receiver``, to which nothing will be sent after all."""
        if isinstance(receiver, Replica) and receiver.name in self._stopped:
            del self._stopped[receiver.name]
            async with self.pool.losing():
                await self.pool.pauses.release(receiver, "load")

    async def load_all(
        self, receivers: Sequence[ReceiverClient], version: int, expected: Probe | None
    ) -> Sequence[ReplicaPause]:
        """Make ``receivers`` serve the staged ``version``, as `load` does. Returns the replicas' pauses.

        Receivers that load from one copy have the same bytes and share processors: for each version one of them, in
        turn, computes the probe. A joining receiver computes it, too.
        """
        joining = {replica.name for replica in self.pool.joining}
        probed = joining.union(same[version % len(same)].name for same in by_copy(receivers).values())
        pauses = await concurrently(
            self.load(receiver, version, expected if receiver.name in probed else None) for receiver in receivers
        )
        return [pause for pause in pauses if pause is not None]

    async def load(self, receiver: ReceiverClient, version: int, expected: Probe | None) -> ReplicaPause | None:
        """Make ``receiver`` serve the staged ``version``.

        Returns the pause in decoding; None if there was no pause or the receiver is gone.

        Raises `UpdateFailed` if log-probs differ from ``expected``: ``receiver`` then serves other weights.
        """
        async with self.pool.losing():
            if isinstance(receiver, Replica):
                return await self._swap(receiver, version, expected)
            await self._report(receiver, version, await self._activate(receiver, version), expected)
            self.pool.serve_other(receiver, version)
        return None

    async def _make_ready(self, receiver: ReceiverClient) -> None:
        if isinstance(receiver, Replica) and not receiver.engine.capabilities.double_buffered:
            async with self.pool.losing():
                await self._stop(receiver)

    async def _stop(self, replica: Replica) -> None:
        with self.waiting_for(f"{replica.name} to {self.pool.pauses.policy}"):
            self._stopped[replica.name] = await self.pool.pauses.halt(replica, "load")

    async def _swap(self, replica: Replica, version: int, expected: Probe | None) -> ReplicaPause:
        if replica.name not in self._stopped:
            await self._stop(replica)
        stopped = self._stopped.pop(replica.name)
        seconds = await self._activate(replica, version)
        check = None if expected is None else partial(self._report, replica, version, 0.0, expected)
        asleep = self.pool.pauses.defer(replica, "load", check)  # on shared devices: it cannot compute yet
        await self._report(replica, version, seconds, None if asleep else expected)
        # Before the version is served, which admits further groups: a wave would start beside the validation.
        await self.on_loaded(replica, version)
        self.pool.serve(replica, version)
        await self.pool.pauses.release(replica, "load")
        assert stopped.stopped is not None, f"{replica.name} was halted, and has not stopped"
        stopped.stall_s = now() - stopped.stopped
        return stopped

    async def _activate(self, receiver: ReceiverClient, version: int) -> float:
        with self.waiting_for(f"{receiver.name} to load"):
            return await receiver.activate(version)

    async def _report(self, receiver: ReceiverClient, version: int, seconds: float, expected: Probe | None) -> None:
        difference = await self._difference(receiver, version, expected)
        self.state.emit(
            UpdatePhase(
                time=now(),
                version=version,
                phase="load",
                where=receiver.name,
                seconds=seconds,
                probe_difference=difference,
            )
        )

    async def _difference(self, receiver: ReceiverClient, version: int, expected: Probe | None) -> float | None:
        """Return the largest difference from the probe ``expected``, in nats; None without a probe.

        Raises `UpdateFailed` if the difference exceeds the tolerance or log-probs are not finite.
        """
        if expected is None:
            return None
        with self.waiting_for(f"{receiver.name} to compute the log-probs of the probe"):
            served = await receiver.probe()
        if served is None:
            return None
        who = f"{receiver.name} serves something else than version {version}, which it received"
        if served.shape != expected.shape:
            raise UpdateFailed(f"{who}: its probe has shape {served.shape}, the trainer's {expected.shape}")
        if not np.isfinite(expected).all():
            raise UpdateFailed(
                f"training diverged: with the weights of version {version} the trainer itself computes log-probs of "
                "the probe that are not finite; lower actor.optim.lr"
            )
        differences = np.abs(served.astype(np.float64) - expected)
        largest = float(differences.max(initial=0.0))
        tolerance = self.pool.probe_tolerance(receiver.name)
        if not largest <= tolerance:  # also true for NaN
            raise UpdateFailed(
                f"{who}: log-probs of the {differences.size} tokens of the probe differ from the trainer's by up to "
                f"{largest:.3g} nats, {float(differences.mean()):.3g} on average; rounding explains at most "
                f"{tolerance:g}. The engine puts weights in the wrong place, or the models are not the same"
            )
        return largest
