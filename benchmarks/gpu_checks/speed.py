"""How fast: a random model of Qwen2.5-0.5B's shape, trained and decoded, beside what one would write first.

    training    FsdpEngine, and a plain step: Hugging Face's module under autocast, whole logits, AdamW
    decoding    the native engine with and without CUDA graphs, and ``transformers.generate``

One after the other in one process, each with the device for itself. The only thing that can be wrong here is a figure
that is not finite or an answer that is too short.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from benchmarks.gpu_checks.models import HALF_BILLION, LIKE_HALF_BILLION, Shape, requests
from benchmarks.gpu_checks.setting import Passed, Setting, one_rank_group, require
from benchmarks.gpu_checks.training import Layout
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.config.schema import Config
from headway.config.sections.learning import ActorConfig, ParallelConfig
from headway.config.sections.model_section import ModelConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.rollout.native import NativeEngine
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.models.pretrained import load_model

PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIE": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
}
"""Teraflops per second of dense bfloat16 products, as the maker states them, by a part of the device's name; the first
that fits counts."""
STEPS = 3
"""Training steps that are measured, after one that is not."""
CONCURRENT = (1, 4, 16, 64, 256)
PROMPT = 128
TOKENS = 128
LARGE_GPU_GB = 60

Once = Callable[[], object]


def shape_of(setting: Setting) -> Shape:
    return LIKE_HALF_BILLION if setting.small else HALF_BILLION


def model_folder(setting: Setting) -> Path:
    """The model, made once: on the device, which is quicker."""
    folder = setting.scratch / shape_of(setting).name
    if not (folder / "config.json").exists():
        with torch.device(setting.device):
            model = AutoModelForCausalLM.from_config(shape_of(setting).config("qwen2"), dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        _empty(setting)
    return folder


# ---------------------------------------------------------------------------------------- training


def training_speed(setting: Setting) -> Passed:
    """Tokens per second, MFU and memory of a training step, and of a plain one."""
    folder, shape = model_folder(setting), shape_of(setting)
    large = (setting.kind.total_memory(setting.device) or 0) > LARGE_GPU_GB * 1e9
    length, budget = (64, 128) if setting.small else (1024, 8192 if large else 2048)
    rows = rows_of_length(shape, 8 if setting.small else 16, length)
    contenders = {
        "headway": headway_step(setting, folder, rows, budget),
        "plain": _plain_step(setting, folder, rows, budget),
    }
    if setting.on_gpu:
        contenders["headway, compiled layers"] = headway_step(setting, folder, rows, budget, compiled=True)
    peak, name = peak_tflops(setting)
    tokens = sum(len(row.input_ids) for row in rows)
    figures: dict[str, Any] = {"device": name, "peak_tflops": peak, "tokens": tokens, "micro_batch_tokens": budget}
    lines = []
    with one_rank_group(setting):
        steps = {contender: measured(setting, make) for contender, make in contenders.items()}
    for contender, (seconds, memory) in steps.items():
        tflops = training_flops(shape, rows) / seconds / 1e12
        mfu = None if peak is None else tflops / peak
        figures[contender] = {"tokens_per_s": tokens / seconds, "tflops": tflops, "mfu": mfu, "memory_gb": memory}
        said = f"{contender}: {tokens / seconds:,.0f} tokens/s, {tflops:.3g} Tflop/s"
        said += "" if mfu is None else f", MFU {mfu:.1%}"
        lines.append(said + ("" if memory is None else f", {memory:.1f} GB at most"))
    ratio = figures["headway"]["tokens_per_s"] / figures["plain"]["tokens_per_s"]
    assumed = "no peak is known for it, so no MFU" if peak is None else f"peak assumed: {peak:g} Tflop/s"
    lines.append(f"headway ÷ plain: {ratio:.2f}; {len(rows)} × {length} tokens, {budget} at once; {name}, {assumed}")
    return Passed(lines, {**figures, "ratio": ratio})


def measured(setting: Setting, make: Callable[[], Once]) -> tuple[float, float | None]:
    """Median seconds of a step, and on a GPU the most memory, in GB, that it had. Everything is given back."""
    _empty(setting)
    setting.kind.reset_peak(setting.device)
    once = make()
    seconds = []
    for _ in range(1 + STEPS):
        started = time.perf_counter()
        once()
        setting.wait()
        seconds.append(time.perf_counter() - started)
    peak = setting.kind.peak_memory(setting.device)
    del once
    _empty(setting)
    return median(seconds[1:]), None if peak is None else peak / 1e9


def headway_step(
    setting: Setting,
    folder: Path,
    rows: Sequence[CollatedRow],
    budget: int,
    packing: Layout = "shared",
    *,
    compiled: bool = False,
) -> Callable[[], Once]:
    def make() -> Once:
        config = Config(
            actor=ActorConfig(ppo_max_token_len_per_gpu=budget),
            model=ModelConfig(enable_gradient_checkpointing=False, packing=packing, compile=compiled),
        )
        device = torch.device(setting.device)
        engine = FsdpEngine(
            model_path=str(folder),
            config=config,
            total_optimizer_steps=100,
            mesh=TrainMesh.make(ParallelConfig(), device),
        )

        def once() -> None:
            loss = engine.train_step(rows, StepContext()).metrics["loss"]
            require(bool(np.isfinite(loss)), f"headway's step has a loss of {loss}")

        return once

    return make


def _plain_step(setting: Setting, folder: Path, rows: Sequence[CollatedRow], budget: int) -> Callable[[], Once]:
    """All rows are equally long, so that nothing is padded."""

    def make() -> Once:
        model = load_model(folder, dtype=torch.float32).to(setting.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        ids = torch.from_numpy(np.stack([row.input_ids for row in rows]).astype(np.int64)).to(setting.device)
        advantages = torch.from_numpy(np.stack([row.columns["advantages"] for row in rows])).to(setting.device)
        behaviour = torch.from_numpy(np.stack([row.logprobs for row in rows])).to(setting.device)
        prompt, together = rows[0].prompt_length, max(1, budget // ids.shape[1])

        def once() -> None:
            for part in torch.arange(len(ids)).split(together):
                with torch.autocast(setting.device, torch.bfloat16) if setting.on_gpu else nullcontext():
                    logits = model(ids[part], use_cache=False).logits[:, prompt - 1 : -1]
                targets = ids[part, prompt:]
                logp = -cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
                ratio = (logp.view_as(targets) - behaviour[part]).exp()
                terms = torch.minimum(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
                (-terms.sum() / advantages.numel()).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            require(bool(norm.isfinite()), f"the plain step has a gradient norm of {float(norm)}")
            optimizer.step()
            optimizer.zero_grad()

        return once

    return make


def rows_of_length(shape: Shape, count: int, length: int) -> list[CollatedRow]:
    """A quarter prompt, the rest response."""
    noise, prompt = np.random.default_rng(0), length // 4
    response = length - prompt
    return [
        CollatedRow(
            input_ids=noise.integers(0, shape.vocabulary, length).astype(np.int32),
            prompt_length=prompt,
            logprobs=np.full(response, -np.log(shape.vocabulary), np.float32),
            versions=np.zeros(response, np.int32),
            loss_mask=np.ones(response, np.bool_),
            columns={"advantages": noise.standard_normal(response).astype(np.float32)},
        )
        for _ in range(count)
    ]


def training_flops(shape: Shape, rows: Sequence[CollatedRow]) -> float:
    """What a step has to compute: 6 per weight and token, the head's for predicted tokens alone, causal attention."""
    head_dim = shape.hidden // shape.heads
    attention = shape.hidden * head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    body = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
    head = shape.hidden * shape.vocabulary
    total = 0.0
    for row in rows:
        length = len(row.input_ids)
        total += 6.0 * (body * length + head * len(row.logprobs))
        total += 6.0 * shape.layers * shape.hidden * length**2  # two products over half of length², three times
    return total


def peak_tflops(setting: Setting) -> tuple[float | None, str]:
    """What is assumed of the device, None where nothing is known; and its name."""
    name = torch.cuda.get_device_name() if setting.on_gpu else "CPU"
    return next((peak for part, peak in PEAKS.items() if part in name.upper()), None), name


# ---------------------------------------------------------------------------------------- decoding


def decoding_speed(setting: Setting) -> Passed:
    """Tokens per second at 1 to 256 sequences, prompts included, by each way to decode."""
    folder = model_folder(setting)
    counts = (1, 4) if setting.small else CONCURRENT
    tokens = 16 if setting.small else TOKENS
    ways = {"native": _native(setting, folder, eager=False), "generate": _generate(setting, folder)}
    if setting.on_gpu:
        ways["without graphs"] = _native(setting, folder, eager=True)
    rates: dict[str, dict[int, float]] = {}
    memory: dict[str, float] = {}
    for way, decode in ways.items():
        _empty(setting)
        setting.kind.reset_peak(setting.device)
        rates[way] = decode(counts, tokens)
        if (peak := setting.kind.peak_memory(setting.device)) is not None:
            memory[way] = peak / 1e9
    lines = [_decoding_line(count, {way: rates[way][count] for way in ways}) for count in counts]
    if memory:
        lines.append("memory at most: " + ", ".join(f"{way} {gb:.1f} GB" for way, gb in memory.items()))
    lines.append(f"prompts of {PROMPT} tokens, answers of {tokens}; tokens of answers ÷ all of the time")
    return Passed(lines, {"tokens_per_s": rates, "memory_gb": memory, "prompt": PROMPT, "tokens": tokens})


def _decoding_line(count: int, rates: dict[str, float]) -> str:
    others = ", ".join(f"{way} {rate:,.0f}" for way, rate in rates.items() if way != "native")
    ratio = rates["native"] / rates["generate"]
    return f"{count:>3} sequences: {rates['native']:,.0f} tokens/s ({ratio:.1f}× generate); {others}"


Decode = Callable[[Sequence[int], int], dict[int, float]]
"""(numbers of sequences, tokens of each answer) → tokens per second by number."""


def _native(setting: Setting, folder: Path, *, eager: bool) -> Decode:
    async def run(counts: Sequence[int], tokens: int) -> dict[int, float]:
        engine = NativeEngine(
            load_model(folder, dtype=_served(setting)).to(setting.device),
            name="bench",
            seed=0,
            slots=max(counts),
            max_context=PROMPT + tokens,
            max_batched_tokens=8192,
            enforce_eager=eager,
            decode=lambda ids: "",
        )
        rates = {}
        try:
            for count in counts:
                asked = requests([PROMPT] * count, shape_of(setting).vocabulary, tokens=tokens)
                for _ in range(2):  # the first records graphs
                    started = time.perf_counter()
                    async with local_episode_worker(engine) as worker:
                        groups = [group async for group in worker.generate(asked)]
                    seconds = time.perf_counter() - started
                written = sum(group.trajectories[0].length for group in groups)
                require(written == count * tokens, f"{count} answers have {written} tokens, not {count * tokens}")
                rates[count] = written / seconds
        finally:
            await engine.close()
        return rates

    return lambda counts, tokens: asyncio.run(run(counts, tokens))


def _generate(setting: Setting, folder: Path) -> Decode:
    def decode(counts: Sequence[int], tokens: int) -> dict[int, float]:
        model = load_model(folder, dtype=_served(setting)).to(setting.device)
        rates = {}
        for count in counts:
            asked = requests([PROMPT] * count, shape_of(setting).vocabulary, tokens=tokens)
            ids = torch.from_numpy(np.stack([r.prompt.token_ids for r in asked]).astype(np.int64)).to(setting.device)
            for written in (4, tokens):  # the first touches what is touched first
                started = time.perf_counter()
                with torch.inference_mode():
                    out = model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        do_sample=True,
                        top_k=0,
                        top_p=1.0,
                        min_new_tokens=written,
                        max_new_tokens=written,
                        pad_token_id=0,
                    )
                setting.wait()
                seconds = time.perf_counter() - started
            require(out.shape[1] == PROMPT + tokens, f"generate wrote {out.shape[1] - PROMPT} tokens, not {tokens}")
            rates[count] = count * tokens / seconds
        return rates

    return decode


def _served(setting: Setting) -> torch.dtype:
    return torch.bfloat16 if setting.on_gpu else torch.float32


def _empty(setting: Setting) -> None:
    gc.collect()
    setting.kind.release_cached()
