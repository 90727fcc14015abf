"""Pool of a run's replicas: which serve, which wait to join, and what happens when one is lost.

    join() ──▶ JOINING ──serve(version)──▶ SERVING ──lose()──▶ gone; episode workers send its calls to others

A replica serves nothing before it has loaded the current version. It is gone when it died, or was fenced off: it did
not answer, or keeps failing, and its later results are ignored. After the loss of the last serving replica, calls,
groups and validations wait until another one has joined and loaded the trainer's version. The run ends when none is
left and none can be started. Other receivers of the policy are started again together.
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
    """Replicas of a run, and other receivers of its policy. Tells episode workers and `PauseController` who serves."""

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
            others: hold the policy and generate nothing.
            replaceable: another replica may be started in the place of one that is gone.
            probe_tolerance: nats by which log-probs of the receiver of a given name may differ by rounding.
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
        """True while the others were started again, and wait for a version."""
        self._wanted = 0
        """Version under which log-probs of the others are wanted."""
        self.lose_others: Callable[[RunError], None] | None = None
        """Function that has the others started again; None where their loss ends the run."""
        self.lose_ranks: Callable[[RunError], None] | None = None
        """Function that has the trainer's ranks started again, and all replicas with them, in whose processes they are;
        None where replicas have processes of their own."""
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
        """True when no replica serves, and one that joined will do so as soon as it has the trainer's version; or when
        other receivers that were started again are waited for. What comes back with a trainer gets it from there.
        """
        # Else the trainer's weights of now, amid a version, would come before those that it publishes while it redoes.
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
        """Receivers that generate nothing, while they are there."""
        return [other for other in self._others if not other.is_gone]

    async def others_have(self, version: int) -> None:
        """Wait until all receivers that generate nothing have loaded ``version``."""
        self._wanted = version
        self._state.changed.changed()
        await self._state.changed.until(lambda: self._others_serve(version))

    def others_need(self, version: int) -> bool:
        """Tell whether receivers that generate nothing are waited for, and no update will bring them ``version``."""
        return self._late and self._wanted == version and not self._others_serve(version)

    def _others_serve(self, version: int) -> bool:
        return all(other.version == version and not other.is_gone for other in self._others)

    def others_left(self, why: RunError) -> None:
        """Note that the receivers that generate nothing are gone; calls of them fail."""
        self._late = False
        for other in self._others:
            other.leave(why)
        self._state.changed.changed()

    async def others_back(self) -> int:
        """Note that the receivers that generate nothing were started again, with the initial model."""
        # New clients: the old ones are gone for good, and have the version of the ranks that were lost.
        self._others = [ReceiverClient(other.receiver, self.timeouts) for other in self._others]
        self._late = True
        self._state.changed.changed()
        return 0

    @property
    def validator(self) -> Replica:
        """Replica that runs the validations: the first that serves, or will serve where none does."""
        return self.replicas[0]

    async def served(self) -> None:
        """Wait until some replica serves."""
        await self._state.changed.until(lambda: bool(self._serving))

    def join(self, engine: RolloutEngine) -> Replica:
        """Add a replica that was not there at the start; it serves from the next update on, or, where no other one
        serves, as soon as it has the trainer's version."""
        name = engine.name
        # Never a name twice: what is still told of the lost replica would be taken for the new one's.
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
        """Forget a replica whose process has ended. Raises as `lose` does."""
        for replica in self.replicas:
            if replica.name == engine.name:
                await self.lose(WorkerUnavailable(replica, death))

    def serve(self, replica: Replica, version: int) -> None:
        """Note that ``replica`` has loaded ``version``. A late one that was overtaken waits for the next version.

        The oldest version served must never go back: groups were admitted under it.
        """
        joins = replica.name in self._joining and version >= self._state.staleness.served_version
        if joins:
            self._serving[replica.name] = self._joining.pop(replica.name)
        elif replica.name not in self._serving:  # it was overtaken, or lost while it loaded
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
        """Forget a lost receiver. Raises the error of its loss where nothing can take its place."""
        replica = gone.remote
        replica.leave(gone.why)
        if not isinstance(replica, Replica):
            if self.lose_others is None:
                raise gone.why
            self.lose_others(gone.why)
            return
        if replica.name in self._gone:  # another of its calls has told of the loss
            return
        if self.lose_ranks is not None:
            self.lose_ranks(gone.why)  # and it stays until they are: `left_with_ranks`
            return
        if not self._replaceable and len(self.replicas) == 1 and replica.name in self._serving:
            self._tell_lost(replica, gone.why)
            raise gone.why  # and it stays: whoever asks it next learns that it is gone, not of an empty pool
        self._forget(replica, gone.why)
        await self.lost.send((replica.name, gone.why))

    def left_with_ranks(self, why: RunError) -> None:
        """Forget all replicas, which end with the training ranks in whose processes they are."""
        for replica in self.replicas if self.lose_ranks is not None else ():
            replica.leave(why)
            self._forget(replica, why)

    def _forget(self, replica: Replica, why: RunError) -> None:
        self._tell_lost(replica, why)
        if self._joining.pop(replica.name, None) is None:  # else it served nothing
            del self._serving[replica.name]
            self._state.unload(replica.name)
            self.episode_workers.left(replica.name)
            self.pauses.left(replica.name)

    def _tell_lost(self, replica: Replica, why: RunError) -> None:
        self._gone.add(replica.name)
        self._state.emit(ReplicaLost(time=now(), replica=replica.name, reason=str(why)))

    @asynccontextmanager
    async def losing(self) -> AsyncIterator[None]:
        """Lose the receiver for which a call within the block raises `WorkerUnavailable`. Raises as `lose` does."""
        try:
            yield
        except WorkerUnavailable as gone:
            await self.lose(gone)

    async def failed(self, replica: str, error: HeadwayError) -> None:
        """Lose a replica whose calls ended with ``error``. Raises ``error`` if the replica is not to blame."""
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
