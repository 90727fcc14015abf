"""Settings of an evaluation: from MODEL, DATA and ``a.b=c`` to its configuration.

RUN's config.yaml, or --config, or nothing ─▶ what DATA means ─▶ a.b=c ─▶ less what only trains ─▶ doctor ─▶ Job
    (beneath)                                                   (on top)
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.config.checks import without_effect
from headway.config.doctor import diagnose
from headway.config.layers import Layer, lies_in, overlay, read_overrides, settings_of
from headway.config.loading import LoadedConfig, load
from headway.config.schema import AsyncTrainingConfig, Config, OverlongBufferConfig
from headway.config.sections.agent_section import AgentConfig
from headway.config.sections.learning import AlgorithmConfig
from headway.config.sections.model_section import ModelConfig
from headway.config.sections.rollout_section import RolloutConfig
from headway.config.sections.run_section import ClusterConfig, RunConfig
from headway.config.sizing.placement import needs_critic
from headway.data.files import file_kind
from headway.data.problems import REASONING_GYM
from headway.data.rows import settings_named
from headway.data.tasks import TASKS, is_task
from headway.errors import ConfigError, DataError, ModelError, UserError
from headway.reports.checkpoint_folders import Checkpoints, version_of
from headway.reports.run_directory import RunDirectory

DATA_FILES = "a .jsonl, .csv or .parquet file, or a dataset by folder or name on the hub"
SAID_OTHERWISE = {"model.path": "MODEL", "rollout.n": "--n", "rollout.temperature": "--temperature"}
OF_A_FILE = ("data.train", "data.val", "data.val_size", "data.task")
OF_A_TASK = ("data.train", "data.val", "data.val_size", "data.task.name")
"""Settings that DATA sets when it names a task."""
OF_THE_ENGINE = (
    "name",
    "val_n",
    "val_temperature",
    "stop",
    "dtype",
    "max_concurrent",
    "max_batched_tokens",
    "kv_cache_gib",
    "enforce_eager",
    "threads",
    "tensor_model_parallel_size",
    "engine_kwargs",
)
"""Settings of ``rollout`` that an evaluation takes over from a run."""
OF_PROGRAMS = tuple(key for key in AgentConfig.model_fields if key != "min_episodes")
"""Settings of ``agent`` for episodes that a program makes; they are the same in an evaluation."""
FILTERS = ("top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "min_tokens")
"""Sampling filters of training. Validation uses none of them."""
MEANINGFUL = (
    "run.seed",
    "model.dtype",
    "model.trust_remote_code",
    "data",
    "reward",
    *(f"rollout.{key}" for key in (*OF_THE_ENGINE, *FILTERS)),
    *(f"agent.{key}" for key in OF_PROGRAMS),
    "cluster.device",
)
"""Settings and sections that affect an evaluation, except those in `IDLE`."""
IDLE = ("data.epochs", "data.shuffle", "reward.overlong_buffer")
"""Settings within `MEANINGFUL` that affect only training."""
NEVER_S = 1e9
"""Stall limit in seconds that is never reached: nothing watches an evaluation."""


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """An evaluation. ``config`` has ``model.path``; its ``rollout.val_n`` and ``rollout.val_temperature`` apply."""

    config: Config
    held_out: bool
    """True if the configuration's held-out problems are asked; else all rows of ``data.train`` are."""
    data: str
    """Description of the data, to be shown."""
    notes: tuple[str, ...]
    by_default: bool
    """True if settings that are not given have their defaults, because there is neither a run nor ``--config``."""
    version: int | None = None
    """Version of the model, by its folder; None if that names none, as for a model that no run exported."""
    newer: int | None = None
    """Version of the run's newest complete checkpoint, if it is newer than the model; else None."""


def settle(
    model: str,
    data: str | None,
    overrides: Sequence[str] | Layer,
    *,
    config_file: Path | None = None,
    n: int | None = None,
    temperature: float | None = None,
) -> EvaluationJob:
    """Resolve what is to be evaluated. All is checked that can be checked without the model and the data.

    Raises:
        UserError: MODEL is a run's directory without a model, or a path that does not exist.
        ConfigError: unknown settings, settings without effect here, no DATA although nothing else names any, or several
            greedy answers per problem.
    """
    path, run_config = _model(model)
    if run_config is not None and config_file is not None:
        raise ConfigError(
            f"--config {config_file}: {model} is a run with a config.yaml of its own; drop one of the two"
        )
    base = config_file if config_file is not None else run_config
    if data is None and base is None:
        if model.startswith(("/", "./", "../")) and not Path(path).exists():
            raise ModelError(
                f"MODEL: got {model}, which does not exist; expected a Hugging Face folder, a name on the hub, or a "
                "run's directory"
            )
        folder = Path(path).expanduser()
        run = RunDirectory(folder.parent)
        has_record = run.events.is_file() or run.metrics.is_file()
        of_run = f", here {run.path}," if folder == run.model and run.config.is_file() and has_record else ""
        raise ConfigError(
            f"expected DATA: {DATA_FILES}, or a task ({_tasks()}). It may be left out where MODEL is a "
            f"run's directory{of_run} or --config is given: their held-out problems are asked then"
        )
    settings = settings_of(overrides)
    given = frozenset(settings.values)
    made = () if data is None else OF_A_TASK if is_task(data) else OF_A_FILE
    _refuse({key: "DATA says what is read; drop one of the two" for key in given if lies_in(key, *made)})
    options = [f"rollout.val_n={n}"] if n is not None else []
    options += [f"rollout.val_temperature={temperature}"] if temperature is not None else []
    meant = read_overrides([*_meaning(data), *options])
    loaded = load(base, Layer(settings.origin, overlay(meant.values, settings.values), notes=settings.notes))
    # After loading, which knows better what an unknown key is.
    by_option = {"rollout.val_n": ("--n", n), "rollout.val_temperature": ("--temperature", temperature)}
    problems = {
        key: f"{option} {value} says that, too; drop one of the two"
        for key, (option, value) in by_option.items()
        if value is not None
    }
    problems |= {key: f"{argument} says that here" for key, argument in SAID_OTHERWISE.items()}
    for key in given - problems.keys():
        if lies_in(key, *IDLE) or not lies_in(key, *MEANINGFUL):
            problems[key] = "no effect on an evaluation; drop it"
    _refuse({key: problems[key] for key in given & problems.keys()})
    other_task = data is not None and is_task(data) and (base is None or _task_of(base) != data)
    own_verifier = other_task and not any(lies_in(key, "reward.function", "reward.functions") for key in given)
    config = _less_training(loaded.config, path, given, own_verifier=own_verifier)
    if config.rollout.val_n > 1 and config.rollout.val_temperature == 0:
        raise ConfigError(
            f"--n {config.rollout.val_n}: greedy answers (--temperature 0) are all equal; give a --temperature above "
            "0, such as 1.0, or --n 1"
        )
    _refuse({key: f"has no effect: {why}" for key, why in without_effect(config).items() if key in given})
    diagnose(LoadedConfig(config))
    held_out = data is None or is_task(data)
    sources = ", ".join(source.label for source in config.data.held_out_sources)
    named = data or f"held-out problems of {sources or config.data.label}"
    version, newer = version_of(Path(path)), None
    if run_config is not None and version is not None:
        checkpoints = Checkpoints(RunDirectory(run_config.parent).checkpoints)
        newest = max(checkpoints.complete(with_critic=needs_critic(load(run_config).config)), default=version)
        newer = newest if newest > version else None
    return EvaluationJob(
        config, held_out, named, tuple(loaded.notes), by_default=base is None, version=version, newer=newer
    )


def _model(model: str) -> tuple[str, Path | None]:
    """Return the model's folder, or its name on the hub, and the configuration file of its run; None without a run."""
    directory = RunDirectory(Path(model).expanduser())
    # A folder with a config.json is a model's, even if it has a run's files, too.
    if not directory.config.is_file() or (directory.path / "config.json").is_file():
        return model, None
    if not directory.model.is_dir():
        command = "train" if directory.events.is_file() else "sft"
        raise UserError(
            f"{model}: this run has no {directory.model.name}/, which is written at its end; wait for that, go on with "
            f"one that ended early (headway {command} --resume {shlex.quote(model)}), or give a Hugging Face folder"
        )
    return str(directory.model), directory.config


def _task_of(base: Path) -> str | None:
    task = load(base).config.data.task
    return task.name if task is not None else None


def _tasks() -> str:
    return f"{', '.join(TASKS.names())}, {REASONING_GYM}<dataset>, or file.py:function"


def _meaning(data: str | None) -> list[str]:
    """Translate DATA into settings that replace earlier data."""
    if data is None:
        return []
    nothing_else = ["data.val=null"]
    ((key, source),) = settings_named(data, "test", "validation").items()
    if key != "data.train":
        return [*nothing_else, f"{key}={json.dumps(source)}", "data.train=null"]
    if isinstance(source, str):
        try:
            file_kind(source)
        except DataError as wrong:  # its own advice names settings, which an evaluation refuses
            what = str(wrong).partition(";")[0]
            raise ConfigError(f"DATA: got {what}; expected {DATA_FILES}, or a task: {_tasks()}") from wrong
    return [*nothing_else, f"{key}={json.dumps(source)}", "data.val_size=0"]


def _refuse(problems: Mapping[str, str]) -> None:
    """Raise `ConfigError` with a line for each key of ``problems``, if there is any."""
    if problems:
        raise ConfigError("\n".join(f"{key}: {problems[key]}" for key in sorted(problems)))


def _less_training(config: Config, model: str, given: frozenset[str], *, own_verifier: bool) -> Config:
    """Return ``config`` for an evaluation by one replica. Settings that only training uses have their defaults.

    The run's sampling filters are left out, except those that are ``given``. A correction is set only because the
    doctor requires one with filters.
    """
    kept = [*OF_THE_ENGINE, *(key for key in FILTERS if any(lies_in(g, f"rollout.{key}") for g in given))]
    rollout = {key: getattr(config.rollout, key) for key in kept}
    rollout["n_gpus_per_node"] = rollout["tensor_model_parallel_size"]
    reward = config.reward.model_copy(update={"overlong_buffer": OverlongBufferConfig()})
    if own_verifier:
        reward = reward.model_copy(update={"function": "task", "params": {}, "functions": None})
    return Config(
        mode="on_policy",
        run=RunConfig(seed=config.run.seed),
        model=ModelConfig(path=model, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code),
        data=config.data.model_copy(update={"epochs": 1, "shuffle": False}),
        reward=reward,
        rollout=RolloutConfig().model_copy(update=rollout),
        agent=config.agent.model_copy(update={"min_episodes": None}),
        algorithm=AlgorithmConfig.model_validate({"rollout_correction": {"name": "truncate"}}),
        async_training=AsyncTrainingConfig(use_rollout_log_probs=False),
        cluster=ClusterConfig(backend="inline", device=config.cluster.device, stall_timeout_s=NEVER_S),
    )
