"""Names of verl's recipe: other spellings of Headway's keys, and keys that Headway accepts at one value only.

Works on flat layers: ``{"actor_rollout_ref.rollout.n": 8}`` becomes ``{"rollout.n": 8}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError

IGNORED_PREFIX = "actor_rollout_ref."

AHEAD_STEPS = "trainer.generate_ahead_steps"
ETA = "async_training.staleness_threshold"
PARTIAL = "async_training.partial_rollout"
ON_UPDATE = "async_training.on_update"
PIPELINE = "async_pipeline"
SANDBOX = "sandbox"
"""Section of which a bare name is the kind."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key of verl's recipe that is fixed in Headway: ``values`` are accepted, all others refused for ``reason``."""

    values: tuple[Any, ...]
    reason: str


FIXED: Mapping[str, Fixed] = {
    "rollout.mode": Fixed(("async",), "the rollout engine is always asynchronous"),
    "rollout.calculate_log_probs": Fixed((True,), "the engine always reports the log-prob of every token it samples"),
    "actor.strategy": Fixed(("fsdp2", "fsdp"), "the train engine is FSDP2"),
    "actor.use_dynamic_bsz": Fixed(
        (True,), "micro-batches are always packed by tokens; actor.ppo_max_token_len_per_gpu sets how many"
    ),
    "hybrid_engine": Fixed((False,), "placement.kind=shared (mode=colocate_sync) is how devices are shared"),
    "data.return_raw_chat": Fixed((True,), "prompts stay as they are until the chat template is applied"),
    "data.train_batch_size": Fixed((0,), "prompts stream one by one; actor.ppo_mini_batch_size sets the batch"),
    "data.gen_batch_size": Fixed((1,), "the unit that streams is one prompt with its rollout.n trajectories"),
    "train_batch_size": Fixed((0,), "prompts stream one by one; actor.ppo_mini_batch_size sets the batch"),
}

RENAMED: Mapping[str, str] = {
    "custom_reward_function.path": "reward.function",
    "custom_reward_function.name": "reward.function",
    "custom_reward_function.reward_kwargs": "reward.params",
    "data.train_files": "data.train",
    "data.val_files": "data.val",
    "trainer.default_local_dir": "run.dir",
    "trainer.experiment_name": "run.name",
    "trainer.logger": "reports.trackers",
    "trainer.project_name": "reports.project",
    "trainer.total_epochs": "data.epochs",
    "trainer.total_training_steps": "rollout.total_rollout_steps",
}
"""verl's keys → Headway's keys for the same settings; used only to suggest the right key."""

USUAL: Mapping[str, tuple[str, ...]] = {
    "base_model": ("model.path",),
    "batch_size": ("actor.ppo_mini_batch_size",),
    "beta": ("actor.kl_loss_coef",),
    "bf16": ("model.dtype",),
    "clip_range": ("actor.clip_ratio",),
    "cliprange": ("actor.clip_ratio",),
    "dataset": ("data.train",),
    "dataset_name": ("data.train",),
    "entropy_coef": ("actor.entropy_coeff",),
    "epochs": ("data.epochs",),
    "eps_clip": ("actor.clip_ratio",),
    "epsilon": ("actor.clip_ratio",),
    "epsilon_high": ("actor.clip_ratio_high",),
    "eval_dataset": ("data.val",),
    "eval_steps": ("rollout.test_freq",),
    "gradient_checkpointing": ("model.enable_gradient_checkpointing",),
    "group_size": ("rollout.n",),
    "kl_coef": ("actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef"),
    "learning_rate": ("actor.optim.lr",),
    "log_with": ("reports.trackers",),
    "logger": ("reports.trackers",),
    "loggers": ("reports.trackers",),
    "loss_type": ("algorithm.policy_loss.loss_mode",),
    "lr": ("actor.optim.lr",),
    "lr_scheduler": ("actor.optim.lr_scheduler_type",),
    "max_async_level": ("async_training.staleness_threshold",),
    "max_completion_length": ("data.max_response_length",),
    "max_grad_norm": ("actor.grad_clip",),
    "max_head_offpolicyness": ("async_training.staleness_threshold",),
    "max_new_tokens": ("data.max_response_length",),
    "max_staleness": ("async_training.staleness_threshold",),
    "max_steps": ("rollout.total_rollout_steps",),
    "max_tokens": ("data.max_response_length",),
    "micro_batch_size": ("actor.ppo_max_token_len_per_gpu",),
    "mlflow": ("reports.trackers",),
    "mlflow.experiment_name": ("reports.project",),
    "model": ("model.path",),
    "model_name": ("model.path",),
    "model_name_or_path": ("model.path",),
    "n_samples_per_prompt": ("rollout.n",),
    "num_epochs": ("data.epochs",),
    "num_generations": ("rollout.n",),
    "num_iterations": ("actor.ppo_epochs",),
    "num_train_epochs": ("data.epochs",),
    "output_dir": ("run.dir",),
    "padding_free": ("model.packing",),
    "per_device_train_batch_size": ("actor.ppo_mini_batch_size",),
    "prometheus": ("reports.trackers",),
    "report_to": ("reports.trackers",),
    "reward_funcs": ("reward.function",),
    "save_steps": ("trainer.save_freq",),
    "staleness": ("async_training.staleness_threshold",),
    "tensorboard": ("reports.trackers",),
    "torch_dtype": ("model.dtype",),
    "tracker": ("reports.trackers",),
    "trackio": ("reports.trackers",),
    "use_prefix_grouper": ("model.packing",),
    "use_remove_padding": ("model.packing",),
    "use_tensorboard": ("reports.trackers",),
    "use_wandb": ("reports.trackers",),
    "wandb": ("reports.trackers",),
    "wandb.name": ("reports.run_name",),
    "wandb.project": ("reports.project",),
    "wandb_project": ("reports.project",),
    "wandb_run_name": ("reports.run_name",),
    "warmup_steps": ("actor.optim.lr_warmup_steps",),
    "weight_decay": ("actor.optim.weight_decay",),
}
"""Names of settings in other systems (TRL, OpenRLHF, AReaL, prime-rl), whole or the last part → the nearest keys here;
for suggestions."""


def canonical_key(key: str) -> str:
    """Spell a key without the recipe's prefixes: ``+actor_rollout_ref.rollout.n`` is ``rollout.n``."""
    return key.removeprefix("+").removeprefix(IGNORED_PREFIX)


def translate(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate one flat layer into Headway's own keys.

    Raises:
        ConfigError: a key that Headway accepts at one value has another; two spellings of one setting disagree.
    """
    result: dict[str, Any] = {}
    for spelled, given in values.items():
        key, value = canonical_key(spelled), given
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


def _accept_fixed(key: str, value: Any) -> None:
    fixed = FIXED[key]
    if not any(type(value) is type(allowed) and value == allowed for allowed in fixed.values):
        allowed = " or ".join(map(str, fixed.values))
        raise ConfigError(f"{key}: got {value!r}, but Headway accepts only {allowed}: {fixed.reason}")


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
