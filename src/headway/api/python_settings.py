"""Settings given in Python: from nested mappings, dotted keys and keywords to flat settings of YAML's types.

{"rollout": {"n": 8}, "actor.optim.lr": 1e-5}, reward=score ─▶ {"rollout.n": 8, "actor.optim.lr": 1e-5,
                                                                "reward.function": score}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

from headway.cluster.machine.worker_setup import available_cores
from headway.config.aliases import translate
from headway.config.doctor import diagnose, machine_notes
from headway.config.layers import Layer, flatten, overlay
from headway.config.loading import LoadedConfig, load
from headway.config.schema import Config
from headway.data.rows import TRAIN_SPLIT, settings_named
from headway.devices import listed_here
from headway.errors import ConfigError, shown
from headway.reports.run_directory import RunDirectory

IN_PYTHON = "in Python"
"""Origin of the settings, for messages."""

SHORT: Mapping[str, tuple[str, str]] = {
    "model": ("model.path", "model"),
    "data": ("data.train", "data"),
    "reward": ("reward.function", "reward"),
    "loss": ("algorithm.policy_loss.loss_mode", "algorithm.policy_loss"),
    "advantage": ("algorithm.adv_estimator", "algorithm.adv_estimator"),
    "task": ("data.task.name", "data.task"),
    "tools": ("agent.tools", "agent.tools"),
    "environment": ("agent.environment", "agent.environment"),
    "program": ("agent.program", "agent.program"),
    "agent": ("agent.client", "agent"),
}
"""Keyword → the setting for a plain value, and the section for a mapping."""


def settings_given(
    config: Mapping[str, Any] | None, settings: Mapping[str, Any] | None, keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all settings, flat: ``keywords`` replace ``settings``, which replace ``config``.

    Keywords that are None count as not given. Callables stay callables.

    Raises:
        ConfigError: a key is not text, a value has a type that no setting has, or a key is given twice.
    """
    below = overlay(_flat(config or {}, "config"), _flat(settings or {}, "settings"))
    return overlay(below, _flat(_long(keywords), "the keywords"))


def layer(values: Mapping[str, Any]) -> Layer:
    """Return the settings as a layer over a file's. Raises `ConfigError` as `translate` does."""
    translated, notes = translate(values, IN_PYTHON)
    return Layer(IN_PYTHON, translated, notes=tuple(notes))


def _long(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords as settings. Several rewards become ``reward.functions``, one mapping each."""
    found: dict[str, Any] = {}
    for name, given in keywords.items():
        if given is None:
            continue
        value = given
        of_value, of_mapping = SHORT.get(name, (name, name))
        key = of_mapping if isinstance(value, Mapping) else of_value
        if name == "reward" and isinstance(value, list | tuple):
            key, value = "reward.functions", [one if isinstance(one, Mapping) else {"function": one} for one in value]
        elif name == "tools" and not isinstance(value, list | tuple):
            value = [value]
        elif name == "data" and isinstance(value, str):
            ((key, value),) = settings_named(value, TRAIN_SPLIT).items()
        found[key] = value
    return found


def _flat(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{what}: got {shown(values)}, expected a mapping of settings, like {{'rollout.n': 8}}")
    if odd := next((name for name in values if not isinstance(name, str)), None):
        raise ConfigError(f"{what}: got the key {odd!r}, expected the name of a setting, like 'rollout.n'")
    found: dict[str, Any] = {}
    for key, value in flatten({name: _plain(value, name) for name, value in values.items()}):
        if key in found:
            raise ConfigError(f"{key} is given twice in {what}, with dots and nested; drop one of them")
        found[key] = value
    return found


def _plain(value: Any, key: str) -> Any:
    """Return a value with YAML's types, or a callable. Raises `ConfigError` for any other."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case PurePath() | Fraction():
            return str(value)
        case Mapping():
            return {name: _plain(inner, f"{key}.{name}") for name, inner in value.items()}
        case Sequence():  # text is a sequence, too; it was handled above
            return [_plain(inner, key) for inner in value]
    if callable(value):
        return value
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # a number of numpy's
        return _plain(value.item(), key)
    raise ConfigError(f"{key}: got {shown(value)}, expected a number, text, a list, a mapping, or a function")


def load_checked(path: Path | None, overrides: Sequence[str] | Layer = (), *, supervised: bool = False) -> LoadedConfig:
    """Return the configuration after the doctor's checks, with its notes. ``supervised``: for ``headway sft``.

    Raises `ConfigError` for anything wrong.
    """
    if path is not None and "=" in str(path) and not path.exists():
        raise ConfigError(f"expected CONFIG, a YAML file, before the settings, but the first argument is {path}")
    loaded = load(path, overrides)
    if loaded.config.data.accept_changes:
        raise ConfigError("data.accept_changes: it has no effect on a new run; it is for --resume RUN")
    return _diagnosed(loaded, supervised)


def load_resumed(
    run: Path, overrides: Sequence[str] | Layer = (), *, supervised: bool = False
) -> tuple[Config, LoadedConfig]:
    """Return the old configuration of the run in the directory ``run``, and the checked new one.

    ``supervised``: True for a run of ``headway sft``.

    Raises:
        UserError: there is no run.
        ConfigError: a setting is wrong.
    """
    directory = RunDirectory.existing_sft(run) if supervised else RunDirectory.existing(run)
    # The run wrote its file itself: a setting that a change left without effect is not the user's mistake.
    loaded = load(directory.config, overrides)
    loaded = _diagnosed(replace(loaded, user_keys=loaded.typed_keys), supervised)
    return load(directory.config).config, loaded


def _diagnosed(loaded: LoadedConfig, supervised: bool) -> LoadedConfig:
    notes = diagnose(loaded, supervised=supervised)
    if not supervised:
        notes = [*notes, *machine_notes(loaded.config, cores=available_cores(), gpus=listed_here())]
    return replace(loaded, notes=notes)
