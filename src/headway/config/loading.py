"""Loading: from files and arguments to a checked configuration.

preset of ``mode`` ─▶ defaults' files ─▶ the file ─▶ ``a.b=c`` arguments ─▶ schema ─▶ LoadedConfig
    (beneath)                                        (on top)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from headway.config.aliases import join_corrections, resolve_ahead_steps, resolve_partial_rollout
from headway.config.checks import rules, without_effect
from headway.config.conditions import with_texts
from headway.config.layers import (
    Layer,
    flatten,
    lies_in,
    nest,
    overlay,
    read_file,
    resolve_references,
    settings_of,
    with_own_code,
)
from headway.config.presets import preset
from headway.config.recipes import with_own_files
from headway.config.schema import Config
from headway.config.schema_messages import explain
from headway.config.sizing.placement import needs_critic
from headway.errors import ConfigError

LOSS_MODE = "algorithm.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"
_ENVIRONMENT = re.compile(r"(?<!\\)\$\{oc\.env:([^,}]*)\}")
"""Pattern of an environment variable without a default."""
_REFERENCE = re.compile(r"(\\*)\$\{")
"""Pattern of the beginning of a reference, with preceding backslashes: an odd number of them makes it text."""


class _Dumper(yaml.SafeDumper):
    """YAML writer: sections as blocks, lists on one line."""


_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)
# Loading reads 1e9 as a number, YAML 1.1 does not: such a text gets quotes.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)?\.?\d+[eE][-+]?\d+$"), list("-+.0123456789")
)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and the origins of its values."""

    config: Config
    user_keys: frozenset[str] = frozenset()
    """Dotted keys that the user gave a value, in a file or on the command line. All others have the mode's or the
    schema's. A null counts as not given."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the user on decisions that loading made."""
    usual_keys: frozenset[str] = frozenset()
    """Keys of ``user_keys`` that a file gives the value of the mode or the schema. A run's own file has many."""
    typed_keys: frozenset[str] = frozenset()
    """Keys of ``user_keys`` that were given outside the file: on the command line or in Python."""


def load(
    path: Path | None, overrides: Sequence[str] | Layer = (), environment: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Read ``path`` and ``overrides``, put the mode's preset beneath them, and check keys, types and ranges.

    The doctor checks whether settings fit each other. If ``environment`` is given, variables that it lacks stay as they
    are written, for code that only reads a run.

    Raises:
        ConfigError: keys or values are wrong; one message names all of them.
    """
    typed = settings_of(overrides)
    layers = [*(map(with_own_code, read_file(path)) if path is not None else []), typed]
    moved = [note for layer in layers for note in layer.notes]
    # While the layers are separate: what a choice replaces depends on its layer.
    layers, notes = _replace_whole_choices(layers)
    notes += moved
    user: dict[str, Any] = {}
    for layer in layers:
        user = overlay(user, layer.values)
    # On all layers together: related keys may be in different ones.
    user = join_corrections(resolve_ahead_steps(user))
    # Only now: the mode's values are below all layers, whichever layer names the mode.
    mode = user.get("mode", Config.model_fields["mode"].default)
    beneath, kept = preset(mode), _without_cleared(resolve_partial_rollout(user), _flat_values(mode_config(mode)))
    flat = overlay(beneath, kept)
    if environment is not None:
        flat = {
            key: with_texts(
                value, partial(_ENVIRONMENT.sub, lambda at: at[0] if at[1] in environment else f"\\{at[0]}")
            )
            for key, value in flat.items()
        }
    # Files after references: a path may contain one.
    values = with_own_files(resolve_references(flat))
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join([explain(error, _origins(layers)), *moved])) from None
    # After validation, since B depends on settings of two sections.
    config = _of_whole_versions(config, notes)
    usual, resolved = _flat_values(mode_config(config.mode)), _flat_values(config)
    # A reference and its value: `dump` writes the reference, since the value may be a secret.
    config._written |= {
        key: (flat[key], resolved[key])
        for key in _of_environment(flat)
        if isinstance(resolved.get(key), str | list | dict)
    }
    same = {key for key, value in resolved.items() if key in usual and usual[key] == value}
    given = frozenset(key for key, value in user.items() if value is not None)
    named = frozenset(typed.values)
    return LoadedConfig(config, given, notes, usual_keys=given & same - named, typed_keys=given & named)


def _without_cleared(user: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's values without null or empty sections and mappings, which have the values of ``usual``."""
    sections = {key for key, value in usual.items() if value == {}} | {
        key[:at] for key in usual for at, sign in enumerate(key) if sign == "."
    }
    return {key: value for key, value in user.items() if key not in sections or value not in (None, {})}


def _of_whole_versions(config: Config, notes: list[str]) -> Config:
    """Return the configuration with the run's length rounded up to whole versions. A change is added to ``notes``."""
    total, b = config.rollout.total_rollout_steps, config.groups_per_version
    if total is None or total % b == 0:
        return config
    whole = -(-total // b) * b
    notes.append(
        f"rollout.total_rollout_steps={total} is rounded up to {whole}, a multiple of B={b} "
        "(trigger_parameter_sync_step × require_batches × ppo_mini_batch_size groups of a version)"
    )
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"total_rollout_steps": whole})})


def _of_environment(values: Mapping[str, Any]) -> set[str]:
    """Return the keys whose values depend on environment variables, directly or through references."""
    texts = {key: str(value) for key, value in values.items()}
    found = {key for key, text in texts.items() if "${oc.env:" in text or "${oc.decode:" in text}
    # Repeated until nothing more is found: references may be chained.
    while more := {key for key in texts.keys() - found if any(f"${{{name}}}" in texts[key] for name in found)}:
        found |= more
    return found


def written_values(config: Config) -> dict[str, Any]:
    """Return all values by dotted key for writing: values from environment variables stay references.

    Each ``${`` in other values is escaped, so that reading does not take it for a reference.
    """
    # OmegaConf reads two backslashes before a reference as one, so existing ones are doubled.
    escape = partial(_REFERENCE.sub, lambda found: f"{found[1] * 2}\\${{")
    values = {key: with_texts(value, escape) for key, value in _flat_values(config).items()}
    here = _flat_values(config)
    return values | {key: text for key, (text, value) in config._written.items() if here.get(key) == value}


def dump(config: Config) -> str:
    """Return the resolved configuration as YAML that loads back to an equal one.

    A setting with the value of the mode or schema is left out if it has no effect or is null.
    """
    idle = without_effect(config)
    beneath = {key: _default(config, key) for key in idle} | _flat_values(mode_config(config.mode))
    values = {
        key: value
        for key, value in written_values(config).items()
        if not ((key in idle or value is None) and value == beneath.get(key))
    }
    text: str = yaml.dump(
        nest(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120
    )
    return text


def resolved(config: Config, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat settings ``given`` with the values that ``config``, made from them, has. They load back to it.

    A key that loading replaces by another stays as it is.
    """
    known = {key: value for key, value in written_values(config).items() if value is not None}
    return {key: known.get(key, value) for key, value in given.items()}


def mode_config(mode: str) -> Config:
    """Return the configuration that ``mode`` alone gives. Raises `ConfigError` for an unknown mode."""
    return Config.model_validate(nest({**preset(mode), "mode": mode}))


def _default(config: Config, key: str) -> Any:
    """Return the default of the setting ``key``, as JSON types. The mode's configuration may lack its section."""
    *sections, name = key.split(".")
    section: Any = config
    for part in sections:
        section = getattr(section, part, None)
    known = type(section).model_fields.get(name) if isinstance(section, BaseModel) else None
    return None if known is None else to_jsonable_python(known.get_default(call_default_factory=True))


def _flat_values(config: Config) -> dict[str, Any]:
    """Return all values of a configuration by dotted key, as JSON types."""
    return dict(flatten(config.model_dump(mode="json")))


REPLACES: Mapping[str, tuple[str, ...]] = {
    "model.path": ("model.make", "model.warmup"),
    "data.train": ("data.task",),
    "reward.functions": ("reward.function", "reward.params"),
    "reward.function": ("reward.functions",),
}
"""Choice → keys of earlier layers that it replaces. One layer cannot give both."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "data.task.name": ("data.task.params", "model.warmup.params"),
    "reward.function": ("reward.params",),
    LOSS_MODE: ("algorithm.policy_loss",),
}
"""Choice → keys that belong to one value of it, and are dropped when a later layer changes the choice."""


def _replace_whole_choices(layers: Sequence[Layer]) -> tuple[list[Layer], list[str]]:
    """Drop earlier layers' settings of a model, data, task, reward or loss that a later layer replaces."""
    kept: list[Layer] = []
    notes: list[str] = []
    for layer in layers:
        for choice, replaced in REPLACES.items():
            if layer.gives(choice):
                if layer.gives(*replaced):
                    raise ConfigError(
                        f"{choice} replaces {' and '.join(replaced)}, but both are given {layer.origin}; drop one"
                    )
                kept = [other.without(*replaced) for other in kept]
        if layer.gives("data.train"):
            # A task's verifier is dropped with its task; another reward function stays.
            of_task = [other.values.get("reward.function") == "task" for other in kept]
            kept = [
                other.without("reward.function") if lost else other for other, lost in zip(kept, of_task, strict=True)
            ]
            scored = ("reward.function", "reward.functions", "agent.environment", "agent.program", "agent.client")
            if any(of_task) and not any(later.gives(*scored) for later in layers[len(kept) :]):
                notes.append("reward.function is exact_match: data.train replaced the task whose verifier it was")
        for choice, parts in PARTS.items():
            if layer.gives(choice):
                kept = _drop_parts(kept, choice, layer.values[choice], *parts)
        if not layer.gives(f"{CORRECTION}.name"):
            _check_no_part_of_list(kept, layer, CORRECTION)
        kept.append(layer)
    return kept, notes


def _drop_parts(layers: Sequence[Layer], choice: str, value: Any, *parts: str) -> list[Layer]:
    """Return the layers without ``parts``, unless these were written for this value of ``choice``.

    A section without other keys stays, empty. A loss's keys stay if no layer has named a loss: they may be for any.
    """
    before = [layer.values[choice] for layer in layers if layer.gives(choice)]
    if before[-1:] == [value] or (choice == LOSS_MODE and not before):
        return list(layers)
    empty = parts if choice == "data.task.name" else ()
    return [
        Layer(layer.origin, {**layer.without(*parts).values, **{part: {} for part in empty if layer.gives(part)}})
        for layer in layers
    ]


def _check_no_part_of_list(earlier: Sequence[Layer], layer: Layer, section: str) -> None:
    """Raise `ConfigError` if ``layer`` gives a key of ``section``, which is a list in an earlier layer."""
    part = next((key for key in layer.values if key.startswith(f"{section}.")), None)
    of_list = next((other for other in earlier if isinstance(other.values.get(section), list)), None)
    if part is not None and of_list is not None:
        raise ConfigError(
            f"{part}={layer.values[part]} is given {layer.origin}, but {section} is a list {of_list.origin}, of which "
            f"it cannot be one part; give the whole list, {section}=[…]"
        )


def _origins(layers: Sequence[Layer]) -> dict[str, str]:
    """Return dotted key → the place where it was last written, the most recently written keys first."""
    origins: dict[str, str] = {}
    for layer in reversed(layers):
        for key in layer.values:
            origins.setdefault(key, layer.origin)
    return origins


SOURCES_OF_DATA = ("data.train", "data.val", "data.prompt_key", "data.answer_key")
"""Keys that may change only with ``data.accept_changes``."""


def check_changes(before: Config, after: Config, version: int, *, epochs_begun: int = 0) -> dict[str, tuple[Any, Any]]:
    """Check the settings that a resumed run changes, and return them: dotted key → (before, after).

    ``version``: the checkpoint's version. ``epochs_begun``: number of passes over the data begun by then.

    Raises:
        ConfigError: the checkpoint rules out a change; one message has all of them, with reasons.
    """
    old, new = _flat_values(before), _flat_values(after)
    changes = {
        key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }
    accepted = SOURCES_OF_DATA if after.data.accept_changes else ()
    problems = [
        f"{key}: {now!r} instead of {then!r} ({rule['why']})"
        for key, (then, now) in changes.items()
        for rule in rules()["resume"]["rules"]
        if lies_in(key, *rule["sections"]) and not lies_in(key, *rule.get("free", ()), *accepted)
    ]
    if needs_critic(after) and not needs_critic(before):
        problems.append("a critic (the checkpoint has none: the run was begun without)")
    consumed, total = version * before.groups_per_version, after.rollout.total_rollout_steps
    if total is not None and total < consumed:
        problems.append(f"rollout.total_rollout_steps: {total} (the checkpoint has trained {consumed} groups already)")
    if after.data.epochs is not None and after.data.epochs < epochs_begun:
        problems.append(f"data.epochs: {after.data.epochs} (the checkpoint has begun epoch {epochs_begun} already)")
    if problems:
        raise ConfigError(
            f"what a resumed run cannot change: {'; '.join(problems)}. "
            "Leave them out, or start another run (model.path may be this one's model folder)"
        )
    return changes
