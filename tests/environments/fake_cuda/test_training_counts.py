"""What the trainer asks of a GPU in a micro-batch. The numbers are exact: a change that needs less lowers them."""

from __future__ import annotations

from functools import partial

import torch
from transformers import Qwen2ForCausalLM

from headway.config.schema import Config
from headway.config.sections.learning import ActorConfig
from headway.data.interfaces.training import StepContext
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.train.fsdp.micro_batches import collate, on_device
from headway.engines.train.fsdp.sharded_module import PolicyModule
from headway.models.attention.packed_attention import NAME
from tests.environments.fake_cuda.counting import META, Counts, fake_model, on_fake_cuda
from tests.environments.fake_cuda.models import qwen
from tests.environments.fake_cuda.training import Packing, rows_of, trainer

CONFIG = Config(actor=ActorConfig.model_validate({"ppo_max_token_len_per_gpu": 1024}))


def step_of(lengths: list[int]) -> Counts:
    """One optimizer step on rows with so many response tokens, two of which fill a micro-batch."""
    with on_fake_cuda() as counts, trainer(Qwen2ForCausalLM, qwen(2), CONFIG) as engine:
        counts.clear()
        engine.learner.step(rows_of(lengths), partial(engine._part, StepContext()))
    return counts


def test_copies_and_waits_of_a_micro_batch_are_few() -> None:
    two, four = step_of([300] * 4), step_of([300] * 8)
    assert len(four.attention) - len(two.attention) == 2 * 2, "there are not two micro-batches more, of two layers"
    assert len(four.pageable) - len(two.pageable) == 0
    assert len(four.uploads) - len(two.uploads) == 2
    assert [upload.beside for upload in four.uploads if upload.pinned] == [True] * 4, "a copy waits for computing"
    assert len(four.waits) - len(two.waits) == 0
    assert len(four.downloads) - len(two.downloads) == 0


def forward_backward(layers: int) -> tuple[int, int]:
    """Operations of a packed line, forward and backward, in the dtype that GPUs compute in."""
    with on_fake_cuda() as counts:
        lm = fake_model(Qwen2ForCausalLM, qwen(layers), torch.bfloat16, META)
        lm.set_attn_implementation(NAME)
        policy = PolicyModule(lm, 1.0)
        rows = rows_of([300] * 2)
        (pack,) = Packing.of(CONFIG)(rows)
        (batch,) = on_device(META, collate(rows, pack.trees))
        counts.clear()
        logprobs, _ = policy(batch)
        forward = counts.total
        logprobs.sum().backward()
        return forward, counts.total - forward


def test_operations_of_a_layer_forward_and_backward_are_few() -> None:
    """Counted is what each further layer adds, attention's own kernel included: half of what two layers add."""
    (forward_2, backward_2), (forward_4, backward_4) = forward_backward(2), forward_backward(4)
    assert (forward_4 - forward_2) / 2 == 39
    assert (backward_4 - backward_2) / 2 == 74


def test_log_probs_of_rows_are_read_once_and_not_in_each_micro_batch() -> None:
    """The numbers that ranks agree on before are read apart from them."""
    with on_fake_cuda() as counts, trainer(Qwen2ForCausalLM, qwen(2), CONFIG) as engine, torch.no_grad():
        two, four = (_read_for(engine, counts, rows) for rows in (4, 8))
    assert two == four


def _read_for(engine: FsdpEngine, counts: Counts, rows: int) -> tuple[int, int]:
    counts.clear()
    engine.forward_logprobs(rows_of([300] * rows))
    return len(counts.downloads), len(counts.waits)
