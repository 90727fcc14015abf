"""A plain synchronous loop over the engines: generate, reward, advantage, update, copy weights. Nothing else.

What ``mode=on_policy`` must equal, bit for bit.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.agents.chat.chat_template import answer_decoder
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.config.loading import load
from headway.config.sections.learning import ParallelConfig
from headway.config.sizing.placement import concurrent
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.interfaces.training import StepContext
from headway.data.sources import build_sources
from headway.engines.rollout.native.engine import NativeEngine
from headway.engines.train.batch_advantages import BatchAdvantages
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.weights.outgoing_version import Stream
from headway.engines.weights.protocols import IncomingWeights
from headway.models.pretrained import load_model
from headway.models.tokenizer import load_tokenizer
from headway.pipeline.actor_critic import outcomes
from headway.runtime.user_code import load_function
from tests.data.resolving import resolve


async def plain_loop(config_path: Path, out: Path) -> None:
    config = load(config_path).config
    path, steps = config.model.path, config.rollout.total_rollout_steps // config.actor.ppo_mini_batch_size
    tokenizer, model = load_tokenizer(path), load_model(path, dtype=torch.float32)
    score = load_function(config.reward.function)
    prompts = build_sources(config, tokenizer).train
    trainer = FsdpEngine(
        model_path=path,
        config=config,
        total_optimizer_steps=steps,
        mesh=TrainMesh.make(ParallelConfig(), torch.device("cpu")),
    )
    manifest = trainer.manifest(torch.float32)

    def receive(version: int, incoming: IncomingWeights) -> None:
        (sink,) = incoming.expect([incoming.manifest])
        weights = Stream(manifest, trainer.gather(manifest, 2**20))
        for chunk in weights:
            sink.room(chunk.header).copy_(chunk.payload)
            sink.filled(chunk.header)
        sink.ended(weights.digests)

    decode = answer_decoder(tokenizer)
    engine = NativeEngine(
        model,
        name="plain",
        seed=config.run.seed,
        slots=concurrent(config),
        max_context=config.data.max_prompt_length + config.data.max_response_length,
        max_batched_tokens=config.rollout.max_batched_tokens,
        decode=decode,
        receive=receive,
        manifest=manifest,
    )
    sampling = SamplingParams(config.data.max_response_length, stop_token_ids=(tokenizer.eos_token_id,))
    advantages = BatchAdvantages(config.algorithm)
    for step in range(steps):
        batch = [prompts.next() for _ in range(config.actor.ppo_mini_batch_size)]
        requests = [Group(i, prompt, config.rollout.n, sampling) for i, prompt in enumerate(batch)]
        groups = []
        async with local_episode_worker(engine, decode=decode) as worker:
            async for done in worker.generate(requests):
                rewards = torch.tensor([score(t.text, batch[done.number].answer) for t in done.trajectories]).numpy()
                groups.append(replace(done, rewards=rewards))
        groups.sort(key=lambda group: group.number)
        rows = resolve([sample for group in groups for sample in group.samples()], lambda handle: handle)
        columns = advantages(rows, outcomes(groups))["advantages"]
        rows = [replace(row, columns={"advantages": column}) for row, column in zip(rows, columns, strict=True)]
        trainer.train_step(rows, StepContext(version=step))
        await engine.stage_weights(step + 1)
        await engine.activate(step + 1)
    await engine.close()
    trainer.export(out)


def run_plain_loop(config_path: Path, out: Path) -> None:
    """The loop to its end."""
    run_alone(plain_loop(config_path, out))


def run_alone(loop: Coroutine[Any, Any, None]) -> None:
    """Run ``loop`` in a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        asyncio.run(loop)
    finally:
        dist.destroy_process_group()
