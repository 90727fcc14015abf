"""The sides of ``make bench-train``: Headway's engine, rows laid out as it is told, and a plain loop.

A step here is forward, loss and backward over all micro-batches, and the gradient's norm. The optimizer's step, which
is the same for all sides and large beside so short ones, is left out, and so are its states.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile

from benchmarks.train_workload import Kind
from headway.config.schema import Config
from headway.config.sections.learning import ActorConfig, ParallelConfig
from headway.config.sections.model_section import ModelConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow, token_budget_batches
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.models.pretrained import load_model

CLIP = 0.2
UNLIMITED = 1e9


class Plain:
    """Plain loop over transformers, written well.

    Rows are sorted by length, padded on the right, in micro-batches of so many tokens; the head sees answers alone.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._model = load_model(folder, dtype=torch.float32)
        self._budget = budget

    def gradient(self, rows: Sequence[CollatedRow]) -> dict[str, torch.Tensor]:
        self._backward(rows)
        found = {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}
        self._model.zero_grad()
        return found

    def step(self, rows: Sequence[CollatedRow]) -> None:
        self._backward(rows)
        self._model.zero_grad()

    def _backward(self, rows: Sequence[CollatedRow]) -> None:
        total = sum(len(row.logprobs) for row in rows)
        for batch in token_budget_batches([len(row.input_ids) for row in rows], self._budget):
            self._loss([rows[i] for i in batch], total).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), UNLIMITED)

    def _loss(self, rows: Sequence[CollatedRow], total: int) -> torch.Tensor:
        ids = pad_sequence([torch.from_numpy(row.input_ids).long() for row in rows], batch_first=True)
        lengths = torch.tensor([len(row.input_ids) for row in rows])
        prompts = torch.tensor([row.prompt_length for row in rows])
        position = torch.arange(ids.shape[1] - 1)
        predicts = (position >= prompts[:, None] - 1) & (position < lengths[:, None] - 1)
        hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = self._model.get_output_embeddings()(hidden[:, :-1][predicts])
        logprobs = -cross_entropy(logits.float(), ids[:, 1:][predicts], reduction="none")
        behaviour = torch.cat([torch.from_numpy(row.logprobs) for row in rows])
        advantages = torch.cat([torch.from_numpy(row.columns["advantages"]) for row in rows])
        ratio = (logprobs - behaviour).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum() / total


class Headway:
    """The train engine on one rank, without its optimizer's step. Needs torch.distributed's default group."""

    def __init__(self, folder: Path, budget: int, kind: Kind) -> None:
        config = Config(
            actor=ActorConfig(ppo_max_token_len_per_gpu=budget, grad_clip=UNLIMITED, clip_ratio=CLIP),
            model=ModelConfig(packing=kind.value, enable_gradient_checkpointing=False),
        )
        self._engine = FsdpEngine(
            model_path=str(folder),
            config=config,
            total_optimizer_steps=10**9,
            mesh=TrainMesh.make(ParallelConfig(), torch.device("cpu")),
        )
        if kind is not Kind.PADDED and self._engine.padded is not None:
            raise RuntimeError(f"the engine pads rows that are to be {kind}: {self._engine.padded}")
        self._found: dict[str, torch.Tensor] | None = None
        self._engine._learner._update = self._keep  # type: ignore[method-assign]

    def _keep(self, grad_norm: float, lr: float) -> None:
        if self._found is not None:
            named = self._engine._policy.lm.named_parameters()
            self._found |= {name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None}

    def step(self, rows: Sequence[CollatedRow]) -> None:
        report = self._engine.train_step(rows, StepContext())
        if report.skipped:
            raise ArithmeticError(f"the step's loss is {report.metrics['loss']}")

    def gradient(self, rows: Sequence[CollatedRow]) -> dict[str, torch.Tensor]:
        self._found = {}
        try:
            self.step(rows)
            return self._found
        finally:
            self._found = None


Side = Plain | Headway
"""One way to compute a mini-batch's gradient (``step``), and to return it by the parameter's name (``gradient``)."""


def side_of(kind: Kind, folder: Path, budget: int) -> Side:
    return Plain(folder, budget) if kind is Kind.PLAIN else Headway(folder, budget, kind)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """‖found − expected‖ ÷ ‖expected‖ over all parameters."""
    off = sum(float((found[name].double() - e.double()).square().sum()) for name, e in expected.items())
    return float((off / sum(float(e.double().square().sum()) for e in expected.values())) ** 0.5)


def peak_bytes(side: Side, rows: Sequence[CollatedRow]) -> int:
    """Most bytes of tensors that a step holds at once, beyond what was there before it.

    From torch's own record of every allocation: unlike the process's resident size it knows nothing of what malloc
    keeps, and is the same each time.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        side.step(rows)
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def give_back() -> None:
    """Return freed memory to the system, so that one cell's leftovers are not another's."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
