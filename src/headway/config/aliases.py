"""Other spellings of keys: names of verl's recipe, and those that Headway's own had in earlier releases.

Works on flat layers: ``{"actor_rollout_ref.rollout.n": 8}`` becomes ``{"rollout.n": 8}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headway.config.conditions import with_texts
from headway.errors import ConfigError

FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "rollout.mode": (("async",), "the rollout engine is always asynchronous"),
    "rollout.calculate_log_probs": ((True,), "the engine always reports the log-prob of every token it samples"),
    "actor.strategy": (("fsdp2", "fsdp"), "the train engine is FSDP2"),
    "actor.use_dynamic_bsz": (
        (True,),
        "micro-batches are always packed by tokens; actor.ppo_max_token_len_per_gpu sets how many",
    ),
    "hybrid_engine": ((False,), "cluster.placement=shared (mode=colocate_sync) is how devices are shared"),
    "data.return_raw_chat": ((True,), "prompts stay as they are until the chat template is applied"),
    "data.train_batch_size": ((0,), "prompts stream one by one; actor.ppo_mini_batch_size sets the batch"),
    "data.gen_batch_size": ((1,), "the unit that streams is one prompt with its rollout.n trajectories"),
    "train_batch_size": ((0,), "prompts stream one by one; actor.ppo_mini_batch_size sets the batch"),
}
"""Keys of verl's that Headway reads at some values only, and why."""

IGNORED_PREFIX = "actor_rollout_ref."

AHEAD_STEPS = "trainer.generate_ahead_steps"
ETA = "async_training.staleness_threshold"
PARTIAL = "async_training.partial_rollout"
ON_UPDATE = "async_training.on_update"
PIPELINE = "async_pipeline"
ALSO = "algorithm.rollout_correction.also"
SANDBOX = "sandbox"
"""Section of which a bare name is the kind."""


_OF_AGENTS = (
    "tools mcp environment program endpoint_host endpoint_port params tool_parser environment_processes stall_s "
    "max_turns max_turn_tokens step_timeout_s episode_timeout_s train_on_limit min_episodes "
    "episode_retries env"
)
_SOURCES = {"data.sources": "data.train", "data.val_sources": "data.val"}
MOVED: Mapping[str, str] = {
    **{f"rollout.{name}": f"agent.{name}" for name in _OF_AGENTS.split()},
    "rollout.agent": "agent.client",
    **dict.fromkeys(("rollout.agent.command", "agent.command", "agent.client.command"), "agent.client"),
    "rollout.agent_sampling": "agent.sampling",
    "rollout.agent_models": "agent.models",
    "rollout.runners": "agent.workers",
    "rollout.vllm.engine_args": "rollout.engine_kwargs",
    "placement.kind": "cluster.placement",
    "offpolicy.guard": "algorithm.guard",
    "offpolicy.guard.min_ess": "algorithm.guard.min_ess",
    "offpolicy.guard.action": "algorithm.guard.action",
    **_SOURCES,
}
"""Keys of earlier releases → what they are called now. Both names work for one release."""
GONE: Mapping[str, tuple[Any, str]] = {
    "data.prefetch": (64, "64 prompts are tokenised ahead"),
    **dict.fromkeys(
        ("rollout.val_max_concurrent", "agent.val_max_concurrent"),
        (None, "twice as many held-out episodes are open as a replica decodes at once"),
    ),
    "sandbox.cpu_s": (10, "a call has as many seconds of processor time as of sandbox.wall_s, and 10 at least"),
    "sandbox.processes": (32, "a call has at most 32 processes and threads"),
    "sandbox.output_kib": (64, "a call prints at most 64 KiB"),
    "sandbox.scratch_mib": (64, "a call writes at most 64 MiB"),
    "model.warmup.give_up.answer": ("?", "the teacher writes ? instead of an answer that it gives up"),
    "param_update.backend": (
        "auto",
        "broadcast goes by NCCL where there are GPUs and the trainer waits for the update, else by gloo",
    ),
    "reports.run_name": (None, "trackers call the run as its directory; run.name names that"),
    "trainer.max_nonfinite_steps": (10, "a run ends after 10 skipped optimizer steps in a row"),
}
"""Keys of earlier releases that are no settings any more → their default, and what holds instead."""
_OLD_SECTIONS = ("placement", "offpolicy", "rollout.vllm")
"""Sections of earlier releases, which may be left empty."""
_MOVED_MAPPINGS = ("rollout.mcp", "rollout.params", "rollout.env", "rollout.vllm.engine_args")
_REFERENCE = re.compile(r"(?<!\\)\$\{([\w.]+)\}")
"""Pattern of a reference to another key; one behind a backslash is text."""


def canonical_key(key: str) -> str:
    """Spell a key as it is called now, without the recipe's prefixes.

    ``+actor_rollout_ref.rollout.n`` is ``rollout.n``, and ``rollout.tools`` is ``agent.tools``.
    """
    plain = _without_prefixes(key)
    if plain in MOVED:
        return MOVED[plain]
    for mapping in _MOVED_MAPPINGS:
        if plain.startswith(f"{mapping}."):
            return MOVED[mapping] + plain.removeprefix(mapping)
    return plain


def _without_prefixes(key: str) -> str:
    return key.removeprefix("+").removeprefix(IGNORED_PREFIX)


def notes_on_old_keys(values: Mapping[str, Any], where: str, *, of_a_run: bool = False) -> list[str]:
    """Return notes on keys of earlier releases among flat settings that are written ``where``. ``of_a_run``: on values
    alone that held for the run so far, and do not any more.
    """
    plain = {_without_prefixes(key): value for key, value in values.items()}
    if of_a_run:
        lost = {key: value for key, value in plain.items() if _is_lost(key, value)}
        return [f"{where}: {key}={value} does not hold any more: {GONE[key][1]}" for key, value in lost.items()]
    told = [f"{old} is {new} now" for old in plain if (new := canonical_key(old)) != old]
    told += [f"{ALSO} is the rest of a list at algorithm.rollout_correction now"] if plain.get(ALSO) else []
    notes = [f"{where}: {', '.join(told)}; the old name works in this release only"] if told else []
    gone = [f"{key} is no setting any more: {GONE[key][1]}" for key in plain if key in GONE]
    gone += [f"{key} is no section any more" for key, value in plain.items() if _is_empty_old_section(key, value)]
    return [*notes, *(f"{where}: {one}; drop it" for one in gone)]


def _is_lost(key: str, value: Any) -> bool:
    return key in GONE and value not in (None, GONE[key][0])


def _is_empty_old_section(key: str, value: Any) -> bool:
    return key in _OLD_SECTIONS and value in ({}, None)


def translate(values: Mapping[str, Any], *, of_a_run: bool = False) -> dict[str, Any]:
    """Translate one flat layer into Headway's own keys, without keys that are `GONE` and have their default.

    ``of_a_run``: whatever their values.

    Raises:
        ConfigError: a key that Headway accepts at one value has another; two spellings of one setting disagree; a key
            is `GONE` and has another value than its default.
    """
    gone = {key: value for spelled, value in values.items() if (key := _without_prefixes(spelled)) in GONE}
    if lost := [key for key, value in gone.items() if _is_lost(key, value) and not of_a_run]:
        raise ConfigError("\n".join(f"{key} is no setting any more: {GONE[key][1]}; drop it" for key in lost))
    result: dict[str, Any] = {}
    for spelled, given in values.items():
        key, value = canonical_key(spelled), _with_new_names(given)
        if key in gone or _is_empty_old_section(key, value):
            continue
        if _without_prefixes(spelled) in _SOURCES and not given:  # as in every file of a run with one file of prompts
            if key in values:
                continue
            value = None
        elif (
            key in _SOURCES.values() and given is None and any(values.get(old) for old in _SOURCES if MOVED[old] == key)
        ):
            continue  # as it was written beside sources
        if key in FIXED:
            _accept_fixed(key, value)
            continue
        if key == PIPELINE:
            if not isinstance(value, bool):
                raise ConfigError(f"{PIPELINE}: got {value!r}, expected true (mode=overlapped) or false")
            if not value:
                continue
            key, value = "mode", "overlapped"
        if key == SANDBOX and isinstance(value, str):
            key = f"{SANDBOX}.kind"
        if key in result and result[key] != value:
            raise ConfigError(f"{key} is given twice, as {result[key]!r} and as {value!r}")
        result[key] = value
    return result


def _with_new_names(value: Any) -> Any:
    """Spell keys that ``value`` refers to as they are called now."""
    return with_texts(value, lambda text: _REFERENCE.sub(lambda found: f"${{{canonical_key(found[1])}}}", text))


def _accept_fixed(key: str, value: Any) -> None:
    accepted, why = FIXED[key]
    if not any(type(value) is type(one) and value == one for one in accepted):
        raise ConfigError(f"{key}: got {value!r}, but Headway accepts only {' or '.join(map(str, accepted))}: {why}")


def resolve_ahead_steps(user: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's values with ``trainer.generate_ahead_steps`` replaced by the staleness threshold η.

    Raises:
        ConfigError: both are given, or the steps are not a whole number of at least 1.
    """
    steps = user.get(AHEAD_STEPS)
    if steps is None:
        return dict(user)
    if user.get(ETA) is not None:
        raise ConfigError(
            f"{AHEAD_STEPS}={steps} and {ETA}={user[ETA]} say the same thing (steps = η + 1); give one of them"
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"{AHEAD_STEPS}: got {steps!r}, expected a whole number of at least 1 (η + 1)")
    return {key: value for key, value in user.items() if key != AHEAD_STEPS} | {ETA: steps - 1}


def join_corrections(user: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's values with the corrections of ``also``, a key of earlier releases, in one list."""
    further = user.get(ALSO)
    section = f"{ALSO.rpartition('.')[0]}."
    rest = {key: value for key, value in user.items() if key != ALSO}
    if not further:
        return rest
    first = {key.removeprefix(section): value for key, value in rest.items() if key.startswith(section)}
    return {key: value for key, value in rest.items() if not key.startswith(section)} | {
        section[:-1]: [first, *further]
    }


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
