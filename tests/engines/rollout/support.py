"""Tiny models, requests, references, and groups made of calls for the rollout engine's tests."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Completion, GenerateRequest, Priority, SamplingParams
from headway.data.types import Prompt, RowAt, RowTokens, Trajectory
from headway.engines.rollout.native.native_core import EngineCore, Finished
from headway.engines.rollout.native.step_attention import PrefillBlocks
from headway.engines.weights.buckets import parts_of_files, whole
from headway.models.weight_files import file_tensors

VOCABULARY = 40
CONTEXT = 64
STOP = 1
TOLERANCE = 1e-5
"""Of log-probs in float32."""
FAMILIES: dict[str, Any] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 9}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
}
"""What the engine runs by its faster path."""
MIXTURES: dict[str, Any] = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 12,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Mixtures of experts, which transformers fuses as it reads them."""


class WholeContexts(PrefillBlocks):
    """As on a GPU: a context is one block."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fixed = False


def make_model(family: str = "qwen3", *, tied: bool = True, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random decoder of two layers, with weights large enough for its distributions to be far from uniform."""
    config_type, model_type, extra = (FAMILIES | MIXTURES)[family]
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = config_type(tie_word_embeddings=tied, **{**sizes, **extra, **changes})
    torch.manual_seed(seed)
    model = model_type(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and norms start as constants, which would hide mistakes
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.2)
    return model


def tensors_of_files(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a model's files, as views of its parameters."""
    parts = parts_of_files(whole(dict(model.named_parameters())), file_tensors(model))
    return {name: part.values for name, (part,) in parts.items()}


def served_tensors(core: EngineCore) -> dict[str, torch.Tensor]:
    """The same of what ``core`` serves."""
    return {name: part.values for name, (part,) in core.weights._parts.items()}


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


@dataclass(eq=False)
class Asked:
    """A group that was asked for, and what has come of it."""

    request: Group
    client: str
    done: dict[int, Completion] = field(default_factory=dict)

    def trajectory(self, k: int) -> Trajectory:
        call = self.done[k]
        return Trajectory(
            id=self.request.prompt.trajectory_id(k),
            replica="replica",
            text=decode(call.tokens.ids.tolist()),
            prompt_length=len(self.request.prompt.token_ids),
            length=call.length,
            finish_reason=call.finish_reason,
            version_spans=call.version_spans,
            started=call.started,
            finished=call.finished,
            rows=(RowAt(k, len(self.request.prompt.token_ids), call.length),),
        )

    def group(self) -> Group:
        ks = range(self.request.n)
        prompt = np.asarray(self.request.prompt.token_ids, np.int32)
        rows = tuple(RowTokens.answer(prompt, self.done[k].tokens) for k in ks)
        return replace(self.request, trajectories=tuple(map(self.trajectory, ks)), tokens=rows)


class AskedCore(EngineCore):
    """A core that is asked for groups: each is n calls of its prompt."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._numbers = iter(range(10**9))
        self.asked: dict[tuple[str, int], tuple[Asked, int]] = {}
        """(group, k) of what is unfinished, by client and number of the call."""

    def ask(self, requests: Sequence[Group], client: str = "owner") -> None:
        calls, asked = [], {}
        for request in requests:
            group = Asked(request, client)
            for k in range(request.n):
                calls.append(make_call(request, k, next(self._numbers)))
                asked[client, calls[-1].number] = (group, k)
        self.submit(client, calls)
        self.asked |= asked

    def groups(self, finished: Iterable[Finished]) -> list[Group]:
        """The groups that this completes."""
        complete = []
        for client, call in finished:
            group, k = self.asked.pop((client, call.number))
            group.done[k] = call
            if len(group.done) == group.request.n:
                complete.append(group.group())
        return complete

    def abort_groups(self, numbers: Sequence[int]) -> list[Group]:
        """Abort these training groups."""
        wanted: dict[str, list[int]] = {}
        for (client, number), (group, _) in self.asked.items():
            if group.request.number in numbers and group.request.priority is Priority.TRAINING:
                wanted.setdefault(client, []).append(number)
        for client, calls in wanted.items():
            self.abort(client, calls)
        return self.groups(self.take_finished())

    def unfinished(self) -> list[int]:
        """Numbers of the groups that are not complete."""
        return sorted({group.request.number for group, _ in self.asked.values()})


def make_call(request: Group, k: int = 0, number: int = 0, **changes: Any) -> GenerateRequest:
    """The call of one answer of a group."""
    settings: dict[str, Any] = {
        "number": number,
        "trajectory": request.prompt.trajectory_id(k),
        "input_ids": request.prompt.token_ids,
        "sampling": request.sampling,
        "priority": request.priority,
        "together": request.n,
    }
    return GenerateRequest(**{**settings, **changes})


def make_core(model: PreTrainedModel, *, slots: int = 8, seed: int = 7, **changes: Any) -> AskedCore:
    """A core over a copy of ``model``; its clock counts how often it is asked."""
    ticks = iter(range(10**9))
    settings: dict[str, Any] = {
        "name": "replica",
        "seed": seed,
        "slots": slots,
        "max_context": CONTEXT,
        "max_batched_tokens": 48,
        "decode": decode,
        "clock": lambda: float(next(ticks)),
    }
    return AskedCore(copy.deepcopy(model), **{**settings, **changes})


def make_request(
    number: int,
    *,
    n: int = 4,
    length: int | None = None,
    priority: Priority = Priority.TRAINING,
    attempt: int = 0,
    **sampling: Any,
) -> Group:
    """A random prompt, the same for the same number."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(2, VOCABULARY, length or int(rng.integers(3, 14))).astype(np.int32)
    prompt = Prompt(epoch=0, row=number, attempt=attempt, source="test", text="", token_ids=tokens)
    params = SamplingParams(**{"max_tokens": 16, "stop_token_ids": (STOP,), **sampling})
    return Group(number, prompt, n, params, priority)


def activate(core: EngineCore, version: int, model: PreTrainedModel) -> None:
    """Serve another model's weights from now on."""

    def load() -> None:
        core.weights.memory.allocate()
        with torch.no_grad():
            for name, values in tensors_of_files(model).items():
                served_tensors(core)[name].copy_(values)
        core.weights.state.version = version
        core.weights.state.loaded()

    core.activate(version, load)


def finish(core: AskedCore) -> list[Group]:
    """Step until there is nothing to do."""
    groups: list[Group] = []
    with torch.inference_mode():
        while core.has_work:
            groups.extend(core.groups(core.step()))
    return groups


def steps(core: AskedCore, count: int) -> list[Group]:
    with torch.inference_mode():
        return [group for _ in range(count) if core.has_work for group in core.groups(core.step())]


def tokens_of(groups: Sequence[Group]) -> dict[tuple[int, int], list[int]]:
    """Every trajectory's token ids by (number, k)."""
    return {(g.number, k): r.ids.tolist() for g in groups for k, r in enumerate(g.tokens)}


def logits_behind(
    model: PreTrainedModel, pairs: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]]
) -> list[torch.Tensor]:
    """[T, V] logits of each continuation behind its prompt, of ``pairs`` of both, by one plain Hugging Face forward.

    Shorter ones are padded behind, which no token before that sees.
    """
    wholes = [torch.from_numpy(np.concatenate(pair).astype(np.int64)) for pair in pairs]
    if not wholes:
        return []
    with torch.no_grad():
        logits = model(input_ids=pad_sequence(wholes, batch_first=True)).logits
    return [of[len(prompt) - 1 : len(prompt) - 1 + len(ids)] for of, (prompt, ids) in zip(logits, pairs, strict=True)]


def logprobs_behind(
    model: PreTrainedModel, pairs: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]]
) -> list[NDArray[np.float32]]:
    """[T] log-probs of each continuation's tokens (see `logits_behind`)."""
    return [
        logits.float().log_softmax(-1).gather(1, torch.from_numpy(ids.astype(np.int64))[:, None]).squeeze(1).numpy()
        for logits, (_, ids) in zip(logits_behind(model, pairs), pairs, strict=True)
    ]


def reference_logprobs(model: PreTrainedModel, group: Group, k: int) -> NDArray[np.float32]:
    """[T] log-probs of one response by a plain Hugging Face forward over prompt and response."""
    return logprobs_behind(model, [(group.tokens[k].prompt_ids, group.tokens[k].ids)])[0]


def assert_logprobs(groups: Sequence[Group], model_of: Mapping[int, PreTrainedModel]) -> None:
    """Every token's log-prob is that of its version's model, over the whole sequence; no other version sampled."""
    rows = [row for group in groups for row in group.tokens]
    assert {version for row in rows for version in row.versions.tolist()} <= set(model_of)
    for version, model in model_of.items():
        mine = [row for row in rows if (row.versions == version).any()]
        for row, expected in zip(mine, _nearest(model, mine), strict=True):
            own = row.versions == version
            np.testing.assert_allclose(row.logprobs[own], expected[own], atol=TOLERANCE, rtol=0)


def _nearest(model: PreTrainedModel, rows: Sequence[RowTokens]) -> list[NDArray[np.float32]]:
    """[T] of each row by a plain forward in the model's dtype, and where that is float32 and rounds otherwise, in
    float64."""
    pairs = [(row.prompt_ids, row.ids) for row in rows]
    plain = logprobs_behind(model, pairs)
    near = [np.allclose(row.logprobs, of, atol=TOLERANCE, rtol=0) for row, of in zip(rows, plain, strict=True)]
    if model.dtype != torch.float32 or all(near):
        return plain
    exact_model = copy.deepcopy(model).double()
    exact_model.set_experts_implementation("eager")  # others have no products of float64
    exact = logprobs_behind(exact_model, pairs)
    return [
        np.where(np.abs(row.logprobs - more) < np.abs(row.logprobs - less), more, less)
        for row, less, more in zip(rows, plain, exact, strict=True)
    ]
