"""The configuration's schema: every key, its type, its default and its meaning. Values are data; nothing here acts.

    YAML file(s) ─▶ preset of ``mode`` under them ─▶ ``a.b=c`` overrides ─▶ this schema ─▶ doctor ─▶ the run

Key names are verl's, or those of its fully-asynchronous recipe, wherever verl has one. The sections' modules in
`headway.config.sections`: `model_section`; `rollout_section` for generation and updates; `learning` for mesh,
algorithm and optimizers; `losses` for policy losses; `run_section` for run, trainer, cluster and reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from headway.config.presets import PRESETS
from headway.config.sections.agent_section import AgentConfig, SandboxConfig
from headway.config.sections.learning import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    LogpConfig,
    RefConfig,
    SftConfig,
)
from headway.config.sections.model_section import ModelConfig
from headway.config.sections.rollout_section import ParamUpdateConfig, RolloutConfig
from headway.config.sections.run_section import ClusterConfig, ReportsConfig, RunConfig, TrainerConfig
from headway.config.sections.section import (
    Eta,
    NonNegative,
    Positive,
    Section,
    Share,
    Weight,
    shortest_spelling,
    text_or_list,
)


class TaskConfig(Section):
    """A procedural task, which generates problems with their answers."""

    name: str = "sort"
    """Name of the task: built-in (``sort``, ``reverse``), ``reasoning_gym/<dataset>``, or ``file.py:function`` for your
    own (docs/data.md)."""
    size: Positive = 20_000
    """Number of training problems in one epoch."""
    val_size: Positive = 512
    """Number of held-out problems, disjoint from the training ones."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters that are passed to the task."""


class SourceConfig(Section):
    """One of several sources of prompts: a file, or a Hugging Face dataset. A bare path is ``{path: …}``."""

    path: str | None = None
    """A JSONL, CSV or Parquet file, or a folder that ``save_to_disk`` wrote."""
    dataset: str | None = None
    """A dataset on the Hugging Face Hub, or a folder of data files; needs the extra ``datasets``."""
    subset: str | None = None
    """Subset of the dataset, if it has several (``main`` of ``openai/gsm8k``)."""
    split: str | None = None
    """Split of the dataset. Default: ``train`` for training, ``test`` for held-out prompts."""
    revision: str | None = None
    """Revision of the dataset: a commit or tag of its repository."""
    name: str | None = None
    """Name of the source in metrics; it overrides the rows' ``data_source``."""
    weight: Weight | None = None
    """Share of the training prompts, relative to the other sources; given for all or for none (docs/data.md)."""
    prompt_key: str | None = None
    """Column of the prompt. Default: ``data.prompt_key``."""
    answer_key: str | None = None
    """Column of the ground truth. Default: ``data.answer_key``."""

    @property
    def label(self) -> str:
        """The source's name in messages."""
        return self.path or self.dataset or ""

    @model_validator(mode="after")
    def _is_one_thing(self) -> SourceConfig:
        # Equal: both are given, or neither.
        if (self.path is None) == (self.dataset is None):
            raise ValueError("expected exactly one of path (a file) and dataset (of Hugging Face)")
        if self.path is not None and any(v is not None for v in (self.subset, self.split, self.revision)):
            raise ValueError("expected subset, split and revision beside a dataset alone; a file has none")
        return self

    @model_serializer(mode="wrap")
    def _what_is_given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if value is not None}


Sources = tuple[
    Annotated[SourceConfig, BeforeValidator(lambda value: {"path": value} if isinstance(value, str) else value)], ...
]
FileOrSources = Annotated[
    Annotated[Annotated[str, Tag("text")] | Annotated[Sources, Tag("list")], Discriminator(text_or_list)] | None,
    BeforeValidator(lambda value: [value] if isinstance(value, Mapping) else value or None),
]
"""Prompts: the path of one file, or sources with their own keys. An empty list means none."""


def _sources(given: str | Sources | None) -> Sources:
    return (SourceConfig(path=given),) if isinstance(given, str) else given or ()


NO_VARIABLES = frozenset(
    {"messages", "conversation", "documents", "tools", "chat_template", "add_generation_prompt", "tokenize"}
    | {"continue_final_message", "tokenizer_kwargs", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask"}
)
"""Arguments of ``apply_chat_template`` that are not template variables, or that Headway sets."""


class DataConfig(Section):
    """Prompts, ground truths and lengths (docs/data.md)."""

    train: FileOrSources = None
    """A JSONL, CSV or Parquet file of training prompts, or a folder that ``save_to_disk`` wrote; or a source with the
    keys below, or a list of sources, mixed by their weights if they have any. Replaces ``task``."""
    val: FileOrSources = None
    """Held-out prompts, given like ``train``. Default: ``val_size`` rows split off ``train`` by seed."""
    task: TaskConfig | None = None
    """A procedural task instead of files."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    answer_key: str = "auto"
    """Column of the ground truth, or with dots a value inside a column. ``auto``: verl's ``reward_model.ground_truth``
    if a row has it, else ``answer``, else the assistant's message at the end of a chat."""
    val_size: NonNegative = 128
    """Number of rows of ``train`` held out when ``val`` is not given."""
    val_max_samples: Positive | None = None
    """Maximum number of rows of ``val`` to use, chosen by ``run.seed``. Default: all."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Use of the tokenizer's chat template: ``auto`` applies it to messages only; ``always`` makes plain text a user
    message."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, like ``{enable_thinking: false}``. A row's column of this name overrides them."""
    max_prompt_length: Positive = 512
    """Maximum number of tokens of a prompt. Longer prompts are left out, and counted."""
    max_response_length: Positive = 512
    """Maximum number of tokens of an answer; sampling stops there."""
    max_bad_rows: Share = Fraction(1, 100)
    """Maximum share of unusable rows, which are left out: the chat template or the tokenizer refuses them, they are
    empty, or the task raises. The run ends if there are more."""
    accept_changes: bool = Field(False, exclude=True)
    """Let ``--resume`` go on although the data differ from the checkpoint's. Holds for this one resumption."""
    shuffle: bool = True
    """Shuffle every epoch, by ``run.seed``."""
    epochs: Positive | None = None
    """Length of the run in passes over the data, instead of ``rollout.total_rollout_steps``."""

    @property
    def label(self) -> str:
        """Short name of the training data: ``a.jsonl × 3, openai/gsm8k × 1``, or the task's name; may be empty."""
        named = [
            f"{one.label} × {shortest_spelling(one.weight)}" if one.weight else one.label for one in self.train_sources
        ]
        return ", ".join(named) or (self.task.name if self.task else "")

    @property
    def train_sources(self) -> tuple[SourceConfig, ...]:
        """Sources of training prompts; empty with a task."""
        return _sources(self.train)

    @property
    def held_out_sources(self) -> tuple[SourceConfig, ...]:
        """Sources of held-out prompts; empty if held-out rows are split off ``train``."""
        return _sources(self.val)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, values: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(NO_VARIABLES & values.keys()):
            raise ValueError(f"expected variables of the chat template alone; {taken[0]} is set by Headway")
        return values


class OverlongBufferConfig(Section):
    """DAPO's soft overlong penalty."""

    enable: bool = False
    """Subtract the overlong penalty from training rewards."""
    len: Positive = 64
    """Number of tokens before ``data.max_response_length`` over which the penalty grows."""
    penalty_factor: float = Field(1.0, gt=0)
    """Penalty of an answer of full length."""


class RewardFunctionConfig(Section):
    """One of several reward functions."""

    function: str
    """The reward function, as in ``reward.function``."""
    name: str | None = None
    """Name of the reward in metrics and messages. Default: the function's own."""
    weight: float = 1.0
    """Factor of the reward's values before they are added up."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the function, as in ``reward.params``."""

    @property
    def label(self) -> str:
        """The reward's ``name``, or the function's."""
        return self.name or self.function.rpartition(":")[2]


PROGRAM = "program"
"""Name of the reward that each episode's program returns."""


class RewardConfig(Section):
    """The reward, which turns a response into a number (docs/rewards.md)."""

    function: str = "exact_match"
    """The reward's function: ``exact_match``, ``math_verify``, ``regex``, ``format``, ``code`` (unit tests, in
    the sandbox), ``task`` (the task's own verifier) or ``file.py:function``: your own, or one written for TRL or verl;
    or ``program``, the rewards of ``agent.environment``, ``program`` or ``client``, with which it is the default."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the function (verl's ``reward_kwargs``)."""
    functions: Annotated[tuple[RewardFunctionConfig, ...], Field(min_length=1)] | None = None
    """Several functions instead of one: the reward is Σ ``weight`` · value over those that apply."""
    workers: Positive = 1
    """Number of processes that run the reward; they never import torch. Each scores one group at a time, or up to 16
    if all functions are ``async def``."""
    timeout_s: float = Field(10.0, gt=0)
    """Time limit in seconds of one call of the function."""
    retries: NonNegative = 1
    """Number of retries after an exception or a time-out, before the group is ``failed``."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    """Penalty on training rewards only, applied after dynamic sampling."""

    @property
    def all(self) -> tuple[RewardFunctionConfig, ...]:
        """All reward functions: ``functions``, or the one ``function``."""
        return self.functions or (RewardFunctionConfig(function=self.function, params=self.params),)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all reward functions."""
        return tuple(one.function for one in self.all)

    @property
    def by_program(self) -> bool:
        """True if episodes have the rewards that their programs return."""
        return self.functions is None and self.function == PROGRAM


class Admission(StrEnum):
    GROUP = "group"
    BATCH = "batch"


class Order(StrEnum):
    FIFO = "fifo"
    WINDOW = "window"
    READY = "ready"


class AsyncTrainingConfig(Section):
    """Limits on generation ahead of training, and the consumption of groups. A mode sets the values of this section."""

    trigger_parameter_sync_step: Positive = 1
    """Number of train batches per parameter update."""
    require_batches: Positive = 1
    """Number of mini-batches per train batch."""
    staleness_threshold: Eta = Fraction(0)
    """η: number of versions' groups that may be admitted ahead. May be fractional; kept exactly."""
    partial_rollout: bool | None = None
    """Cut answers in flight at an update: true means ``on_update: interrupt``, unless that is ``keep``; false means
    ``drain``."""
    admission: Admission = Admission.GROUP
    """Admit each group as soon as there is room, or waves of at most B groups once all admitted groups are rewarded."""
    order: Order = Order.FIFO
    """Order in which finished groups are taken: ``fifo`` by number; ``window`` any group within W of the oldest number;
    ``ready`` the one that finished first (docs/staleness.md)."""
    window: Positive | Literal["B"] | None = None
    """Window W of ``order: window``; ``B`` is the number of groups per version."""
    on_update: Literal["drain", "interrupt", "keep"] = "drain"
    """Treatment of answers in flight when new weights arrive: ``drain`` finishes them first; ``interrupt`` stops them
    and continues under the new weights; ``keep`` continues in place with the old KV cache."""
    drain: Literal["episode", "turn"] = "episode"
    """Unit that ``on_update: drain`` finishes if a program makes the episodes: ``episode`` finishes all episodes of
    started groups, ``turn`` only the decoding turns."""
    fill_queue: bool = False
    """Let the first train batch wait until ⌊(1+η)·B⌋ groups are queued: for studies of staleness; η only bounds it."""
    max_lag: NonNegative | None = None
    """Maximum lag of a trained group with ``order: ready``, which has no bound by itself."""
    on_overdue: Literal["wait", "drop"] = "wait"
    """Handling of overdue groups. ``wait``: groups that would exceed ``max_lag`` with the next version are taken first,
    and the train batch waits for them. ``drop``: older groups are discarded, and aborted if they still decode; this
    favours short answers."""
    use_rollout_log_probs: bool = True
    """Use the engine's log-probs as π_prox (the PPO denominator). False: the trainer recomputes them at each train
    batch."""


class Config(Section):
    """The whole configuration of a run."""

    _written: dict[str, tuple[Any, Any]] = PrivateAttr(default_factory=dict)
    """Dotted key → a text with ``${oc.env:NAME}``, and its value here. Only the text is written, to keep secrets."""
    mode: str = Field("async_partial", json_schema_extra={"enum": list(PRESETS)})
    """Name of the preset: a set of values that the user's own override."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    agent: AgentConfig = AgentConfig()
    sandbox: SandboxConfig = SandboxConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    logp: LogpConfig = LogpConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    param_update: ParamUpdateConfig = ParamUpdateConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    reports: ReportsConfig = ReportsConfig()
    sft: SftConfig = SftConfig()

    @model_validator(mode="before")
    @classmethod
    def _programs_give_rewards(cls, values: Any) -> Any:
        """Default to the program's rewards if the program returns some and no reward function is given."""
        if not isinstance(values, Mapping):
            return values
        agent, reward = values.get("agent"), values.get("reward") or {}
        gives = isinstance(agent, Mapping) and any(map(agent.get, ("environment", "program", "client")))
        if not gives or not isinstance(reward, Mapping) or reward.get("function") or reward.get("functions"):
            return values
        # A copy: the given mapping is the caller's.
        return {**values, "reward": {**reward, "function": PROGRAM}}

    @property
    def writes_journal(self) -> bool:
        """True if the run keeps a journal: the settings ask for one, and there will be checkpoints to resume from."""
        return self.run.journal_sync_s is not None and self.trainer.save_freq >= 0

    @property
    def groups_per_batch(self) -> int:
        return self.async_training.require_batches * self.actor.ppo_mini_batch_size

    @property
    def groups_per_version(self) -> int:
        """Number of groups per version, B."""
        return self.async_training.trigger_parameter_sync_step * self.groups_per_batch

    @property
    def window(self) -> int | None:
        """The window W: 1 for fifo, None (no limit) for ready."""
        order, groups = self.async_training.order, self.async_training.window
        if order is Order.WINDOW:
            return groups if isinstance(groups, int) else self.groups_per_version
        return 1 if order is Order.FIFO else None
