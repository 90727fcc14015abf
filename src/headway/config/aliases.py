"""Other spellings of keys: verl's names, and earlier names of Headway's keys. ``aliases.toml`` lists them.

Works on flat layers: ``{"actor_rollout_ref.rollout.n": 8}`` becomes ``{"rollout.n": 8}``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.config.conditions import with_texts
from headway.errors import ConfigError

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FIXED: Mapping[str, tuple[list[Any], str]] = {key: (row["values"], row["why"]) for key, row in _TABLES["fixed"].items()}
"""Key of verl's → the values that Headway accepts, and the reason."""
GONE: Mapping[str, tuple[Any, str]] = {key: (row.get("default"), row["now"]) for key, row in _TABLES["gone"].items()}
"""Removed key → its default, and what holds instead."""
MOVED: Mapping[str, str] = _TABLES["moved"] | _TABLES["moved_mappings"]
"""Earlier name of a key → its present name."""

IGNORED_PREFIX = "actor_rollout_ref."
AHEAD_STEPS = "trainer.generate_ahead_steps"
ETA = "async_training.staleness_threshold"
PARTIAL = "async_training.partial_rollout"
ON_UPDATE = "async_training.on_update"
PIPELINE = "async_pipeline"
CORRECTION = "algorithm.rollout_correction"
ALSO = f"{CORRECTION}.also"
"""Earlier key of the further corrections in a list."""
SANDBOX = "sandbox"
"""Section whose value may be a bare name, which is its ``kind``."""
_OLD_SECTIONS = ("placement", "offpolicy", "rollout.vllm")
"""Removed sections, which may still be given empty."""
_REFERENCE = re.compile(r"(?<!\\)\$\{([\w.]+)\}")
"""Pattern of a reference to another key. After a backslash it is text."""


def gone_text(key: str) -> str:
    """Return the message that a key of `GONE`, in any spelling, was removed, and what holds instead."""
    return f"{key} is no setting any more: {GONE[canonical_key(key)][1]}"


def canonical_key(key: str) -> str:
    """Return the present spelling of a key, without verl's prefixes.

    ``+actor_rollout_ref.rollout.n`` is ``rollout.n``, and ``rollout.tools`` is ``agent.tools``.
    """
    plain = _without_prefixes(key)
    if plain in MOVED:
        return MOVED[plain]
    # With the dot: rollout.env is also the beginning of another key, rollout.environment.
    mapping = next((old for old in _TABLES["moved_mappings"] if plain.startswith(f"{old}.")), "")
    return MOVED[mapping] + plain.removeprefix(mapping) if mapping else plain


def _without_prefixes(key: str) -> str:
    return key.removeprefix("+").removeprefix(IGNORED_PREFIX)


def translate(values: Mapping[str, Any], where: str, *, of_a_run: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Translate a flat layer to Headway's own keys. Returns it with notes on old keys. ``where``: its origin.

    ``of_a_run``: True if a run wrote the layer. Then old keys are upgraded, and notes tell only of removed keys
    whose values no longer hold.

    Raises:
        ConfigError: a key of `FIXED` has another value; two spellings of one setting disagree; a key of `GONE` does not
            have its default.
    """
    result: dict[str, Any] = {}
    renamed, gone, lost = [], [], []
    for spelled, given in values.items():
        plain = _without_prefixes(spelled)
        value = with_texts(given, lambda text: _REFERENCE.sub(lambda at: f"${{{canonical_key(at[1])}}}", text))
        key = canonical_key(plain)
        if key in GONE:
            default, now = GONE[key]
            if value not in (None, default):
                lost.append((f"{plain}={value}", f"{gone_text(plain)}; drop it", now))
            else:
                gone.append(f"{where}: {gone_text(plain)}; drop it")
        elif plain in _OLD_SECTIONS and value in ({}, None):
            gone.append(f"{where}: {plain} is no section any more; drop it")
        elif key in FIXED:
            _accept_fixed(key, value)
        # `async_pipeline: false` must not set a mode.
        elif (key, value) != (PIPELINE, False):
            renamed += [f"{plain} is {key} now"] if key != plain else []
            _add(result, *_respelled(key, value))
    if result.get(ALSO):
        renamed.append(f"{ALSO} is the rest of a list at {CORRECTION} now")
    if of_a_run:
        return result, [f"{where}: {setting} does not hold any more: {now}" for setting, _, now in lost]
    # After the loop: one message has all renamed keys.
    if lost:
        raise ConfigError("\n".join(refusal for _, refusal, _ in lost))
    notes = [f"{where}: {', '.join(renamed)}; the old name works in this release only"] if renamed else []
    return result, notes + gone


def _accept_fixed(key: str, value: Any) -> None:
    accepted, why = FIXED[key]
    # Types are compared, too: in Python 1 == True and 0 == False.
    if not any(type(value) is type(one) and value == one for one in accepted):
        raise ConfigError(f"{key}: got {value!r}, but Headway accepts only {' or '.join(map(str, accepted))}: {why}")


def _respelled(key: str, value: Any) -> tuple[str, Any]:
    """Return a setting with the schema's key and value. Raises `ConfigError` for a wrong value of an old spelling."""
    if key == PIPELINE:
        if not isinstance(value, bool):
            raise ConfigError(f"{PIPELINE}: got {value!r}, expected true (mode=overlapped) or false")
        return "mode", "overlapped"
    return (f"{SANDBOX}.kind", value) if key == SANDBOX and isinstance(value, str) else (key, value)


def _add(result: dict[str, Any], key: str, value: Any) -> None:
    """Add a setting. If two spellings are given, the one with a value counts; two different values are an error."""
    nothing: tuple[Any, ...] = (None, [])
    if key in result and result[key] not in nothing and value not in nothing and result[key] != value:
        raise ConfigError(f"{key} is given twice, as {result[key]!r} and as {value!r}")
    # A run's own file may have both spellings of a key, one of them null or empty.
    if result.get(key) in nothing or value not in nothing:
        result[key] = value


def resolve_ahead_steps(user: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all layers with ``trainer.generate_ahead_steps`` as the staleness threshold η.

    Raises:
        ConfigError: both are given, or the steps are not a whole number of at least 1.
    """
    result = dict(user)
    steps = result.pop(AHEAD_STEPS, None)
    if steps is None:
        return result
    if user.get(ETA) is not None:
        raise ConfigError(
            f"{AHEAD_STEPS}={steps} and {ETA}={user[ETA]} say the same thing (steps = η + 1); give one of them"
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"{AHEAD_STEPS}: got {steps!r}, expected a whole number of at least 1 (η + 1)")
    return result | {ETA: steps - 1}


def join_corrections(user: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all layers, with the first correction and those of ``also`` in one list."""
    result = dict(user)
    if further := result.pop(ALSO, None):
        first = [key for key in result if key.startswith(f"{CORRECTION}.")]
        result[CORRECTION] = [{key.rpartition(".")[2]: result.pop(key) for key in first}, *further]
    return result


def resolve_partial_rollout(user: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's values with ``on_update`` set as ``partial_rollout`` implies.

    Raises:
        ConfigError: the user wrote both, and they contradict each other.
    """
    partial, on_update = user.get(PARTIAL), user.get(ON_UPDATE)
    if not isinstance(partial, bool):
        return dict(user)
    allowed = ("interrupt", "keep") if partial else ("drain",)
    if on_update is not None and on_update not in allowed:
        raise ConfigError(
            f"{PARTIAL}={str(partial).lower()} means {ON_UPDATE}={' or '.join(allowed)}, but {ON_UPDATE}={on_update} "
            "is given; drop one of them"
        )
    return dict(user) | {ON_UPDATE: on_update or allowed[0]}
