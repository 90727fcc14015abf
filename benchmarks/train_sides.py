"""Sides of a training step: the train engine, rows laid out as it is told, and a plain loop over transformers."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile

from headway.config.schema import Config
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow, token_budget_batches
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.models.pretrained import load_model

UNLIMITED = 1e9
"""Norm to which a gradient is clipped that is compared."""


def train_engine(folder: Path, device: str = "cpu", steps: int = 10**9, **sections: Any) -> FsdpEngine:
    """Return the train engine. ``sections`` of the configuration. Needs torch.distributed's default group."""
    config = Config.model_validate(sections)
    mesh = TrainMesh.make(config.actor.parallel, torch.device(device))
    return FsdpEngine(model_path=str(folder), config=config, total_optimizer_steps=steps, mesh=mesh)


def next_token_logprobs(model: Any, rows: Sequence[CollatedRow]) -> torch.Tensor:
    """Return the log-probs of all rows' answers, one behind the other, from one forward pass over padded rows."""
    device = model.device
    ids = pad_sequence([torch.from_numpy(row.input_ids).long() for row in rows], batch_first=True).to(device)
    lengths = torch.tensor([len(row.input_ids) for row in rows], device=device)
    prompts = torch.tensor([row.prompt_length for row in rows], device=device)
    position = torch.arange(ids.shape[1] - 1, device=device)
    predicts = (position >= prompts[:, None] - 1) & (position < lengths[:, None] - 1)
    with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[:, :-1][predicts])
    return -cross_entropy(logits.float(), ids[:, 1:][predicts], reduction="none")


class Plain:
    """Plain loop over transformers, written well.

    Rows are sorted by length, padded on the right, in micro-batches of so many tokens; the head sees answers alone. On
    a GPU it runs under autocast.
    """

    def __init__(self, folder: Path, budget: int, device: str = "cpu") -> None:
        self.model = load_model(folder, dtype=torch.float32).to(device)
        self._budget = budget

    def gradient(self, rows: Sequence[CollatedRow]) -> dict[str, torch.Tensor]:
        self.backward(rows)
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return found

    def step(self, rows: Sequence[CollatedRow]) -> None:
        self.backward(rows)
        self.model.zero_grad()

    def backward(self, rows: Sequence[CollatedRow], clip: float = UNLIMITED) -> float:
        """Add the gradient of the loss; returns its norm."""
        total = sum(len(row.logprobs) for row in rows)
        for batch in token_budget_batches([len(row.input_ids) for row in rows], self._budget):
            self._loss([rows[i] for i in batch], total).backward()
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip))

    def _loss(self, rows: Sequence[CollatedRow], total: int) -> torch.Tensor:
        logprobs = next_token_logprobs(self.model, rows)
        behaviour = torch.cat([torch.from_numpy(row.logprobs) for row in rows]).to(logprobs.device)
        advantages = torch.cat([torch.from_numpy(row.columns["advantages"]) for row in rows]).to(logprobs.device)
        ratio = (logprobs - behaviour).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / total


class Side:
    """The train engine on one rank, without its optimizer's step."""

    def __init__(self, folder: Path, budget: int, packing: str) -> None:
        actor = {"ppo_max_token_len_per_gpu": budget, "grad_clip": UNLIMITED, "clip_ratio": 0.2}
        model = {"packing": packing, "enable_gradient_checkpointing": False}
        self._engine = train_engine(folder, actor=actor, model=model)
        if packing != "padded" and self._engine.padded is not None:
            raise RuntimeError(f"the engine pads rows that are to be {packing}: {self._engine.padded}")
        self._found: dict[str, torch.Tensor] | None = None
        self._engine.learner._update = self._keep  # type: ignore[method-assign]

    def _keep(self, grad_norm: float, lr: float) -> None:
        if self._found is not None:
            named = self._engine._policy.lm.named_parameters()
            self._found |= {name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None}

    def step(self, rows: Sequence[CollatedRow]) -> None:
        report = self._engine.train_step(rows, StepContext())
        if report.skipped:
            raise ArithmeticError(f"the step's loss is {report.metrics['loss']}")

    def gradient(self, rows: Sequence[CollatedRow]) -> dict[str, torch.Tensor]:
        self._found = found = {}
        self.step(rows)
        self._found = None
        return found


def distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """‖found − expected‖ ÷ ‖expected‖ over all tensors."""
    off = sum(float((found[name].double() - e.double()).square().sum()) for name, e in expected.items())
    return float((off / sum(float(e.double().square().sum()) for e in expected.values())) ** 0.5)


def peak_bytes(side: Plain | Side, rows: Sequence[CollatedRow]) -> int:
    """Return the most bytes of tensors that a step holds at once, beyond what was there before it.

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
