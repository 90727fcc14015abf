"""What the native engine asks of a GPU in a step. A bound is what a step has: a change that needs less lowers it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

from headway.data.interfaces.rollout import GenerateRequest, SamplingParams
from headway.data.types import TrajectoryId
from headway.engines.rollout.native.native_core import EngineCore
from tests.environments.fake_cuda.counting import Counts, fake_model, on_fake_cuda
from tests.environments.fake_cuda.models import qwen

LAYERS = 4
PLAIN = SamplingParams(50)
PROMPTS = list(range(100, 116))
"""Lengths of prompts, no two of which are the same."""


@dataclass
class Step:
    """What one step of the engine asked for."""

    operations: int
    attention: int
    uploads: int
    pageable: int
    downloads: int
    waits: int
    pins: int
    names: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Counts) -> Step:
        return cls(
            counts.total,
            len(counts.attention),
            len(counts.uploads),
            len(counts.pageable),
            len(counts.downloads),
            len(counts.waits),
            len(counts.of("pin")),
            dict(counts.operations),
        )


@contextmanager
def engine(layers: int = LAYERS) -> Iterator[tuple[Counts, EngineCore]]:
    with on_fake_cuda() as counts, torch.no_grad():
        model = fake_model(Qwen2ForCausalLM, qwen(layers))
        core = EngineCore(model, name="fake", seed=0, slots=64, max_context=2048, max_batched_tokens=16_384, decode=str)
        yield counts, core


def submit(core: EngineCore, lengths: list[int], sampling: SamplingParams) -> None:
    calls = [
        GenerateRequest(number, TrajectoryId(0, number, 0, 0), np.arange(length, dtype=np.int32), sampling)
        for number, length in enumerate(lengths)
    ]
    core.submit("a client", calls)


def counted(counts: Counts, work: Callable[[], object]) -> Step:
    counts.clear()
    work()
    return Step.of(counts)


def decode_step(layers: int = LAYERS, sampling: SamplingParams = PLAIN) -> Step:
    """The second of two decoding steps of 16 rows: in the first the cache may be divided anew."""
    with engine(layers) as (counts, core):
        submit(core, PROMPTS, sampling)
        core.step()
        core.step()
        return counted(counts, core.step)


def test_operations_of_a_decode_step_beyond_those_of_its_layers_are_few() -> None:
    few, many = decode_step(2), decode_step(4)
    of_layer = (many.operations - few.operations) // 2
    assert of_layer <= 15, many.names
    assert few.operations - 2 * of_layer <= 40, few.names


def test_sampling_with_top_p_adds_few_operations_to_a_decode_step() -> None:
    plain, filtered = decode_step(2), decode_step(2, SamplingParams(50, top_p=0.95))
    assert filtered.operations - plain.operations <= 10, filtered.names
    assert filtered.names.get("sort", 0) <= 1


def test_a_decode_step_attends_once_in_each_layer() -> None:
    assert decode_step().attention == LAYERS


def test_copies_of_a_decode_step_are_few_and_none_is_from_pageable_memory() -> None:
    step = decode_step(2)
    assert step.pageable == 0
    assert step.uploads <= 3
    assert step.downloads <= 1
    assert step.pins <= 3
    assert step.waits <= 1


def test_a_prefill_of_16_prompts_of_16_lengths_attends_once_in_each_layer() -> None:
    with engine() as (counts, core):
        submit(core, PROMPTS, PLAIN)
        step = counted(counts, core.step)
    assert step.attention <= LAYERS
    assert "clone" not in step.names
    assert step.uploads <= 18
    assert step.pageable <= 1
    assert step.waits <= 2
