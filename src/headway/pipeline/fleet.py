"""The rollout replicas of a run: who serves, who waits to join, and what happens when one dies.

    join() ──▶ JOINING ──serve(version)──▶ SERVING ──lose()──▶ gone; its groups are dropped and their prompts run again

A replica serves nothing before it has loaded the current version. While at least one other serves, a replica's death is
not the run's: the run ends with the last one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from headway.errors import WorkerDied
from headway.events import ReplicaJoined, ReplicaLost
from headway.interfaces import FinishedGroup, GenerateRequest, RolloutEngine
from headway.pipeline.concurrently import concurrently
from headway.pipeline.router import Router
from headway.pipeline.state import RunState, now


class Fleet:
    def __init__(self, replicas: Sequence[RolloutEngine], state: RunState, router: Router) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when a replica joined the serving ones, or left them."""
        self._state = state
        self._router = router
        self._serving = {replica.name: replica for replica in replicas}
        for replica in replicas:
            router.add(replica.name)
        self._joining: dict[str, RolloutEngine] = {}
        self._gone: set[str] = set()

    @property
    def serving(self) -> list[RolloutEngine]:
        """In the order in which they came."""
        return list(self._serving.values())

    @property
    def receivers(self) -> list[RolloutEngine]:
        """Who gets the next version: those that serve, and those that wait to."""
        return [*self._serving.values(), *self._joining.values()]

    @property
    def validator(self) -> RolloutEngine:
        """The replica that validates."""
        return next(iter(self._serving.values()))

    def __getitem__(self, name: str) -> RolloutEngine:
        """A serving replica."""
        return self._serving[name]

    def serves(self, replica: RolloutEngine) -> bool:
        return replica.name in self._serving

    def join(self, replica: RolloutEngine) -> None:
        """A replica that was not there at the start; it serves from the next update on."""
        if replica.name in self._serving or replica.name in self._joining or replica.name in self._gone:
            raise ValueError(f"a replica named {replica.name!r} is or was part of this run; give it a name of its own")
        self._joining[replica.name] = replica

    def serve(self, replica: RolloutEngine, version: int) -> None:
        """``replica`` has loaded ``version``. A late one that was overtaken meanwhile waits for the next version.

        The oldest version served must never go back: groups were admitted under it.
        """
        joins = replica.name in self._joining and version >= self._state.staleness.served_version
        if joins:
            self._serving[replica.name] = self._joining.pop(replica.name)
            self._router.add(replica.name)
        elif not self.serves(replica):
            return
        self._state.load(replica.name, version)
        if joins:
            self._state.emit(ReplicaJoined(time=now(), replica=replica.name, version=version, slots=replica.slots))
            self.on_change()

    async def generate(
        self, replica: RolloutEngine, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[FinishedGroup]:
        """`RolloutEngine.generate`, which ends early, and raises nothing, when the replica dies and others go on."""
        try:
            async for finished in replica.generate(requests):
                self._router.finished(replica.name, finished)
                yield finished
        except WorkerDied as death:
            await self.lose(replica, death)

    async def lose(self, replica: RolloutEngine, death: WorkerDied) -> None:
        """``replica`` died. Raises ``death`` when nobody serves any more."""
        if replica.name not in self._gone:
            self._gone.add(replica.name)
            self._state.emit(ReplicaLost(time=now(), replica=replica.name, reason=str(death)))
        self._joining.pop(replica.name, None)
        if not self.serves(replica):
            return  # it served nothing, or is known to be dead
        if len(self._serving) == 1:
            raise death  # and it stays: whoever asks it next learns of its death, not of an empty fleet
        del self._serving[replica.name]
        self._state.unload(replica.name)
        lost = self._router.forget(replica.name)
        for number in lost:
            self._state.run_again(number, f"{replica.name} died")
        self.on_change()
        await self.abort(lost)  # what other replicas generate of a split group is of no use

    async def abort(self, numbers: Sequence[int]) -> None:
        """End these groups wherever they are being generated."""
        if numbers:
            await concurrently(self._abort_at(replica, numbers) for replica in self.serving)

    async def drop_older_than(self, version: int) -> None:
        """End the groups that are being generated and have a token of an older version."""
        older = await concurrently(self._older_at(replica, version) for replica in self.serving)
        if len(self._serving) > 1:  # other parts of split groups
            await self.abort(sorted({number for found in older for number in found}))

    async def _abort_at(self, replica: RolloutEngine, numbers: Sequence[int]) -> None:
        try:
            await replica.abort(numbers)
        except WorkerDied as death:
            await self.lose(replica, death)

    async def _older_at(self, replica: RolloutEngine, version: int) -> list[int]:
        try:
            return await replica.abort_older_than(version)
        except WorkerDied as death:
            await self.lose(replica, death)
            return []
