"""The configuration's schema: every key, its type, its default and its meaning. Values are data; nothing here acts.

    YAML file(s) ─▶ preset of ``mode`` under them ─▶ ``a.b=c`` overrides ─▶ this schema ─▶ doctor ─▶ the run

Key names are the field's (verl and its fully-asynchronous recipe) wherever the field has one.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)

from headway.config.transports import known_transport

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, le=1)]


def exact_fraction(value: Any) -> Any:
    """0.3, "0.3" and "3/10" all become 3/10: a float is read as the decimal that its shortest spelling shows."""
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ValueError("expected a number, like 1, 0.3 or 3/10") from None


def types_in(annotation: Any) -> set[Any]:
    """The plain types that an annotation is made of: ``Positive | None`` is made of int and None's type."""
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return set().union(*map(types_in, inner)) if inner else {annotation}


def on_or_off(value: Any) -> Any:
    """YAML reads a bare ``on`` or ``off`` as a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def never_or_every(value: int) -> int:
    if value == 0:
        raise ValueError("expected a number of versions, or -1")
    return value


def shortest_spelling(value: Fraction) -> int | float | str:
    """The number as a user would type it: an integer or decimal where that is exact, else ``p/q``."""
    if value.denominator == 1:
        return int(value)
    return float(value) if Fraction(str(float(value))) == value else str(value)


Eta = Annotated[Fraction, BeforeValidator(exact_fraction), Field(ge=0), PlainSerializer(shortest_spelling)]
Share = Annotated[Fraction, BeforeValidator(exact_fraction), Field(ge=0, le=1), PlainSerializer(shortest_spelling)]
Every = Annotated[int, Field(ge=-1), AfterValidator(never_or_every)]
"""A number of versions between two events, or -1."""


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors; values are checked where they are built."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _a_truth_value_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and {int, float} & types_in(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError("expected a number")
        return value


class RunConfig(Section):
    name: str = "headway"
    """Names the run's directory when ``run.dir`` is not given."""
    dir: Path | None = None
    """Where everything of the run goes. Default: ``runs/<name>-<time>``."""
    seed: int = Field(0, ge=0)
    """Seeds model, data order and sampling."""


class MakeModelConfig(Section):
    """A model made from nothing: a Qwen3-style causal LM with a character tokenizer."""

    architecture: Literal["qwen3", "qwen2", "llama"] = "qwen3"
    hidden_size: Positive = 128
    num_hidden_layers: Positive = 3
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive = 2
    head_dim: Positive = 32
    intermediate_size: Positive = 384
    max_position_embeddings: Positive = 256
    tie_word_embeddings: bool = True
    vocabulary: str = Field("0123456789abcdefghijklmnopqrstuvwxyz:=,|+-*() ", min_length=1)
    """Characters of the tokenizer; padding and end-of-sequence are added."""

    @field_validator("vocabulary")
    @classmethod
    def _each_character_once(cls, value: str) -> str:
        if repeated := [character for character, count in Counter(value).items() if count > 1]:
            raise ValueError(f"expected each character once, but {', '.join(map(repr, repeated))} repeats")
        return value

    @model_validator(mode="after")
    def _heads_share_keys_evenly(self) -> MakeModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"expected num_attention_heads ({self.num_attention_heads}) to be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        return self


class GiveUpConfig(Section):
    """A teacher that does not finish everything: what reinforcement learning then has to find out for itself."""

    above: Positive
    """Answers of more characters are given up on …"""
    rate: float = Field(gt=0, lt=1)
    """… with this probability, …"""
    answer: str = "?"
    """… and this is what the teacher writes instead."""


class WarmupConfig(Section):
    """Supervised steps on the task until held-out greedy accuracy lies in ``target``."""

    target: tuple[float, float] = (0.4, 0.6)
    """The window of held-out greedy accuracy in which warm-up stops."""
    batch_size: Positive = 128
    lr: float = Field(1e-3, gt=0)
    eval_every: Positive = 20
    """Optimizer steps between two evaluations. A jump over the window goes back to the last weights below it and on
    with a quarter of the learning rate and of these steps."""
    min_steps: NonNegative = 0
    """The window counts from here on: before that, accuracy may be right by a skill half learned."""
    max_steps: Positive = 2000
    """The learning rate falls linearly to zero here; a warm-up that is outside the window by then has failed."""
    give_up: GiveUpConfig | None = None
    """Teach from imperfect solutions. Default: the task's own, all right."""
    params: dict[str, Any] = {}
    """Parameters of the task that differ in warm-up: shorter problems, for example."""

    @field_validator("target")
    @classmethod
    def _a_window_of_accuracies(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] < value[1] <= 1:
            raise ValueError("expected [low, high] with 0 <= low < high <= 1")
        return value


class ModelConfig(Section):
    path: str | None = None
    """A Hugging Face folder (config, weights, tokenizer). Replaces ``make`` and ``warmup``."""
    make: MakeModelConfig | None = None
    """Make a small model instead of loading one."""
    warmup: WarmupConfig | None = None
    """Supervised warm-up of a made model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Training compute dtype; ``auto`` is bfloat16 on GPUs, float32 on CPUs. Master weights are float32."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    trust_remote_code: bool = False


class TaskConfig(Section):
    """A procedural task: problems are generated, with their answers."""

    name: str = "sort"
    """A task of Headway's own (``sort``, ``reverse``) or ``reasoning_gym/<dataset>``."""
    size: Positive = 20_000
    """Training problems in one epoch."""
    val_size: Positive = 512
    """Held-out problems, disjoint from the training ones."""
    params: dict[str, Any] = {}
    """Parameters of the task, passed through."""


class DataConfig(Section):
    train: str | None = None
    """A JSONL or Parquet file of training prompts. Replaces ``task``."""
    val: str | None = None
    """A JSONL or Parquet file of held-out prompts. Default: ``val_size`` rows split off ``train`` by seed."""
    task: TaskConfig | None = None
    """A procedural task instead of files."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Column of the ground truth."""
    val_size: NonNegative = 128
    """Rows of ``train`` held out when ``val`` is not given."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """``auto`` applies the tokenizer's chat template to messages only; ``always`` makes plain text a user message."""
    max_prompt_length: Positive = 512
    """Prompts of more tokens are left out, and counted."""
    max_response_length: Positive = 512
    """Sampling stops after this many tokens."""
    shuffle: bool = True
    """Shuffle every epoch, by ``run.seed``."""
    epochs: Positive | None = None
    """Length of the run in passes over the data; the alternative to ``rollout.total_rollout_steps``."""
    prefetch: NonNegative = 64
    """Prompts tokenised ahead of admission."""


class RewardConfig(Section):
    function: str = "exact_match"
    """``exact_match``, ``task`` (the task's own verifier) or ``file.py:function``."""
    workers: Positive = 1
    """Processes that run the reward; they never import torch and are killed on a time-out."""
    timeout_s: float = Field(10.0, gt=0)
    """For one call of the function."""
    retries: NonNegative = 1
    """Further tries after an exception or a time-out, before the group is ``failed``."""


class RolloutConfig(Section):
    name: Literal["native"] = "native"
    """The engine: ``native`` is Headway's own, over any Hugging Face decoder."""
    n: Positive = 8
    """Trajectories per prompt."""
    temperature: float = Field(1.0, ge=0)
    top_p: Probability = 1.0
    top_k: NonNegative = 0
    """0 is off. Filters (``top_p`` < 1, ``top_k`` > 0) change the behaviour policy."""
    total_rollout_steps: Positive | None = None
    """Length of the run in *trained* groups; a multiple of B. Exactly one of this and ``data.epochs`` is given."""
    test_freq: Every = 1
    """Versions between two validations; the first and the last version are always validated. -1: only those two."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the served weights; ``auto`` is that of ``model.dtype``."""
    max_concurrent: Positive = 64
    """Trajectories that one replica decodes at once. Bounds memory, not staleness."""
    max_batched_tokens: Positive = 4096
    """Prompt tokens of one prefill forward."""
    nnodes: NonNegative = 1
    """Machines of the rollout role."""
    n_gpus_per_node: Positive = 1
    """Replicas on each (on CPUs: processes)."""
    split_groups: bool = False
    """Spread the trajectories of one group over the replicas. Off: a group stays on one, and its prompt is prefilled
    once."""
    threads: NonNegative = 0
    """Torch threads of one replica; 0 divides the machine's cores among the processes."""
    val_n: Positive = 1
    """Answers per held-out problem."""
    val_temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    enable_dual_buffer: bool = True
    """Receive new weights into a second copy, in host memory, while decoding goes on. Off: decoding is paused first,
    and they are written over the ones that were served."""
    param_update_preduce_bucket_size_mb: float = Field(64, gt=0)
    """Bucket in which the trainer assembles full tensors."""
    param_update_consume_bucket_size_mb: float = Field(64, gt=0)
    """Bucket in which the engine copies when it loads."""


class OptimConfig(Section):
    lr: float = Field(1e-6, gt=0)
    lr_warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; ``linear`` and ``cosine`` fall to ``min_lr_ratio`` at the last optimizer step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)


class FsdpConfig(Section):
    param_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses (FSDP2's CPUOffloadPolicy)."""
    reshard_after_forward: bool = True


class ActorConfig(Section):
    ppo_mini_batch_size: Positive = 32
    """Groups of one optimizer step."""
    ppo_epochs: Positive = 1
    """Passes over each fetch."""
    ppo_max_token_len_per_gpu: Positive = 16_384
    """Tokens (padding included) of one micro-batch; an answer longer than this has a micro-batch of its own."""
    clip_ratio: float = Field(0.2, gt=0)
    clip_ratio_low: float | None = Field(None, gt=0)
    """ε below; default ``clip_ratio``."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """ε above (clip-higher); default ``clip_ratio``."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """Mean over all valid tokens of the mini-batch, or over sequences: of their token means, of their token sums, or of
    their token sums over the constant ``loss_scale_factor``."""
    loss_scale_factor: float | None = Field(None, gt=0)
    """The constant length of ``seq-mean-token-sum-norm``, such as ``data.max_response_length``."""
    entropy_coeff: float = Field(0.0, ge=0)
    use_kl_loss: bool = False
    """Add ``kl_loss_coef`` · KL(π_θ‖π_ref) to the loss; brings the reference policy in."""
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"
    """The estimator. With ``+`` its value, and the unbiased gradient (docs/algorithms/kl.md)."""
    grad_clip: float = Field(1.0, gt=0)
    """Maximum norm of the gradient."""
    optim: OptimConfig = OptimConfig()
    fsdp_config: FsdpConfig = FsdpConfig()


class RefConfig(Section):
    """The reference policy, where the algorithm asks for one."""

    nnodes: NonNegative = 0
    """Machines of its own; 0 puts it on the trainer's ranks, inside each fetch."""
    n_gpus_per_node: Positive = 1


class PolicyLossConfig(Section):
    """The loss and its parameters; each is for the losses that it names, and null is that loss's own default."""

    loss_mode: str = "ppo_clip"
    """Name in the registry of policy losses (docs/algorithms), or ``file.py:function``."""
    clip_ratio_c: float | None = Field(None, gt=0)
    """``dual_clip``: largest ratio that counts where the advantage is negative; ``dppo_*``: truncation."""
    tau_pos: float | None = Field(None, gt=0)
    """``sapo``: temperature of the gate where the advantage is positive."""
    tau_neg: float | None = Field(None, gt=0)
    """``sapo``: … and elsewhere."""
    rollout_is_threshold: float | None = Field(None, gt=0)
    """``truncated_is``: largest π_θ/π_behav that counts in full."""
    clip_cov_ratio: Probability | None = None
    """``clip_cov``: share of the tokens that lose their gradient."""
    clip_cov_lb: float | None = None
    """``clip_cov``: those are drawn from the tokens whose covariance is above this …"""
    clip_cov_ub: float | None = None
    """… and below this."""
    kl_cov_ratio: Probability | None = None
    """``kl_cov``: share of the tokens that get the penalty."""
    ppo_kl_coef: float | None = Field(None, ge=0)
    """``kl_cov``: coefficient of the penalty."""
    ignore_last: NonNegative | None = None
    """``t_ppo``: so many last tokens of an unfinished answer are left out."""

    @property
    def given(self) -> dict[str, Any]:
        """The parameters that are not left to the loss."""
        return self.model_dump(exclude={"loss_mode"}, exclude_none=True)


class FilterGroupsConfig(Section):
    enable: bool = False
    """Dynamic sampling (DAPO): groups whose rewards are all equal are ``filtered``, and refilled."""


class RolloutCorrectionConfig(Section):
    """What to do with w = π_prox/π_behav where the two differ (``async_training.use_rollout_log_probs: false``)."""

    name: str | None = None
    """``truncate``, ``mask`` (IcePop), ``reject``, ``veto``, ``off_policy_sequence_mask``, or ``file.py:function``.
    Default: w is 1."""
    bound: float | None = Field(None, gt=0)
    """Largest π_prox/π_behav that counts (in full, for ``truncate``). 2 where neither bound is given."""
    lower: float | None = Field(None, gt=0)
    """Smallest one."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Of which ratio the bounds speak: each token's, the answer's product, or its geometric mean."""
    veto: float | None = Field(None, gt=0)
    """Beside any other action: an answer with a token whose ratio is below this is rejected whole."""
    delta: float | None = Field(None, gt=0)
    """``off_policy_sequence_mask``: largest mean of log(π_behav/π_θ) of a bad answer, in nats per token."""


class AlgorithmConfig(Section):
    adv_estimator: str = "grpo"
    """Name in the registry of advantages (docs/algorithms), or ``file.py:function``."""
    norm_adv_by_std_in_grpo: bool = True
    """``grpo``, ``grpo_passk``: divide by the group's standard deviation or not."""
    gamma: float = Field(1.0, ge=0, le=1)
    """``reinforce_plus_plus``: discount from token to token."""
    pass_k: Positive = 4
    """``pass_at_k``: k."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()


class Admission(StrEnum):
    GROUP = "group"
    BATCH = "batch"


class Order(StrEnum):
    FIFO = "fifo"
    WINDOW = "window"
    READY = "ready"


class AsyncTrainingConfig(Section):
    """How far generation may run ahead, and how groups are taken. A mode is a set of values for this section."""

    trigger_parameter_sync_step: Positive = 1
    """Fetches per parameter update."""
    require_batches: Positive = 1
    """Mini-batches per fetch."""
    staleness_threshold: Eta = Fraction(0)
    """η: how many versions' worth of groups may be admitted ahead. May be fractional; kept exactly."""
    partial_rollout: bool | None = None
    """True means ``on_update: interrupt`` unless ``keep`` is asked for; False means ``drain``."""
    admission: Admission = Admission.GROUP
    """Admit groups one by one, or in waves of at most B when everything admitted was rewarded."""
    order: Order = Order.FIFO
    window: Positive | Literal["B"] | None = None
    """W, for ``order: window``; ``B`` is the number of groups per version."""
    on_update: Literal["drain", "interrupt", "keep"] = "drain"
    max_lag: NonNegative | None = None
    """Largest lag that is trained on with ``order: ready``, which has no bound of its own."""
    on_overdue: Literal["wait", "drop"] = "wait"
    """``wait``: groups that the next version would make older than ``max_lag`` are taken first, and the fetch waits for
    them. ``drop``: older groups are discarded, aborted if they still decode; that favours short answers."""
    use_rollout_log_probs: bool = True
    """The engine's log-probs are π_prox (the PPO denominator). False: recomputed by the trainer at each fetch."""


class ParamUpdateConfig(Section):
    schedule: Literal["synchronous", "overlapped"] = "synchronous"
    """``synchronous``: the trainer waits until every replica has loaded. ``overlapped``: it waits for gather alone, and
    trains on while replicas receive and load, each at its own pace."""
    transport: Annotated[str, AfterValidator(known_transport)] = "auto"
    """``broadcast`` uses a process group of its own, ``object_store`` Ray's, ``shared_memory`` is for one machine,
    ``disk`` leaves safetensors files, ``local`` copies inside one process; ``auto`` is ``local`` where there is only
    one, else ``broadcast``."""
    encoding: Literal["full", "delta"] = "full"
    """``delta`` sends only what changed in the served dtype; the trainer then keeps a copy of it in host memory."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Of ``broadcast``: ``nccl`` from GPU to GPU, ``gloo`` through host memory; ``auto`` is ``nccl`` where there are
    GPUs and the trainer waits for the update."""
    directory: Path | None = None
    """Of the files of ``disk``, which every worker must reach. Default: ``weights`` in the run's directory."""
    verify: bool = True
    """After each update, compare what each replica serves with the trainer on a few fixed sequences. Checksums of what
    was received are always compared."""
    timeout_s: float = Field(120.0, gt=0)
    """For one update. A replica that has not answered by then is left out, and its prompts run again elsewhere; the run
    ends when it was the last."""


class PlacementConfig(Section):
    kind: Literal["split", "shared"] = "split"
    """Training and generation on devices of their own, or taking turns on the same ones."""


class TrainerConfig(Section):
    nnodes: Positive = 1
    n_gpus_per_node: Positive = 1
    """Training ranks per machine (on CPUs: processes)."""
    use_nodes_ratios: tuple[Share, Share, Share, Share] | None = None
    """[train, logp, ref_logp, generate]: fractions of all ``nnodes × n_gpus_per_node`` devices, instead of counts.
    Exact: 0.25 or 1/3."""
    generate_ahead_steps: Positive | None = None
    """η + 1, the other way to say ``async_training.staleness_threshold``. Loading says it there; here it stays null."""
    threads: NonNegative = 0
    """Torch threads of one training rank; 0 divides the machine's cores among the processes."""
    save_freq: Every = -1
    """Versions between two checkpoints; -1: only at the end."""
    max_nonfinite_steps: NonNegative = 10
    """Optimizer steps in a row that may be skipped for a non-finite loss or gradient."""


class ClusterConfig(Section):
    backend: Literal["ray", "inline"] = "ray"
    """``inline`` runs every role in one process: debugging, tests, notebooks."""
    address: str | None = None
    """A Ray cluster to join; default: start one here and stop it at the end."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    start_timeout_s: float = Field(120.0, gt=0)
    """For Ray and all workers to come up."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """Nothing happened for so long: the run ends and says who waits for whom. Above the longest optimizer step."""


class ReportsConfig(Section):
    live: Annotated[Literal["auto", "on", "off"], BeforeValidator(on_or_off)] = "auto"
    """The live view; ``auto`` shows it on a terminal and prints plain lines elsewhere."""
    tensorboard: bool = True
    activity_interval_s: float = Field(1.0, gt=0)
    """Seconds between two reports of what a replica was doing."""


class Config(Section):
    """The whole configuration of a run."""

    mode: str = "async_partial"
    """The preset: a dictionary of values that lies under the user's own."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    param_update: ParamUpdateConfig = ParamUpdateConfig()
    placement: PlacementConfig = PlacementConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    reports: ReportsConfig = ReportsConfig()

    @property
    def groups_per_fetch(self) -> int:
        return self.async_training.require_batches * self.actor.ppo_mini_batch_size

    @property
    def groups_per_version(self) -> int:
        """B."""
        return self.async_training.trigger_parameter_sync_step * self.groups_per_fetch

    @property
    def window(self) -> int | None:
        """W: 1 for fifo, None (no limit) for ready."""
        match self.async_training.order:
            case Order.FIFO:
                return 1
            case Order.READY:
                return None
            case Order.WINDOW:
                w = self.async_training.window
                return w if isinstance(w, int) else self.groups_per_version
