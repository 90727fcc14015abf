"""Pool of a run's replicas: tracks which serve and which join, and handles losses.

    join() ──▶ JOINING ──serve(version)──▶ SERVING ──lose()──▶ gone; episode workers send its calls to others

A replica serves only after it has loaded the current version. It is gone when it has died or was fenced off, because it
did not answer or keeps failing; results of a fenced replica are ignored. After the loss of the last serving replica,
calls, groups and validations wait until another one has joined and loaded the trainer's version. The run ends if no
replica is left and none can be started. Receivers that generate nothing are restarted together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from headway.config.sizing.timeouts import Timeouts
from headway.data.interfaces.rollout import RolloutEngine
from headway.data.interfaces.weights import PolicyReceiver
from headway.errors import HeadwayError, NonFinite, RunError, WorkerDied
from headway.events import ReplicaJoined, ReplicaLost
from headway.pipeline.admission.pipeline_state import RunState, now
from headway.pipeline.remote_workers import ReceiverClient, Replica, WorkerUnavailable
from headway.pipeline.stage import Channel
from headway.pipeline.update.pause_controller import PauseController
from headway.runtime.task_groups import concurrently


class ReplicaPool:
    """Replicas of a run, and other receivers of its policy. Tells episode workers and `PauseController` which serve."""

    kind = "replica"
    then = "serves from the next version on, or at once where no other one does"

    def __init__(
        self,
        state: RunState,
        replicas: Sequence[RolloutEngine],
        others: Sequence[PolicyReceiver],
        pauses: PauseController,
        timeouts: Timeouts,
        *,
        replaceable: bool = False,
        probe_tolerance: Callable[[str], float] = lambda name: 1e-3,
    ) -> None:
        """Create the pool.

        Args:
            others: receivers that hold the policy and generate nothing.
            replaceable: True if a lost replica may be replaced.
            probe_tolerance: receiver's name -> largest difference of log-probs that counts as rounding, in nats.
        """
        self.lost: Channel[tuple[str, RunError]] = Channel("ReplicaPool")
        """Names of replicas that are gone, and why. Supervision starts replacements for them."""
        self.pauses = pauses
        self.episode_workers = pauses.episode_workers
        self.timeouts = timeouts
        self.probe_tolerance = probe_tolerance
        self._state = state
        self._replaceable = replaceable
        self._serving = {engine.name: Replica(engine, timeouts) for engine in replicas}
        for engine in replicas:
            self._tell_joined(engine)
        self._others = [ReceiverClient(other, timeouts) for other in others]
        self._late = False
        """True after the other receivers were restarted, while they wait for a version."""
        self._wanted = 0
        """Version under which the other receivers are to compute log-probs."""
        self.lose_others: Callable[[RunError], None] | None = None
        """Function that restarts the other receivers; None if their loss ends the run."""
        self.lose_ranks: Callable[[RunError], None] | None = None
        """Function that restarts the trainer's ranks together with the replicas in their processes; None if replicas
        have processes of their own."""
        self._joining: dict[str, Replica] = {}
        self._gone: set[str] = set()
        """Names of replicas that were given up."""

    @property
    def serving(self) -> list[Replica]:
        """Serving replicas, in the order in which they began to serve."""
        return list(self._serving.values())

    @property
    def joining(self) -> list[Replica]:
        """Replicas that joined and wait for their first version."""
        return list(self._joining.values())

    @property
    def needs_version(self) -> bool:
        """True if no replica serves but one has joined and needs the trainer's version, or if restarted other receivers
        are awaited. Replicas that restart together with the trainer are not counted: it sends them the version itself.
        """
        # Otherwise the trainer's current weights, amid a version, would come before those that it publishes while
        # redoing.
        joins = self.lose_ranks is None and not self._serving and bool(self._joining)
        return joins or self.others_need(self._state.version)

    @property
    def replicas(self) -> list[Replica]:
        """Replicas that serve, and those that joined and wait for their first version."""
        return [*self._serving.values(), *self._joining.values()]

    @property
    def receivers(self) -> list[ReceiverClient]:
        """Receivers of the next version: all replicas, and the others that hold a copy of the policy."""
        return [*self.replicas, *self.others]

    @property
    def others(self) -> list[ReceiverClient]:
        """Receivers that generate nothing and are not gone."""
        return [other for other in self._others if not other.is_gone]

    async def others_have(self, version: int) -> None:
        """Wait until all receivers that generate nothing have loaded ``version``."""
        self._wanted = version
        self._state.changed.changed()
        await self._state.changed.until(lambda: self._others_serve(version))

    def others_need(self, version: int) -> bool:
        """Return True if receivers that generate nothing are awaited, and no update will bring them ``version``."""
        return self._late and self._wanted == version and not self._others_serve(version)

    def _others_serve(self, version: int) -> bool:
        return all(other.version == version and not other.is_gone for other in self._others)

    def others_left(self, why: RunError) -> None:
        """Note that the receivers that generate nothing are gone. Calls to them fail."""
        self._late = False
        for other in self._others:
            other.leave(why)
        self._state.changed.changed()

    async def others_back(self) -> int:
        """Note that the receivers that generate nothing were restarted with the initial model."""
        # New clients: the old ones are gone for good, and have the version of the lost ranks.
        self._others = [ReceiverClient(other.receiver, self.timeouts) for other in self._others]
        self._late = True
        self._state.changed.changed()
        return 0

    @property
    def validator(self) -> Replica:
        """Replica that runs the validations: the first that serves or, if none does, the first that joins."""
        return self.replicas[0]

    async def served(self) -> None:
        """Wait until some replica serves."""
        await self._state.changed.until(lambda: bool(self._serving))

    def join(self, engine: RolloutEngine) -> Replica:
        """Add a late replica. It serves from the next update on, or, if no other replica serves, as soon as it has the
        trainer's version."""
        name = engine.name
        # Names are never reused: late reports about the lost replica would be taken for the new one's.
        if name in self._gone or any(name == receiver.name for receiver in self.receivers):
            raise ValueError(f"a replica named {name!r} is or was part of this run; give it a name of its own")
        self._joining[name] = Replica(engine, self.timeouts)
        self._state.changed.changed()
        return self._joining[name]

    @property
    def present(self) -> list[RolloutEngine]:
        """Engines of all replicas."""
        return [replica.engine for replica in self.replicas]

    async def died(self, engine: RolloutEngine, death: WorkerDied) -> None:
        """Forget a replica whose process has ended. Raises like `lose`."""
        for replica in self.replicas:
            if replica.name == engine.name:
                await self.lose(WorkerUnavailable(replica, death))

    def serve(self, replica: Replica, version: int) -> None:
        """Note that ``replica`` has loaded ``version``. A late replica with an outdated version waits for the next one.

        The oldest version served must never decrease: groups were admitted under it.
        """
        joins = replica.name in self._joining and version >= self._state.staleness.served_version
        if joins:
            self._serving[replica.name] = self._joining.pop(replica.name)
        elif replica.name not in self._serving:  # it loaded an outdated version, or was lost meanwhile
            return
        self._state.load(replica.name, version)
        if joins:
            self._state.emit(
                ReplicaJoined(time=now(), replica=replica.name, version=version, slots=replica.engine.slots)
            )
            self._tell_joined(replica.engine)

    def serve_other(self, receiver: ReceiverClient, version: int) -> None:
        """Note that ``receiver``, which generates nothing, has loaded ``version``."""
        receiver.version = version
        self._late &= not self._others_serve(version)
        self._state.changed.changed()

    async def lose(self, gone: WorkerUnavailable) -> None:
        """Forget a lost receiver. Raises the error of its loss if it cannot be replaced."""
        replica = gone.remote
        replica.leave(gone.why)
        if not isinstance(replica, Replica):
            if self.lose_others is None:
                raise gone.why
            self.lose_others(gone.why)
            return
        if replica.name in self._gone:  # another of its calls has reported the loss
            return
        if self.lose_ranks is not None:
            self.lose_ranks(gone.why)  # it stays until the ranks are lost: `left_with_ranks`
            return
        if not self._replaceable and len(self.replicas) == 1 and replica.name in self._serving:
            self._tell_lost(replica, gone.why)
            raise gone.why  # it stays: later callers get its loss as the error, not an empty pool
        self._forget(replica, gone.why)
        await self.lost.send((replica.name, gone.why))

    def left_with_ranks(self, why: RunError) -> None:
        """Forget all replicas, which ended together with the training ranks in the same processes."""
        for replica in self.replicas if self.lose_ranks is not None else ():
            replica.leave(why)
            self._forget(replica, why)

    def _forget(self, replica: Replica, why: RunError) -> None:
        self._tell_lost(replica, why)
        if self._joining.pop(replica.name, None) is None:  # otherwise it did not serve
            del self._serving[replica.name]
            self._state.unload(replica.name)
            self.episode_workers.left(replica.name)
            self.pauses.left(replica.name)

    def _tell_lost(self, replica: Replica, why: RunError) -> None:
        self._gone.add(replica.name)
        self._state.emit(ReplicaLost(time=now(), replica=replica.name, reason=str(why)))

    @asynccontextmanager
    async def losing(self) -> AsyncIterator[None]:
        """Context that calls `lose` for a `WorkerUnavailable` raised in its block. Raises like `lose`."""
        try:
            yield
        except WorkerUnavailable as gone:
            await self.lose(gone)

    async def failed(self, replica: str, error: HeadwayError) -> None:
        """Give up a replica whose calls failed with ``error``. Raises ``error`` if the replica is not to blame."""
        if isinstance(error, NonFinite) or not isinstance(error, RunError):
            raise error
        if replica in self._serving:
            await self.lose(WorkerUnavailable(self._serving[replica], error))

    async def abort_older_than(self, version: int) -> None:
        """Abort the training groups and calls under way that have a token of an older version than ``version``."""
        await self.episode_workers.abort_older_than(version)
        await concurrently(self._abort_older_at(replica, version) for replica in self.serving)

    def _tell_joined(self, replica: RolloutEngine) -> None:
        self.episode_workers.joined(replica)
        self.pauses.joined(replica)

    async def _abort_older_at(self, replica: Replica, version: int) -> None:
        async with self.losing():
            await replica.abort_older_than(version)
