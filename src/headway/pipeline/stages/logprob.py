"""LogProb: log π_prox of each fetch, recomputed by a role on separate ranks (``logp``).

    consumes        fetches, each for one version of the trainer
    waits for       the role to serve that version, which it gets with every update
    is unblocked by ParamUpdate, when the role has loaded; by the role's ranks, which answer
    produces        the same fetches, with a column of log-probs per trajectory

It works on a version's next fetch while the trainer is busy with this one. On the trainer's own ranks this happens
inside the fetch (`headway.pipeline.stages.actor_train`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from headway.data.interfaces.training import ProximalEngine
from headway.data.types import ColumnName
from headway.events import WAITS_FOR_GROUPS
from headway.pipeline.admission.fetches import Fetch, FetchSource
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.channel import Channel
from headway.pipeline.stage import Stage
from headway.pipeline.update.replica_pool import ReplicaPool


class LogProb(Stage[Fetch, Fetch]):
    waits_for_input = WAITS_FOR_GROUPS
    waits_for_output = "ActorTrain"

    def __init__(
        self, state: RunState, input: FetchSource, output: Channel[Fetch], engine: ProximalEngine, fleet: ReplicaPool
    ) -> None:
        super().__init__(state.emit, input, output)
        self._state = state
        self._engine = engine
        self._fleet = fleet

    @property
    def waiting_for(self) -> str | None:
        waiting = super().waiting_for
        return "ActorTrain, to end the version" if waiting and self._state.took_version else waiting

    async def process_data(self, fetch: Fetch) -> AsyncGenerator[Fetch, None]:
        if fetch.groups:
            with self._waiting_within(f"version {fetch.version} to be loaded"):
                await self._state.changed.until(lambda: self._fleet.others_serve(fetch.version))
            with self._waiting_within(f"log-probs under version {fetch.version}, of the ranks of logp"):
                columns = await self._engine.proximal_logprobs(fetch.samples(), fetch.version)
            fetch.add(ColumnName.PROX_LOGPROBS, columns)
        yield fetch
