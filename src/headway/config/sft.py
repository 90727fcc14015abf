"""The section of supervised fine-tuning, ``headway sft``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.config.learning import OptimConfig
from headway.config.section import Every, NonNegative, Positive, Section


class SftOptimConfig(OptimConfig):
    """The AdamW optimizer of ``headway sft`` and its learning rate."""

    lr: float = Field(1e-5, gt=0)
    """Learning rate after warm-up."""
    lr_warmup_steps: NonNegative = 10
    """Optimizer steps of linear warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after warm-up; ``linear`` and ``cosine`` fall to ``min_lr_ratio`` at the last
    optimizer step."""


class SftConfig(Section):
    """Supervised fine-tuning by ``headway sft``, which one recipe can have beside all that ``headway train`` reads."""

    batch_size: Positive = 32
    """Number of conversations in one optimizer step."""
    max_length: Positive | None = None
    """Most tokens of a conversation; longer ones are left out, and counted. Default: ``data.max_prompt_length`` +
    ``data.max_response_length``."""
    completion_key: str = "auto"
    """Column of the completion, where rows are a prompt and its completion. ``auto``: ``completion``, ``response`` or
    ``output``."""
    max_steps: Positive | None = None
    """Number of optimizer steps; at most those of ``data.epochs`` where that is given. Default: as many as
    ``data.epochs`` passes over the data take, or one pass."""
    val_freq: Positive = 50
    """Optimizer steps between two measurements of the loss on held-out conversations."""
    save_freq: Every = 200
    """Optimizer steps between two checkpoints; -1: only at the end."""
    optim: SftOptimConfig = SftOptimConfig()
