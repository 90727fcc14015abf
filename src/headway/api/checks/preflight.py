"""Checks of a run's inputs. They come before its directory is made, a model is warmed up or a worker is started.

`check_inputs` ─▶ the rows to train on        the model's files and its mesh, data, reward: no torch, so that
                                              ``--dry-run`` and the doctor can ask, too
`check_prompts` ─▶ tokenizer, prompts         more of the model's folder, prompts as tokens: no torch either
`check_model`  ─▶ prompts                     the algorithm's names, what the model's files say, prompts as tokens
"""

from __future__ import annotations

import asyncio
import os
import socket
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from headway.agents.adapters.mcp_servers import check_sdk
from headway.agents.episodes.program_workers import ProgramWorkers, chats_of, program_spec, variables
from headway.agents.interface.program_messages import ProgramDescription
from headway.agents.rewards.code_tests import unit_tests_of
from headway.agents.rewards.reward_workers import RewardWorkers
from headway.agents.rewards.scorers import RewardSpec, Scorer
from headway.api.checks import model_checks
from headway.cluster.on_ray.network_interface import check_listens
from headway.config.doctor import check_releases, check_vllm_installed
from headway.config.schema import Config
from headway.config.sections.agent_section import CODE
from headway.data.files import Record
from headway.data.hub import check_library
from headway.data.rows import by_source
from headway.data.sources import DataBundle, Rows, build_sources, check_rows, read_rows
from headway.devices import chosen
from headway.errors import (
    ConfigError,
    DataError,
    ModelError,
    ScoringFailed,
    UserCodeError,
    UserError,
    WorkerDied,
    boundary,
    shown,
)
from headway.models.logits import is_known
from headway.models.model_folder import check_folder, find_folder, read_object, text_config
from headway.reports.trackers.tracker_set import check_packages
from headway.runtime.user_code import check_call, load_function, names_user_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONNECT_TIMEOUT_S = 10.0
"""Limit in seconds for the address of a cluster to accept a connection."""
D = TypeVar("D")

LOAD_TIMEOUT_S = 30.0
"""Limit in seconds for a process to start and import the reward's file, which may import torch and transformers."""
LOWER = "lower the lengths"
LOSS_PARAMETERS = ("inputs", "params")
"""Names of the parameters of a policy loss, and of a rollout correction."""
ESTIMATOR_PARAMETERS = ("normalize_by_std", "gamma", "lam", "k")
"""Optional parameters of an advantage estimator, after its inputs."""
TESTS_TRIED = 32
"""Maximum number of rows of a source that are read for unit tests."""
NEEDS_ANSWERS = (CODE, "exact_match", "math_verify", "regex")
"""Names of built-in rewards that cannot score a row whose answer is null."""


def check_inputs(config: Config, *, user_code: bool = True) -> Rows:
    """Return the run's rows, after a check that the reward fits their columns. With ``user_code`` a user's own reward
    is loaded, in its own process.

    Raises:
        ConfigError: torch or transformers is too old here; no such reward or task, or parameters that the task does
            not take; vLLM is not installed here; the endpoint for agents cannot listen at its address; or
            ``actor.parallel`` does not fit the model's heads or experts.
        DataError: a data file is missing, or holds something else than it should.
        ModelError: the folder of ``model.path`` is missing, or lacks a file, or has one that is damaged; or its logits
            are made in a way that is not supported.
        UserCodeError: the reward's file does not import, or its function needs what the rows lack.
    """
    check_releases()
    if config.rollout.name == "vllm" and config.cluster.address is None:  # workers will all be here
        check_vllm_installed()
    # Before anything imports the libraries of the hub, which read this setting once.
    go_offline_without_a_hub(config)
    model_type = None if config.model.path is None else check_folder(config.model.path)
    model_checks.check_numbers(config)
    if model_type is not None and not is_known(model_type):
        model_checks.check_unknown_family(config)
    rows = read_rows(config)
    _check_answers(config, rows)
    agent = config.agent
    if agent.client is not None and agent.endpoint_host != "node" and config.cluster.address is None:
        # here: the HTTP server takes a third of a second to import
        from headway.agents.endpoint.endpoint_server import check_address

        asyncio.run(check_address(agent.endpoint_host, agent.endpoint_port))  # episode workers will all be here
    if config.agent.has_program and user_code:
        programs = ProgramWorkers("preflight", config, None)
        asyncio.run(_closed_after(load_program(config, rows, programs), programs.close))
    if config.reward.by_program:
        return rows
    spec = reward_spec(config, rows)
    if spec.has_user_code:
        if not user_code:
            return rows
        reward = one_reward_worker(config, spec)
        asyncio.run(_closed_after(load_reward(reward, spec), reward.close))
    else:
        Scorer(spec)  # made only to be checked
    return rows


def missing_packages(config: Config) -> list[str]:
    """Return a message for each package that is too old, or that the settings need and that is not installed."""
    checks: list[Callable[[], None]] = [check_releases, partial(check_packages, config)]
    if config.rollout.name == "vllm" and config.cluster.address is None:  # workers will all be here
        checks.append(check_vllm_installed)
    if config.agent.mcp:
        checks.append(check_sdk)
    names = [source.dataset for source in (*config.data.train_sources, *config.data.held_out_sources)]
    checks += [partial(check_library, name) for name in names if name][:1]
    missing = []
    for check in checks:
        try:
            check()
        except UserError as error:
            missing.append(str(error))
    return missing


def check_prompts(config: Config, rows: Rows) -> tuple[PreTrainedTokenizerBase | None, DataBundle | None]:
    """Check a model's tokenizer and the first prompts of ``rows`` as tokens, without torch. Returns the tokenizer and
    the sources of prompts. Both are None for a model that has to be downloaded first, and for a model that the run
    makes, unless a program makes the episodes.

    Only for ``--dry-run`` and the doctor: transformers works without torch until the process ends.

    Raises:
        ConfigError: a sequence may be longer than the model's positions; transformers has no plan for
            ``actor.parallel``; or as `headway.agents.episodes.program_workers.chat_hosting` does of a program's chats.
        DataError: as `check_model`.
        ModelError: the tokenizer cannot be opened or made.
    """
    model, programs = config.model, config.agent.has_program
    folder = None if model.path is None else find_folder(model.path)
    if folder is None and not (programs and model.make is not None):
        return None, None
    if folder is not None:
        limit = read_object(folder / "config.json").get("max_position_embeddings")
        # `check_model` reports odd values
        model_checks.check_positions(config, limit if isinstance(limit, int) else None, LOWER)
    from headway.models.tokenizer import load_tokenizer, torch_hidden

    with torch_hidden():
        if folder is not None and (config.actor.parallel.tp > 1 or config.actor.parallel.ep > 1):
            model_checks.check_family_plans(config, text_config(folder / "config.json"))
        if model.path is not None:
            tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        else:
            from headway.models.made_model import make_tokenizer

            assert model.make is not None
            tokenizer = make_tokenizer(model.make)
        return tokenizer, _prompts(config, tokenizer, rows)


def check_model(config: Config, rows: Rows, *, when_too_long: str = LOWER) -> DataBundle | None:
    """Open all of the model but its weights, and tokenize the first prompts of ``rows``. Returns the sources of
    prompts; None where the run has yet to make its model.

    ``when_too_long``: advice in the message when a sequence may be longer than the model's positions.

    Raises:
        ConfigError: no such algorithm, sequences longer than the model's positions, a bias for an unknown token, a mesh
            that the model cannot be divided over, or a KV cache without room for one context.
        DataError: prompts that the tokenizer cannot render, or that are all too long.
        ModelError: the folder is missing or incomplete, has no causal language model, or has another model's weights;
            or the trainer or the rollout engine cannot run this kind of model.
        UserCodeError: the user's loss, estimator or correction cannot be called with the run's arguments.
    """
    from headway.engines.train.batch_advantages import BatchAdvantages
    from headway.engines.train.fsdp.objective import Objective

    _check_own_functions(config)
    # Both are made only to be checked: they refuse names that do not exist.
    BatchAdvantages(config.algorithm)
    Objective(config)
    if config.cluster.address is not None:
        timeout_s = min(config.cluster.start_timeout_s, CONNECT_TIMEOUT_S)
        asyncio.run(check_listens(config.cluster.address, timeout_s))
    joins = config.cluster.address is not None  # a cluster that is joined is taken to have any kind of device
    device = chosen(config.cluster.device, lambda kind: joins or kind.is_there())  # refused where it is not here
    if config.model.path is None:
        return None
    from headway.models.pretrained import load_config
    from headway.models.tokenizer import load_tokenizer

    trust_remote_code = config.model.trust_remote_code
    model_config = load_config(config.model.path, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=trust_remote_code)
    with boundary(f"{config.model.path}: cannot build the model that config.json describes", ModelError):
        model_checks.check_positions(config, getattr(model_config, "max_position_embeddings", None), when_too_long)
        model_checks.check_vocabulary(config.model.path, model_config, tokenizer)
        model_checks.check_biases(config, model_config)
        model_checks.check_mesh(config, model_config)
        model_checks.check_engine(config, model_config)
        model_checks.check_built(config, model_config)  # after the others: odd values may keep a model from being built
        model_checks.check_kv_cache(config, model_config, device)
    return _prompts(config, tokenizer, rows)


def _prompts(config: Config, tokenizer: PreTrainedTokenizerBase, rows: Rows) -> DataBundle:
    """Check the chat template for programs, the form of all rows, and the first prompts as tokens."""
    if config.agent.has_program:
        chats_of(config, tokenizer)
    notes = check_rows(config, tokenizer, rows)
    sources = build_sources(config, tokenizer, rows)
    return replace(sources, notes=tuple(dict.fromkeys([*notes, *sources.notes])))


def go_offline_without_a_hub(config: Config) -> None:
    """Make libraries use only their cache, here and in all workers, when a model or dataset is on the hub and the hub's
    host cannot be resolved. Otherwise they would retry for half a minute each time.

    Call it before the libraries are imported: they read this setting once.
    """
    datasets = any(source.dataset is not None for source in config.data.train_sources + config.data.held_out_sources)
    model = config.model.path is not None and find_folder(config.model.path) is None
    # Behind a proxy it is the proxy that resolves the hub's name.
    if not (datasets or model) or urllib.request.getproxies():
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def reward_spec(config: Config, rows: Rows) -> RewardSpec:
    """The reward of ``config``, with the columns that its rows have."""
    return replace(RewardSpec.of(config), columns=rows.columns, lacked=rows.lacked)


def one_reward_worker(config: Config, spec: RewardSpec, log_path: Path | None = None) -> RewardWorkers:
    """Return a reward process that is not started. It prints to ``log_path``; None: to this process's stderr."""
    return RewardWorkers(spec, workers=1, retries=0, log_path=log_path, env=variables(config.agent.env))


async def load_reward(reward: RewardWorkers, spec: RewardSpec) -> None:
    """Load the user's reward in a subprocess. Raises `UserCodeError` if it cannot be used."""
    advice = "raise reward.timeout_s above the time that it needs"
    await _in_time(reward.load(), spec.shown, max(LOAD_TIMEOUT_S, spec.timeout_s), advice)


async def load_program(config: Config, rows: Rows, programs: ProgramWorkers) -> ProgramDescription:
    """Load the program in a subprocess, check that rows have the columns it needs, and describe it."""
    shown = program_spec(config).shown
    limit = LOAD_TIMEOUT_S + programs.waits_s  # a server that is late says so itself
    described = await _in_time(programs.describe(), shown, limit, "load what takes long at the first episode")
    if rows.columns is not None and (missing := [name for name in described.columns if name not in rows.columns]):
        raise UserCodeError(
            f"{shown} needs {', '.join(missing)}, and the rows have {', '.join(sorted(rows.columns)) or 'nothing'} "
            "beside prompt and answer; give the rows that column, or the parameter a default"
        )
    if config.reward.by_program and described.gives_reward is False:
        raise ConfigError(f"reward.function=program, and {shown} gives no reward; name a function that scores answers")
    return described


async def _closed_after(loading: Awaitable[object], close: Callable[[], Awaitable[None]]) -> None:
    try:
        await loading
    finally:
        await close()


async def _in_time(loading: Awaitable[D], shown: str, limit: float, advice: str) -> D:
    """Wait until a process has loaded user code, at most ``limit`` seconds, and return its description."""
    try:
        return await asyncio.wait_for(loading, limit)
    except TimeoutError:
        raise UserCodeError(
            f"{shown} was not imported within {limit:g} s; see to it that the file imports quickly, or {advice}"
        ) from None
    except WorkerDied as cause:  # an end of that process, or its silence, is only ever the user's code's doing
        raise UserCodeError(
            f"{cause}; see to it that the file imports, quickly and without ending its process"
        ) from cause


def _check_answers(config: Config, rows: Rows) -> None:
    """Check that rows from files have the answers that the reward needs; a task's problems always have answers."""
    needing = [one.function for one in config.reward.all if one.function in NEEDS_ANSWERS]
    if not needing:
        return
    files = [(name, rows.train, places) for name, places in by_source(rows.parts if config.data.train_sources else ())]
    files += [(f"data.val ({name})", rows.val, places) for name, places in by_source(rows.val_parts)]
    for what, of_all, places in files:
        records = [of_all[i] for i in places]
        if records and all(record.answer is None for record in records):
            raise DataError(
                f"{what}: the answer of all {len(records)} rows is null, and reward.function={needing[0]} compares "
                "with it; set data.answer_key to the column that holds it, or give a reward that needs none"
            )
        _check_comparable(what, records, needing)
        if CODE in needing:
            _check_tests(records)


def _check_comparable(what: str, records: Sequence[Record], needing: Sequence[str]) -> None:
    """Check that no answer is a list or a dictionary where a reward compares it as text or as a number."""
    if (function := next((name for name in needing if name != CODE), None)) is None:
        return
    odd = [record for record in records if isinstance(record.answer, list | dict)]
    if odd:
        raise DataError(
            f"{what}: answers are lists or dictionaries ({len(odd)} of {len(records)}), such as {shown(odd[0].answer)} "
            f"({odd[0].where}), and reward.function={function} compares with one text or number; set data.answer_key "
            "to the column, or by dots the value in one, that holds it, or give a function of your own"
        )


def _check_tests(records: Sequence[Record]) -> None:
    """Check that one of the first ``records`` has unit tests. During the run a row without them fails its group, and
    the run ends if all rows fail."""
    refused: DataError | None = None
    for record in (record for record in records[:TESTS_TRIED] if record.answer is not None):
        try:
            unit_tests_of(record.answer, record.extra)
            return
        except ScoringFailed as cause:
            refused = refused or DataError(f"{record.where}: reward.function={CODE} cannot read its tests: {cause}")
    if refused is not None:
        raise refused


def own_functions(config: Config) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield the user's own loss, estimator and corrections, each with the names of its positional parameters and of its
    keyword parameters."""
    algorithm = config.algorithm
    for spec, positional, named in (
        (algorithm.policy_loss.loss_mode, LOSS_PARAMETERS, ()),
        (algorithm.adv_estimator, ("inputs",), ESTIMATOR_PARAMETERS),
        *((one.name or "", LOSS_PARAMETERS, ()) for one in algorithm.corrections),
    ):
        if names_user_code(spec):
            yield spec, positional, named


def _check_own_functions(config: Config) -> None:
    """Check that the user's losses, estimators, corrections and demonstrations can be called."""
    for spec, positional, named in own_functions(config):
        check_call(spec, load_function(spec), positional, named)
    warmup = config.model.warmup
    if warmup is not None and warmup.demonstrations is not None:
        check_call(warmup.demonstrations, load_function(warmup.demonstrations), ("rng",))
