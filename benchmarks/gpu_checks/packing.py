"""Layouts of rows: the gradient is that of single rows whatever they are, and how fast each of them trains.

padded   a micro-batch's rows, as long as the longest
packed   one line without padding
shared   one line in which a group's prompt stands once
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_checks.models import checked_shape, peaked_model
from benchmarks.gpu_checks.setting import Finding, Findings, Setting, one_rank_group, require
from benchmarks.gpu_checks.speed import LARGE_GPU_GB, compared, headway_step, model_folder, shape_of, step_rows
from benchmarks.gpu_checks.training import (
    FLOAT32_TOLERANCE,
    Reference,
    compare,
    engine_of,
    random_rows,
    reference,
    tolerance,
)
from benchmarks.runner import timed
from benchmarks.shapes import Shape, group_rows, long_tailed
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.data.types import TrajectoryId

LAYOUTS = ("padded", "packed", "shared")
"""Values of ``model.packing``, the plainest first."""
WINDOW = 8
"""Positions that a token sees in layers with a window."""
N = 8
"""Answers to a prompt."""


def gradients(setting: Setting) -> Findings:
    """One mini-batch's gradient by each layout on the device, against single rows in float64 on the CPU."""
    folder = peaked_model(setting)
    rows = grouped(random_rows(setting, 24), checked_shape(setting))
    expected = reference(folder, rows)
    with one_rank_group(setting):
        for dtype in ("float32", "bfloat16"):
            limit = tolerance(setting, folder, rows, expected, dtype)
            off = {layout: _off(setting, folder, rows, expected, dtype, limit, layout) for layout in LAYOUTS}
            found = ", ".join(f"{layout} {value:.2g}" for layout, value in off.items())
            yield Finding(dtype, f"gradients off by {found} of their norm (limit {limit:.2g})", off)
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # beyond it a kernel computes all scores at once
        for name, other in (("head size 128", peaked_model(setting, wide=True)), ("windows", windowed(folder))):
            off = _off(setting, other, rows, reference(other, rows), "float32", FLOAT32_TOLERANCE, "shared", name)
            yield Finding(name, f"float32, shared: gradient off by {off:.2g} of its norm", {"shared": off})


def _off(
    setting: Setting,
    folder: Path,
    rows: Sequence[CollatedRow],
    expected: Reference,
    dtype: str,
    limit: float,
    layout: str,
    what: str = "",
) -> float:
    engine = engine_of(setting, folder, dtype, packing=layout)
    if layout != "padded":
        require(engine.padded is None, f"{what or layout} rows are padded: {engine.padded}")
    return compare(engine, rows, expected, f"{layout}, {what or dtype}", limit)["gradient"]


def windowed(folder: Path) -> Path:
    """Return a copy of the model whose every second layer sees `WINDOW` tokens."""
    copy = Path(shutil.copytree(folder, f"{folder}-windows", dirs_exist_ok=True))
    path = copy / "config.json"
    config = json.loads(path.read_text())
    kinds = ["full_attention", "sliding_attention"]
    config |= {"use_sliding_window": True, "sliding_window": WINDOW}
    config["layer_types"] = [kinds[layer % 2] for layer in range(config["num_hidden_layers"])]
    path.write_text(json.dumps(config))
    return copy


def speed(setting: Setting) -> Findings:
    """Tokens per second and memory of a training step by layout, and what arithmetic allows."""
    folder, shape = model_folder(setting), shape_of(setting)
    large = (setting.kind.total_memory(setting.device) or 0) > LARGE_GPU_GB * 1e9
    length, budget = (64, 256) if setting.small else (512, 8192 if large else 4096)
    answers = np.random.default_rng(0).permutation(long_tailed(2 * N, 2, length)).tolist()
    rows = group_rows([length] * 2, answers, shape.vocabulary)
    steps = {layout: (layout, headway_step(setting, folder, rows, budget, packing=layout)) for layout in LAYOUTS}
    yield from compared(setting, rows, budget, steps)


def grouped(rows: Sequence[CollatedRow], shape: Shape) -> list[CollatedRow]:
    """Return the answers of ``rows`` as those of groups of `N`, behind a prompt that each group shares."""
    noise, made = np.random.default_rng(2), []
    for index, row in enumerate(rows):
        group, k = divmod(index, N)
        if k == 0:
            prompt = noise.integers(0, shape.vocabulary, int(noise.integers(1, 40))).astype(np.int32)
        ids = np.concatenate([prompt, row.input_ids[row.prompt_length :]])
        made.append(replace(row, input_ids=ids, prompt_length=len(prompt), episode=TrajectoryId(0, group, 0, k)))
    return made


# ---------------------------------------------------------------------------------------- compiling


def kernels(setting: Setting) -> Findings:
    """Compile for all: take the steps of `training`, `packing`, `compiled` and `training_speed`.

    torch keeps what FlexAttention and ``model.compile`` have compiled in files that all processes of a machine share. A
    check that takes the same steps finds them there, and needs no time for it.
    """
    rows = random_rows(setting)
    folder, wide = peaked_model(setting), peaked_model(setting, wide=True)
    with one_rank_group(setting):
        for dtype in ("float32", "bfloat16"):
            yield _taken(setting, "head size 64", dtype, folder, rows, dtype=dtype)
        yield _taken(setting, "compiled layers", "bfloat16", folder, rows, dtype="bfloat16", compile=True)
        many = grouped(random_rows(setting, 24), checked_shape(setting))
        for name, dtype, model in (
            ("head size 128", "float32", wide),
            ("head size 128", "bfloat16", wide),
            ("windows", "float32", windowed(folder)),
        ):
            yield _taken(setting, name, dtype, model, many, dtype=dtype)
        # One layer: each layer of a model is compiled by itself, and all are alike.
        layer = replace(shape_of(setting), name="one-layer", layers=1)
        with torch.device(setting.device):
            layer.random("qwen2").to(torch.bfloat16).save_pretrained(setting.scratch / layer.name)
        for compiled in (False, True):
            step = headway_step(setting, setting.scratch / layer.name, *step_rows(setting), compile=compiled)()
            name = "compiled layers" if compiled else "head size 64"
            yield Finding(name, f"0.5 B {timed(step):.0f} s")


def _taken(
    setting: Setting, name: str, what: str, folder: Path, rows: Sequence[CollatedRow], *, dtype: str, **model: Any
) -> Finding:
    """Take a step, and compute log-probs without a gradient: kernels of their own."""
    engine = engine_of(setting, folder, dtype, **model)

    def step() -> None:
        engine.forward_logprobs(rows)
        engine.train_step(rows, StepContext())
        setting.wait()

    return Finding(name, f"{what} {timed(step):.0f} s")
