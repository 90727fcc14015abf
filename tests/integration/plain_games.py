"""A plain synchronous loop with turns: play, advantage, update, copy weights. No worker, no program, no template.

What ``mode=on_policy`` of ``recipes/agents/guess.yaml`` must equal, bit for bit.
"""

import asyncio
import string
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.agents.episodes.episode_tokens import call_key
from headway.config.loading import load
from headway.config.sections.learning import ParallelConfig
from headway.config.sizing.placement import concurrent
from headway.data.interfaces.rollout import GenerateRequest, SamplingParams
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.data.sources import build_sources
from headway.data.types import Outcomes, Prompt, SampledTokens, TurnSpan
from headway.engines.rollout.native.engine import NativeEngine
from headway.engines.train.batch_advantages import BatchAdvantages
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.weights.outgoing_version import Stream
from headway.engines.weights.protocols import IncomingWeights
from headway.models.pretrained import load_model
from headway.models.tokenizer import load_tokenizer, text_of
from tests.integration.plain_loop import run_alone

TURNS = 4


class Table:
    """The table at which games are played: the engine, and the answers that are waited for."""

    def __init__(self, engine: NativeEngine, tokenizer: Any, most: int, room: int) -> None:
        self.engine, self.tokenizer, self.most, self.room = engine, tokenizer, most, room
        self.numbers, self.waiting = count(), dict[int, asyncio.Future[Any]]()
        self.reading = asyncio.get_running_loop().create_task(self.read())

    async def read(self) -> None:
        async for batch in self.engine.finished("me"):
            for done in batch:
                self.waiting.pop(done.number).set_result(done)

    async def ask(self, prompt: Prompt, k: int, ids: list[int], key: int) -> Any:
        number = next(self.numbers)
        answer = self.waiting[number] = asyncio.get_running_loop().create_future()
        sampling = SamplingParams(min(self.most, self.room - len(ids)), stop_token_ids=(self.tokenizer.eos_token_id,))
        call = GenerateRequest(number, prompt.trajectory_id(k), np.array(ids, np.int32), sampling, key, goes_on=True)
        await self.engine.submit("me", [call])
        return await answer

    async def play(self, prompt: Prompt, k: int) -> tuple[CollatedRow, float]:
        """One game: its row, and whether it was won."""
        hidden = str(prompt.answer)
        ids = start = self.tokenizer.encode(prompt.text)
        mask, logprobs, versions = list[bool](), list[float](), list[int]()
        turns, won = list[TurnSpan](), False
        for turn in range(TURNS):
            done = await self.ask(prompt, k, ids, call_key(ids) if turn else 0)
            tokens: SampledTokens = done.tokens
            turns.append(TurnSpan(turn, len(mask), len(mask) + len(tokens.ids)))
            ids, mask = ids + tokens.ids.tolist(), mask + [True] * len(tokens.ids)
            logprobs, versions = logprobs + tokens.logprobs.tolist(), versions + tokens.versions.tolist()
            ended = tokens.ids[-1] == self.tokenizer.eos_token_id
            text = self.tokenizer.decode(tokens.ids[:-1] if ended else tokens.ids)
            won, guess = text == hidden, len(text) == 1 and text in string.ascii_uppercase
            if won or not guess or turn == TURNS - 1:
                break
            tail = self.tokenizer.encode(f"{'' if ended else '<eos>'}{'<' if hidden < text else '>'}")
            ids, mask = ids + tail, mask + [False] * len(tail)
            logprobs, versions = logprobs + [0.0] * len(tail), versions + [-1] * len(tail)
        # Else what is kept for games that are over fills the memory: the youngest lose theirs, and prefill once more.
        await self.engine.release([prompt.trajectory_id(k)])
        row = CollatedRow(
            np.array(ids, np.int32),
            len(start),
            np.array(logprobs, np.float32),
            np.array(versions, np.int32),
            np.array(mask),
            finished=True,  # an answer of a whole turn met the turn's own limit, and none of the run's
            episode=prompt.trajectory_id(k),
            turns=tuple(turns),
        )
        return row, float(won)

    async def play_all(self, prompts: Sequence[Prompt], n: int) -> list[list[tuple[CollatedRow, float]]]:
        """``n`` games for each prompt, all at once."""
        games = await asyncio.gather(*(self.play(prompt, k) for prompt in prompts for k in range(n)))
        return [list(games[i : i + n]) for i in range(0, len(games), n)]


async def plain_games(config_path: Path, out: Path) -> None:
    config = load(config_path).config
    assert config.model.path is not None and config.agent.max_turn_tokens is not None
    path, size = config.model.path, config.actor.ppo_mini_batch_size
    steps = (config.rollout.total_rollout_steps or 0) // size
    tokenizer, model = load_tokenizer(path), load_model(path, dtype=torch.float32)
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

    room = config.data.max_prompt_length + config.data.max_response_length
    engine = NativeEngine(
        model,
        name="plain",
        seed=config.run.seed,
        slots=concurrent(config),
        max_context=room,
        max_batched_tokens=config.rollout.max_batched_tokens,
        decode=text_of(tokenizer),
        receive=receive,
        manifest=manifest,
    )
    table = Table(engine, tokenizer, config.agent.max_turn_tokens, room)
    advantages = BatchAdvantages(config.algorithm)
    for step in range(steps):
        groups = list[list[tuple[CollatedRow, float]]]()
        while len(groups) < size:  # groups that all end alike are replaced
            played = await table.play_all([prompts.next() for _ in range(size - len(groups))], config.rollout.n)
            groups += [games for games in played if len({reward for _, reward in games}) > 1]
        games = [game for group in groups for game in group]
        rows = [row for row, _ in games]
        outcomes = Outcomes(
            ids=tuple(row.episode for row in rows),
            rewards=np.array([reward for _, reward in games], np.float32),
            groups=np.repeat(np.arange(len(groups)), config.rollout.n),
            episode_of=np.arange(len(rows)),
        )
        columns = advantages(rows, outcomes)["advantages"]
        rows = [replace(row, columns={"advantages": column}) for row, column in zip(rows, columns, strict=True)]
        trainer.train_step(rows, StepContext(version=step))
        await engine.stage_weights(step + 1)
        await engine.activate(step + 1)
    table.reading.cancel()
    await engine.close()
    trainer.export(out)


def run_plain_games(config_path: Path, out: Path) -> None:
    """The loop to its end."""
    run_alone(plain_games(config_path, out))
