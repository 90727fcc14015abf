"""Random models, prompts and rows that the checks compute with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config

from benchmarks.gpu_checks.setting import Setting
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.packing import CollatedRow
from headway.data.types import GroupTokens, Prompt
from headway.engines.weights.buckets import pack, whole
from headway.engines.weights.outgoing_version import Window
from headway.engines.weights.weight_layout import Manifest, buckets, build_manifest
from headway.models.pretrained import load_model

FAMILIES: dict[str, Any] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}
SPREAD = 2.0
"""Standard deviation of a random model's logits: distributions are far from uniform, so that mistakes show."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with tied embeddings."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    context: int

    def config(self, family: str, **changes: Any) -> Any:
        head_dim = {"head_dim": self.hidden // self.heads} if family == "qwen3" else {}
        sizes = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        return FAMILIES[family](**{**sizes, **head_dim, **changes})


TINY = Shape("tiny", 64, 32, 2, heads=4, kv_heads=2, intermediate=64, context=640)
MIDDLE = Shape("middle", 2048, 512, 6, heads=8, kv_heads=4, intermediate=1536, context=1024)
HALF_BILLION = Shape("0.5b", 151_936, 896, 24, heads=14, kv_heads=2, intermediate=4864, context=4096)
"""The shape of Qwen2.5-0.5B."""
LIKE_HALF_BILLION = Shape("like-0.5b", 512, 56, 2, heads=14, kv_heads=2, intermediate=128, context=4096)
"""`HALF_BILLION` in its CPU form."""


def checked_shape(setting: Setting) -> Shape:
    """The model of the checks that compare numbers."""
    return TINY if setting.small else MIDDLE


def peaked_model(setting: Setting, family: str = "qwen3", seed: int = 0) -> Path:
    """A folder with `checked_shape`'s random weights, representable in bfloat16; made once."""
    shape = checked_shape(setting)
    folder = setting.scratch / f"{shape.name}-{family}-{seed}"
    if not folder.exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = shape.config(family, initializer_range=SPREAD / shape.hidden**0.5)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:  # biases and norms start as constants, which would hide mistakes
                    torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
        # Rounded: in bfloat16 both sides then compute with the very weights of the reference.
        model.to(torch.bfloat16).float().save_pretrained(folder)
    return folder


def on_device(folder: Path, setting: Setting, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_model(folder, dtype=dtype).to(setting.device)


def requests(
    lengths: Sequence[int], vocabulary: int, *, n: int = 1, tokens: int, temperature: float = 1.0
) -> list[Group]:
    """One for each prompt length, each with ``n`` answers of ``tokens`` tokens."""
    noise = np.random.default_rng(0)
    asked = []
    for number, length in enumerate(lengths):
        ids = noise.integers(0, vocabulary, length).astype(np.int32)
        prompt = Prompt(epoch=0, row=number, attempt=0, source="check", text="", token_ids=ids)
        asked.append(Group(number, prompt, n, SamplingParams(tokens, temperature=temperature)))
    return asked


def rows_of(groups: Sequence[GroupTokens]) -> list[CollatedRow]:
    """What was generated, as the trainer gets it."""
    return [
        CollatedRow(
            input_ids=np.concatenate([row.prompt_ids, row.ids]),
            prompt_length=len(row.prompt_ids),
            logprobs=row.logprobs,
            versions=row.versions,
            loss_mask=row.loss_mask,
        )
        for group in groups
        for row in group
    ]


def manifest_of(model: PreTrainedModel) -> Manifest:
    return build_manifest((name, tuple(p.shape), p.dtype) for name, p in model.named_parameters())


def windows(model: PreTrainedModel, manifest: Manifest, bucket_bytes: int) -> list[Window] | Any:
    """The model's weights bucket by bucket, on its own device: what a trainer's gather yields."""
    shards = whole(dict(model.named_parameters()))
    room = torch.empty(min(bucket_bytes, manifest.nbytes), dtype=torch.uint8, device=model.device)
    return pack(manifest, shards, buckets(manifest.nbytes, bucket_bytes), room)
