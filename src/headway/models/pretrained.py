"""Opening models, with a single message if one cannot be opened.

Also here: the atomic export of a model as an ordinary Hugging Face folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig, DistributedMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from headway.errors import ModelError, boundary
from headway.models.model_folder import needs_own_code
from headway.models.tokenizer import check_folder, expanded
from headway.runtime.progress import progress_here

DECODERS_ALWAYS = ("gpt_neox", "gpt_neox_japanese")
"""Model types that are decoders although their config's ``is_decoder`` is false."""
LOADING = threading.Lock()
"""Lock held while a model is loaded: roles of one process load their models one after the other."""


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    divide: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel:
    """Open the causal LM at ``path`` on the CPU, all weights in ``dtype``, in evaluation mode (no dropout).

    ``path`` is a Hugging Face folder, or a model's name on the hub. ``divide`` turns parameters of the model, still on
    the meta device, into `DTensor`: only this rank's part of these is read.

    Raises:
        ModelError: no such folder, no config, weights that are missing, incomplete or unreadable, or not a causal LM.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    doing = f"{path}: cannot load the weights (a folder needs model.safetensors or its shards)"
    # from_pretrained patches global state while it works, so that two loads at once corrupt each other.
    with LOADING, boundary(doing, ModelError), quiet_transformers(), _divided_by(divide) as asked:
        model, info = AutoModelForCausalLM.from_pretrained(
            expanded(path),
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation or attention(config),
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # otherwise loading raises, and says neither which weights nor how
            output_loading_info=True,
            **asked,
        )
    if mismatched := info["mismatched_keys"]:
        name, there, expected = min(mismatched)
        others = f", and {len(mismatched) - 1} more" if len(mismatched) > 1 else ""
        raise ModelError(
            f"{path}: cannot load the weights: their sizes are not those of config.json: {name} is {list(there)}, not "
            f"{list(expected)}{others}. Give config and weights of one model"
        )
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"{path}: the weights lack {', '.join(missing[:3])}{more}; they would be random. Give a complete copy of "
            "the model"
        )
    model.eval()
    if not _takes_grouped_products(model):
        model.set_experts_implementation("eager")  # else the first step would fail
    return model


def _takes_grouped_products(model: PreTrainedModel) -> bool:
    """Tell whether one product can compute all experts of a layer: torch needs rows of multiples of 16 bytes.
    Multiples of 8 numbers are, in any dtype. If tp divides experts, this rank's part counts.
    """
    stacked = (of for name, of in model.named_parameters() if of.ndim == 3 and ".experts." in name)
    here = (of.to_local() if isinstance(of, DTensor) else of for of in stacked)
    return not any(size % 8 for part in here for size in part.shape[1:])


@contextmanager
def _divided_by(divide: Callable[[PreTrainedModel], None] | None) -> Iterator[dict[str, Any]]:
    """Context in which ``from_pretrained``, with the arguments given, has models divided by ``divide``.

    It replaces what `transformers` does for a `DistributedConfig`: FSDP2 on all decoders alike, and no other mesh.
    """
    if divide is None:
        yield {}
        return

    def distribute(cls: type[PreTrainedModel], model: PreTrainedModel, *_: object) -> PreTrainedModel:
        model._is_distributed_loading_by_transformers = True
        divide(model)
        return model

    def prepare(cls: type[PreTrainedModel], config: Any, device_map: Any = None) -> tuple[Any, Any, None]:
        return config, device_map, None

    initialize = PreTrainedModel._initialize_missing_keys

    def without_weights(model: PreTrainedModel, is_quantized: bool) -> None:
        # A missing weight ends in an error. Initialising it first would be a collective, and ranks that miss no weight
        # would not take part.
        for parameter in model.parameters():
            parameter._is_hf_initialized = True
        initialize(model, is_quantized)

    with (
        patch.multiple(
            DistributedMixin,
            prepare_distribute_model=classmethod(prepare),
            maybe_distribute_model=classmethod(distribute),
        ),
        patch.object(PreTrainedModel, "_initialize_missing_keys", without_weights),
    ):
        yield {"distributed_config": DistributedConfig()}


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The model's configuration. Raises `ModelError` when there is none, or it is not that of a causal LM."""
    check_folder(path)
    what = (
        "the model's configuration, config.json"
        if Path(expanded(path)).is_dir()
        else "it from the hub, and no folder has that name"
    )
    try:
        with boundary(f"{path}: cannot read {what}", ModelError):
            config = AutoConfig.from_pretrained(expanded(path), trust_remote_code=trust_remote_code)
    except ModelError as error:
        if trust_remote_code or "trust_remote_code" not in str(error.__cause__):
            raise
        raise needs_own_code(path) from error
    remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    reads_both_ways = (
        getattr(config, "is_encoder_decoder", False)
        or (getattr(config, "is_decoder", None) is False and config.model_type not in DECODERS_ALWAYS)
        or getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all")
    )
    if (type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or reads_both_ways) and not remote:
        raise ModelError(
            f"{path}: a {config.model_type!r} model is not a causal language model; give a decoder such as Qwen3 or "
            "Llama"
        )
    return config


def attention(model_config: Any) -> str | None:
    """Return the ``transformers`` attention that a model needs; None: its default.

    A soft cap on the scores (Gemma 2, and Gemma 3 where its config has one) exists in its eager attention alone.
    """
    capped = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    return None if capped is None else "eager"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and its tables of missing weights, which `load_model` reports in one message.
    They would disrupt the live view, and fill the workers' logs.
    """
    before, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write config, generation config, weights and tokenizer to ``path``; a folder that is there is replaced."""
    with replaced_when_complete(path) as folder, progress_here().writing(folder), quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def replaced_when_complete(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path`` that takes its place when the block ends well, and is removed when it fails.

    Between the two renames a reader may find no folder at ``path``, but never half of one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    temporary.mkdir()
    try:
        yield temporary
        replace_folder(temporary, path)
    except BaseException:
        rmtree(temporary, ignore_errors=True)
        raise


def replace_folder(temporary: Path, path: Path) -> None:
    """Rename ``temporary`` to ``path`` in its parent; what was there before is moved aside first, then removed."""
    old = path.with_name(f".{path.name}.old")
    rmtree(old, ignore_errors=True)  # a folder cannot be renamed to one that has files
    if path.exists():
        # Moved aside, not removed: after a kill in between, one of the two folders is still whole.
        path.rename(old)
    temporary.rename(path)
    rmtree(old, ignore_errors=True)
