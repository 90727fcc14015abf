"""The section of supervised fine-tuning, ``headway sft``."""

from __future__ import annotations

from headway.config.sections.learning import OptimConfig
from headway.config.sections.section import Every, Positive, Section


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
    optim: OptimConfig = OptimConfig(lr=1e-5, lr_warmup_steps=10, lr_scheduler_type="cosine")
