"""The learning rate as a function of the optimizer step."""

from __future__ import annotations

import math

from headway.config.sections.learning import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``total_steps``.

    It rises linearly over ``lr_warmup_steps`` (the first step already has lr/lr_warmup_steps, so none is wasted), then
    stays, or falls to ``min_lr_ratio · lr``, which the last step has.
    """
    warmup = config.lr_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    last = total_steps - 1
    progress = min(1.0, (step - warmup) / (last - warmup)) if last > warmup else 0.0
    match config.lr_scheduler_type:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - progress
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)
