"""The sections of learning: the policy's losses, the critic, the reference, the estimators."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headway.config.sections.losses import ChosenLoss, PpoClip
from headway.config.sections.parallel import ParallelConfig
from headway.config.sections.section import Every, NonNegative, Positive, Section


class OptimConfig(Section):
    """The AdamW optimizer and its learning rate."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate after warm-up."""
    lr_warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up; ``linear`` and ``cosine`` fall to ``min_lr_ratio`` at the last
    optimizer step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of ``lr`` that is left at the last optimizer step."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""


class FsdpConfig(Section):
    """Sharding of the policy (FSDP2)."""

    param_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses (FSDP2's CPUOffloadPolicy)."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass and gather them again in the backward pass: less
    memory, more communication."""


class ActorConfig(Section):
    """The policy's loss, mini-batches and optimizer."""

    ppo_mini_batch_size: Positive = 32
    """Number of groups in one optimizer step."""
    ppo_epochs: Positive = 1
    """Number of training passes over each fetch."""
    ppo_max_token_len_per_gpu: Positive = 16_384
    """Most tokens of one micro-batch on each rank: those that are computed, and padding where rows are padded
    (``model.packing``). A longer answer has a micro-batch of its own."""
    clip_ratio: float = Field(0.2, gt=0)
    """Clip range ε where ``clip_ratio_low`` or ``clip_ratio_high`` is not given: ratios count in 1 ± ε."""
    clip_ratio_low: float | None = Field(None, gt=0)
    """Clip range ε of ratios below 1; default ``clip_ratio``."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """Clip range ε of ratios above 1 (clip-higher); default ``clip_ratio``."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """Aggregation of the loss: mean over all valid tokens of the mini-batch, or over sequences: of their token means,
    of their token sums, or of their token sums over the constant ``loss_scale_factor``."""
    loss_scale_factor: float | None = Field(None, gt=0)
    """Constant that ``seq-mean-token-sum-norm`` divides token sums by, such as ``data.max_response_length``."""
    entropy_coeff: float = Field(0.0, ge=0)
    """Subtract this times the policy's mean entropy from the loss."""
    use_kl_loss: bool = False
    """Add ``kl_loss_coef`` · KL(π_θ‖π_ref) to the loss; brings the reference policy in."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Coefficient of the KL term in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"
    """KL estimator of the loss. With ``+``: its value, with the unbiased gradient (docs/algorithms/kl.md)."""
    use_bias_correction_kl: bool = False
    """Weigh the estimator by π_θ/π_behav: its value and gradient are then unbiased on stale data, too."""
    prox_logp_method: Literal["recompute", "loglinear"] = "recompute"
    """Source of log π_prox with ``async_training.use_rollout_log_probs: false``: a forward pass, or log-linear
    interpolation between the versions of the tokens and the current policy."""
    grad_clip: float = Field(1.0, gt=0)
    """Maximum norm of the gradient."""
    optim: OptimConfig = OptimConfig()
    fsdp_config: FsdpConfig = FsdpConfig()
    parallel: ParallelConfig = ParallelConfig()

    @property
    def clip_range(self) -> tuple[float, float]:
        """Clip ranges ε of ratios below and above 1."""
        low, high = self.clip_ratio_low, self.clip_ratio_high
        return self.clip_ratio if low is None else low, self.clip_ratio if high is None else high


class RefConfig(Section):
    """The reference policy, where the algorithm asks for one."""

    nnodes: NonNegative = 0
    """Number of machines of the reference; 0 puts it on the trainer's ranks, inside each fetch."""
    n_gpus_per_node: Positive = 1
    """Devices on each of the reference's machines (on CPUs: processes)."""


class LogpConfig(Section):
    """The role that recomputes log π_prox (``async_training.use_rollout_log_probs: false``)."""

    nnodes: NonNegative = 0
    """Number of machines of this role: its ranks hold a copy of the policy together, and get every update. 0 puts it on
    the trainer's ranks, inside each fetch."""
    n_gpus_per_node: Positive = 1
    """Devices on each of this role's machines (on CPUs: processes)."""


class CriticConfig(Section):
    """The critic, where the advantage estimator asks for one. It begins as a copy of the initial model."""

    enable: bool | None = None
    """Use a critic. null: with ``gae``. true: for an estimator of your own that looks at values."""
    nnodes: NonNegative = 0
    """Number of machines of the critic; 0 puts it on the trainer's ranks, inside each fetch."""
    n_gpus_per_node: Positive = 1
    """Devices on each of the critic's machines (on CPUs: processes)."""
    ppo_epochs: Positive = 1
    """Number of the critic's passes over each fetch; mini-batches are the actor's."""
    cliprange_value: float | None = Field(0.5, gt=0)
    """Largest change that values are trained to from what they were at the fetch's start; null: no limit."""
    grad_clip: float = Field(1.0, gt=0)
    """Maximum norm of the critic's gradient."""
    optim: OptimConfig = OptimConfig(lr=1e-5)


class FilterGroupsConfig(Section):
    """Dynamic sampling, which leaves out groups whose rewards are all equal."""

    enable: bool = False
    """Dynamic sampling (DAPO): groups whose rewards are all equal are ``filtered``, and refilled."""


class CorrectionConfig(Section):
    """A correction of off-policy data."""

    name: str | None = None
    """Name of the correction: ``truncate``, ``mask`` (IcePop), ``reject``, ``veto``, ``off_policy_sequence_mask``, or
    ``file.py:function``. Default: none, so that w is 1."""
    bound: float | None = Field(None, gt=0)
    """Largest π_prox/π_behav that counts (in full, for ``truncate``). 2 where neither bound is given."""
    lower: float | None = Field(None, gt=0)
    """Smallest π_prox/π_behav that counts."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio that the bounds apply to: each token's, the answer's product, or its geometric mean."""
    veto: float | None = Field(None, gt=0)
    """Smallest ratio of a token: an answer with one below this is rejected whole, beside any other action."""
    delta: float | None = Field(None, gt=0)
    """``off_policy_sequence_mask``: largest mean of log(π_behav/π_θ) of a bad answer, in nats per token."""

    @property
    def looks_at_sequences(self) -> bool:
        """True where it looks at whole sequences, or may do so."""
        by_token = self.name in ("truncate", "mask", "reject") and self.level == "token" and self.veto is None
        return self.name is not None and not by_token


class RolloutCorrectionConfig(CorrectionConfig):
    """Correction by w = π_prox/π_behav where the two differ (``async_training.use_rollout_log_probs: false``)."""

    also: tuple[CorrectionConfig, ...] = ()
    """Further corrections, whose weights are multiplied with this one's: a rejection by the geometric mean, say, beside
    ``truncate``."""

    @property
    def all(self) -> tuple[CorrectionConfig, ...]:
        """The corrections in use: this one and those of ``also``, where they have a name."""
        return tuple(one for one in (self, *self.also) if one.name is not None)


class KlCtrlConfig(Section):
    """The KL penalty of ``use_kl_in_reward``."""

    kl_coef: float = Field(0.001, ge=0)
    """Coefficient of the penalty in the reward."""


class GuardConfig(Section):
    """Action on an effective sample size of an optimizer step below ``min_ess`` (docs/algorithms/health.md)."""

    min_ess: float | None = Field(None, gt=0, lt=1)
    """Least effective sample size, (Σw)²/(N·Σw²) with w = π_θ/π_behav over the step's N tokens; 1 is on policy. null:
    off."""
    action: Literal["warn", "tighten", "lower_eta", "stop"] = "warn"
    """Action of the guard. ``warn`` says so once per version. ``tighten`` halves the clip range, down to an eighth.
    ``lower_eta`` admits half as far ahead; both come back when the size does. ``stop`` ends the run after the version,
    with a checkpoint."""


class AlgorithmConfig(Section):
    """Advantages, losses, corrections and filters (docs/algorithms/grpo.md and the pages beside it)."""

    adv_estimator: str = "grpo"
    """Name in the registry of advantages (docs/algorithms), or ``file.py:function``."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation or not (``grpo``, ``grpo_passk``, ``gigpo``)."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount γ from token to token (``gae``, ``reinforce_plus_plus``)."""
    lam: float = Field(1.0, ge=0, le=1)
    """λ of generalized advantage estimation (``gae``)."""
    turn_discount: float = Field(1.0, ge=0, le=1)
    """Discount of rewards and values from each turn of an episode to the next (docs/algorithms/gae.md)."""
    step_weight: float = Field(1.0, ge=0)
    """Weight ω of what is said of single turns, beside what is said of their episode (``gigpo``)."""
    pass_k: Positive = 4
    """Number k of answers in pass@k (``pass_at_k``)."""
    policy_loss: ChosenLoss = PpoClip()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong_filtering: bool = False
    """Leave answers that were cut off out of every loss (DAPO). Their rewards still count in their groups."""
    use_kl_in_reward: bool = False
    """Take ``kl_ctrl.kl_coef`` · KL(π_prox‖π_ref) off each token's reward; brings the reference policy in."""
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = "k1"
    """The KL estimator in the reward (docs/algorithms/kl.md)."""
    kl_ctrl: KlCtrlConfig = KlCtrlConfig()
    guard: GuardConfig = GuardConfig()

    @property
    def looks_at_sequences(self) -> bool:
        """True where the policy loss, or a correction, looks at whole sequences, or may do so."""
        corrections = self.rollout_correction.all
        return self.policy_loss.looks_at_sequences or any(one.looks_at_sequences for one in corrections)


class SftConfig(Section):
    """Supervised fine-tuning by ``headway sft``, which one recipe can have beside all that ``headway train`` reads."""

    batch_size: Positive = 32
    """Number of conversations in one optimizer step."""
    max_length: Positive | None = None
    """Most tokens of a conversation; longer ones are left out, and counted. Default: ``data.max_prompt_length`` +
    ``data.max_response_length``."""
    completion_key: str = "auto"
    """Column of the completion, where rows are a prompt and its completion. ``auto``: ``completion``, ``response`` or
    ``output``."""
    max_steps: Positive | None = None
    """Number of optimizer steps; at most those of ``data.epochs`` where that is given. Default: as many as
    ``data.epochs`` passes over the data take, or one pass."""
    val_freq: Positive = 50
    """Optimizer steps between two measurements of the loss on held-out conversations."""
    save_freq: Every = 200
    """Optimizer steps between two checkpoints; -1: only at the end."""
    optim: OptimConfig = OptimConfig(lr=1e-5, lr_warmup_steps=10, lr_scheduler_type="cosine")
