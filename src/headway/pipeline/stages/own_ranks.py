"""Stages of roles that have ranks of their own: RefLogProb, LogProb, Values, CriticTrain.

    RefLogProb    rewarded groups, as many as wait ──▶ log-probs of the frozen reference policy ──▶ the message queue
    LogProb       a train batch ──▶ log π_prox, under the version that trains it ──▶
    Values        a train batch ──▶ the critic's values ──▶
    CriticTrain   a train batch with returns, from ActorTrain ──▶ optimizer steps of the critic

    consumes        groups that are rewarded, or train batches
    waits for       its input; LogProb for its ranks to serve the batch's version, which they get with every update;
                    Values for the critic to be trained on all earlier batches
    is unblocked by the ranks, which answer, or are started again; ParamUpdate, which loads the version; CriticTrain
    produces        the same groups or batches, with a column for each row; CriticTrain: a critic for the next batch

LogProb and Values work on a version's next batch while the trainer is busy with the current one. A role on the
trainer's ranks has no stage: `Actor` calls it, since two models driven at once would interleave their collectives
differently on each rank.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.training import LogProbEngine, ProximalEngine
from headway.data.types import Column, ColumnName
from headway.pipeline.actor_critic import Critic, add_column, samples_of
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.admission.train_batches import TrainBatch
from headway.pipeline.recovery.rank_restarts import RankRestarts
from headway.pipeline.stage import Channel, Stage
from headway.pipeline.update.replica_pool import ReplicaPool


@dataclass(eq=False)
class RefLogProb(Stage[Group, Group]):
    waits_for_output = None

    input: Channel[Group]
    reference: LogProbEngine
    restarts: RankRestarts

    async def process_data(self, group: Group) -> AsyncGenerator[Group, None]:
        groups = [group, *self.input.take_waiting()]
        samples = samples_of(groups)
        with self._waiting_within("log-probs of the ranks of ref"):
            columns = await self.restarts.surviving(lambda: self.reference.forward_logprobs(samples))
        add_column(groups, ColumnName.REF_LOGPROBS, columns)
        for group in groups:
            yield group


@dataclass(eq=False)
class LogProb(Stage[TrainBatch, TrainBatch]):
    waits_for_output = "ActorTrain"

    run_state: RunState
    engine: ProximalEngine
    pool: ReplicaPool
    restarts: RankRestarts

    @property
    def waiting_for(self) -> str | None:
        waiting = super().waiting_for
        return "ActorTrain, to end the version" if waiting and self.run_state.took_version else waiting

    async def process_data(self, batch: TrainBatch) -> AsyncGenerator[TrainBatch, None]:
        if batch.groups:
            columns = await self.restarts.surviving(partial(self._logprobs, batch))
            add_column(batch.groups, ColumnName.PROX_LOGPROBS, columns)
        yield batch

    async def _logprobs(self, batch: TrainBatch) -> Sequence[Column]:
        with self._waiting_within(f"version {batch.version} to be loaded"):
            # Within `surviving`: restarted ranks have the initial model, and need the version again.
            await self.pool.others_have(batch.version)
        with self._waiting_within(f"log-probs under version {batch.version}, of the ranks of logp"):
            return await self.engine.proximal_logprobs(samples_of(batch.groups), batch.version)


@dataclass(eq=False)
class Values(Stage[TrainBatch, TrainBatch]):
    waits_for_output = "ActorTrain"

    critic: Critic

    async def process_data(self, batch: TrainBatch) -> AsyncGenerator[TrainBatch, None]:
        if batch.groups:
            with self._waiting_within("the critic"):
                await self.critic.add_values(batch)
        yield batch


@dataclass(eq=False)
class CriticTrain(Stage[TrainBatch, None]):
    critic: Critic

    async def process_data(self, batch: TrainBatch) -> AsyncGenerator[None, None]:
        with self._waiting_within("the critic's step"):
            await self.critic.train(batch)
        return
        yield  # never reached: makes this an async generator, as `Stage` expects
