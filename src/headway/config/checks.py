"""Checks of a whole configuration by the rules of ``checks.toml``: clashes, and settings without effect.

A setting without effect is an error if the user wrote it, and a note if the mode did. A dumped configuration omits it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from functools import cache
from math import floor
from pathlib import Path
from typing import Any

from headway.config.conditions import filled, holds
from headway.config.layers import flatten, lies_in
from headway.config.schema import Config
from headway.config.sections.agent_section import CODE
from headway.config.sizing.placement import (
    GROUP_RELATIVE,
    MOST_SLOTS,
    most_in_flight,
    needs_critic,
    needs_greedy_baseline,
    needs_logp,
    needs_reference,
)
from headway.config.sizing.run_memory import restarts_trainer
from headway.config.transport_facts import transport_of
from headway.runtime.sandbox.python_tool import PYTHON
from headway.runtime.user_code import names_user_code

SEQUENCE_MASK = "off_policy_sequence_mask"
"""Correction that compares π_behav with the current policy, not with the proximal one."""


@cache
def rules() -> Mapping[str, Any]:
    """Return the rules. They are read once."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def facts(config: Config) -> dict[str, Any]:
    """Return all values of a configuration by dotted key, and the derived facts that rules use."""
    loss, estimator = config.algorithm.policy_loss, config.algorithm.adv_estimator
    shared, trainer = config.cluster.placement == "shared", config.trainer
    sources = [*config.data.train_sources, *config.data.held_out_sources]
    corrections = [one.name or "" for one in config.algorithm.corrections]
    prompt, response, n = config.data.max_prompt_length, config.data.max_response_length, config.rollout.n
    eta, b = config.async_training.staleness_threshold, config.groups_per_version
    total, size = config.rollout.total_rollout_steps, config.actor.ppo_mini_batch_size
    # n + True is n + 1: a greedy answer in addition to a group's own.
    in_flight = most_in_flight(config) // n * (n + needs_greedy_baseline(config))
    look_elsewhere = [name == SEQUENCE_MASK or names_user_code(name) for name in corrections]
    return dict(flatten(config.model_dump(mode="json", warnings=False))) | {
        "ahead": floor(eta * b) > 0,
        "answer_keys": bool(sources) and all(source.answer_key is not None for source in sources),
        "clip_end": 1 + config.actor.clip_range[1],
        "clips": loss.clips,
        "code_reward": CODE in config.reward.names,
        "corrects_nothing": config.async_training.use_rollout_log_probs and not (corrections and all(look_elsewhere)),
        "critic": needs_critic(config),
        "group_relative": estimator in GROUP_RELATIVE,
        "group_tokens": prompt + n * response,
        "groups_per_version": b,
        "joins_nothing": not _names_a_cluster(config.cluster.address),
        "least_lag": floor(1 + eta - Fraction(1, b)),
        "longest": prompt + response,
        "made": config.model.path is None and config.model.make is not None,
        "mesh_ranks": config.actor.parallel.least_ranks,
        "most_in_flight": in_flight,
        "named_trackers": not {"wandb", "mlflow", "trackio"}.isdisjoint(config.reports.trackers),
        "one_replica": not trainer.use_nodes_ratios and (config.rollout.replicas == 1 or shared),
        "optimizer_steps": None if total is None else total // size * config.actor.ppo_epochs,
        "own_estimator": names_user_code(estimator),
        "programs": config.agent.has_program,
        "prometheus": "prometheus" in config.reports.trackers,
        "prompt_keys": bool(sources) and all(source.prompt_key is not None for source in sources),
        "python_tool": PYTHON in config.agent.tools,
        "recomputed": needs_logp(config),
        "reference": needs_reference(config),
        "restarts": restarts_trainer(config),
        "reward_tries": 1 + config.reward.retries,
        "shares_prompts": config.model.packing == "shared" and n > 1,
        "slowest_reward": config.reward.timeout_s * (1 + config.reward.retries),
        "task_reward": "task" in config.reward.names,
        "takes_turns": shared and config.async_training.trigger_parameter_sync_step > 1,
        "training_ranks": trainer.nnodes * trainer.n_gpus_per_node,
        "transport": transport_of(config.param_update.transport, backend=config.cluster.backend, shared=shared),
        "two_answers": prompt + 2 * response,
        "useful_slots": max(in_flight, MOST_SLOTS),
        "weighs_behaviour": loss.weighs_behaviour,
    }


def _names_a_cluster(address: str | None) -> bool:
    """Tell whether ``address`` is valid for Ray: None, ``auto``, or host and port."""
    host, _, port = (address or "auto").removeprefix("ray://").rpartition(":")
    # isascii: int() refuses ², which is a digit, too. Nine digits: int() also refuses thousands of digits.
    names_a_port = host and "/" not in host and port.isascii() and port.isdigit() and 0 < int(port[:9]) < 65536
    return address in (None, "auto") or bool(names_a_port)


def problems(part: str, known: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of one part of the configuration. ``known``: its `facts`."""
    for rule in rules()["problems"].get(part, ()):
        if holds(rule, known):
            yield filled(rule["says"], known)


def keys_of(rule: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of a rule on settings without effect."""
    section, _, names = rule["keys"].rpartition(": ")
    return [f"{section}.{name}".lstrip(".") for name in names.split()]


def idle_keys(known: Mapping[str, Any]) -> dict[str, str]:
    """Return key without effect → the reason, also for keys with their defaults. ``known``: the `facts`."""
    found: dict[str, str] = {}
    for rule in rules()["idle"]["rules"]:
        if holds(rule, known):
            for key in keys_of(rule):
                found.setdefault(key, filled(rule["why"], known))
    return found


def without_effect(config: Config) -> dict[str, str]:
    """Return key without effect in this configuration → the reason, also for keys with their defaults."""
    return idle_keys(facts(config))


def unread_by_sft(keys: Iterable[str]) -> Iterator[str]:
    """Yield a line for each of ``keys`` that ``headway sft`` does not read."""
    of_sft = rules()["sft"]
    for key in sorted(keys):
        if not lies_in(key, *of_sft["reads"]):
            own = next((own for theirs, own in of_sft["in_place_of"].items() if lies_in(key, theirs)), None)
            yield f"{key} has no effect: headway sft does not read it{f', but {own}' if own else ''}; drop it"
