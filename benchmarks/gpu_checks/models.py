"""Random models, prompts, rows and weights that the checks compute with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.gpu_checks.setting import Setting
from benchmarks.shapes import Shape
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.packing import CollatedRow
from headway.data.types import GroupTokens, Prompt
from headway.engines.weights.buckets import pack, whole
from headway.engines.weights.outgoing_version import Stream, Window
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.weight_layout import Manifest, buckets, build_manifest
from headway.models.pretrained import load_model

SPREAD = 2.0
"""Standard deviation of a random model's logits: distributions are far from uniform, so that mistakes show."""
TINY = Shape("tiny", 64, 32, 2, heads=4, kv_heads=2, intermediate=64, context=640)
MIDDLE = Shape("middle", 2048, 512, 6, heads=8, kv_heads=4, intermediate=1536, context=1024)
TINY_WIDE = Shape("tiny-wide", 64, 256, 2, heads=2, kv_heads=1, intermediate=64, context=640)
WIDE = Shape("wide", 2048, 512, 6, heads=4, kv_heads=2, intermediate=1536, context=1024)
"""Heads of 128, those of Qwen3."""
HALF_BILLION = Shape("0.5b", 151_936, 896, 24, heads=14, kv_heads=2, intermediate=4864, context=4096)
"""The shape of Qwen2.5-0.5B."""
LIKE_HALF_BILLION = Shape("like-0.5b", 512, 56, 2, heads=14, kv_heads=2, intermediate=128, context=4096)
"""`HALF_BILLION` in its CPU form."""


def checked_shape(setting: Setting, *, wide: bool = False) -> Shape:
    """Return the model of the checks that compare numbers; ``wide``: with heads of 128."""
    if wide:
        return TINY_WIDE if setting.small else WIDE
    return TINY if setting.small else MIDDLE


def peaked_model(setting: Setting, family: str = "qwen3", seed: int = 0, *, wide: bool = False) -> Path:
    """Return a folder with `checked_shape`'s random weights, representable in bfloat16; made once."""
    shape = checked_shape(setting, wide=wide)
    folder = setting.scratch / f"{shape.name}-{family}-{seed}"
    if not folder.exists():
        model = shape.random(family, seed, initializer_range=SPREAD / shape.hidden**0.5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:  # biases and norms start as constants, which would hide mistakes
                    torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
        # Rounded: in bfloat16 both sides then compute with the very weights of the reference.
        made = Path(tempfile.mkdtemp(dir=setting.scratch))
        model.to(torch.bfloat16).float().save_pretrained(made)
        with suppress(OSError):  # another lane has made it
            made.rename(folder)
    return folder


def on_device(folder: Path, setting: Setting, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_model(folder, dtype=dtype).to(setting.device)


def requests(
    lengths: Sequence[int], vocabulary: int, *, n: int = 1, tokens: int, temperature: float = 1.0, top_p: float = 1.0
) -> list[Group]:
    """Return a request for each prompt length, each with ``n`` answers of ``tokens`` tokens."""
    noise = np.random.default_rng(0)
    prompts = [noise.integers(0, vocabulary, length).astype(np.int32) for length in lengths]
    sampling = SamplingParams(tokens, temperature=temperature, top_p=top_p)
    return [Group(k, Prompt(0, k, 0, "check", "", ids), n, sampling) for k, ids in enumerate(prompts)]


def rows_of(groups: Sequence[GroupTokens]) -> list[CollatedRow]:
    """Return generated rows as the trainer gets them."""
    return [
        CollatedRow(np.concatenate([r.prompt_ids, r.ids]), len(r.prompt_ids), r.logprobs, r.versions, r.loss_mask)
        for group in groups
        for r in group
    ]


def manifest_of(model: PreTrainedModel) -> Manifest:
    return build_manifest((name, tuple(p.shape), p.dtype) for name, p in model.named_parameters())


def windows(weights: Mapping[str, torch.Tensor], manifest: Manifest, bucket_bytes: int) -> Iterator[Window]:
    """Return weights bucket by bucket, on their own device: what a trainer's gather yields."""
    device = next(iter(weights.values())).device
    room = torch.empty(min(bucket_bytes, manifest.nbytes), dtype=torch.uint8, device=device)
    return pack(manifest, whole(weights), buckets(manifest.nbytes, bucket_bytes), room)


def receive_from(weights: Mapping[str, torch.Tensor], bucket_bytes: int = 2**22) -> Callable[..., None]:
    """Return an engine's way to receive a version: ``weights``, whichever it is, without a transport."""
    manifest = build_manifest((name, tuple(w.shape), w.dtype) for name, w in weights.items())

    def receive(version: int, incoming: IncomingWeights) -> None:
        (sink,) = incoming.expect([incoming.manifest])
        stream = Stream(manifest, windows(weights, manifest, bucket_bytes))
        for chunk in stream:
            sink.room(chunk.header).copy_(chunk.payload)
            sink.filled(chunk.header)
        sink.ended(stream.digests)

    return receive
