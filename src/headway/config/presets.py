"""The modes: dictionaries of configuration values that lie beneath the user's own. No code asks for a mode's name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headway.errors import ConfigError
from headway.runtime.user_code import did_you_mean

Values = Mapping[str, Any]
"""Configuration values by dotted key."""
USUAL: Values = {
    "cluster.placement": "split",
    "async_training.trigger_parameter_sync_step": 1,
    "async_training.require_batches": 1,
    "async_training.staleness_threshold": 0,
    "async_training.admission": "batch",
    "async_training.order": "fifo",
    "async_training.window": None,
    "async_training.on_update": "drain",
    "async_training.max_lag": None,
    "async_training.on_overdue": "wait",
    "param_update.schedule": "synchronous",
    "param_update.transport": "auto",
}
"""Values of all modes, where they say nothing else."""
# Read-only: all configurations of a process share these.
PRESETS: Mapping[str, Values] = MappingProxyType(
    {
        mode: MappingProxyType({**USUAL, **values})
        for mode, values in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
    }
)


def preset(mode: Any) -> Values:
    """Return the values of ``mode``. Raises `ConfigError`, naming the modes that there are, for any other."""
    if isinstance(mode, str) and mode in PRESETS:
        return PRESETS[mode]
    given = "null" if mode is None else repr(mode)
    hint = did_you_mean(str(mode), PRESETS)
    raise ConfigError(f"mode: there is no mode {given}{hint}; choose one of {', '.join(PRESETS)}")
