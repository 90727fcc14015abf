"""Kernels that are compiled, by FlexAttention and ``model.compile``: once, before the checks that need them.

torch keeps what it has compiled in files that all processes of a machine share. A check that takes the same steps
finds them there: it has limits for computing, not for compiling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_checks.models import checked_shape, peaked_model
from benchmarks.gpu_checks.packing import grouped, windowed
from benchmarks.gpu_checks.setting import Finding, Findings, Setting, one_rank_group
from benchmarks.gpu_checks.speed import headway_step, shape_of, step_rows
from benchmarks.gpu_checks.training import engine_of, random_rows
from benchmarks.runner import timed
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow


def kernels(setting: Setting) -> Findings:
    """Take the steps of `training`, `packing`, `compiled` and the measurements, and say how long each took."""
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
