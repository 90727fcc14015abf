"""The native engine: what it says of its tokens is what the trainer says, and no way to compute a step changes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, TopPLogitsWarper

from benchmarks.gpu_checks.models import checked_shape, on_device, peaked_model, requests, rows_of
from benchmarks.gpu_checks.setting import Finding, Findings, Setting, one_rank_group, require
from benchmarks.train_sides import train_engine
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import GenerateRequest, OnUpdate
from headway.data.packing import CollatedRow
from headway.data.types import GroupTokens, RowTokens
from headway.devices import Compute, GraphRecorder
from headway.engines.rollout.native.fused_forward import FusedForward
from headway.engines.rollout.native.native_core import EngineCore
from headway.engines.rollout.native.sampler import has_kernel

TEMPERATURE = 0.8
FLOAT32_TOLERANCE = 1e-3
"""Nats, for any token: sums of a few thousand float32 terms in another order."""
BFLOAT16_FACTOR = 2.0
"""Limit in bfloat16, where both sides round: so many times what rounding alone makes of the
trainer's own log-probs, measured on the same tokens against its float32."""
MIXED = tuple(range(3, 51, 3))
"""Lengths of prompts, all of which are prefilled in one step."""
TOP_P = 0.9
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


def logprobs(setting: Setting) -> Findings:
    """The engine's log-probs of its own samples against the trainer's, in float32 and bfloat16.

    On a GPU both are to be of the fast paths: no check but this one has them with numbers to compare.
    """
    attention = {}
    with one_rank_group(setting):
        for family, wide in (("qwen3", True), ("qwen2", False)):
            folder, label = peaked_model(setting, family, wide=wide), f"head size {128 if wide else 64}"
            for dtype in ("float32", "bfloat16"):
                rows, prefill = sampled_rows(setting, folder, dtype)
                mine = np.concatenate([row.logprobs for row in rows])
                trainer = trainer_logprobs(setting, folder, dtype, rows)
                difference = np.abs(mine - trainer)
                if dtype == "float32":
                    limit, off = FLOAT32_TOLERANCE, float(difference.max())
                else:
                    rounding = _rms(trainer - trainer_logprobs(setting, folder, "float32", rows))
                    limit, off = BFLOAT16_FACTOR * rounding, _rms(difference)
                what = "at most" if dtype == "float32" else "rms"
                text = f"{dtype} {off:.2g} nats {what} (limit {limit:.2g})"
                require(off <= limit, f"engine and trainer differ: {label} {text}, {len(mine)} tokens")
                yield Finding(label, text)
                attention[dtype] = prefill
    for dtype, prefill in attention.items():
        yield Finding("attention of a prefill", f"{dtype}, {len(MIXED)} lengths: {prefill}")


def sampled_rows(setting: Setting, folder: Path, dtype: str) -> tuple[list[CollatedRow], str]:
    """Rows behind prompts of `MIXED` lengths, which are prefilled together, and what computed their attention."""
    model = on_device(folder, setting, getattr(torch, dtype))
    core = core_of(setting, model, recorder_of(setting))
    if setting.on_gpu:
        require_fast_paths(core, dtype)
    vocabulary, tokens = checked_shape(setting).vocabulary, 24 if setting.small else 64
    asked = requests(MIXED, vocabulary, n=2, tokens=tokens, temperature=TEMPERATURE)
    rows = rows_of(finish(core, asked))
    alone = core_of(setting, model)
    return rows, profiled(setting, lambda: finish(alone, requests(MIXED, vocabulary, tokens=1))).attention


def require_fast_paths(core: EngineCore, dtype: str) -> None:
    """Raise `CheckFailed` that names what an engine on a GPU does in slower ways; its warnings say why."""
    forward, slow = core._runner._forward, []
    if not isinstance(forward, FusedForward):
        slow.append("the fused forward pass")
    elif dtype == "bfloat16" and not forward.varlen:
        slow.append("attention of all lengths in one call (varlen)")
    if not has_kernel(core._runner.device):
        slow.append("the kernel that samples")
    require(not slow, f"{dtype}: the engine fell back from {' and '.join(slow)}; the log says why")


def trainer_logprobs(setting: Setting, folder: Path, dtype: str, rows: Sequence[CollatedRow]) -> NDArray[np.float32]:
    """[all tokens] nats."""
    sections = {"rollout": {"temperature": TEMPERATURE}, "model": {"dtype": dtype}}
    engine = train_engine(folder, setting.device, actor={"ppo_max_token_len_per_gpu": 4096}, **sections)
    return np.concatenate(engine.forward_logprobs(rows))


# ---------------------------------------------------------------------------------------- tokens


def decoding(setting: Setting) -> Findings:
    """Compare tokens decoded step by step, from recorded steps, and with contexts that are prefilled again half-way.

    Greedy ones are those of ``transformers.generate``, too. In float64: each way sums in another order, and what that
    does to a float32 turns one of some thousand sampled tokens. The log-probs' check has recorded steps in the others.
    """
    model = on_device(peaked_model(setting), setting, torch.float64)
    vocabulary, tokens = checked_shape(setting).vocabulary, 20 if setting.small else 96
    # The longest crosses the first span of recorded steps, so that a second shape is recorded.
    asked = requests([3, 17, 60, 245], vocabulary, n=3, tokens=tokens)
    eager = tokens_of(finish(core_of(setting, model), asked))
    core = core_of(setting, model, recorder_of(setting))
    recorded = tokens_of(finish(core, asked))
    graphs = core._runner._graphs
    require(
        graphs is not None and graphs.works and bool(graphs.recorded),
        "decoding steps were not recorded: the engine gave CUDA graphs up (its log says why)",
    )
    assert graphs is not None
    same(eager, recorded, "with CUDA graphs (rollout.enforce_eager=false)", "without")
    yield Finding(
        "CUDA graphs", f"{sum(map(len, eager.values()))} tokens the same, {len(graphs.recorded)} shapes recorded"
    )
    for way, recorder in (("recorded", recorder_of(setting)), ("not recorded", None)):
        again = tokens_of(finish(core_of(setting, model, recorder), asked, interrupt_after=7))
        same(eager, again, f"with contexts prefilled again after an interrupt, {way}", "decoded in one go")
    yield Finding("interrupt", "all contexts prefilled again in mid-decode: the same tokens")
    ahead = setting.kind.runs_ahead
    with mock.patch.object(type(setting.kind), "runs_ahead", 1 - ahead):
        other = tokens_of(finish(core_of(setting, model, recorder_of(setting)), asked, interrupt_after=7))
    same(eager, other, f"with {1 - ahead} steps launched ahead", f"with {ahead}")
    yield Finding("running ahead", "steps launched before or after the last one's tokens are read: the same tokens")
    mixed = requests(MIXED, vocabulary, tokens=tokens)
    one_by_one = tokens_of(finish(core_of(setting, model, batched=1), mixed))
    same(one_by_one, tokens_of(finish(core_of(setting, model), mixed)), "prefilled together", "prefilled one by one")
    yield Finding("mixed prompts", f"{len(MIXED)} lengths prefilled in one step or each in its own: the same tokens")
    nucleus = requests([3, 17, 60], vocabulary, n=4, tokens=tokens, temperature=TEMPERATURE, top_p=TOP_P)
    answers = finish(core_of(setting, model, recorder_of(setting)), nucleus)
    same(tokens_of(finish(core_of(setting, model), nucleus)), tokens_of(answers), "top-p with CUDA graphs", "without")
    worst = max(float(np.abs(r.logprobs - of_nucleus(model, r)).max()) for group in answers for r in group)
    require(worst <= FLOAT32_TOLERANCE, f"top-p: a log-prob is {worst:.2g} nats off transformers' nucleus")
    yield Finding("top-p", f"{TOP_P:g}: the same tokens, log-probs within {worst:.1g} nats of transformers' nucleus")
    greedy = requests([3, 17, 60], vocabulary, tokens=tokens, temperature=0.0)
    mine = tokens_of(finish(core_of(setting, model, recorder_of(setting)), greedy))
    same({(r.number, 0): generated(model, r) for r in greedy}, mine, "greedy", "by transformers.generate")
    yield Finding("greedy", f"{sum(map(len, mine.values()))} tokens: those of transformers.generate")


def of_nucleus(model: PreTrainedModel, row: RowTokens) -> NDArray[np.float64]:
    """[T] log-probs of an answer's tokens by a plain forward pass and transformers' own filter; -inf outside."""
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.ids]).astype(np.int64))[None].to(model.device)
    with torch.inference_mode():
        logits = model(ids).logits[0, len(row.prompt_ids) - 1 : -1] / TEMPERATURE
        kept = TopPLogitsWarper(TOP_P)(ids, logits).log_softmax(-1)
    chosen: NDArray[np.float64] = kept.gather(1, ids[0, len(row.prompt_ids) :, None]).squeeze(1).cpu().numpy()
    return chosen


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
                paused = core.pause(OnUpdate.INTERRUPT)
                require(paused.interrupted == len(calls), f"{paused.interrupted} of {len(calls)} were interrupted")
                core.resume()
            for _, call in core.step():
                assert call.tokens is not None
                answers[call.number] = RowTokens.answer(calls[call.number].input_ids, call.tokens)
    require(len(answers) == len(calls), f"{len(answers)} of {len(calls)} answers after {MOST_STEPS} steps")
    numbers = iter(range(len(calls)))
    return [tuple(answers[next(numbers)] for _ in range(request.n)) for request in asked]


def tokens_of(groups: Sequence[GroupTokens]) -> Tokens:
    return {(number, k): r.ids.tolist() for number, group in enumerate(groups) for k, r in enumerate(group)}


def core_of(
    setting: Setting,
    model: PreTrainedModel,
    recorder: GraphRecorder | None = None,
    *,
    slots: int = 32,
    batched: int = 512,
    context: int | None = None,
) -> EngineCore:
    return EngineCore(
        model,
        name="check",
        seed=0,
        slots=slots,
        max_context=context or checked_shape(setting).context,
        max_batched_tokens=batched,
        recorder=recorder,
        decode=lambda ids: "",
        clock=lambda: 0.0,
        temperature=TEMPERATURE,
    )


def recorder_of(setting: Setting) -> GraphRecorder:
    return setting.kind.recorder(torch.device(setting.device, 0)) or RunsAgain()


def _rms(values: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


# ---------------------------------------------------------------------------------------- where a step's time goes


LINES = 10
ATTENTION = re.compile(r"attention|attn|flash|fmha|sdpa|flex|triton_tem", re.IGNORECASE)
NOT_A_KERNEL = re.compile(r"aten::scaled_dot_product_attention|backward|^_Flash|^## ", re.IGNORECASE)
"""Names of what only calls another: torch's front door and its nodes of gradients; and the way back."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """What the profiler has seen of a step."""

    device_seconds: float
    """Of all kernels on a GPU; of all operations on a CPU."""
    launched: float
    """Kernels, or operations on a CPU."""
    lines: list[str]
    """Those that take longest: their share, how often, and their name."""
    attention: str
    """Operations and kernels that compute attention, and how often."""


def profiled(setting: Setting, work: Callable[[], object], steps: int = 1) -> Profiled:
    """Run ``work``, which is so many ``steps``, under the profiler. Raises `CheckFailed` where none attends."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    setting.wait()
    with profile(activities=activities) as recorded:
        work()
        setting.wait()
    events = list(recorded.key_averages())
    # An operation's time on the device is its kernels', which are events of their own. So are ranges with a name.
    counted = [
        event
        for event in events
        if (event.device_type == DeviceType.CUDA) == setting.on_gpu
        and not (setting.on_gpu and event.is_user_annotation)
    ]
    total = sum(_microseconds(event, setting) for event in counted)
    longest = sorted(counted, key=lambda event: -_microseconds(event, setting))[:LINES]
    lines = [
        f"{_microseconds(event, setting) / max(total, 1):6.1%} {event.count / steps:6g} × {event.key[:90]}"
        for event in longest
    ]
    attends = [event for event in events if ATTENTION.search(event.key) and not NOT_A_KERNEL.search(event.key)]
    require(bool(attends), f"the profile has no attention that is known by its name, among {len(events)} events")
    names = [f"{e.count / steps:g} × {e.key.removeprefix('aten::_').partition('<')[0][:60]}" for e in attends]
    launched = sum(event.count for event in counted) / steps
    return Profiled(total / steps / 1e6, launched, lines, ", ".join(sorted(names)))


def _microseconds(event: Any, setting: Setting) -> float:
    return float(event.self_device_time_total if setting.on_gpu else event.self_cpu_time_total)
