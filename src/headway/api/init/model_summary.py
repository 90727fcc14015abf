"""Summaries of a model's files (sizes, longest context, chat template; no weights) and of the available devices."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.cluster.machine.worker_setup import available_cores
from headway.config.sizing.model_shape import ModelShape
from headway.config.sizing.process_memory import PER_MACHINE
from headway.devices import listed_here, memory_listed_here
from headway.errors import ConfigError, ModelError, boundary
from headway.models.logits import is_known
from headway.models.model_folder import (
    OTHER_WEIGHTS,
    TOKENIZERS,
    find_folder,
    needs_own_code,
    read_object,
    without_config,
)
from headway.models.tokenizer import load_tokenizer, torch_hidden

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALL = 50_000_000
"""Number of parameters below which a model is taken to answer without reasoning."""
USUAL_GPU = 80_000_000_000
"""Bytes of a GPU's memory if its size is unknown."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of a run."""

    gpus: int
    """Number of GPUs; 0 for a run on CPUs."""
    device_bytes: int
    """Bytes of memory of one GPU; on CPUs, of the machine."""
    cores: int
    vllm: bool = False
    """True if vLLM is installed."""
    host_bytes: int | None = None
    """Bytes of memory of the machine with the GPUs; None if unknown."""
    here: bool = True
    """False if the GPUs are not this machine's."""

    @property
    def on_cpu(self) -> bool:
        return self.gpus == 0

    @property
    def nodes(self) -> int:
        return -(-self.gpus // PER_MACHINE)

    @property
    def words(self) -> str:
        if self.on_cpu:
            return f"{self.cores} {'core' if self.cores == 1 else 'cores'}, no GPU"
        size = f"{self.gpus} {'GPU' if self.gpus == 1 else 'GPUs'} of {self.device_bytes / 1e9:.0f} GB"
        return size if self.here else f"{size}, not those of this machine"


def look_here(gpus: int | None, gpu_gb: float | None) -> Machine:
    """Return this machine's devices, or those that the user describes: ``gpus`` GPUs of ``gpu_gb`` GB each.

    Raises:
        ConfigError: the GPUs of several machines do not fill them, or the number of GPUs is unknown.
    """
    known_here = listed_here()
    if gpus is None and known_here is None:
        raise ConfigError("how many GPUs this machine has is not known; give --gpus N (0: CPUs)")
    there = known_here or 0
    wanted = there if gpus is None else gpus
    if wanted > PER_MACHINE and wanted % PER_MACHINE:
        raise ConfigError(
            f"--gpus {wanted}: above {PER_MACHINE} they are counted in machines of {PER_MACHINE}; give a multiple of "
            f"{PER_MACHINE}, such as {wanted // PER_MACHINE * PER_MACHINE}"
        )
    known, host = memory_listed_here(on_cpu=wanted == 0), memory_listed_here(on_cpu=True)
    given = None if gpu_gb is None or wanted == 0 else int(gpu_gb * 1e9)
    return Machine(
        gpus=wanted,
        device_bytes=given or known or USUAL_GPU,
        cores=available_cores(),
        vllm=importlib.util.find_spec("vllm") is not None,
        host_bytes=host if wanted <= there else None,
        here=wanted <= there,
    )


USUAL_EXPERTS = 2
"""Number of experts per token if the model's files do not say."""
THINKING = ("<think>", "enable_thinking", "reasoning_content")
"""Words that show that a chat template's model thinks before it answers; one is enough."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a model that is not loaded."""

    path: str
    """Folder, or name on the hub, as the user gave it."""
    config: Mapping[str, Any]
    """The model's ``config.json``, or its text part, with the key names that transformers uses for all models."""
    shape: ModelShape
    estimated: bool = False
    """True if the family is unknown and its memory is computed as a Llama's."""
    chats: bool = False
    """True where the tokenizer has a chat template."""
    thinks: bool = False
    """True if the chat template has a place for thoughts before the answer."""
    marks: tuple[str, ...] = ()
    """Texts of the tokenizer's special tokens."""
    lacks: tuple[str, ...] = ()
    """Parts that the folder lacks: ``weights``, ``tokenizer``."""
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, compare=False)

    @property
    def family(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def positions(self) -> int | None:
        """Longest context in tokens; None if the files do not say."""
        number = self.config.get("max_position_embeddings")
        return number if isinstance(number, int) and number > 0 else None

    @property
    def size(self) -> str:
        """Number of parameters as text, such as ``1.7 B``."""
        number = self.shape.parameters
        about = "about " if self.estimated else ""
        unit, letter = next((pair for pair in ((10**9, "B"), (10**6, "M")) if number >= pair[0]), (1000, "K"))
        return f"{about}{number / unit:.3g} {letter}"


def look_at_model(path: str, *, trust_remote_code: bool = False) -> ModelFacts:
    """Read the properties of the model at ``path``, a folder or a name on the hub.

    Raises:
        ModelError: no such folder, no ``config.json``, a tokenizer that cannot be opened, missing sizes, or model code
            that the user has not allowed.
    """
    folder, lacks = find_folder(path), []
    if folder is None:
        config = _of_the_hub(path)
    elif not (folder / "config.json").is_file():
        raise without_config(path)
    else:
        config = read_object(folder / "config.json")
        if not any(folder.glob("*.safetensors")) and not any((folder / name).exists() for name in OTHER_WEIGHTS):
            lacks.append("weights")
        if "auto_map" not in config and not any((folder / name).exists() for name in TOKENIZERS):
            lacks.append("tokenizer")
    tokenizer = None
    # A family that only transformers knows is built for its check, which needs torch: torch must not be hidden now.
    with torch_hidden() if is_known(str(config.get("model_type"))) else nullcontext():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
            raise needs_own_code(path)
        if "tokenizer" not in lacks:
            tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        text = config.get("text_config")
        config = {**config, **text} if isinstance(text, Mapping) else config
        family = CONFIG_MAPPING[config["model_type"]] if config.get("model_type") in CONFIG_MAPPING else None
        config |= {name: config[own] for name, own in getattr(family, "attribute_map", {}).items() if own in config}
    if (shape := shape_of(config)) is None:
        raise ModelError(
            f"{path}: config.json does not tell the sizes of a decoder (hidden_size, num_hidden_layers, "
            "num_attention_heads, vocab_size); give the folder of a causal language model"
        )
    template = str(tokenizer.chat_template or "") if tokenizer is not None else ""
    return ModelFacts(
        path=path,
        config=config,
        shape=shape,
        estimated=ModelShape.of(config) is None,
        chats=bool(template),
        thinks=any(word in template for word in THINKING),
        marks=tuple(tokenizer.all_special_tokens) if tokenizer is not None else (),
        lacks=tuple(lacks),
        tokenizer=tokenizer,
    )


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the sizes of a model of any family; an unknown one is read as a Llama or a Mixtral.

    None if ``config`` lacks them.
    """
    if (known := ModelShape.of(config)) is not None:
        return known
    sizes = {key: value for key, value in config.items() if key not in ("mlp_only_layers", "decoder_sparse_step")}
    if not sizes.get("num_experts_per_tok"):
        sizes["num_experts_per_tok"] = USUAL_EXPERTS
    if isinstance(hidden := sizes.get("hidden_size"), int):
        sizes.setdefault("intermediate_size", 4 * hidden)
    mixture = sizes.get("num_experts") or sizes.get("num_local_experts")
    return ModelShape.of({**sizes, "model_type": "mixtral" if mixture else "llama"})


def _of_the_hub(name: str) -> dict[str, Any]:
    with torch_hidden():
        from transformers import PreTrainedConfig

        doing = f"{name}: no such folder here, and no such model can be had from the hub; give a Hugging Face folder"
        with boundary(doing, ModelError):
            config, _ = PreTrainedConfig.get_config_dict(name)
    if not config:
        raise ModelError(f"{name}: the hub's model has no config.json; give a model of transformers")
    return dict(config)
