"""The native engine: what it says of its tokens is what the trainer says, and no way to compute a step changes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from benchmarks.gpu_checks.models import checked_shape, on_device, peaked_model, requests, rows_of
from benchmarks.gpu_checks.setting import Passed, Setting, one_rank_group, require
from benchmarks.train_sides import train_engine
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import GenerateRequest, OnUpdate
from headway.data.packing import CollatedRow
from headway.data.types import GroupTokens, RowTokens
from headway.devices import Compute, GraphRecorder
from headway.engines.rollout.native.native_core import EngineCore

TEMPERATURE = 0.8
FLOAT32_TOLERANCE = 1e-3
"""Nats, for any token: sums of a few thousand float32 terms in another order."""
BFLOAT16_FACTOR = 2.0
"""Limit in bfloat16, where both sides round: so many times what rounding alone makes of the
trainer's own log-probs, measured on the same tokens against its float32."""
MOST_STEPS = 10_000
"""Limit of an engine that never comes to an end."""

Tokens = Mapping[tuple[int, int], list[int]]
"""(request, answer) → token ids."""


class RunsAgain:
    """A recorder for the CPU: what a CUDA graph replays, it computes again."""

    def record(self, compute: Compute) -> Compute:
        compute()
        return compute

    def reset(self) -> None:
        """Nothing is kept."""


# ---------------------------------------------------------------------------------------- log-probs


def logprobs(setting: Setting) -> Passed:
    """The engine's log-probs of its own samples against the trainer's, in float32 and bfloat16."""
    lines, figures = [], {}
    with one_rank_group(setting):
        for family in ("qwen3",) if setting.small else ("qwen3", "qwen2"):
            folder = peaked_model(setting, family)
            for dtype in ("float32", "bfloat16"):
                rows = sampled_rows(setting, folder, dtype)
                mine = np.concatenate([row.logprobs for row in rows])
                trainer = trainer_logprobs(setting, folder, dtype, rows)
                difference = np.abs(mine - trainer)
                if dtype == "float32":
                    limit, off = FLOAT32_TOLERANCE, float(difference.max())
                else:
                    rounding = _rms(trainer - trainer_logprobs(setting, folder, "float32", rows))
                    limit, off = BFLOAT16_FACTOR * rounding, _rms(difference)
                what = "at most" if dtype == "float32" else "rms"
                line = f"{family} {dtype}: {off:.2g} nats {what} over {len(mine)} tokens (limit {limit:.2g})"
                require(off <= limit, f"engine and trainer differ: {line}")
                lines.append(line)
                figures[f"{family} {dtype}"] = {"difference": off, "limit": limit, "tokens": len(mine)}
    return Passed(lines, figures)


def sampled_rows(setting: Setting, folder: Path, dtype: str) -> list[CollatedRow]:
    core = _core(setting, on_device(folder, setting, getattr(torch, dtype)), _recorder(setting))
    vocabulary, tokens = checked_shape(setting).vocabulary, 24 if setting.small else 64
    asked = requests([3, 9, 24, 40], vocabulary, n=4, tokens=tokens, temperature=TEMPERATURE)
    return rows_of(finish(core, asked))


def trainer_logprobs(setting: Setting, folder: Path, dtype: str, rows: Sequence[CollatedRow]) -> NDArray[np.float32]:
    """[all tokens] nats."""
    sections = {"rollout": {"temperature": TEMPERATURE}, "model": {"dtype": dtype}}
    engine = train_engine(folder, setting.device, actor={"ppo_max_token_len_per_gpu": 4096}, **sections)
    return np.concatenate(engine.forward_logprobs(rows))


# ---------------------------------------------------------------------------------------- tokens


def decoding(setting: Setting) -> Passed:
    """Compare tokens decoded step by step, from recorded steps, and with contexts that are prefilled again half-way.

    Greedy ones are those of ``transformers.generate``, too. In float64: each way sums in another order, and what that
    does to a float32 turns one of some thousand sampled tokens. The log-probs' check has recorded steps in the others.
    """
    model = on_device(peaked_model(setting), setting, torch.float64)
    vocabulary = checked_shape(setting).vocabulary
    # The longest crosses the first span of recorded steps, so that a second shape is recorded.
    asked = requests([3, 17, 60, 245], vocabulary, n=3, tokens=20 if setting.small else 96)
    eager = tokens_of(finish(_core(setting, model), asked))
    core = _core(setting, model, _recorder(setting))
    recorded = tokens_of(finish(core, asked))
    graphs = core._runner._graphs
    require(
        graphs is not None and graphs.works and len(graphs) > 0,
        "decoding steps were not recorded: the engine gave CUDA graphs up (its log says why)",
    )
    same(eager, recorded, "with CUDA graphs (rollout.enforce_eager=false)", "without")
    again = tokens_of(finish(_core(setting, model), asked, interrupt_after=7))
    same(eager, again, "with contexts prefilled again after an interrupt", "decoded in one go")
    greedy = requests([3, 17, 60], vocabulary, tokens=20 if setting.small else 96, temperature=0.0)
    mine = tokens_of(finish(_core(setting, model, _recorder(setting)), greedy))
    same({(r.number, 0): generated(model, r) for r in greedy}, mine, "greedy", "by transformers.generate")
    count = sum(map(len, eager.values()))
    recordings = len(graphs) if graphs is not None else 0
    return Passed(
        [
            f"{count} sampled tokens: the same with and without CUDA graphs ({recordings} shapes recorded), and "
            "prefilled again half-way",
            f"{sum(map(len, mine.values()))} greedy tokens: those of transformers.generate",
        ],
        {"tokens": count, "recorded_shapes": recordings},
    )


def same(expected: Tokens, found: Tokens, this: str, other: str) -> None:
    """Raise `CheckFailed` that names the first token that differs."""
    for key, tokens in expected.items():
        differs = [at for at, pair in enumerate(zip(tokens, found[key], strict=False)) if pair[0] != pair[1]]
        at = differs[0] if differs else min(len(tokens), len(found[key]))
        require(
            tokens == found[key],
            f"answer {key[1]} to prompt {key[0]} differs from token {at} of {len(tokens)} on: "
            f"{found[key][at : at + 3]} {this}, {tokens[at : at + 3]} {other}",
        )


def generated(model: PreTrainedModel, request: Group) -> list[int]:
    """Greedy tokens by ``transformers.generate``."""
    ids = torch.from_numpy(request.prompt.token_ids.astype(np.int64))[None].to(model.device)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=request.sampling.max_tokens
        )
    return [int(token) for token in out[0, ids.shape[1] :]]


def finish(core: EngineCore, asked: Sequence[Group], interrupt_after: int | None = None) -> list[GroupTokens]:
    """Answer all; after so many steps everything that decodes is interrupted, and goes on from its context."""
    places = [(request, k) for request in asked for k in range(request.n)]
    calls = [
        GenerateRequest(number, request.prompt.trajectory_id(k), request.prompt.token_ids, request.sampling)
        for number, (request, k) in enumerate(places)
    ]
    core.submit("check", calls)
    answers: dict[int, RowTokens] = {}
    with torch.inference_mode():
        for step in range(MOST_STEPS):
            if not core.has_work:
                break
            if step == interrupt_after:
                core.pause(OnUpdate.INTERRUPT)
                core.resume()
            for _, call in core.step():
                assert call.tokens is not None
                answers[call.number] = RowTokens.answer(calls[call.number].input_ids, call.tokens)
    require(len(answers) == len(calls), f"{len(answers)} of {len(calls)} answers after {MOST_STEPS} steps")
    numbers = iter(range(len(calls)))
    return [tuple(answers[next(numbers)] for _ in range(request.n)) for request in asked]


def tokens_of(groups: Sequence[GroupTokens]) -> Tokens:
    return {(number, k): r.ids.tolist() for number, group in enumerate(groups) for k, r in enumerate(group)}


def _core(setting: Setting, model: PreTrainedModel, recorder: GraphRecorder | None = None) -> EngineCore:
    return EngineCore(
        model,
        name="check",
        seed=0,
        slots=16,
        max_context=checked_shape(setting).context,
        max_batched_tokens=512,
        recorder=recorder,
        decode=lambda ids: "",
        clock=lambda: 0.0,
        temperature=TEMPERATURE,
    )


def _recorder(setting: Setting) -> GraphRecorder:
    return setting.kind.recorder(torch.device(setting.device, 0)) or RunsAgain()


def _rms(values: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
