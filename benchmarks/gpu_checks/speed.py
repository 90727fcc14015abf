"""How fast: a random model of Qwen2.5-0.5B's shape, trained and decoded, beside what one would write first.

    training    FsdpEngine, and a plain step: Hugging Face's module under autocast, AdamW
    decoding    the native engine with and without CUDA graphs, and ``transformers.generate``

One after the other in one process, each with the device for itself. The only thing that can be wrong here is a figure
that is not finite or an answer that is too short.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_checks.models import HALF_BILLION, LIKE_HALF_BILLION
from benchmarks.gpu_checks.setting import Passed, Setting, one_rank_group, require
from benchmarks.rollout_engines import Engine, Generate, Native, Request
from benchmarks.runner import timed
from benchmarks.shapes import Shape, group_rows, work
from benchmarks.train_sides import Plain, train_engine
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow

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

Once = Callable[[], None]


def shape_of(setting: Setting) -> Shape:
    return LIKE_HALF_BILLION if setting.small else HALF_BILLION


def model_folder(setting: Setting) -> Path:
    """Return the model's folder, made once: on the device, which is quicker."""
    folder = setting.scratch / shape_of(setting).name
    if not (folder / "config.json").exists():
        with torch.device(setting.device):
            shape_of(setting).random("qwen2").to(torch.bfloat16).save_pretrained(folder)
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
        "plain": partial(_plain_step, setting, folder, rows, budget),
    }
    if setting.on_gpu:
        contenders["headway, compiled layers"] = headway_step(setting, folder, rows, budget, compile=True)
    peak, name = peak_tflops(setting)
    tokens = sum(len(row.input_ids) for row in rows)
    figures: dict[str, Any] = {"device": name, "peak_tflops": peak, "tokens": tokens, "micro_batch_tokens": budget}
    lines = []
    with one_rank_group(setting):
        steps = {contender: measured(setting, make) for contender, make in contenders.items()}
    for contender, (seconds, memory) in steps.items():
        tflops = work("packed", rows, budget).flops(shape) / seconds / 1e12
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
    setting: Setting, folder: Path, rows: Sequence[CollatedRow], budget: int, **model: Any
) -> Callable[[], Once]:
    """Return what makes a step of the train engine. ``model``: settings of that section."""

    def make() -> Once:
        sections = {"actor": {"ppo_max_token_len_per_gpu": budget}}
        sections["model"] = {"enable_gradient_checkpointing": False, **model}
        engine = train_engine(folder, setting.device, 100, **sections)

        def once() -> None:
            loss = engine.train_step(rows, StepContext()).metrics["loss"]
            require(bool(np.isfinite(loss)), f"headway's step has a loss of {loss}")

        return once

    return make


def _plain_step(setting: Setting, folder: Path, rows: Sequence[CollatedRow], budget: int) -> Once:
    """All rows are equally long, so that nothing is padded."""
    side = Plain(folder, budget, setting.device)
    optimizer = torch.optim.AdamW(side.model.parameters(), lr=1e-6, fused=True)

    def once() -> None:
        norm = side.backward(rows, clip=1.0)
        require(bool(np.isfinite(norm)), f"the plain step has a gradient norm of {norm}")
        optimizer.step()
        optimizer.zero_grad()

    return once


def rows_of_length(shape: Shape, count: int, length: int) -> list[CollatedRow]:
    """A quarter prompt, the rest response."""
    return group_rows([length // 4] * count, [length - length // 4] * count, shape.vocabulary)


def peak_tflops(setting: Setting) -> tuple[float | None, str]:
    """What is assumed of the device, None where nothing is known; and its name."""
    name = torch.cuda.get_device_name() if setting.on_gpu else "CPU"
    return next((peak for part, peak in PEAKS.items() if part in name.upper()), None), name


# ---------------------------------------------------------------------------------------- decoding


def decoding_speed(setting: Setting) -> Passed:
    """Tokens per second at 1 to 256 sequences, prompts included, by each way to decode."""
    counts, tokens = ((1, 4), 16) if setting.small else (CONCURRENT, TOKENS)
    served = "bfloat16" if setting.on_gpu else "float32"
    common = (model_folder(setting), max(counts), PROMPT + tokens, setting.device, served)
    ways: dict[str, Callable[[], Engine]] = {
        "native": lambda: Native(*common, max_batched_tokens=8192),
        "generate": lambda: Generate(*common),
    }
    if setting.on_gpu:
        ways["without graphs"] = lambda: Native(*common, max_batched_tokens=8192, enforce_eager=True)
    rates: dict[str, dict[int, float]] = {}
    memory: dict[str, float] = {}
    for way, load in ways.items():
        _empty(setting)
        setting.kind.reset_peak(setting.device)
        rates[way] = _decoded(setting, load(), counts, tokens)
        if (peak := setting.kind.peak_memory(setting.device)) is not None:
            memory[way] = peak / 1e9
    lines = []
    for count in counts:
        others = ", ".join(f"{way} {rates[way][count]:,.0f}" for way in ways if way != "native")
        native, ratio = rates["native"][count], rates["native"][count] / rates["generate"][count]
        lines.append(f"{count:>3} sequences: {native:,.0f} tokens/s ({ratio:.1f}× generate); {others}")
    if memory:
        lines.append("memory at most: " + ", ".join(f"{way} {gb:.1f} GB" for way, gb in memory.items()))
    lines.append(f"prompts of {PROMPT} tokens, answers of {tokens}; tokens of answers ÷ all of the time")
    return Passed(lines, {"tokens_per_s": rates, "memory_gb": memory, "prompt": PROMPT, "tokens": tokens})


def _decoded(setting: Setting, engine: Engine, counts: Sequence[int], tokens: int) -> dict[int, float]:
    """Return tokens per second by the number of sequences. ``engine`` is closed at the end."""
    noise, rates = np.random.default_rng(0), {}
    try:
        for count in counts:
            prompts = noise.integers(1, shape_of(setting).vocabulary, (count, PROMPT)).tolist()
            asked, lengths = [Request(tuple(ids), tokens) for ids in prompts], list[int]()

            def once(asked: Sequence[Request] = asked, lengths: list[int] = lengths) -> None:
                lengths[:] = engine.run(asked)
                setting.wait()

            once()  # records graphs
            rates[count] = count * tokens / timed(once)
            require(lengths == [tokens] * count, f"{count} answers have {sum(lengths)} tokens, not {count * tokens}")
    finally:
        engine.close()
    return rates


def _empty(setting: Setting) -> None:
    gc.collect()
    setting.kind.release_cached()
