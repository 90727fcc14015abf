"""The modes: dictionaries of configuration values, which the user's own override. No code checks a mode's name."""

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
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_USUAL = {key: None if value == "null" else value for key, value in _TABLES.pop("usual").items()}
# Read-only: all configurations of a process share these.
PRESETS: Mapping[str, Values] = MappingProxyType(
    {mode: MappingProxyType({**_USUAL, **values}) for mode, values in _TABLES.items()}
)


def preset(mode: Any) -> Values:
    """Return the values of ``mode``. Raises `ConfigError` for an unknown mode; the message lists all modes."""
    if isinstance(mode, str) and mode in PRESETS:
        return PRESETS[mode]
    given = "null" if mode is None else repr(mode)
    hint = did_you_mean(str(mode), PRESETS)
    raise ConfigError(f"mode: there is no mode {given}{hint}; choose one of {', '.join(PRESETS)}")
