"""Checks of settings that depend on the algorithm: keys that the chosen one ignores have no effect. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import floor
from types import MappingProxyType

from headway.config.schema import Config
from headway.config.sections.losses import DualClip, TPpo
from headway.config.sizing.placement import needs_critic, needs_logp
from headway.runtime.user_code import names_user_code

Idle = tuple[str, str]
"""A dotted key and why it has no effect."""

ESTIMATOR_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "norm_adv_by_std_in_grpo": ("grpo", "grpo_passk", "gigpo"),
        "gamma": ("gae", "reinforce_plus_plus"),
        "lam": ("gae",),
        "pass_k": ("pass_at_k",),
        "step_weight": ("gigpo",),
    }
)
"""Keys of ``algorithm`` → the advantage estimators that look at them."""
GROUP_RELATIVE = (
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "maxrl",
    "grpo_passk",
    "pass_at_k",
    "reinforce_plus_plus_baseline",
    "gigpo",
)
"""Estimators that compare the trajectories of a group."""
CRITIC_KEYS = (
    "ppo_epochs",
    "cliprange_value",
    "grad_clip",
    "optim.lr",
    "optim.lr_warmup_steps",
    "optim.lr_scheduler_type",
    "optim.min_lr_ratio",
    "optim.weight_decay",
    "optim.betas",
)
_SIZES = ("nnodes", "n_gpus_per_node")
CORRECTION_KEYS = ("name", "bound", "lower", "level", "veto", "delta")
SEQUENCE_MASK = "off_policy_sequence_mask"


def idle_estimator_keys(config: Config) -> Iterator[Idle]:
    algorithm = config.algorithm
    if not algorithm.use_kl_in_reward:
        for key in ("kl_penalty", "kl_ctrl.kl_coef"):
            yield f"algorithm.{key}", "algorithm.use_kl_in_reward is off"
    elif algorithm.kl_ctrl.kl_coef == 0:
        for key in ("use_kl_in_reward", "kl_penalty"):
            yield f"algorithm.{key}", "algorithm.kl_ctrl.kl_coef is 0"
    chosen = algorithm.adv_estimator
    for key, users in ESTIMATOR_KEYS.items():
        if chosen not in users and not names_user_code(chosen):
            yield f"algorithm.{key}", f"algorithm.adv_estimator is {chosen}"
    if not config.agent.has_program:
        yield "algorithm.turn_discount", "without agent.tools, environment, program or client an episode is one turn"


def idle_loss_keys(config: Config) -> Iterator[Idle]:
    actor, loss = config.actor, config.algorithm.policy_loss
    if not loss.clips:
        for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            yield f"actor.{key}", f"algorithm.policy_loss.loss_mode={loss.loss_mode} does not clip"
    if actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield "actor.loss_scale_factor", f"actor.loss_agg_mode is {actor.loss_agg_mode}"


def idle_correction_keys(config: Config) -> Iterator[Idle]:
    correction = config.algorithm.rollout_correction
    keys = (
        ("algorithm.rollout_correction",)
        if isinstance(correction, tuple)
        else tuple(f"algorithm.rollout_correction.{key}" for key in CORRECTION_KEYS)
    )
    corrections = config.algorithm.corrections
    if config.async_training.use_rollout_log_probs:
        # Some compare with the current policy, whatever stands for the proximal one.
        if not corrections or not all(_looks_at_the_policy(one.name) for one in corrections):
            for key in keys:
                yield (
                    key,
                    "async_training.use_rollout_log_probs makes π_prox the behaviour policy itself, so there is "
                    "nothing to correct; set it to false",
                )
    elif not corrections:
        for key in keys[1:]:
            yield key, "algorithm.rollout_correction.name is not given"


def _looks_at_the_policy(name: str | None) -> bool:
    """Tell whether the correction ``name`` compares, or may compare, π_behav with the current policy."""
    return name == SEQUENCE_MASK or (name is not None and names_user_code(name))


def idle_role_keys(config: Config) -> Iterator[Idle]:
    """Yield the idle keys of roles that only some algorithms use, and of the handling of off-policy data."""
    asked = config.async_training.use_rollout_log_probs
    own_estimator = names_user_code(config.algorithm.adv_estimator)
    if asked:
        yield "actor.prox_logp_method", "async_training.use_rollout_log_probs takes the engine's log-probs for π_prox"
    if not needs_logp(config):
        reason = (
            "async_training.use_rollout_log_probs takes the engine's"
            if asked
            else f"actor.prox_logp_method is {config.actor.prox_logp_method}"
        )
        for key in _SIZES:
            yield f"logp.{key}", f"no log-probs are recomputed: {reason}"
    if not needs_critic(config):
        for key in (*_SIZES, *CRITIC_KEYS):
            yield f"critic.{key}", f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs no critic; gae does"
    if config.critic.enable and config.algorithm.adv_estimator != "gae" and not own_estimator:
        yield "critic.enable", f"algorithm.adv_estimator={config.algorithm.adv_estimator} looks at no values"
    if config.rollout.greedy_baseline and config.algorithm.adv_estimator != "remax" and not own_estimator:
        yield (
            "rollout.greedy_baseline",
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} has its own baseline",
        )
    loss = config.algorithm.policy_loss
    if loss.weighs_behaviour and not config.algorithm.use_kl_in_reward:
        for key in ("async_training.use_rollout_log_probs", "logp.nnodes", "actor.prox_logp_method"):
            yield key, f"algorithm.policy_loss.loss_mode={loss.loss_mode} weighs by π_θ/π_behav, and needs no π_prox"
    if config.algorithm.overlong_filtering:
        yield "algorithm.policy_loss.ignore_last", "algorithm.overlong_filtering masks answers that were cut off whole"
    if needs_critic(config) and config.critic.optim.lr_scheduler_type == "constant":
        yield "critic.optim.min_lr_ratio", "critic.optim.lr_scheduler_type is constant"
    guard, eta = config.algorithm.guard, config.async_training.staleness_threshold
    if guard.min_ess is None:
        yield "algorithm.guard.action", "algorithm.guard.min_ess is not given"
    elif guard.action == "tighten" and not loss.clips:
        yield "algorithm.guard.action", f"algorithm.policy_loss.loss_mode={loss.loss_mode} has no clip range to tighten"
    elif guard.action == "lower_eta" and floor(eta * config.groups_per_version) < 1:
        yield "algorithm.guard.action", "nothing runs ahead (η·B < 1), so there is no η to lower"


def algorithm_problems(config: Config) -> Iterator[str]:
    """Yield the reasons why the configured algorithm cannot be trained with, a message each."""
    algorithm, n = config.algorithm, config.rollout.n
    loss, actor = algorithm.policy_loss, config.actor
    if isinstance(loss, TPpo) and not loss.ignore_last:
        yield (
            "algorithm.policy_loss.loss_mode=t_ppo leaves out the last tokens of answers that were cut off; without "
            "algorithm.policy_loss.ignore_last it is ppo_clip: give that, or choose ppo_clip"
        )
    if isinstance(loss, TPpo) and config.agent.has_program:
        yield (
            "algorithm.policy_loss.loss_mode=t_ppo leaves out the last tokens of answers that were cut off, and those "
            "of an episode with a program may be a tool's, or of an answer that had ended; choose ppo_clip"
        )
    if actor.use_kl_loss and actor.use_bias_correction_kl and actor.kl_loss_type.endswith("+"):
        yield (
            f"actor.kl_loss_type={actor.kl_loss_type} with actor.use_bias_correction_kl: both mend the gradient, and "
            "together they would count it twice; drop one of the two"
        )
    given = algorithm.rollout_correction
    if isinstance(given, tuple) and len(algorithm.corrections) < len(given):
        yield "algorithm.rollout_correction: every correction of a list needs a name"
    for one in algorithm.corrections if loss.weighs_behaviour else ():
        if one.name != SEQUENCE_MASK:
            yield (
                f"algorithm.policy_loss.loss_mode={loss.loss_mode} weighs by π_θ/π_behav itself; with "
                f"algorithm.rollout_correction.name={one.name} staleness would be corrected twice; drop one of the two"
            )
    if isinstance(loss, DualClip) and loss.clip_ratio_c <= 1 + actor.clip_range[1]:
        yield (
            f"algorithm.policy_loss.clip_ratio_c={loss.clip_ratio_c:g} is inside the clip range, which ends at "
            f"1 + actor.clip_ratio_high = {1 + actor.clip_range[1]:g}; expected more (usual: 3)"
        )
    for one in algorithm.corrections:
        if (one.lower is not None and one.lower > 1) or (one.bound is not None and one.bound < 1):
            yield (
                f"algorithm.rollout_correction: {one.name} with lower={one.lower}, bound={one.bound} is for tokens "
                "that are off policy alone: a ratio of 1 lies outside; expected lower ≤ 1 ≤ bound"
            )
    if algorithm.adv_estimator == "remax" and algorithm.filter_groups.enable:
        yield (
            "algorithm.adv_estimator=remax with algorithm.filter_groups: answers that are all right where the greedy "
            "one is wrong have advantages, and would be filtered; set algorithm.filter_groups.enable=false"
        )
    if config.critic.enable is False and algorithm.adv_estimator == "gae":
        yield "critic.enable=false: algorithm.adv_estimator=gae needs a critic's values; drop one of the two"
    if n == 1 and algorithm.adv_estimator in GROUP_RELATIVE:
        yield (
            f"rollout.n=1: {algorithm.adv_estimator} compares the trajectories of a group, so every advantage would be "
            "0; give at least 2"
        )
    if algorithm.adv_estimator == "gigpo" and not config.agent.has_program:
        yield (
            "algorithm.adv_estimator=gigpo compares the turns of episodes, and without agent.tools, environment or "
            "program an episode is one turn; choose grpo, which then says the same"
        )
    if n == 1 and algorithm.filter_groups.enable:
        yield "rollout.n=1: algorithm.filter_groups would filter every group, as one reward has no spread"
    if algorithm.adv_estimator == "pass_at_k" and 1 < n <= algorithm.pass_k:
        yield (
            f"algorithm.pass_k={algorithm.pass_k} with rollout.n={n}: pass@k compares subsets of k of more than k "
            "answers; lower the first or raise the second"
        )
    if config.actor.loss_agg_mode == "seq-mean-token-sum-norm" and config.actor.loss_scale_factor is None:
        yield (
            "actor.loss_agg_mode=seq-mean-token-sum-norm divides by a constant length: set actor.loss_scale_factor, "
            "for example to data.max_response_length"
        )


def min_episodes(config: Config) -> int:
    """Fewest episodes of a group that must not have failed: ``agent.min_episodes``, or what the estimator needs."""
    algorithm = config.algorithm
    if config.agent.min_episodes is not None:
        return config.agent.min_episodes
    of_k = {"pass_at_k": algorithm.pass_k, "grpo_passk": algorithm.pass_k}
    least = of_k.get(algorithm.adv_estimator, 2 if algorithm.adv_estimator in GROUP_RELATIVE else 1)
    return min(least, config.rollout.n)
