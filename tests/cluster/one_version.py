"""One version's work over any backend, driven as the pipeline would: generate, log-probs, step, update, generate."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cluster.workers import Workers
from headway.config.schema import Config
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import OnUpdate, SamplingParams
from headway.data.interfaces.training import StepContext
from headway.data.interfaces.weights import ReceiveReport, SendReport
from headway.data.types import Outcomes, Prompt, TrainSample

N = 4


def tiny_config(backend: str, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "cluster": {"backend": backend, "device": "cpu"},
        "rollout": {"n": N, "max_concurrent": 8, "threads": 1},
        "trainer": {"threads": 1},
        "data": {"max_prompt_length": 16, "max_response_length": 16},
        "actor": {"ppo_mini_batch_size": 2, "use_kl_loss": True, "optim": {"lr": 1e-2}},
        "param_update": {"timeout_s": 20},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config(**base)


def request(row: int) -> Group:
    prompt = Prompt(epoch=0, row=row, attempt=0, source="test", text="", token_ids=np.array([5, 6, 7 + row], np.int32))
    return Group(number=row, prompt=prompt, n=N, sampling=SamplingParams(max_tokens=8, stop_token_ids=(1,)))


@dataclass(frozen=True)
class Outcome:
    before: list[str]
    after: list[str]
    versions_after: set[int]
    metrics: dict[str, float]
    sent: SendReport
    received: ReceiveReport
    probe_difference: float
    """Between the trainer and what is served."""


async def generate(workers: Workers, rows: range) -> list[Group]:
    (worker,), replica = workers.episode_workers, workers.rollouts[0]
    await worker.join(replica)
    await worker.route([replica.name])
    groups = [group async for group in worker.generate([request(row) for row in rows])]
    await worker.leave(replica.name)
    return sorted(groups, key=lambda group: group.number)


async def update(workers: Workers, version: int) -> tuple[SendReport, ReceiveReport, NDArray[np.float32] | None]:
    """To all replicas. The reports, and what the first replica answers to the probe."""
    names = [replica.name for replica in workers.rollouts]
    await workers.trainer.reach(names)
    for replica in workers.rollouts:
        await replica.pause(OnUpdate.INTERRUPT)
    sent, *received = await asyncio.gather(
        workers.trainer.send_weights(version, names), *(replica.stage_weights(version) for replica in workers.rollouts)
    )
    for replica in workers.rollouts:
        await replica.activate(version)
    served = await workers.rollouts[0].probe()
    for replica in workers.rollouts:
        await replica.resume()
    return sent, received[0], served


async def one_version(workers: Workers) -> Outcome:
    """Raises whatever an engine raises."""
    groups = await generate(workers, range(2))
    trajectories = [(group, t) for group in groups for t in group.trajectories]
    samples = [TrainSample(group.tokens, t.id.k, t.prompt_length, t.length, t.id) for group, t in trajectories]
    outcomes = Outcomes(
        ids=tuple(t.id for _, t in trajectories),
        rewards=np.array([t.id.k - 1.5 for _, t in trajectories], np.float32),
        groups=np.array([group.number for group, _ in trajectories]),
        episode_of=np.arange(len(trajectories)),
        lengths=np.array([t.length for _, t in trajectories]),
    )
    assert workers.reference is not None
    reference = await workers.reference.forward_logprobs(samples)
    proximal = await workers.trainer.proximal_logprobs(samples, 0)
    columns = {"ref_logprobs": reference, "prox_logprobs": proximal}
    columns |= await workers.trainer.advantages(samples, outcomes)
    step = await workers.trainer.train_step(
        [replace(sample, columns={name: of[i] for name, of in columns.items()}) for i, sample in enumerate(samples)],
        StepContext(),
    )
    sent, received, served = await update(workers, 1)
    after = await generate(workers, range(2, 4))
    return Outcome(
        before=[t.text for group in groups for t in group.trajectories],
        after=[t.text for group in after for t in group.trajectories],
        versions_after={version for g in after for t in g.trajectories for _, version in t.version_spans},
        metrics=step.metrics,
        sent=sent,
        received=received,
        probe_difference=float(np.abs(served - sent.probe).max()) if served is not None else np.inf,
    )
