"""Dtypes that a run's models have on a kind of device, as torch spells them without the prefix: ``bfloat16``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.config.schema import Config
from headway.devices import kind_of

if TYPE_CHECKING:
    from headway.devices import Device


def compute_dtype(config: Config, device: Device) -> str:
    """Return the dtype of the trainer's matrix products: ``model.dtype``; ``auto`` is the device's."""
    return kind_of(device).dtype if config.model.dtype == "auto" else config.model.dtype


def served_dtype(config: Config, device: Device) -> str:
    """Return the dtype of the weights that rollouts are served from: ``rollout.dtype``; ``auto`` is the trainer's."""
    return compute_dtype(config, device) if config.rollout.dtype == "auto" else config.rollout.dtype
