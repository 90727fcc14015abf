"""The modes: dictionaries of configuration values that lie beneath the user's own. No code asks for a mode's name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headway.config.transport_facts import WITHIN_PROCESS
from headway.errors import ConfigError

Values = Mapping[str, Any]
"""Configuration values by dotted key."""


def _preset(
    *,
    trigger: int,
    eta: float,
    admission: str,
    order: str,
    on_update: str,
    window: str | None = None,
    placement: str = "split",
    schedule: str = "synchronous",
    transport: str = "auto",
) -> Values:
    return MappingProxyType(
        {
            "cluster.placement": placement,
            "async_training.trigger_parameter_sync_step": trigger,
            "async_training.require_batches": 1,
            "async_training.staleness_threshold": eta,
            "async_training.admission": admission,
            "async_training.order": order,
            "async_training.window": window,
            "async_training.on_update": on_update,
            "async_training.max_lag": None,
            "async_training.on_overdue": "wait",
            "param_update.schedule": schedule,
            "param_update.transport": transport,
        }
    )


PRESETS: Mapping[str, Values] = MappingProxyType(
    {
        "colocate_sync": _preset(
            trigger=1,
            eta=0,
            admission="batch",
            order="fifo",
            on_update="drain",
            placement="shared",
            transport=WITHIN_PROCESS,
        ),
        "on_policy": _preset(trigger=1, eta=0, admission="batch", order="fifo", on_update="drain"),
        "one_step_off": _preset(trigger=1, eta=1, admission="batch", order="fifo", on_update="drain"),
        "stream_off_policy": _preset(trigger=4, eta=0, admission="group", order="ready", on_update="drain"),
        "async_stale": _preset(trigger=4, eta=0.5, admission="group", order="window", window="B", on_update="drain"),
        "async_partial": _preset(
            trigger=4, eta=0.5, admission="group", order="window", window="B", on_update="interrupt"
        ),
        "overlapped": _preset(
            trigger=1,
            eta=1,
            admission="group",
            order="window",
            window="B",
            on_update="interrupt",
            schedule="overlapped",
        ),
        "colocate_async": _preset(
            trigger=1,
            eta=0.5,
            admission="group",
            order="window",
            window="B",
            on_update="interrupt",
            placement="shared",
            transport=WITHIN_PROCESS,
        ),
    }
)


def preset(mode: Any) -> Values:
    """Return the values of ``mode``. Raises `ConfigError`, naming the modes that there are, for any other."""
    if isinstance(mode, str) and mode in PRESETS:
        return PRESETS[mode]
    close = difflib.get_close_matches(str(mode), PRESETS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    given = "null" if mode is None else repr(mode)
    raise ConfigError(f"mode: there is no mode {given}{hint}; choose one of {', '.join(PRESETS)}")
