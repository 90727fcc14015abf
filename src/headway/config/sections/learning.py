"""The sections of learning: the mesh, the policy's losses, the critic, the reference, the estimators.

    ranks of a role = replicate × shard × cp × tp         shard is the remaining factor
    experts         = replicate × (shard · cp · tp / ep) × ep

Ranks are numbered with tp fastest, then cp: the cp · tp ranks that compute the same rows, an *inner mesh*, are
neighbours, and a group of devices of one machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import product
from math import lcm
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headway.config.sections.losses import ChosenLoss, PpoClip
from headway.config.sections.section import Every, NonNegative, Positive, Section

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_attention_heads_per_layer")
"""Keys of a layer's number of attention heads in the families' ``config.json``."""
KV_HEADS = (
    "num_key_value_heads",
    "num_global_key_value_heads",
    "swa_num_key_value_heads",
    "num_key_value_heads_per_layer",
)
"""Keys of a layer's number of key and value heads."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a layer's number of routed experts."""
DIVIDES = (5, 23)
"""First release of transformers that can divide matrices and experts as Headway asks."""

KLKind = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
"""Name of an estimator of the KL divergence, as in `headway.algorithms.kl`."""


class ParallelConfig(Section):
    """Dimensions of the mesh of policy, critic, reference and ``logp``. The weights are sharded over the remaining
    factor of a role's devices (FSDP2)."""

    replicate: Positive = 1
    """Number of copies of the sharded model (HSDP): each is sharded over its own ranks, and gradients are summed over
    the copies. With one copy per machine, weights are gathered only within machines."""
    tp: Positive = 1
    """Tensor parallelism: number of ranks that divide each layer's matrices, by the model's plan in
    ``transformers``. Must divide the numbers of attention heads and of key and value heads."""
    cp: Positive = 1
    """Context (sequence) parallelism by Ulysses: number of ranks that divide each line of tokens and, in attention, the
    heads. A micro-batch has ``cp`` times as many tokens."""
    ep: Positive = 1
    """Expert parallelism: number of ranks that divide the experts of a mixture-of-experts model. A multiple of ``tp``,
    and a divisor of the number of ranks of one copy and of the number of experts."""

    @property
    def inner(self) -> int:
        """Number of ranks that compute the same rows: those of an inner mesh."""
        return self.tp * self.cp

    @property
    def least_ranks(self) -> int:
        """Minimum number of ranks of such a mesh. Other possible numbers are multiples of it."""
        return self.replicate * lcm(self.inner, self.ep)

    @property
    def is_plain(self) -> bool:
        """True if all ranks shard and each has different rows."""
        return self == ParallelConfig()

    def problems(self, nnodes: int, per_node: int, whose: str) -> Iterator[str]:
        """Yield problems of this mesh on ``nnodes`` × ``per_node`` devices. ``whose``: the role, for messages."""
        ranks = nnodes * per_node
        copies = self.replicate * self.inner
        if ranks % copies:
            yield (
                f"actor.parallel: replicate={self.replicate} × cp={self.cp} × tp={self.tp} is {copies} ranks, which do "
                f"not divide the {ranks} of {whose}; give a multiple of {copies}, or lower one of them"
            )
            return
        if self.inner > per_node or per_node % self.inner:
            yield (
                f"actor.parallel: cp={self.cp} × tp={self.tp} is {self.inner} ranks, which have to be on one machine, "
                f"and {whose} has {per_node} on each; expected a divisor of {per_node}"
            )
        of_copy = ranks // self.replicate
        if self.ep > 1 and self.ep % self.tp:
            yield f"actor.parallel: ep={self.ep} is no multiple of tp={self.tp}; give one, or set ep=1"
        elif of_copy % self.ep:
            yield (
                f"actor.parallel: ep={self.ep} does not divide the {of_copy} ranks of one copy of the model on "
                f"{whose}; expected a divisor of {of_copy}"
            )


def model_problems(parallel: ParallelConfig, model: Mapping[str, object]) -> Iterator[str]:
    """Yield dimensions that do not fit a model. ``model``: its ``config.json``, or that file's text part."""
    heads, experts = _numbers(model, HEADS), _numbers(model, EXPERTS)
    kv_heads = _numbers(model, KV_HEADS) or heads
    # Ulysses divides the heads of each tp rank into whole heads.
    inner = f"actor.parallel: cp={parallel.cp} × tp={parallel.tp} is {parallel.inner}, which"
    of_heads = [*_indivisible(inner, parallel.inner, heads, "attention heads")]
    of_heads += _indivisible(f"actor.parallel.tp={parallel.tp}", parallel.tp, kv_heads, "heads of keys and values")
    yield from of_heads[:1]
    if parallel.ep > 1 and not experts:
        yield f"actor.parallel.ep={parallel.ep}: the model has no experts to divide; set ep=1"
    yield from _indivisible(f"actor.parallel.ep={parallel.ep}", parallel.ep, experts, "experts")


def replica_problems(size: int, model: Mapping[str, object]) -> Iterator[str]:
    """Yield reasons why vLLM cannot divide a model over ``size`` devices. ``model``: its ``config.json``.

    With fewer key and value heads than devices, several devices hold each head.
    """
    heads = _numbers(model, HEADS)
    kv_heads = _numbers(model, KV_HEADS) or heads
    setting = f"rollout.tensor_model_parallel_size={size}"
    if of_heads := [*_indivisible(setting, size, heads, "attention heads")]:
        yield from of_heads
    elif (odd := next((count for count in kv_heads if count % size and size % count), None)) is not None:
        yield (
            f"{setting} neither divides the model's {odd} heads of keys and values nor is a multiple; expected a "
            f"divisor of {odd}, or a multiple"
        )


def expert_problems(parallel: ParallelConfig, model: Mapping[str, object], ranks: Mapping[str, int]) -> Iterator[str]:
    """Yield a problem for each role whose mesh leaves a rank without experts.

    ``ranks``: role with its own devices → its number of ranks, which the mesh fits.
    """
    experts = min(_numbers(model, EXPERTS), default=0)
    for role, count in ranks.items():
        if not experts or _each_holds(parallel, count, experts):
            continue
        copies = [number for number in range(1, count + 1) if count % (number * parallel.inner) == 0]
        others = (
            parallel.model_copy(update={"replicate": replicate, "ep": ep})
            for ep, replicate in product(sorted({parallel.ep, *range(1, experts + 1)}), copies)
        )
        able = [mesh for mesh in others if _fits(mesh, count, experts) and _each_holds(mesh, count, experts)]
        nearest = min(
            able, key=lambda mesh: (mesh.replicate != parallel.replicate, mesh.replicate, mesh.ep), default=None
        )
        way_out = "give another number of ranks"
        if nearest is not None:
            way_out = f"set actor.parallel.replicate={nearest.replicate} and actor.parallel.ep={nearest.ep}"
        yield (
            f"actor.parallel: with replicate={parallel.replicate} and ep={parallel.ep}, some of the {count} ranks of "
            f"{role} would hold none of a layer's {experts} experts; {way_out}"
        )


def _fits(parallel: ParallelConfig, ranks: int, experts: int) -> bool:
    of_copy = ranks // parallel.replicate
    return of_copy % parallel.ep == experts % parallel.ep == 0 and (parallel.ep == 1 or parallel.ep % parallel.tp == 0)


def _each_holds(parallel: ParallelConfig, ranks: int, experts: int) -> bool:
    """Tell whether each rank holds an expert. FSDP2 gives the first ranks of a group equal parts, rounded up."""
    sharding = ranks // parallel.replicate // (parallel.ep if parallel.ep > 1 else parallel.tp)
    local = experts // parallel.ep
    return -(-local // sharding) * (sharding - 1) < local


def plan_problems(parallel: ParallelConfig, model: Any) -> Iterator[str]:
    """Yield dimensions that `transformers` has no plan for. ``model``: configuration of the text part, or its class."""
    release = version("transformers")
    if (parallel.tp > 1 or parallel.ep > 1) and tuple(map(int, release.split(".")[:2])) < DIVIDES:
        yield (
            f"actor.parallel.tp={parallel.tp} and ep={parallel.ep}: transformers {release} cannot divide models so. "
            f"Install {'.'.join(map(str, DIVIDES))} or later (vLLM may ask for an older one), or set both to 1"
        )
        return
    for name in ("tp", "ep"):
        size = getattr(parallel, name)
        # A model's own plan has at least its output layer, which alone would divide almost nothing.
        if size > 1 and not getattr(model, f"base_model_{name}_plan", None):
            yield (
                f"actor.parallel.{name}={size}, and transformers has no plan for dividing a {model.model_type!r} model "
                f"so; set actor.parallel.{name}=1"
            )


def _numbers(model: Mapping[str, object], names: Sequence[str]) -> list[int]:
    """Return the numbers above 0 under any of ``names``: one for the model, or a list for its layers."""
    values = [model.get(name) for name in names]
    each = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return [one for one in each if isinstance(one, int) and one > 0]


def _indivisible(what: str, by: int, numbers: Sequence[int], of: str) -> Iterator[str]:
    """Yield a problem if ``by`` does not divide one of ``numbers``. ``what``: the setting of ``by``, for the
    message.
    """
    if (odd := next((number for number in numbers if number % by), None)) is not None:
        yield f"{what} does not divide the model's {odd} {of}; expected a divisor of {odd}"


class OptimConfig(Section):
    """The AdamW optimizer and its learning rate."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate after warm-up."""
    lr_warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after warm-up. ``linear`` and ``cosine`` fall to ``min_lr_ratio`` at the last optimizer
    step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of ``lr`` at the last optimizer step."""
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
    """Number of training passes over each train batch."""
    ppo_max_token_len_per_gpu: Positive = 16_384
    """Maximum number of tokens of one micro-batch on each rank: computed ones, and padding if rows are padded
    (``model.packing``). A longer answer gets its own micro-batch."""
    clip_ratio: float = Field(0.2, gt=0)
    """Clip range ε for ``clip_ratio_low`` and ``clip_ratio_high`` if they are not given: ratios count in 1 ± ε."""
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
    """Add ``kl_loss_coef`` · KL(π_θ‖π_ref) to the loss. Needs the reference policy."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Coefficient of the KL term in the loss."""
    kl_loss_type: KLKind = "k3"
    """KL estimator of the loss. With ``+``: the estimator's value with the unbiased gradient
    (docs/algorithms/kl.md)."""
    use_bias_correction_kl: bool = False
    """Weight the estimator by π_θ/π_behav, so that its value and gradient are unbiased on stale data, too."""
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
    """The reference policy, if the algorithm needs one."""

    nnodes: NonNegative = 0
    """Number of machines of the reference; 0 puts it on the trainer's ranks, inside each train batch."""
    n_gpus_per_node: Positive = 1
    """Devices on each of the reference's machines (on CPUs: processes)."""


class LogpConfig(Section):
    """The role that recomputes log π_prox (``async_training.use_rollout_log_probs: false``)."""

    nnodes: NonNegative = 0
    """Number of machines of this role. Its ranks together hold a copy of the policy, and get every update. 0 puts the
    role on the trainer's ranks, inside each train batch."""
    n_gpus_per_node: Positive = 1
    """Devices on each of this role's machines (on CPUs: processes)."""


class CriticConfig(Section):
    """The critic, if the advantage estimator needs one. It starts as a copy of the initial model."""

    enable: bool | None = None
    """Use a critic. null: only with ``gae``. true: for your own estimator that uses values."""
    nnodes: NonNegative = 0
    """Number of machines of the critic; 0 puts it on the trainer's ranks, inside each train batch."""
    n_gpus_per_node: Positive = 1
    """Devices on each of the critic's machines (on CPUs: processes)."""
    ppo_epochs: Positive = 1
    """Number of the critic's passes over each train batch; mini-batches are the actor's."""
    cliprange_value: float | None = Field(0.5, gt=0)
    """Clip range of values around those at the train batch's start; null: no limit."""
    grad_clip: float = Field(1.0, gt=0)
    """Maximum norm of the critic's gradient."""
    optim: OptimConfig = OptimConfig(lr=1e-5)


class FilterGroupsConfig(Section):
    """Dynamic sampling, which leaves out groups whose rewards are all equal."""

    enable: bool = False
    """Dynamic sampling (DAPO): groups whose rewards are all equal are ``filtered``, and refilled."""


class CorrectionConfig(Section):
    """Correction by w = π_prox/π_behav if the two differ (``async_training.use_rollout_log_probs: false``), or a list
    of corrections, whose weights are multiplied: for example ``truncate`` and a rejection by the geometric mean."""

    name: str | None = None
    """Name of the correction: ``truncate``, ``mask`` (IcePop), ``reject``, ``veto``, ``off_policy_sequence_mask``, or
    ``file.py:function``. Default: none, so that w is 1."""
    bound: float | None = Field(None, gt=0)
    """Largest π_prox/π_behav that counts (for ``truncate``: in full). 2 if neither bound is given."""
    lower: float | None = Field(None, gt=0)
    """Smallest π_prox/π_behav that counts."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio that the bounds apply to: each token's, their product over the answer, or their geometric mean."""
    veto: float | None = Field(None, gt=0)
    """Smallest ratio of a token. An answer with a ratio below this is rejected as a whole, in addition to the
    action."""
    delta: float | None = Field(None, gt=0)
    """``off_policy_sequence_mask``: largest mean of log(π_behav/π_θ) of a bad answer, in nats per token."""

    @property
    def looks_at_sequences(self) -> bool:
        """True if the correction uses whole sequences, or may do so."""
        by_token = self.name in ("truncate", "mask", "reject") and self.level == "token" and self.veto is None
        return self.name is not None and not by_token


OneOrSeveral = Annotated[
    Annotated[CorrectionConfig, Tag("one")] | Annotated[tuple[CorrectionConfig, ...], Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "one"),
]
"""One correction, or several whose weights are multiplied."""


class KlCtrlConfig(Section):
    """The KL penalty of ``use_kl_in_reward``."""

    kl_coef: float = Field(0.001, ge=0)
    """Coefficient of the penalty in the reward."""


class GuardConfig(Section):
    """Action when an optimizer step's effective sample size is below ``min_ess`` (docs/algorithms/health.md)."""

    min_ess: float | None = Field(None, gt=0, lt=1)
    """Least effective sample size, (Σw)²/(N·Σw²) with w = π_θ/π_behav over the step's N tokens; 1 is on policy. null:
    off."""
    action: Literal["warn", "tighten", "lower_eta", "stop"] = "warn"
    """Action of the guard. ``warn`` warns once per version. ``tighten`` halves the clip range, down to an eighth.
    ``lower_eta`` halves η for admission. Both are undone when the size recovers. ``stop`` ends the run after the
    version, with a checkpoint."""


class AlgorithmConfig(Section):
    """Advantages, losses, corrections and filters (docs/algorithms/grpo.md and the pages beside it)."""

    adv_estimator: str = "grpo"
    """Advantage estimator: a name (docs/algorithms), or ``file.py:function``."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide advantages by the group's standard deviation (``grpo``, ``grpo_passk``, ``gigpo``)."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount γ from token to token (``gae``, ``reinforce_plus_plus``)."""
    lam: float = Field(1.0, ge=0, le=1)
    """λ of generalized advantage estimation (``gae``)."""
    turn_discount: float = Field(1.0, ge=0, le=1)
    """Discount of rewards and values from each turn of an episode to the next (docs/algorithms/gae.md)."""
    step_weight: float = Field(1.0, ge=0)
    """Weight ω of the turns' advantages, which are added to their episode's (``gigpo``)."""
    pass_k: Positive = 4
    """Number k of answers in pass@k (``pass_at_k``)."""
    policy_loss: ChosenLoss = PpoClip()
    """The policy loss, which ``loss_mode`` chooses. Each loss has its own keys."""
    rollout_correction: OneOrSeveral = CorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong_filtering: bool = False
    """Leave cut-off answers out of every loss (DAPO). Their rewards still count in their groups."""
    use_kl_in_reward: bool = False
    """Subtract ``kl_ctrl.kl_coef`` · KL(π_prox‖π_ref) from each token's reward. Needs the reference policy."""
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = "k1"
    """The KL estimator in the reward (docs/algorithms/kl.md)."""
    kl_ctrl: KlCtrlConfig = KlCtrlConfig()
    guard: GuardConfig = GuardConfig()

    @property
    def corrections(self) -> tuple[CorrectionConfig, ...]:
        """Corrections in use, which are those with a name."""
        given = self.rollout_correction
        return tuple(one for one in (given if isinstance(given, tuple) else (given,)) if one.name is not None)

    @property
    def looks_at_sequences(self) -> bool:
        """True if the policy loss or a correction uses whole sequences, or may do so."""
        return self.policy_loss.looks_at_sequences or any(one.looks_at_sequences for one in self.corrections)


class SftConfig(Section):
    """Supervised fine-tuning by ``headway sft``. One recipe can also have the sections of ``headway train``."""

    batch_size: Positive = 32
    """Number of conversations in one optimizer step."""
    max_length: Positive | None = None
    """Maximum number of tokens of a conversation. Longer ones are left out, and counted. Default:
    ``data.max_prompt_length`` + ``data.max_response_length``."""
    completion_key: str = "auto"
    """Column of the completion, if rows have a prompt and its completion. ``auto``: ``completion``, ``response`` or
    ``output``."""
    max_steps: Positive | None = None
    """Number of optimizer steps; at most those of ``data.epochs`` passes if that is given. Default: those of
    ``data.epochs`` passes over the data, or of one pass."""
    val_freq: Positive = 50
    """Optimizer steps between two measurements of the loss on held-out conversations."""
    save_freq: Every = 200
    """Optimizer steps between two checkpoints; -1: only at the end."""
    optim: OptimConfig = OptimConfig(lr=1e-5, lr_warmup_steps=10, lr_scheduler_type="cosine")
