"""Checks of a run's inputs before its directory is made, a model warmed up or a worker started.

`check_inputs` ─▶ the rows to train on        the model's files and its mesh, data, reward: no torch, so that
                                              ``--dry-run`` and the doctor can ask, too, by `check_without_torch`
`check_model`  ─▶ prompts                     the algorithm's names, what the model's files say, prompts as tokens
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from headway.cluster.address import check_listens
from headway.config.machine import check_vllm_installed
from headway.config.parallel import model_problems, plan_problems
from headway.config.sandbox import CODE
from headway.config.schema import Config
from headway.data.files import Record
from headway.data.rows import by_source
from headway.data.sources import DataBundle, Rows, build_sources, read_rows
from headway.devices import chosen
from headway.endpoint.address import check_address
from headway.episodes.hosting import chats_of
from headway.episodes.runners import ProgramRunners, program_spec, variables
from headway.errors import ConfigError, DataError, ModelError, ScoringFailed, UserCodeError, WorkerDied, boundary
from headway.models.folder import SAFETENSORS, SAFETENSORS_INDEX, check_folder, find_folder, read_object, text_config
from headway.models.logits import is_known
from headway.rewards.code_tests import unit_tests_of
from headway.rewards.request import RewardSpec
from headway.rewards.runners import RewardRunners
from headway.rewards.scorers import make_scorer
from headway.user_code import check_call, load_function, names_a_file

CONNECT_TIMEOUT_S = 10.0
D = TypeVar("D")

LOAD_TIMEOUT_S = 30.0
"""Seconds for a process to start and import the reward's file: long enough for torch and transformers, too."""
LOWER = "lower the lengths"
LOSS_PARAMETERS = ("inputs", "params")
"""Names of the parameters of a policy loss, and of a rollout correction."""
ESTIMATOR_PARAMETERS = ("normalize_by_std", "gamma", "lam", "k")
"""Names of the parameters that an advantage estimator gets after its inputs, where it has them."""
INTEGERS = ("I", "U", "BOOL")
"""Prefixes of the dtypes, as safetensors spells them, that no weight of a model may have."""
NOT_READ = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"(^|\.)(attn|attention)\.(masked_)?bias$")
"""Patterns for names of buffers that older checkpoints hold: constants, which the model makes itself."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""Pattern for the numbers of layers and experts in names of tensors."""
ROWS_AT_ONCE = 4096
TESTS_TRIED = 32
"""Rows of a source that are looked at for unit tests."""
NEEDS_ANSWERS = (CODE, "exact_match", "math_verify", "regex")
"""Names of built-in rewards that cannot score a row whose answer is null."""


def check_inputs(config: Config) -> Rows:
    """Return the run's rows, with the reward tried on their columns. A user's own reward is loaded in its own process.

    Raises:
        ConfigError: no such reward or task, or parameters that the task does not take; vLLM is not installed here; the
            endpoint for agents cannot listen at its address; or ``actor.parallel`` divides what the model does not
            have, or has in another number.
        DataError: a data file is missing, or holds something else than it should.
        ModelError: the folder of ``model.path`` is missing, or lacks a file, or has one that is damaged; or its logits
            are made in a way that is not supported.
        UserCodeError: the reward's file does not import, or its function needs what the rows lack.
    """
    if config.rollout.name == "vllm" and config.cluster.address is None:  # workers will all be here
        check_vllm_installed()
    go_offline_without_a_hub(config)
    model_type = None if config.model.path is None else check_folder(config.model.path)
    _check_numbers(config)
    if model_type is not None and not is_known(model_type):
        _check_unknown_family(config)
    rows = read_rows(config)
    _check_answers(config, rows)
    rollout = config.rollout
    if rollout.agent is not None and rollout.endpoint_host != "node" and config.cluster.address is None:
        asyncio.run(check_address(rollout.endpoint_host, rollout.endpoint_port))  # keepers will all be here
    if config.rollout.has_program:
        _check_program(config, rows)
    if config.reward.by_program:
        return rows
    spec = replace(RewardSpec.of(config), columns=rows.columns, lacked=rows.lacked)
    if names_a_file(spec.function):
        reward = RewardRunners(spec, workers=1, retries=0, log_path=None, env=variables(config.rollout.env))
        limit = max(LOAD_TIMEOUT_S, spec.timeout_s)
        advice = "raise reward.timeout_s above the time that it needs"
        asyncio.run(_in_a_process(reward.start, reward.close, spec.function, limit, advice))
    else:
        make_scorer(spec)
    return rows


def check_without_torch(config: Config) -> None:
    """Check what can be told without torch: `check_inputs`, and more of a model's folder. A model that has to be
    downloaded first is left alone.

    For ``--dry-run`` and the doctor, which end soon: transformers takes it for good that there is no torch.

    Raises:
        ConfigError: as `check_inputs`; more tokens may come than the model has positions; transformers has no plan for
            ``actor.parallel``; or as `headway.episodes.hosting.chat_hosting` does of a program's chats.
        DataError, UserCodeError: as `check_inputs`.
        ModelError: as `check_inputs`, or the tokenizer, which is to render chats, cannot be opened.
    """
    check_inputs(config)
    model = config.model
    if model.path is None or (folder := find_folder(model.path)) is None:
        return
    limit = read_object(folder / "config.json").get("max_position_embeddings")
    _check_positions(config, limit if isinstance(limit, int) else None, LOWER)  # `check_model` tells of odd values
    from headway.models.tokenizer import load_tokenizer, torch_hidden

    with torch_hidden():
        if config.actor.parallel.tp > 1 or config.actor.parallel.ep > 1:
            _check_family_plans(config, text_config(folder / "config.json"))
        if config.rollout.has_program:
            chats_of(config, load_tokenizer(model.path, trust_remote_code=model.trust_remote_code))


def check_model(config: Config, rows: Rows, *, when_too_long: str = LOWER) -> DataBundle | None:
    """Open all of the model but its weights, and tokenize the first prompts of ``rows``. Returns the sources of
    prompts; None where there is no model yet, only one to make.

    ``when_too_long``: advice in the message where the model has fewer positions than tokens may come.

    Raises:
        ConfigError: no such algorithm, more tokens than the model has positions, a bias for a token that it does not
            have, a mesh that it cannot be divided over, or a KV cache without room for one context.
        DataError: prompts that the tokenizer cannot render, or that are all too long.
        ModelError: the folder is missing or incomplete, holds no causal language model, or weights of another one; or
            the model is of a kind that trainer or rollout engine cannot run.
        UserCodeError: an own loss, estimator or correction cannot be called as it will be.
    """
    from headway.engines.train.advantages import FetchAdvantages
    from headway.engines.train.fsdp.objective import Objective

    _check_own_functions(config)
    FetchAdvantages(config.algorithm)
    Objective(config)
    if config.cluster.address is not None:
        timeout_s = min(config.cluster.start_timeout_s, CONNECT_TIMEOUT_S)
        asyncio.run(check_listens(config.cluster.address, timeout_s))
    _device(config)  # refused where it is not here
    if config.model.path is None:
        return None
    from headway.models.pretrained import load_config
    from headway.models.tokenizer import load_tokenizer

    trust_remote_code = config.model.trust_remote_code
    model_config = load_config(config.model.path, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=trust_remote_code)
    with boundary(f"{config.model.path}: cannot build the model that config.json describes", ModelError):
        _check_positions(config, getattr(model_config, "max_position_embeddings", None), when_too_long)
        _check_vocabulary(config.model.path, model_config, tokenizer)
        _check_biases(config, model_config)
        _check_mesh(config, model_config)
        _check_engine(config, model_config)
        _check_built(config, model_config)  # after the others: odd values may keep a model from being built
        _check_kv_cache(config, model_config)
        if config.rollout.has_program:
            chats_of(config, tokenizer)
    return build_sources(config, tokenizer, rows)


def _check_numbers(config: Config) -> None:
    """Check the numbers that the model's folder, or ``model.make``, gives against ``actor.parallel``."""
    model, parallel = config.model, config.actor.parallel
    if model.path is None and model.make is not None:
        _refuse("model.make", model_problems(parallel, model.make.model_dump()))
    elif model.path is not None and (folder := find_folder(model.path)) is not None and not parallel.is_plain:
        _refuse(model.path, model_problems(parallel, text_config(folder / "config.json")))


def _check_family_plans(config: Config, model: Mapping[str, Any]) -> None:
    """Check what transformers knows of the family of a ``config.json``, without torch."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "auto_map" not in model and (family := model.get("model_type")) in CONFIG_MAPPING:
        _refuse(config.model.path or "", plan_problems(config.actor.parallel, CONFIG_MAPPING[family]))


def _check_mesh(config: Config, model_config: Any) -> None:
    """Check a model's configuration, whose values may be defaults, against ``actor.parallel``."""
    parallel, text = config.actor.parallel, model_config.get_text_config()
    if not parallel.is_plain:
        path = config.model.path or ""
        _refuse(path, model_problems(parallel, text.to_dict()))
        _refuse(path, plan_problems(parallel, text))


def _refuse(model: str, problems: Iterator[str]) -> None:
    if lines := [f"{model}: {problem}" for problem in problems]:
        raise ConfigError("\n".join(lines))


def go_offline_without_a_hub(config: Config) -> None:
    """Make libraries look at their cache alone, here and in all workers, where the hub's host cannot be resolved and a
    model or dataset is named: otherwise they would retry for half a minute each time.

    Call it before the libraries are imported: they read this setting once.
    """
    datasets = any(source.dataset is not None for source in config.data.sources + config.data.val_sources)
    model = config.model.path is not None and find_folder(config.model.path) is None
    if not (datasets or model) or urllib.request.getproxies():
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _check_program(config: Config, rows: Rows) -> None:
    """Load the program in a process of its own, and check that rows have the columns that it needs."""
    programs = ProgramRunners("preflight", config, None)
    shown = program_spec(config).shown
    limit = LOAD_TIMEOUT_S + programs.waits_s  # a server that is late says so itself
    advice = "load what takes long at the first episode"
    described = asyncio.run(_in_a_process(programs.describe, programs.close, shown, limit, advice))
    if rows.columns is not None and (missing := [name for name in described.columns if name not in rows.columns]):
        raise UserCodeError(
            f"{shown} needs {', '.join(missing)}, and the rows have {', '.join(sorted(rows.columns)) or 'nothing'} "
            "beside prompt and answer; give the rows that column, or the parameter a default"
        )
    if config.reward.by_program and described.gives_reward is False:
        raise ConfigError(f"reward.function=program, and {shown} gives no reward; name a function that scores answers")


async def _in_a_process(
    load: Callable[[], Awaitable[D]], close: Callable[[], Awaitable[None]], shown: str, limit: float, advice: str
) -> D:
    """Have user code loaded in a process of its own, and return what it is."""
    try:
        return await asyncio.wait_for(load(), limit)
    except TimeoutError:
        raise UserCodeError(
            f"{shown} was not imported within {limit:g} s; see to it that the file imports quickly, or {advice}"
        ) from None
    except WorkerDied as cause:  # an end of that process, or its silence, is only ever the user's code's doing
        raise UserCodeError(
            f"{cause}; see to it that the file imports, quickly and without ending its process"
        ) from cause
    finally:
        await close()


def _device(config: Config) -> str:
    """Return the kind of the workers' devices. Raises `ConfigError` where they will all be here, and it is not.

    A cluster that is joined is taken to have any kind.
    """
    joins = config.cluster.address is not None
    return chosen(config.cluster.device, lambda kind: joins or kind.is_there())


def _check_answers(config: Config, rows: Rows) -> None:
    """Check that rows from files have the answers that the reward needs; a task's problems always have answers."""
    needing = [one.function for one in config.reward.all if one.function in NEEDS_ANSWERS]
    if not needing:
        return
    files = list(by_source(rows.train, rows.parts)) if config.data.train_sources else []
    files += [(f"data.val ({name})", records) for name, records in by_source(rows.val, rows.val_parts)]
    for what, records in files:
        if records and all(record.answer is None for record in records):
            raise DataError(
                f"{what}: the answer of all {len(records)} rows is null, and reward.function={needing[0]} compares "
                "with it; set data.answer_key to the column that holds it, or give a reward that needs none"
            )
        if CODE in needing:
            _check_tests(records)


def _check_tests(records: Sequence[Record]) -> None:
    """Check that one of the first ``records`` has unit tests. A row without any fails its group while the run goes on,
    which ends where all of them do."""
    refused: DataError | None = None
    for record in (record for record in records[:TESTS_TRIED] if record.answer is not None):
        try:
            unit_tests_of(record.answer, record.extra)
            return
        except ScoringFailed as cause:
            refused = refused or DataError(f"{record.where}: reward.function={CODE} cannot read its tests: {cause}")
    if refused is not None:
        raise refused


def _check_vocabulary(path: str, model_config: Any, tokenizer: Any) -> None:
    """Check for tokens without a row in the embedding: one would end the run at its first prompt, or by a GPU's
    assertion.
    """
    size = getattr(model_config.get_text_config(), "vocab_size", None)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if size is not None and highest >= size:
        raise ModelError(
            f"{path}: the tokenizer has token ids up to {highest}, and the model's embedding (vocab_size in "
            f"config.json) has {size} rows; give the tokenizer that belongs to the model, or resize its embedding"
        )


def _check_positions(config: Config, limit: int | None, way_out: str) -> None:
    length = config.data.max_prompt_length + config.data.max_response_length
    if limit is not None and length > limit:
        raise ConfigError(
            f"data.max_prompt_length={config.data.max_prompt_length} + data.max_response_length="
            f"{config.data.max_response_length} is {length} tokens, more than the {limit} positions of the model at "
            f"{config.model.path}; {way_out}"
        )


def _check_own_functions(config: Config) -> None:
    """Check that own losses, estimators, corrections and demonstrations can be called, before anything needs them."""
    algorithm = config.algorithm
    for spec, positional, named in (
        (algorithm.policy_loss.loss_mode, LOSS_PARAMETERS, ()),
        (algorithm.adv_estimator, ("inputs",), ESTIMATOR_PARAMETERS),
        *((one.name or "", LOSS_PARAMETERS, ()) for one in algorithm.rollout_correction.all),
    ):
        if names_a_file(spec):
            check_call(spec, load_function(spec), positional, named)
    warmup = config.model.warmup
    if warmup is not None and warmup.demonstrations is not None:
        check_call(warmup.demonstrations, load_function(warmup.demonstrations), ("rng",))


def _check_biases(config: Config, model_config: Any) -> None:
    size = getattr(model_config.get_text_config(), "vocab_size", None)
    if size is not None and (unknown := [token for token in config.rollout.logit_bias if not 0 <= token < size]):
        raise ConfigError(
            f"rollout.logit_bias: there is no token {unknown[0]}; the model at {config.model.path} has token ids from "
            f"0 to {size - 1}"
        )


def _check_kv_cache(config: Config, model_config: Any) -> None:
    """Check that the KV cache has room for one context, the least that an engine needs; its true need may be larger."""
    gib, data = config.rollout.kv_cache_gib, config.data
    if gib is None or config.rollout.name != "native":
        return
    import torch

    from headway.engines.rollout.native.cache import KvGeometry
    from headway.models.pretrained import served_dtype

    geometry = KvGeometry.of(model_config.get_text_config())
    itemsize = served_dtype(config, torch.device(_device(config))).itemsize
    context = data.max_prompt_length + data.max_response_length
    needed = geometry.layers * 2 * geometry.kv_heads * geometry.head_dim * itemsize * context / 2**30
    if gib < needed:
        raise ConfigError(
            f"rollout.kv_cache_gib={gib:g} has no room for the keys and values of one answer with its prompt, up to "
            f"{context} tokens, which take {needed:.3g}; raise it, or lower data.max_response_length"
        )


def _check_unknown_family(config: Config) -> None:
    """Check a model of a family that only transformers knows, for the doctor, too. Takes seconds.

    Raises:
        ModelError: no causal language model, or one whose logits or attention are not supported.
    """
    from headway.models.pretrained import load_config

    path = config.model.path or ""
    model_config = load_config(path, trust_remote_code=config.model.trust_remote_code)
    with boundary(f"{path}: cannot build the model that config.json describes", ModelError):
        _check_engine(config, model_config)
        _checked_model(config, model_config)


def _check_engine(config: Config, model_config: Any) -> None:
    """Check that the native rollout engine can run the model, as far as its config tells; raise `ModelError` if not."""
    if config.rollout.name != "native":
        return
    from headway.engines.rollout.native.cache import KvGeometry
    from headway.engines.rollout.native.kinds import check_kind
    from headway.engines.rollout.native.windows import Windows

    max_context = config.data.max_prompt_length + config.data.max_response_length
    check_kind(model_config, max_context)
    Windows.of(model_config, max_context)
    KvGeometry.of(model_config.get_text_config())


def _checked_model(config: Config, model_config: Any) -> Any:
    """Build the model of ``config.json`` without memory for its weights; None if it would have to run code of its own.

    Raises `ModelError` when the model has no layers, or makes its logits in a way that is not supported, or does not
    attend over lines that ``actor.parallel.cp`` ranks divide.
    """
    if config.model.trust_remote_code:
        return None
    import torch
    from transformers import AutoModelForCausalLM

    from headway.models.output_layer import check_output_layer
    from headway.models.packable import undivided, unpackable

    if getattr(model_config.get_text_config(), "num_hidden_layers", 1) < 1:
        raise ModelError(f"{config.model.path}: config.json has no layers (num_hidden_layers); give a whole model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    check_output_layer(model, config.model.path or "")
    cp = config.actor.parallel.cp
    if cp > 1 and (why := unpackable(model)) is not None:
        raise undivided(config.model.path or "", cp, why)
    return model


def _check_built(config: Config, model_config: Any) -> None:
    """Check the weights in their files' headers against the model of ``config.json``: names, shapes, dtypes.

    Tensors that transformers converts, such as experts that it fuses, are compared as the model's files have them.
    What it knows in several forms is left to loading, and so are files of another kind.

    Raises:
        ModelError: a tensor of another shape, one that the model or the file lacks, integers, or two tensors that
            differ where ``config.json`` makes them one; and as `_checked_model`.
    """
    model = _checked_model(config, model_config)
    folder = find_folder(config.model.path or "")
    if folder is None or model is None:
        return
    from transformers.conversion_mapping import get_model_conversion_mapping

    from headway.models.files import file_tensors

    if not (found := list(_tensors_in_files(folder))):
        return
    expected = {name: list(value.shape) for name, value in model.state_dict().items()}
    if get_model_conversion_mapping(model, add_legacy=False):
        try:
            expected = {file.name: list(file.shape) for file in file_tensors(model)}
        except ModelError:
            return
        expected, found = _of_common_kinds(expected, found, model.base_model_prefix)
    _compare(config.model.path or "", model, expected, found)


def _of_common_kinds(
    expected: Mapping[str, list[int]], found: list[_Stored], prefix: str
) -> tuple[dict[str, list[int]], list[_Stored]]:
    """Return the tensors of the kinds, names but for numbers, that a model's files have and these files, too. Of others
    transformers may know several forms."""
    kinds = {NUMBER.sub("*", name): 0 for name in expected}
    there = {one.name: _name_in_the_model(NUMBER.sub("*", one.name), kinds, prefix) for one in found}
    common = kinds.keys() & there.values()
    known = {name: shape for name, shape in expected.items() if NUMBER.sub("*", name) in common}
    return known, [one for one in found if there[one.name] in common]


def _compare(path: str, model: Any, expected: Mapping[str, list[int]], found: list[_Stored]) -> None:
    there = {_name_in_the_model(one.name, expected, model.base_model_prefix): one for one in found}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied: dict[int, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        tied[id(parameter)].append(name)
    copied = {name for names in tied.values() if any(name in there for name in names) for name in names}
    not_read = re.compile("|".join((*NOT_READ, *(model._keys_to_ignore_on_load_unexpected or ()))))
    optional = re.compile("|".join(model._keys_to_ignore_on_load_missing or ()) or "(?!)")
    problems = [
        f"{name} is {one.shape} in the file, and {expected[name]} by config.json"
        for name, one in sorted(there.items())
        if name in expected and one.shape != expected[name]
    ]
    problems = problems or [
        f"the file has {name}, which the model of config.json does not have"
        for name in sorted(there)
        if name not in expected and not not_read.search(name)
    ]
    problems = problems or [
        f"the file lacks {name}, which the model of config.json needs"
        for name in sorted(expected)
        if name not in there and name not in copied and not optional.search(name)
    ]
    problems = problems or [
        f"{name} is of integers ({one.dtype}) in the file"
        for name, one in sorted(there.items())
        if name in parameters and one.dtype.startswith(INTEGERS)
    ]
    problems = problems or [
        f"{first} and {other} differ in the file, and are one by config.json (tie_word_embeddings)"
        for first, *others in ([name for name in names if name in there] for names in tied.values() if len(names) > 1)
        for other in others
        if not _equal(there[first], there[other])
    ]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ModelError(
            f"{path}: the weights are not those of config.json: {problems[0]}{more}. Give config and weights of one "
            "model"
        )


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file of weights; ``dtype`` as safetensors spells it: F32, BF16, I64."""

    file: Path
    name: str
    shape: list[int]
    dtype: str


def _name_in_the_model(name: str, expected: Mapping[str, Any], prefix: str) -> str:
    """Return a weight's name in the model, which may have a head's prefix more or less; else ``name`` itself."""
    if name not in expected:
        for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
            if other in expected:
                return other
    return name


def _equal(one: _Stored, other: _Stored) -> bool:
    """Tell whether two tensors are equal, in pieces, so that two large embeddings are not in memory at once."""
    from safetensors import safe_open

    with safe_open(one.file, framework="pt") as left, safe_open(other.file, framework="pt") as right:
        a, b = left.get_slice(one.name), right.get_slice(other.name)
        return all(
            bool((a[start : start + ROWS_AT_ONCE] == b[start : start + ROWS_AT_ONCE]).all())
            for start in range(0, one.shape[0], ROWS_AT_ONCE)
        )


def _tensors_in_files(folder: Path) -> Iterator[_Stored]:
    from safetensors import safe_open

    if (folder / SAFETENSORS).exists():
        files = [SAFETENSORS]
    elif (folder / SAFETENSORS_INDEX).exists():
        places = json.loads((folder / SAFETENSORS_INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
    else:
        files = []
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                piece = opened.get_slice(name)
                yield _Stored(folder / file, name, piece.get_shape(), piece.get_dtype())
