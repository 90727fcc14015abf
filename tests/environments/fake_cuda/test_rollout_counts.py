"""What the native engine asks of a GPU in a step. The numbers are exact: a change that needs less lowers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from headway.data.interfaces.rollout import GenerateRequest, SamplingParams
from headway.data.types import TrajectoryId
from headway.engines.rollout.native.native_core import EngineCore
from tests.environments.fake_cuda.counting import Counts, fake_model, on_fake_cuda
from tests.environments.fake_cuda.models import mistral, qwen

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
def engine(config: PreTrainedConfig) -> Iterator[tuple[Counts, EngineCore]]:
    with on_fake_cuda() as counts, torch.no_grad():
        model = fake_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
        core = EngineCore(model, name="fake", seed=0, slots=64, max_context=2048, max_batched_tokens=16_384, decode=str)
        yield counts, core


def submit(core: EngineCore, lengths: list[int], sampling: SamplingParams, *, goes_on: bool = False) -> None:
    calls = []
    for number, length in enumerate(lengths):
        ids, trajectory = np.arange(length, dtype=np.int32), TrajectoryId(0, number, 0, 0)
        calls.append(GenerateRequest(number, trajectory, ids, sampling, goes_on=goes_on))
    core.submit("a client", calls)


def counted(counts: Counts, work: Callable[[], object]) -> Step:
    counts.clear()
    work()
    return Step.of(counts)


def decode_step(layers: int = LAYERS, sampling: SamplingParams = PLAIN) -> Step:
    """The second of two decoding steps of 16 rows: in the first the cache may be divided anew."""
    with engine(qwen(layers)) as (counts, core):
        submit(core, PROMPTS, sampling)
        core.step()
        core.step()
        return counted(counts, core.step)


def test_operations_of_a_decode_step_beyond_those_of_its_layers_are_few() -> None:
    """Counted is all that a step asks for but the layers' part: the embedding, positions and their angles, what rows
    attend to, the last norm and the head; then one operation that samples, and one that joins what the host reads.
    """
    few, many = decode_step(2), decode_step(4)
    of_layer = (many.operations - few.operations) / 2
    assert of_layer == 15, many.names
    assert few.operations - 2 * of_layer == 16, few.names


def test_sampling_with_top_p_adds_no_operation_to_a_decode_step() -> None:
    plain, filtered = decode_step(2), decode_step(2, SamplingParams(50, top_p=0.95))
    assert filtered.operations == plain.operations, filtered.names
    assert "sort" not in filtered.names


def test_a_decode_step_attends_once_in_each_layer() -> None:
    assert decode_step().attention == LAYERS


SAMPLINGS = [PLAIN, SamplingParams(50, temperature=0.7, top_p=0.95, top_k=50, min_p=0.01), SamplingParams(50, 0.0)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "filtered", "greedy"])
@pytest.mark.parametrize("rows", [1, 16, 63])
def test_a_decode_step_copies_nothing_to_the_device_and_its_tokens_back_at_once(
    rows: int, sampling: SamplingParams
) -> None:
    with engine(qwen(2)) as (counts, core):
        submit(core, list(range(40, 40 + rows)), sampling)
        core.step()
        for _ in range(10):
            step = counted(counts, core.step)
            assert (step.uploads, step.pins, step.downloads, step.waits) == (0, 0, 1, 1)
            kinds = [(event.kind, event.pinned, event.waits) for event in counts.events]
            # The copy of this step's tokens has begun before the host waits for those of the last one.
            assert kinds == [("download", True, False), ("wait", False, True)]


def test_a_decode_step_whose_batch_has_changed_copies_once_to_the_device() -> None:
    with engine(qwen(2)) as (counts, core):
        submit(core, [100, 101, 102], SamplingParams(50, top_p=0.9))
        core.submit(
            "another", [GenerateRequest(0, TrajectoryId(0, 9, 0, 0), np.arange(9, dtype=np.int32), SamplingParams(4))]
        )
        steps = [counted(counts, core.step) for _ in range(12)]
    changed = [step for step in steps[1:] if step.uploads]
    assert len(changed) == 1 and (changed[0].uploads, changed[0].pageable, changed[0].waits) == (1, 0, 1)


def prefill_step(lengths: list[int], config: PreTrainedConfig, *, continued: bool = False) -> Step:
    """The step in which all prompts start; ``continued``: those whose episodes have each answered once."""
    with engine(config) as (counts, core):
        if continued:
            submit(core, [max(1, length // 2) for length in lengths], SamplingParams(1), goes_on=True)
            while core.has_work:
                core.step()
        submit(core, lengths, PLAIN)
        return counted(counts, core.step)


@pytest.mark.parametrize("continued", [False, True], ids=["whole", "continued"])
@pytest.mark.parametrize("config", [qwen(LAYERS), mistral(LAYERS)], ids=["qwen", "windows"])
@pytest.mark.parametrize("lengths", [PROMPTS, [37], [64, 64, 200, 900, 1]], ids=["16", "1", "5"])
def test_a_prefill_of_prompts_of_any_lengths_attends_once_in_each_layer_and_copies_nothing_for_it(
    lengths: list[int], config: PreTrainedConfig, continued: bool
) -> None:
    step = prefill_step(lengths, config, continued=continued)
    assert step.attention == LAYERS, step.names
    assert not step.names.get("clone", 0), step.names
    assert step.pageable == 0
    assert step.waits == 0


def test_copies_to_the_device_are_few_in_a_prefill_of_16_prompts() -> None:
    step = prefill_step(PROMPTS, qwen(LAYERS))
    assert step.uploads == 2
