"""How fast: a random model of Qwen2.5-0.5B's shape, trained and decoded, beside what one would write first.

    training    FsdpEngine, also with compiled layers; Hugging Face's module under autocast
    decoding    the native engine; ``transformers.generate``
    steps       a decode step, a train step: where their time goes; what an interrupt costs

One after the other in one process, each with the device for itself. The only thing that can be wrong here is a figure
that is not finite or an answer that is too short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_checks.engine import core_of, profiled, recorder_of
from benchmarks.gpu_checks.models import HALF_BILLION, LIKE_HALF_BILLION, on_device, requests
from benchmarks.gpu_checks.setting import Finding, Findings, Setting, one_rank_group, require
from benchmarks.rollout_engines import Engine, Generate, Native, Request
from benchmarks.runner import timed
from benchmarks.shapes import Shape, group_rows, work
from benchmarks.train_sides import Plain, train_engine
from headway.data.interfaces.rollout import GenerateRequest, OnUpdate
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.rollout.native.native_core import EngineCore

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
DECODE_STEPS = 16
"""Decoding steps that are measured."""
CONCURRENT = (1, 4, 16, 64, 256)
GENERATED = (1, 4, 64, 256)
"""Numbers of sequences for ``transformers.generate``, which takes longest."""
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
        setting.give_back()
    return folder


# ---------------------------------------------------------------------------------------- training


def training_speed(setting: Setting) -> Findings:
    """Tokens per second, MFU and memory of a training step, of a plain one, and with compiled layers."""
    folder, (rows, budget) = model_folder(setting), step_rows(setting)
    compiled = partial(headway_step, compile=True)
    contenders = {"headway": headway_step, "plain step": plain_step, "compiled layers": compiled}
    peak, tokens = peak_tflops(setting), sum(len(row.input_ids) for row in rows)
    flops, first = work("packed", rows, budget).flops(shape_of(setting)), 0.0
    with one_rank_group(setting):
        for contender, make in contenders.items():
            seconds, memory = measured(setting, partial(make, setting, folder, rows, budget))
            first, tflops = first or seconds, flops / seconds / 1e12
            text = f"{tokens / seconds:,.0f} tokens/s, {tflops:.3g} Tflop/s"
            text += f", MFU {tflops / peak:.1%} of {peak:g}" if peak else ""
            text += "" if memory is None else f", {memory:.1f} GB at most"
            text += f", {first / seconds:.2f} × headway" * (contender != "headway")
            yield Finding(contender, text)


def step_rows(setting: Setting) -> tuple[list[CollatedRow], int]:
    """Return rows of one length, and the most tokens of a micro-batch."""
    large = (setting.kind.total_memory(setting.device) or 0) > LARGE_GPU_GB * 1e9
    length, budget = (64, 128) if setting.small else (1024, 8192 if large else 2048)
    return rows_of_length(shape_of(setting), 8 if setting.small else 16, length), budget


def measured(setting: Setting, make: Callable[[], Once]) -> tuple[float, float | None]:
    """Median seconds of a step, and on a GPU the most memory, in GB, that it had. Everything is given back."""
    setting.give_back()
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
    setting.give_back()
    return median(seconds[1:]), None if peak is None else peak / 1e9


def headway_step(setting: Setting, folder: Path, rows: Sequence[CollatedRow], budget: int, **model: Any) -> Once:
    """Return a step of the train engine. ``model``: settings of that section."""
    sections = {"actor": {"ppo_max_token_len_per_gpu": budget}}
    sections["model"] = {"enable_gradient_checkpointing": False, **model}
    engine = train_engine(folder, setting.device, 100, **sections)

    def once() -> None:
        loss = engine.train_step(rows, StepContext()).metrics["loss"]
        require(bool(np.isfinite(loss)), f"headway's step has a loss of {loss}")

    return once


def plain_step(setting: Setting, folder: Path, rows: Sequence[CollatedRow], budget: int) -> Once:
    """Return a step of a plain loop. All rows are equally long, so that nothing is padded."""
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


def peak_tflops(setting: Setting) -> float | None:
    """What is assumed of the device, None where nothing is known."""
    name = torch.cuda.get_device_name().upper() if setting.on_gpu else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


# ---------------------------------------------------------------------------------------- decoding


def decoding_speed(setting: Setting) -> Findings:
    """Tokens per second at 1 to 256 sequences, prompts included, by each way to decode."""
    counts, tokens = ((1, 4), 16) if setting.small else (CONCURRENT, TOKENS)
    dtype = "bfloat16" if setting.on_gpu else "float32"
    served = (model_folder(setting), max(counts), PROMPT + tokens, setting.device, dtype)
    ways: dict[str, tuple[Callable[[], Engine], Sequence[int]]] = {
        "native": (lambda: Native(*served, max_batched_tokens=8192), counts),
        "transformers.generate": (lambda: Generate(*served), [count for count in counts if count in GENERATED]),
    }
    native_rates: dict[int, float] = {}
    for way, (load, of_way) in ways.items():
        setting.give_back()
        setting.kind.reset_peak(setting.device)
        for count, rate in _decoded(setting, load(), of_way, tokens):
            native_rates.setdefault(count, rate)
            beside = "" if way == "native" else f" ({rate / native_rates[count]:.2f} × native)"
            yield Finding(way, f"{count}: {rate:,.0f} tokens/s{beside}")
        if (peak := setting.kind.peak_memory(setting.device)) is not None:
            yield Finding(way, f"{peak / 1e9:.1f} GB at most")


def _decoded(setting: Setting, engine: Engine, counts: Sequence[int], tokens: int) -> Iterator[tuple[int, float]]:
    """Yield numbers of sequences, and their tokens per second. ``engine`` is closed at the end."""
    noise = np.random.default_rng(0)
    try:
        for count in counts:
            prompts = noise.integers(1, shape_of(setting).vocabulary, (count, PROMPT)).tolist()
            asked, lengths = [Request(tuple(ids), tokens) for ids in prompts], list[int]()

            def once(asked: Sequence[Request] = asked, lengths: list[int] = lengths) -> None:
                lengths[:] = engine.run(asked)
                setting.wait()

            once()  # records graphs
            seconds = timed(once)
            require(lengths == [tokens] * count, f"{count} answers have {sum(lengths)} tokens, not {count * tokens}")
            yield count, count * tokens / seconds
    finally:
        engine.close()


# ---------------------------------------------------------------------------------------- steps


def steps(setting: Setting) -> Findings:
    """Profile a decode step, interrupt it, and profile a train step."""
    yield from _decode_step(setting)
    setting.give_back()
    with one_rank_group(setting):
        rows, budget = step_rows(setting)
        once = headway_step(setting, model_folder(setting), rows, budget)
        once()
        yield _found(setting, "train step", f"{sum(len(row.input_ids) for row in rows)} tokens", once, 1)


def _decode_step(setting: Setting) -> Findings:
    model = on_device(model_folder(setting), setting, torch.bfloat16 if setting.on_gpu else torch.float32)
    count = 4 if setting.small else 64
    core = core_of(setting, model, recorder_of(setting), slots=max(count, 16), batched=16_384, context=2048)

    def advance() -> None:
        for _ in range(DECODE_STEPS):
            core.step()

    with torch.inference_mode():
        # As many tokens as leave all within one span of recorded steps, whatever is measured.
        asked = requests([PROMPT] * count, shape_of(setting).vocabulary, tokens=4 * DECODE_STEPS + 32)
        sampling = asked[0].sampling
        calls = [GenerateRequest(r.number, r.prompt.trajectory_id(0), r.prompt.token_ids, sampling) for r in asked]
        core.submit("check", calls)
        advance()
        advance()
        yield _found(setting, "decode step", f"{count} sequences", advance, DECODE_STEPS)
        cost = timed(lambda: _interrupted(setting, core))
        length = PROMPT + 4 * DECODE_STEPS
        yield Finding("interrupt", f"{count} sequences of {length} tokens decode again after {cost * 1e3:.1f} ms")


def _interrupted(setting: Setting, core: EngineCore) -> None:
    """Interrupt all that decodes, and go on until each sequence has been prefilled and has another token."""
    require(core.pause(OnUpdate.INTERRUPT).interrupted > 0, "nothing decoded that could be interrupted")
    core.resume()
    core.step()
    while core.stats().waiting:
        core.step()
    setting.wait()


def _found(setting: Setting, name: str, what: str, work: Once, count: int) -> Finding:
    """Time ``work`` of ``count`` steps, then profile it."""
    seconds = timed(lambda: (work(), setting.wait())) / count
    seen = profiled(setting, work, count)
    unit = "kernels" if setting.on_gpu else "operations"
    text = f"{seconds * 1e3:.1f} ms, {what}; {seen.launched:.0f} {unit} take {seen.device_seconds * 1e3:.1f} ms; "
    return Finding(name, f"{text}{seen.attention}", seen.lines)
