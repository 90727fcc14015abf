"""Training: gradients and steps are those of the loss written out plainly in float64 on the CPU, on any ranks.

reference  Hugging Face's module, one row at a time, torch.optim.AdamW        (CPU, float64)
checked    FsdpEngine: padded micro-batches, chunked log-probs, FSDP2         (the device, float32 and bfloat16)

Layouts of rows give the gradient of single rows, whatever they are:

padded     a micro-batch's rows, as long as the longest
packed     one line without padding
shared     one line in which a group's prompt stands once
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from benchmarks.gpu_checks.models import checked_shape, peaked_model
from benchmarks.gpu_checks.setting import CheckFailed, Finding, Findings, Setting, one_rank_group, require
from benchmarks.gpu_checks.speed import headway_step, shape_of, step_rows
from benchmarks.runner import timed
from benchmarks.shapes import Shape, random_row
from benchmarks.train_sides import UNLIMITED, distance, train_engine
from headway.config.sections.learning import OptimConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.data.types import TrajectoryId
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.models.pretrained import load_model

FLOAT32_TOLERANCE = 1e-3
"""Limit of a gradient's ‖difference‖ ÷ ‖reference‖ in float32."""
BFLOAT16_FACTOR = 1.5
"""Limit of it in bfloat16: so many times what Hugging Face's module has there on the same device. Random
weights with peaked distributions are at their worst there: about 0.3."""
STEP_TOLERANCE = 0.02
"""Limit of ‖difference‖ ÷ ‖step‖ of AdamW's first step. The step is the gradient's sign, which rounding turns where
there is hardly any gradient."""
LR = 1e-3
MICRO_BATCH_TOKENS = 256
"""Token budget so small that a mini-batch is several micro-batches."""
BUCKET_BYTES = 65_536
MEET_S = 60.0
"""Limit for all ranks to be there, and for any collective."""

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reference:
    """One mini-batch's loss, gradient and weights after one optimizer step."""

    loss: float
    gradient: Weights
    before: Weights
    after: Weights


def training(setting: Setting) -> Findings:
    """One mini-batch's gradient and optimizer step on the device against the CPU."""
    yield from against_the_cpu(setting, {"float32": {}, "bfloat16": {}})
    yield from against_the_cpu(setting, {"with recomputation": {"enable_gradient_checkpointing": True}})


def compiled(setting: Setting) -> Findings:
    """`training` with layers that are compiled (``model.compile``)."""
    yield from against_the_cpu(setting, {"float32": {"compile": True}, "bfloat16": {"compile": True}})


def against_the_cpu(setting: Setting, cases: Mapping[str, Mapping[str, bool]]) -> Findings:
    """``cases``: settings of the section ``model`` by name, which is the compute dtype or is in float32."""
    folder, rows = peaked_model(setting), random_rows(setting)
    expected = reference(folder, rows)
    with one_rank_group(setting):
        for name, model in cases.items():
            dtype = name if name == "bfloat16" else "float32"
            limit = tolerance(setting, folder, rows, expected, dtype)
            engine = engine_of(setting, folder, dtype, **model)
            found = compare(engine, rows, expected, name, limit, step=dtype == "float32")
            yield Finding(
                name,
                f"gradient off by {found['gradient']:.2g} of its norm (limit {limit:.2g}), loss by {found['loss']:.2g}"
                + (f", AdamW's step by {found['step']:.2g} (limit {STEP_TOLERANCE:g})" if "step" in found else ""),
            )


def fsdp(setting: Setting) -> Findings:
    """Gradient and step of one mini-batch on all GPUs, a rank each; gathered weights; a checkpoint there and back."""
    world = setting.ranks or setting.kind.count()
    folder, rows = peaked_model(setting), random_rows(setting)
    expected = reference(folder, rows)
    torch.save(expected, setting.scratch / "reference.pt")
    if world == 1:
        with one_rank_group(setting):
            found = on_each_rank(setting, folder, rows, expected)
    else:
        found = _in_processes(setting, folder, rows, world)
    title = f"{world} rank{'s' * (world > 1)}, {'NCCL' if setting.on_gpu else 'Gloo'}"
    said = "; ".join(f"{what}: {said}" for what, said in found.items())
    yield Finding("ranks", f"{title}: {said}")


# ---------------------------------------------------------------------------------------- what is compared


def compare(
    engine: FsdpEngine,
    share: Sequence[CollatedRow],
    expected: Reference,
    name: str = "float32",
    limit: float = FLOAT32_TOLERANCE,
    *,
    step: bool = True,
) -> dict[str, float]:
    """How far the engine's gradient, loss and, if asked for, ``step`` are from ``expected``. Collective.

    Raises `CheckFailed`, which begins with ``name``.
    """
    gradient: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:  # when all micro-batches are in, and before clipping or stepping changes anything
        for name, parameter in engine._policy.lm.named_parameters():
            assert parameter.grad is not None
            gradient[name] = _full(parameter.grad)

    engine.learner._optimizer.register_step_pre_hook(keep)
    report = engine.train_step(share, StepContext())
    require(not report.skipped, f"{name}: the step was skipped: loss {report.metrics['loss']}")
    found = {"gradient": distance(gradient, expected.gradient), "loss": abs(report.metrics["loss"] - expected.loss)}
    require(
        found["gradient"] <= limit,
        f"{name}: the gradient is off by {found['gradient']:.2g} of its norm (limit {limit:.2g}), most at "
        f"{worst(gradient, expected.gradient)}",
    )
    require(
        found["loss"] <= limit * max(1.0, abs(expected.loss)),
        f"{name}: the loss is {report.metrics['loss']:.6g}, on the CPU {expected.loss:.6g} (limit {limit:.2g})",
    )
    if step:
        after = {n: _full(parameter) for n, parameter in engine._policy.lm.named_parameters()}
        taken = {n: after[n] - weights for n, weights in expected.before.items()}
        right = {n: expected.after[n] - weights for n, weights in expected.before.items()}
        found["step"] = distance(taken, right)
        require(
            found["step"] <= STEP_TOLERANCE,
            f"{name}: AdamW's step is off by {found['step']:.2g} of its norm (limit {STEP_TOLERANCE:g}), most at "
            f"{worst(taken, right)}",
        )
    return found


def on_each_rank(setting: Setting, folder: Path, share: Sequence[CollatedRow], expected: Reference) -> dict[str, str]:
    """What `fsdp` looks at, on one rank. Collective. Raises `CheckFailed`."""
    scratch = setting.scratch
    found = compare(engine_of(setting, folder, "float32"), share, expected)
    said = {"gradient off by": f"{found['gradient']:.2g}"}
    if setting.on_gpu:
        found = compare(engine_of(setting, folder, "float32", offload=True), share, expected)
        said["with shards in host memory by"] = f"{found['gradient']:.2g}"
    engine = engine_of(setting, folder, "float32")
    before = gathered(engine)
    require(
        all(torch.equal(before[name], weights.float()) for name, weights in expected.before.items()),
        "the weights that were gathered from the ranks are not those of the model's folder",
    )
    said["gathered weights"] = "the model's, bit by bit"
    engine.learner.save(scratch / "checkpoint", {"step": 0})
    engine.train_step(share, StepContext())
    moved = distance(gathered(engine), before)
    require(moved > 0, "a training step changed nothing")
    extra = engine.learner.load(scratch / "checkpoint")
    require(extra == {"step": 0}, f"a checkpoint came back with {extra}, saved was {{'step': 0}}")
    back = gathered(engine)
    require(
        all(torch.equal(back[name], weights) for name, weights in before.items()),
        f"a checkpoint brought other weights back than were saved (off by {distance(back, before):.2g})",
    )
    said["checkpoint"] = "the same weights came back"
    return said


def gathered(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """All weights, as they go to the replicas, on the host. Collective; other ranks' than zero's are unspecified."""
    manifest = engine.manifest(torch.float32)
    flat = torch.empty(manifest.nbytes, dtype=torch.uint8)
    for offset, data in engine.gather(manifest, BUCKET_BYTES, everywhere=True):
        flat[offset : offset + data.numel()].copy_(data)
    return {s.name: flat[s.offset : s.end].view(torch.float32).view(s.shape) for s in manifest.slots}


def worst(found: Weights, expected: Weights) -> str:
    """The tensor that is furthest from what it should be, in its own norm."""
    return max(expected, key=lambda name: distance({name: found[name]}, {name: expected[name] + 1e-30}))


# ---------------------------------------------------------------------------------------- the two sides


def engine_of(setting: Setting, folder: Path, dtype: str, *, offload: bool = False, **model: Any) -> FsdpEngine:
    """Return the checked engine. ``model``: settings of that section."""
    actor = {
        "ppo_max_token_len_per_gpu": MICRO_BATCH_TOKENS,
        "grad_clip": UNLIMITED,
        "optim": {"lr": LR, "weight_decay": 0.0},
        "fsdp_config": {"param_offload": offload},
    }
    return train_engine(folder, setting.device, actor=actor, model={"dtype": dtype, **model})


def random_rows(setting: Setting, count: int = 12) -> list[CollatedRow]:
    """Return rows of very different lengths, with masked tokens."""
    noise, vocabulary = np.random.default_rng(0), checked_shape(setting).vocabulary
    rows = []
    for _ in range(count):
        prompt, answer = (noise.integers(0, vocabulary, int(noise.integers(1, most))) for most in (20, 60))
        row = random_row(prompt, answer, noise.standard_normal(len(answer)))
        rows.append(replace(row, loss_mask=noise.random(len(answer)) < 0.8))
    return rows


def reference(folder: Path, rows: list[CollatedRow]) -> Reference:
    """The step by definition. Fills in the rows' behaviour log-probs: the model's, a little off, for ratios to vary."""
    model = load_model(folder, dtype=torch.float64)
    noise = np.random.default_rng(1)
    for index, row in enumerate(rows):
        behaviour = _logprobs(model, row).detach().numpy() + 0.05 * noise.standard_normal(len(row.logprobs))
        rows[index] = replace(row, logprobs=behaviour.astype(np.float32))
    loss, gradient = plain(model, rows)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.optim.AdamW(model.parameters(), lr=LR, betas=OptimConfig().betas, weight_decay=0.0).step()
    return Reference(loss, gradient, before, {name: p.detach() for name, p in model.named_parameters()})


def tolerance(setting: Setting, folder: Path, rows: Sequence[CollatedRow], expected: Reference, dtype: str) -> float:
    """Limit of a gradient's distance from ``expected``: in bfloat16 by that of Hugging Face's module on the device."""
    if dtype != "bfloat16":
        return FLOAT32_TOLERANCE
    _, gradient = plain(load_model(folder, dtype=torch.bfloat16).to(setting.device), rows)
    return BFLOAT16_FACTOR * distance({name: g.cpu() for name, g in gradient.items()}, expected.gradient)


def plain(model: PreTrainedModel, rows: Sequence[CollatedRow]) -> tuple[float, dict[str, torch.Tensor]]:
    """The mini-batch's loss and gradient by definition, one row at a time; gradients stay in the model."""
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    loss = torch.zeros((), dtype=torch.float64, device=model.device)
    for row in rows:
        behaviour, advantages, mask = (
            torch.from_numpy(a).to(model.device) for a in (row.logprobs, row.columns["advantages"], row.loss_mask)
        )
        ratio = (_logprobs(model, row) - behaviour).exp()
        terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = loss + terms[mask].sum() / tokens
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _logprobs(model: PreTrainedModel, row: CollatedRow) -> torch.Tensor:
    """[T] of a row's response, in float64 or float32."""
    ids = torch.from_numpy(row.input_ids.astype(np.int64)).to(model.device)
    logits = model(ids[None]).logits[0, row.prompt_length - 1 : -1]
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return logits.log_softmax(-1).gather(1, ids[row.prompt_length :, None]).squeeze(1)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, on the host. Collective, and so on the device even where shards are not."""
    moved = tensor.detach().to(tensor.device_mesh.device_type)
    return moved.full_tensor().cpu().clone()


# ---------------------------------------------------------------------------------------- several ranks


def _in_processes(setting: Setting, folder: Path, rows: Sequence[CollatedRow], world: int) -> dict[str, str]:
    store = setting.scratch / "ranks"
    store.unlink(missing_ok=True)
    with ProcessPoolExecutor(world, get_context("spawn")) as ranks:
        shares = [list(rows[rank::world]) for rank in range(world)]
        made = [ranks.submit(_rank, setting, folder, share, rank, world, store) for rank, share in enumerate(shares)]
        try:
            said, *_ = (one.result() for one in made)
        except CheckFailed as failure:
            raise CheckFailed(f"on {world} ranks: {failure}") from None
    return said


def _rank(
    setting: Setting, folder: Path, share: Sequence[CollatedRow], rank: int, world: int, store: Path
) -> dict[str, str]:
    setting.kind.make_current(torch.device(setting.device, rank))
    meeting = {"store": dist.FileStore(str(store), world), "rank": rank, "world_size": world}
    dist.init_process_group(setting.kind.process_groups, **meeting, timeout=timedelta(seconds=MEET_S))
    try:
        return on_each_rank(setting, folder, share, torch.load(setting.scratch / "reference.pt", weights_only=False))
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------- layouts of rows


LAYOUTS = ("padded", "packed", "shared")
"""Values of ``model.packing``, the plainest first."""
WINDOW = 8
"""Positions that a token sees in layers with a window."""
N = 8
"""Answers to a prompt."""


def gradients(setting: Setting) -> Findings:
    """One mini-batch's gradient by each layout on the device, against single rows in float64 on the CPU."""
    folder = peaked_model(setting)
    rows = grouped(random_rows(setting, (2 if setting.small else 3) * N), checked_shape(setting))
    expected = reference(folder, rows)
    with one_rank_group(setting):
        for dtype in ("float32", "bfloat16"):
            limit = tolerance(setting, folder, rows, expected, dtype)
            off = {layout: _off(setting, folder, rows, expected, dtype, limit, layout) for layout in LAYOUTS}
            found = ", ".join(f"{layout} {value:.2g}" for layout, value in off.items())
            yield Finding(dtype, f"gradients off by {found} of their norm (limit {limit:.2g})")
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # beyond it a kernel computes all scores at once
        for name, other in (("head size 128", peaked_model(setting, wide=True)), ("windows", windowed(folder))):
            off = _off(setting, other, rows, reference(other, rows), "float32", FLOAT32_TOLERANCE, "shared", name)
            yield Finding(name, f"float32, shared: gradient off by {off:.2g} of its norm")


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
    return compare(engine, rows, expected, f"{layout}, {what or dtype}", limit, step=False)["gradient"]


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
            yield _taken(setting, "compiled layers", dtype, folder, rows, dtype=dtype, compile=True)
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
            step = headway_step(setting, setting.scratch / layer.name, *step_rows(setting), compile=compiled)
            yield Finding("compiled layers" if compiled else "head size 64", f"0.5 B {timed(step):.0f} s")


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
