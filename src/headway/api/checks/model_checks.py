"""Checks of a model against a run's settings: its numbers, its mesh, its engine, and its weights' files.

No check reads a weight. ``--dry-run`` and the doctor use those without torch: `check_numbers`, `check_family_plans`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headway.config.schema import Config
from headway.config.sections.learning import expert_problems, model_problems, plan_problems, replica_problems
from headway.config.sizing.model_shape import ModelShape
from headway.config.sizing.placement import ACTOR, CRITIC, LOGP, REF, resolve_placement
from headway.config.sizing.run_memory import replica_room
from headway.devices import memory_listed_here
from headway.errors import ConfigError, ModelError, boundary
from headway.models.dtypes import served_dtype
from headway.models.model_folder import compare, find_folder, of_common_kinds, tensors_in_files, text_config


def check_numbers(config: Config) -> None:
    """Check the numbers that the model's folder, or ``model.make``, gives against ``actor.parallel`` and the size of
    replicas.

    Raises `ConfigError`.
    """
    model = config.model
    if model.path is None and model.make is not None:
        _refuse("model.make", _mesh_problems(config, model.make.model_dump()))
    elif model.path is not None and (folder := find_folder(model.path)) is not None and _is_divided(config):
        _refuse(model.path, _mesh_problems(config, text_config(folder / "config.json")))


def check_family_plans(config: Config, model: Mapping[str, Any]) -> None:
    """Check without torch that transformers can divide models of this family. ``model``: content of a ``config.json``.

    Raises `ConfigError` where transformers has no plan for ``actor.parallel``.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "auto_map" not in model and (family := model.get("model_type")) in CONFIG_MAPPING:
        _refuse(config.model.path or "", plan_problems(config.actor.parallel, CONFIG_MAPPING[family]))


def check_mesh(config: Config, model_config: Any) -> None:
    """Check a model's configuration, whose values may be defaults, against ``actor.parallel``. Raises `ConfigError`."""
    text = model_config.get_text_config()
    if _is_divided(config):
        path = config.model.path or ""
        _refuse(path, _mesh_problems(config, text.to_dict()))
        _refuse(path, plan_problems(config.actor.parallel, text))


def _is_divided(config: Config) -> bool:
    several = max(_ranks(config).values()) > 1 or config.rollout.tensor_model_parallel_size > 1
    return several or not config.actor.parallel.is_plain


def _mesh_problems(config: Config, model: Mapping[str, object]) -> Iterator[str]:
    parallel = config.actor.parallel
    yield from model_problems(parallel, model)
    yield from expert_problems(parallel, model, _ranks(config))
    yield from replica_problems(config.rollout.tensor_model_parallel_size, model)


def _ranks(config: Config) -> dict[str, int]:
    """Return the number of ranks of each role with a separate mesh for the model."""
    placement = resolve_placement(config)
    names = {ACTOR: "the trainer", REF: REF, LOGP: LOGP, CRITIC: CRITIC}
    own = [role for role in names if role == ACTOR or not placement.shared(role, ACTOR)]
    return {names[role]: len(placement.devices[role]) for role in own if role in placement.devices}


def _refuse(model: str, problems: Iterator[str]) -> None:
    if lines := [f"{model}: {problem}" for problem in problems]:
        raise ConfigError("\n".join(lines))


def check_vocabulary(path: str, model_config: Any, tokenizer: Any) -> None:
    """Check that each token has a row in the embedding; otherwise the run would end at its first prompt, or by a
    GPU's assertion. Raises `ModelError`.
    """
    size = getattr(model_config.get_text_config(), "vocab_size", None)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if size is not None and highest >= size:
        raise ModelError(
            f"{path}: the tokenizer has token ids up to {highest}, and the model's embedding (vocab_size in "
            f"config.json) has {size} rows; give the tokenizer that belongs to the model, or resize its embedding"
        )


def check_positions(config: Config, limit: int | None, way_out: str) -> None:
    """Raise `ConfigError` where a sequence may be longer than ``limit``. ``way_out``: advice at the message's end."""
    length = config.data.max_prompt_length + config.data.max_response_length
    if limit is not None and length > limit:
        raise ConfigError(
            f"data.max_prompt_length={config.data.max_prompt_length} + data.max_response_length="
            f"{config.data.max_response_length} is {length} tokens, more than the {limit} positions of the model at "
            f"{config.model.path}; {way_out}"
        )


def check_biases(config: Config, model_config: Any) -> None:
    """Raise `ConfigError` where ``rollout.logit_bias`` names a token that the model does not have."""
    size = getattr(model_config.get_text_config(), "vocab_size", None)
    if size is not None and (unknown := [token for token in config.rollout.logit_bias if not 0 <= token < size]):
        raise ConfigError(
            f"rollout.logit_bias: there is no token {unknown[0]}; the model at {config.model.path} has token ids from "
            f"0 to {size - 1}"
        )


def check_kv_cache(config: Config, model_config: Any, device: str) -> None:
    """Check that the KV cache has room for one context, an engine's minimum. The engine may need more.

    ``device``: kind of the replicas' devices. Raises `ConfigError`.
    """
    there = None if device == "cpu" or config.cluster.address is not None else memory_listed_here(on_cpu=False)
    if there is not None and (shape := ModelShape.of(model_config.get_text_config().to_dict())) is not None:
        replica_room(config, shape, there)
    gib, data = config.rollout.kv_cache_gib, config.data
    if gib is None or config.rollout.name != "native":
        return
    import torch

    from headway.engines.rollout.native.supported_models import KvGeometry

    geometry = KvGeometry.of(model_config.get_text_config())
    itemsize = getattr(torch, served_dtype(config, device)).itemsize
    context = data.max_prompt_length + data.max_response_length
    needed = geometry.layers * 2 * geometry.kv_heads * geometry.head_dim * itemsize * context / 2**30
    if gib < needed:
        raise ConfigError(
            f"rollout.kv_cache_gib={gib:g} has no room for the keys and values of one answer with its prompt, up to "
            f"{context} tokens, which take {needed:.3g}; raise it, or lower data.max_response_length"
        )


def check_unknown_family(config: Config) -> None:
    """Check a model whose family only transformers knows. Takes seconds; the doctor calls it, too.

    Raises:
        ModelError: the model is no causal language model, or its logits or attention are not supported.
    """
    from headway.models.pretrained import load_config

    path = config.model.path or ""
    model_config = load_config(path, trust_remote_code=config.model.trust_remote_code)
    with boundary(f"{path}: cannot build the model that config.json describes", ModelError):
        check_engine(config, model_config)
        _checked_model(config, model_config)


def check_engine(config: Config, model_config: Any) -> None:
    """Check by the model's config that the native rollout engine can run it. Raises `ModelError`."""
    if config.rollout.name != "native":
        return
    from headway.engines.rollout.native.supported_models import KvGeometry, Windows, check_kind

    max_context = config.data.max_prompt_length + config.data.max_response_length
    check_kind(model_config, max_context)
    Windows.of(model_config, max_context)
    KvGeometry.of(model_config.get_text_config())


def _checked_model(config: Config, model_config: Any) -> Any:
    """Build the model of ``config.json`` on the meta device; None under ``trust_remote_code``.

    Raises `ModelError` when the model has no layers, when its logits are computed in an unsupported way, or when its
    attention does not work on lines of tokens divided among ``actor.parallel.cp`` ranks.
    """
    if config.model.trust_remote_code:
        return None
    import torch
    from transformers import AutoModelForCausalLM

    from headway.models.attention.packable import undivided, unpackable
    from headway.models.output_layer import check_output_layer

    if getattr(model_config.get_text_config(), "num_hidden_layers", 1) < 1:
        raise ModelError(f"{config.model.path}: config.json has no layers (num_hidden_layers); give a whole model")
    with torch.device("meta"):  # shapes alone: no memory, whatever the model's size
        model = AutoModelForCausalLM.from_config(model_config)
    check_output_layer(model, config.model.path or "")
    cp = config.actor.parallel.cp
    if cp > 1 and (why := unpackable(model)) is not None:
        raise undivided(config.model.path or "", cp, why)
    return model


def check_built(config: Config, model_config: Any) -> None:
    """Check the weights in their files' headers against the model of ``config.json``: names, shapes, dtypes.

    Tensors that transformers converts, such as fused experts, are compared as they are in the model's files. Tensors
    that transformers reads in several forms, and files of other kinds, are checked only when they are loaded.

    Raises:
        ModelError: a tensor has another shape or holds integers; the model or the file lacks one; two tensors differ
            that ``config.json`` ties; or as in `_checked_model`.
    """
    model = _checked_model(config, model_config)
    folder = find_folder(config.model.path or "")
    if folder is None or model is None:
        return
    from transformers.conversion_mapping import get_model_conversion_mapping

    from headway.models.weight_files import file_tensors

    if not (found := list(tensors_in_files(folder))):
        return
    expected = {name: list(value.shape) for name, value in model.state_dict().items()}
    if get_model_conversion_mapping(model, add_legacy=False):
        try:
            expected = {file.name: list(file.shape) for file in file_tensors(model)}
        except ModelError:
            return
        expected, found = of_common_kinds(expected, found, model.base_model_prefix)
    compare(config.model.path or "", model, expected, found)
