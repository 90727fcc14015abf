"""Changes for a run that is resumed: settings that may be given anew, and those that its state rules out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headway.config.layers import flatten, lies_in
from headway.config.schema import Config
from headway.config.sizing.placement import needs_critic
from headway.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Rule:
    sections: tuple[str, ...]
    why: str
    free: tuple[str, ...] = ()
    """Keys within ``sections`` that may change all the same."""


RULES = (
    _Rule(("run.dir",), "the run goes on where it lies; move the directory instead"),
    _Rule(("run.seed",), "it keys the order of the data, and every token that is sampled"),
    _Rule(("mode",), "it is only a set of values, all of which the run has written down; give those that change"),
    _Rule(
        ("model",),
        "the checkpoint holds this model, and the reference policy is what it started from",
        free=("model.enable_gradient_checkpointing", "model.packing", "model.dtype"),
    ),
    _Rule(
        ("data",),
        "the checkpoint knows prompts by their place in these data",
        free=("data.epochs", "data.max_response_length", "data.max_bad_rows"),
    ),
    _Rule(
        (
            "actor.ppo_mini_batch_size",
            "async_training.require_batches",
            "async_training.trigger_parameter_sync_step",
        ),
        "they make up B, in which versions are counted",
    ),
    _Rule(("actor.ppo_epochs", "critic.ppo_epochs"), "the learning-rate schedule counts optimizer steps"),
)


SOURCES_OF_DATA = ("data.train", "data.val", "data.prompt_key", "data.answer_key")
"""Keys that may change, too, with ``data.accept_changes``."""


def check_changes(before: Config, after: Config, version: int, *, epochs_begun: int = 0) -> dict[str, tuple[Any, Any]]:
    """Check the settings that a resumed run changes, and return them: dotted key → (before, after).

    ``version``: the checkpoint's version. ``epochs_begun``: the passes over the data begun by then.

    Raises:
        ConfigError: in one message, every change that the state rules out, and why.
    """
    old, new = _flat(before), _flat(after)
    changes = {
        key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }
    accepted = SOURCES_OF_DATA if after.data.accept_changes else ()
    problems = [
        f"{key}: {now!r} instead of {then!r} ({rule.why})"
        for key, (then, now) in changes.items()
        for rule in RULES
        if lies_in(key, *rule.sections) and not lies_in(key, *rule.free, *accepted)
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


def _flat(config: Config) -> dict[str, Any]:
    return dict(flatten(config.model_dump(mode="json")))
