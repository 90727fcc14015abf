"""The configuration's schema: every key, its type, its default and its meaning. Values are data; nothing here acts.

    YAML file(s) ─▶ preset of ``mode`` under them ─▶ ``a.b=c`` overrides ─▶ this schema ─▶ doctor ─▶ the run

Key names are the field's (verl and its fully-asynchronous recipe) wherever the field has one. Sections of the model are
in `headway.config.sections.model_section`, that of generation in `headway.config.sections.rollout_section`, those of
what is learned and how in `headway.config.sections.learning`, those of the policy losses in
`headway.config.sections.losses`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
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
from headway.config.sections.section import (
    Eta,
    Every,
    Folder,
    NonNegative,
    Positive,
    Section,
    Share,
    exact_fraction,
    exact_number,
    on_or_off,
    shortest_spelling,
    text_or,
)

LONGEST_NAME = 200
"""Most bytes of a run's name: file systems take 255, and the time comes after it."""


class RunConfig(Section):
    """The run's name, place and seed."""

    name: str = "headway"
    """Name of the run's directory when ``run.dir`` is not given: a plain file name, not a path."""
    dir: Folder | None = None
    """Directory of everything that the run writes. Default: ``runs/<name>-<time>``."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of model, data order and sampling."""
    journal_sync_s: float | None = Field(1.0, gt=0)
    """Most seconds of finished work that the loss of a machine costs: the journal is on its disk by then
    (docs/resume.md). The death of a process costs none. Null: no journal, and a resumed run makes groups that were open
    again."""
    stop_timeout_s: float = Field(60.0, gt=0)
    """Seconds within which a run ends after Ctrl-C or SIGTERM. Three quarters of them are for the version that was
    begun, which is given up then; the rest is for writing and for the workers' end. A checkpoint that needs longer is
    waited for."""

    @field_validator("name")
    @classmethod
    def _is_a_plain_file_name(cls, name: str) -> str:
        if not name.strip() or "/" in name or name in (".", "..") or not name.isprintable():
            raise ValueError("expected a plain file name, without /")
        if len(name.encode()) > LONGEST_NAME:
            raise ValueError(f"expected a file name of at most {LONGEST_NAME} bytes")
        return name


class TaskConfig(Section):
    """A procedural task: problems are generated, with their answers."""

    name: str = "sort"
    """A task of Headway's own (``sort``, ``reverse``), ``reasoning_gym/<dataset>``, or ``file.py:function`` for your
    own (docs/data.md)."""
    size: Positive = 20_000
    """Number of training problems in one epoch."""
    val_size: Positive = 512
    """Number of held-out problems, disjoint from the training ones."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters that are passed to the task."""


Weight = Annotated[
    Fraction,
    BeforeValidator(exact_fraction),
    Field(gt=0),
    PlainSerializer(shortest_spelling),
    exact_number(exclusiveMinimum=0),
]


class SourceConfig(Section):
    """One of several sources of prompts: a file, or a Hugging Face dataset. A bare path is ``{path: …}``."""

    path: str | None = None
    """A JSONL, CSV or Parquet file, or a folder that ``save_to_disk`` wrote."""
    dataset: str | None = None
    """A dataset on the Hugging Face Hub, or a folder of data files; needs the extra ``datasets``."""
    subset: str | None = None
    """Subset of the dataset, where there are several (``main`` of ``openai/gsm8k``)."""
    split: str | None = None
    """Split of the dataset. Default: ``train`` for training, ``test`` for held-out prompts."""
    revision: str | None = None
    """Revision of the dataset: a commit or tag of its repository."""
    name: str | None = None
    """Name of the source that the rows count to, whatever their ``data_source`` says."""
    weight: Weight | None = None
    """Share of the training prompts, relative to the other sources': for all sources or for none (docs/data.md)."""
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
        if (self.path is None) == (self.dataset is None):
            raise ValueError("expected exactly one of path (a file) and dataset (of Hugging Face)")
        if self.path is not None and any(v is not None for v in (self.subset, self.split, self.revision)):
            raise ValueError("expected subset, split and revision beside a dataset alone; a file has none")
        return self

    @model_serializer(mode="wrap")
    def _what_is_given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if value is not None}


def _path_or_section(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Sources = tuple[Annotated[SourceConfig, BeforeValidator(_path_or_section)], ...]
FileOrSources = Annotated[
    Annotated[
        Annotated[str, Tag("text")] | Annotated[Sources, Tag("list")], Discriminator(text_or("list", list | tuple))
    ]
    | None,
    BeforeValidator(lambda value: [value] if isinstance(value, Mapping) else value or None),
]
"""Prompts: one file, by its path, or sources with keys of their own. An empty list is none."""


def _sources(given: str | Sources | None) -> Sources:
    return (SourceConfig(path=given),) if isinstance(given, str) else given or ()


NO_VARIABLES = frozenset(
    {"messages", "conversation", "documents", "tools", "chat_template", "add_generation_prompt", "tokenize"}
    | {"continue_final_message", "tokenizer_kwargs", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask"}
)
"""Arguments of ``apply_chat_template`` that are no variables of a template, or that Headway sets."""


class DataConfig(Section):
    """Prompts, ground truths and lengths (docs/data.md)."""

    train: FileOrSources = None
    """A JSONL, CSV or Parquet file of training prompts, or a folder that ``save_to_disk`` wrote; or a source with the
    keys below, or a list of them, mixed by weight where they have weights. Replaces ``task``."""
    val: FileOrSources = None
    """Held-out prompts, in the forms of ``train``. Default: ``val_size`` rows split off ``train`` by seed."""
    task: TaskConfig | None = None
    """A procedural task instead of files."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    answer_key: str = "auto"
    """Column of the ground truth, or by dots a value inside one. ``auto``: verl's ``reward_model.ground_truth`` where a
    row has that, else ``answer``, else what the assistant says at the end of a chat."""
    val_size: NonNegative = 128
    """Number of rows of ``train`` held out when ``val`` is not given."""
    val_max_samples: Positive | None = None
    """Most rows of ``val`` to use, chosen by ``run.seed``. Default: all."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Use of the tokenizer's chat template: ``auto`` applies it to messages only; ``always`` makes plain text a user
    message."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, like ``{enable_thinking: false}``; those of a row's column of this name come on
    top."""
    max_prompt_length: Positive = 512
    """Most tokens of a prompt; longer ones are left out, and counted."""
    max_response_length: Positive = 512
    """Most tokens of an answer, after which sampling stops."""
    max_bad_rows: Share = Fraction(1, 100)
    """Share of the rows that may be left out since they cannot be used: the chat template or the tokenizer refuses
    them, they are empty, or the task raises. The run ends where there are more."""
    accept_changes: bool = Field(False, exclude=True)
    """Go on by ``--resume`` although the data are not those of the checkpoint; it holds for this one resumption."""
    shuffle: bool = True
    """Shuffle every epoch, by ``run.seed``."""
    epochs: Positive | None = None
    """Length of the run in passes over the data; the alternative to ``rollout.total_rollout_steps``."""

    @property
    def label(self) -> str:
        """The training data in short: ``a.jsonl × 3, openai/gsm8k × 1``; the task's name; or nothing."""
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
        """Sources of held-out prompts; empty where held-out rows are split off."""
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
    """Take the overlong penalty off training rewards."""
    len: Positive = 64
    """Number of tokens before ``data.max_response_length`` over which the penalty grows."""
    penalty_factor: float = Field(1.0, gt=0)
    """The penalty of an answer of full length."""


class RewardFunctionConfig(Section):
    """One reward function of several."""

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
"""Name of the reward that is the one that each episode's program gives."""


class RewardConfig(Section):
    """The reward, which turns a response into a number (docs/rewards.md)."""

    function: str = "exact_match"
    """The reward's function: ``exact_match``, ``math_verify``, ``regex``, ``format``, ``code`` (unit tests, in
    the sandbox), ``task`` (the task's own verifier) or ``file.py:function``: a function of one's own, or one that was
    written for TRL or verl; or ``program``, the rewards of ``agent.environment``, ``program`` or ``client``, where it
    is the default."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the function (verl's ``reward_kwargs``)."""
    functions: Annotated[tuple[RewardFunctionConfig, ...], Field(min_length=1)] | None = None
    """Several functions instead of one: the reward is Σ ``weight`` · value over those that apply."""
    workers: Positive = 1
    """Number of processes that run the reward; they never import torch. Each scores one group at a time, or up to 16
    where all functions are ``async def``."""
    timeout_s: float = Field(10.0, gt=0)
    """Most seconds that one call of the function may take."""
    retries: NonNegative = 1
    """Number of further tries after an exception or a time-out, before the group is ``failed``."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    """Penalty taken off training rewards alone, after dynamic sampling has looked at them."""

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
        """True where episodes have the rewards that their programs give."""
        return self.functions is None and self.function == PROGRAM


class Admission(StrEnum):
    GROUP = "group"
    BATCH = "batch"


class Order(StrEnum):
    FIFO = "fifo"
    WINDOW = "window"
    READY = "ready"


class AsyncTrainingConfig(Section):
    """Limits on generation that runs ahead, and the taking of groups. A mode is a set of values for this section."""

    trigger_parameter_sync_step: Positive = 1
    """Number of train batches per parameter update."""
    require_batches: Positive = 1
    """Number of mini-batches per train batch."""
    staleness_threshold: Eta = Fraction(0)
    """η: versions' worth of groups that may be admitted ahead. May be fractional; kept exactly."""
    partial_rollout: bool | None = None
    """Cut answers in flight at an update: true means ``on_update: interrupt`` unless ``keep`` is asked for; false means
    ``drain``."""
    admission: Admission = Admission.GROUP
    """Admit each group as soon as there is room, or all in waves of at most B when everything admitted was rewarded."""
    order: Order = Order.FIFO
    """Order in which finished groups are taken: ``fifo`` by number, ``window`` any whose number is within W of the
    oldest, ``ready`` whichever finished first (docs/staleness.md)."""
    window: Positive | Literal["B"] | None = None
    """Window W of ``order: window``; ``B`` is the number of groups per version."""
    on_update: Literal["drain", "interrupt", "keep"] = "drain"
    """Treatment of answers in flight when new weights arrive: ``drain`` finishes them first, ``interrupt`` stops
    them and goes on under the new weights, ``keep`` goes on in place with the old KV cache."""
    drain: Literal["episode", "turn"] = "episode"
    """Unit that ``on_update: drain`` finishes where a program makes the episodes: all episodes of the groups that were
    started, or the turns that decode."""
    fill_queue: bool = False
    """Let the first train batch wait until ⌊(1+η)·B⌋ groups are queued: for studies of staleness, of which η is only a
    bound."""
    max_lag: NonNegative | None = None
    """Largest lag that is trained on with ``order: ready``, which has no bound of its own."""
    on_overdue: Literal["wait", "drop"] = "wait"
    """Handling of overdue groups. ``wait``: groups that the next version would make older than ``max_lag`` are taken
    first, and the train batch waits for them. ``drop``: older groups are discarded, aborted if they still decode; that
    favours short answers."""
    use_rollout_log_probs: bool = True
    """Take the engine's log-probs for π_prox (the PPO denominator). False: the trainer recomputes them at each train
    batch."""


class TrainerConfig(Section):
    """Training ranks and checkpoints."""

    nnodes: Positive = 1
    """Number of machines of the training role, each another one. More devices of one machine are
    ``n_gpus_per_node``."""
    n_gpus_per_node: Positive = 1
    """Number of training ranks per machine (on CPUs: processes)."""
    use_nodes_ratios: tuple[Share, Share, Share, Share] | None = None
    """Shares [train, logp, ref_logp, generate]: fractions of all ``nnodes × n_gpus_per_node`` devices, instead of
    counts. Exact: 0.25 or 1/3."""
    generate_ahead_steps: Positive | None = None
    """η + 1: another way to set ``async_training.staleness_threshold``, to which loading moves it."""
    threads: NonNegative = 0
    """Number of Torch threads of one training rank; 0 divides the cores of the machine that it is on among the run's
    processes there."""
    save_freq: Every = 10
    """Versions between two checkpoints; -1: only at the end, and a run that is killed before cannot be resumed."""
    max_actor_ckpt_to_keep: Positive | None = 2
    """Checkpoints that are kept, the newest ones, each with its critic's; null: all."""
    max_restarts: NonNegative = 3
    """Most times that training ranks are started again in the course of a run, where one is lost, and trained again on
    the batches since the newest checkpoint. With 0, shared devices, a critic, or ``save_freq: -1`` a loss ends the run.
    """


class ClusterConfig(Section):
    """Ray, devices, and limits of waiting."""

    backend: Literal["ray", "inline"] = "ray"
    """The cluster's backend; ``inline`` runs every role in one process: debugging, tests, notebooks."""
    address: str | None = None
    """A Ray cluster to join; default: start one here and stop it at the end."""
    placement: Literal["split", "shared"] = "split"
    """Training and generation on devices of their own (``split``), or taking turns on the same ones (``shared``)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the workers; ``auto`` is ``cuda`` where there are GPUs."""
    start_timeout_s: float = Field(120.0, gt=0)
    """Most seconds that Ray and all workers may take to come up. Added are one for each 50 MB of the model's files, two
    for each process beyond eight, and ten minutes where kernels are compiled (on GPUs, and by vLLM)."""
    max_replica_restarts: NonNegative = 3
    """Most replicas, and most episode workers, that are started again in the course of a run, in the place of ones that
    died or did not answer."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """Seconds without any movement after which the run ends, and says who waits for whom and what each worker does. A
    step may take longer, for ranks count layers and micro-batches; a layer of a micro-batch, and a reward, may not.
    Whatever size adds to ``param_update.timeout_s`` is added here, too."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("expected each tracker once")
    return names


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus"]


class ReportsConfig(Section):
    """The reports that a run shows and writes."""

    live: Annotated[Literal["auto", "on", "off"], BeforeValidator(on_or_off)] = "auto"
    """The live view; ``auto`` shows it on a terminal and prints plain lines elsewhere."""
    trackers: Annotated[tuple[TrackerName, ...], BeforeValidator(_as_list), AfterValidator(_each_once)] = (
        "tensorboard",
    )
    """Tools for looking at runs that get this one, too (docs/trackers.md). All but ``tensorboard`` need the extra of
    their name."""
    project: str = Field("headway", min_length=1)
    """Project of W&B and trackio, experiment of MLflow."""
    log_model: bool = False
    """Give the exported model to W&B, MLflow and trackio as an artifact. The end of the run waits for its upload."""
    prometheus_host: str = "127.0.0.1"
    """Address at which the figures are there for Prometheus; ``0.0.0.0`` for all of this machine's."""
    prometheus_port: int = Field(9464, ge=0, le=65535)
    """Port at which the figures are there for Prometheus; 0 takes a free one."""
    activity_interval_s: float = Field(1.0, gt=0)
    """Seconds between two reports of what a replica was doing."""
    samples: NonNegative = 2
    """Number of groups of each version, and of problems of each validation, that leave what they said in
    ``samples.jsonl``, for ``headway show``; 0 keeps nothing. Groups are drawn by the seed, so many on average."""


class Config(Section):
    """The whole configuration of a run."""

    _written: dict[str, tuple[Any, Any]] = PrivateAttr(default_factory=dict)
    """By dotted key, a text with ``${oc.env:NAME}`` and what it is here, for what is written: it may be a secret."""
    mode: str = Field("async_partial", json_schema_extra={"enum": list(PRESETS)})
    """The preset: a dictionary of values that lies under the user's own."""
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
        """Take the program's own rewards where there is one that gives some, and no reward function is given."""
        if not isinstance(values, Mapping):
            return values
        agent, reward = values.get("agent"), values.get("reward") or {}
        gives = isinstance(agent, Mapping) and any(map(agent.get, ("environment", "program", "client")))
        if not gives or not isinstance(reward, Mapping) or reward.get("function") or reward.get("functions"):
            return values
        return {**values, "reward": {**reward, "function": PROGRAM}}

    @property
    def groups_per_batch(self) -> int:
        return self.async_training.require_batches * self.actor.ppo_mini_batch_size

    @property
    def groups_per_version(self) -> int:
        """Groups per version, B."""
        return self.async_training.trigger_parameter_sync_step * self.groups_per_batch

    @property
    def window(self) -> int | None:
        """The window W: 1 for fifo, None (no limit) for ready."""
        order, groups = self.async_training.order, self.async_training.window
        if order is Order.WINDOW:
            return groups if isinstance(groups, int) else self.groups_per_version
        return 1 if order is Order.FIFO else None
