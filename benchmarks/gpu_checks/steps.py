"""Where the time of a step goes, at the shape of Qwen2.5-0.5B: decoding, training, a prefill, an interrupt."""

from __future__ import annotations

import torch

from benchmarks.gpu_checks.engine import core_of, finish, recorder_of
from benchmarks.gpu_checks.models import on_device, requests
from benchmarks.gpu_checks.profiling import profiled
from benchmarks.gpu_checks.setting import Finding, Findings, Setting, one_rank_group, require
from benchmarks.gpu_checks.speed import Once, empty, headway_step, model_folder, shape_of, step_rows
from benchmarks.runner import timed
from headway.data.interfaces.rollout import GenerateRequest, OnUpdate
from headway.engines.rollout.native.native_core import EngineCore

STEPS = 16
"""Decoding steps that are measured."""
PROMPT = 128


def steps(setting: Setting) -> Findings:
    """Profile a decode step, an interrupt, a prefill of mixed lengths, and a train step."""
    yield from _decoded(setting)
    empty(setting)
    with one_rank_group(setting):
        rows, budget = step_rows(setting)
        once = headway_step(setting, model_folder(setting), rows, budget)()
        once()
        yield _found(setting, "train step", f"{sum(len(row.input_ids) for row in rows)} tokens", once, 1)


def _decoded(setting: Setting) -> Findings:
    model = on_device(model_folder(setting), setting, torch.bfloat16 if setting.on_gpu else torch.float32)
    count, unit = (4, 16) if setting.small else (64, 64)
    core = core_of(setting, model, recorder_of(setting), slots=max(count, 16), batched=16_384, context=2048)
    with torch.inference_mode():
        # As many tokens as leave all within one span of recorded steps, whatever is measured.
        asked = requests([PROMPT] * count, shape_of(setting).vocabulary, tokens=4 * STEPS + 32)
        sampling = asked[0].sampling
        calls = [GenerateRequest(r.number, r.prompt.trajectory_id(0), r.prompt.token_ids, sampling) for r in asked]
        core.submit("check", calls)
        _advance(core, 2 * STEPS)
        yield _found(setting, "decode step", f"{count} sequences", lambda: _advance(core, STEPS), STEPS)
        usual = timed(lambda: (_advance(core, 1), setting.wait()))
        cost = timed(lambda: _interrupted(setting, core))
        text = f"{count} contexts of {PROMPT + 4 * STEPS} tokens decode again after {cost * 1e3:.1f} ms"
        yield Finding("interrupt", f"{text} (a step: {usual * 1e3:.1f} ms)", {"seconds": cost, "step_seconds": usual})
        core.forget("check")
        mixed = requests([unit * k for k in range(1, 17)], shape_of(setting).vocabulary, tokens=1)
        tokens = sum(len(request.prompt.token_ids) for request in mixed)
        alike = requests([tokens // 16] * 16, shape_of(setting).vocabulary, tokens=1)
        seconds = []
        for some in (mixed, alike):
            finish(core, some)
            core.activate(core.version + 1, lambda: None)  # what was kept of the contexts is given up
            seconds.append(timed(lambda some=some: (finish(core, some), setting.wait())))
            core.activate(core.version + 1, lambda: None)
        layers, attention = shape_of(setting).layers, profiled(setting, lambda: finish(core, mixed)).attention
        text = f"{tokens / seconds[0]:,.0f} tokens/s, {seconds[1] / seconds[0]:.2f} × 16 of one length"
        figures = {"tokens": tokens, "seconds": seconds[0], "alike_seconds": seconds[1]}
        yield Finding("16 prompts of 16 lengths", f"{text}; {layers} layers: {attention}", figures)


def _found(setting: Setting, name: str, what: str, work: Once, count: int) -> Finding:
    """Time ``work`` of ``count`` steps, then profile it."""
    seconds = timed(lambda: (work(), setting.wait())) / count
    seen = profiled(setting, work, count)
    unit = "kernels" if setting.on_gpu else "operations"
    text = f"{seconds * 1e3:.1f} ms, {what}; {seen.launched:.0f} {unit} take {seen.device_seconds * 1e3:.1f} ms; "
    figures = {
        "seconds": seconds,
        "device_seconds": seen.device_seconds,
        "launched": seen.launched,
        "lines": seen.lines,
    }
    return Finding(name, f"{text}{seen.attention}", figures)


def _advance(core: EngineCore, steps: int) -> None:
    for _ in range(steps):
        core.step()


def _interrupted(setting: Setting, core: EngineCore) -> None:
    """Interrupt all that decodes, and go on until each has another token."""
    core.stats()
    paused = core.pause(OnUpdate.INTERRUPT)
    require(paused.interrupted > 0, "nothing decoded that could be interrupted")
    core.resume()
    core.step()
    while core.stats().waiting:
        core.step()
    setting.wait()
