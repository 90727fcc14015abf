"""Attention over sequences of different lengths in one call, with a stand-in for the GPU's kernel: plain arithmetic."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import pytest
import torch

from headway.devices import CPU
from headway.engines.rollout.native import fused_forward, varlen_attention
from headway.engines.rollout.native.fused_forward import FusedForward, best_forward
from headway.engines.rollout.native.step_attention import AttentionShape, PrefillAttention, PrefillContext
from headway.engines.rollout.native.supported_models import Windows
from headway.engines.rollout.native.varlen_attention import VarlenPrefill, has_varlen
from tests.engines.rollout.support import (
    FAMILIES,
    WholeContexts,
    assert_logprobs,
    finish,
    make_core,
    make_model,
    make_request,
    steps,
)
from tests.engines.rollout.test_graphs import Replays
from tests.engines.rollout.test_turns import assert_reference, episodes, long_core, long_model, play
from tests.tiers import crossed, mostly_slow

LAYERS = 2


class Kernel:
    """FlashAttention over sequences of different lengths, in float64, with the checks of torch's own."""

    def __init__(self, *, from_the_top: bool = False, has_windows: bool = True) -> None:
        """``from_the_top``: the first query attends to the first key alone, which is wrong where keys were there.
        Without ``has_windows`` each query attends to all that is before it.
        """
        self._from_the_top, self._has_windows = from_the_top, has_windows
        self.prefills: list[int] = []
        """Sequences of each call with several queries of one."""
        self.read: list[int] = []
        """Keys that each call with one query a sequence reads."""

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        of_queries: torch.Tensor,
        of_keys: torch.Tensor,
        most_queries: int,
        most_keys: int,
        dropout: float,
        causal: bool,
        debug: bool,
        *,
        window_size_left: int = -1,
        window_size_right: int = -1,
        seqused_k: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor]:
        assert not dropout and not debug and queries.dtype == keys.dtype == values.dtype
        assert all(bounds.dtype == torch.int32 and bounds.is_contiguous() for bounds in (of_queries, of_keys))
        assert all(one.stride(-1) == 1 and one.ndim == 3 for one in (queries, keys, values))
        assert len(of_queries) == len(of_keys) and int(of_queries[-1]) == len(queries)
        used = of_keys.diff() if seqused_k is None else seqused_k
        assert used.dtype == torch.int32 and int(used.max()) <= most_keys
        assert int(of_queries.diff().max()) <= most_queries
        output = torch.full_like(queries, torch.nan)
        shared_by = queries.shape[1] // keys.shape[1]
        for index, count in enumerate(used.tolist()):
            mine = slice(int(of_queries[index]), int(of_queries[index + 1]))
            read = slice(int(of_keys[index]), int(of_keys[index]) + count)
            q = queries[mine].double().transpose(0, 1)
            k, v = (one[read].double().repeat_interleave(shared_by, 1).transpose(0, 1) for one in (keys, values))
            assert k.shape[1] == count, "keys beyond the memory that was given"
            scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
            ahead = torch.arange(count) - torch.arange(q.shape[1])[:, None]
            ahead -= 0 if self._from_the_top else count - q.shape[1]
            right = 0 if causal else window_size_right
            hidden = (ahead > right) if right >= 0 else torch.zeros_like(ahead, dtype=torch.bool)
            if window_size_left >= 0 and self._has_windows:
                hidden = hidden | (ahead < -window_size_left)
            output[mine] = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1).to(output.dtype)
        if seqused_k is None:
            self.prefills.append(len(used))
        else:
            self.read.append(int(used.sum()))
        return (output,)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The stand-in, used by every engine that the test makes."""
    kernel = Kernel()
    monkeypatch.setattr(varlen_attention, "_flash", kernel)
    monkeypatch.setattr(fused_forward, "has_varlen", lambda shape, device: True)
    return kernel


@mostly_slow(("family", "recorded"), product(FAMILIES, [False, True]), quick=[("mistral", False), ("llama", True)])
def test_log_probs_are_those_of_the_whole_sequence(kernel: Kernel, family: str, recorded: bool) -> None:
    model = make_model(family)
    core = make_core(model, recorder=Replays() if recorded else None)
    core.ask([make_request(number, length=4 + number, max_tokens=4 + 5 * number) for number in range(4)])
    assert_logprobs(finish(core), {0: model})
    assert kernel.prefills and kernel.read


@mostly_slow("family", FAMILIES, quick=["mistral"])
def test_contexts_that_continue_others_attend_to_all_that_was_there(kernel: Kernel, family: str) -> None:
    model = long_model(family)
    played = episodes(4, turns=4)
    play(long_core(model), played)
    assert_reference(model, played)


def test_a_prefill_of_many_lengths_is_one_call_a_layer_and_a_step_reads_what_its_rows_have(kernel: Kernel) -> None:
    core = make_core(make_model(), slots=16, max_batched_tokens=4096)
    core.ask([make_request(number, n=1, length=5 + number, max_tokens=4, stop_token_ids=()) for number in range(16)])
    kernel.prefills.clear()
    kernel.read.clear()
    steps(core, 3)
    assert kernel.prefills == [16] * LAYERS
    assert kernel.read == [sum(range(6 + turn, 22 + turn)) for turn in range(2) for _ in range(LAYERS)]


def test_a_layer_with_a_window_reads_no_more_than_that(kernel: Kernel) -> None:
    core = make_core(make_model("mistral"), slots=16)
    core.ask([make_request(0, n=16, length=20, max_tokens=3, stop_token_ids=())])
    kernel.read.clear()
    steps(core, 2)
    assert kernel.read == [16 * 9] * LAYERS


@pytest.mark.parametrize("heads", [(4, 4, 32), (8, 2, 64), (14, 2, 64), (8, 1, 128)], ids=str)
@pytest.mark.parametrize("window", [None, 6])
def test_a_prefill_equals_the_one_of_a_call_for_each_length(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int], window: int | None
) -> None:
    monkeypatch.setattr(varlen_attention, "_flash", Kernel())
    shape = AttentionShape(*heads, Windows(window, (False, window is not None)), torch.float32)
    torch.manual_seed(0)
    contexts = [
        PrefillContext(torch.arange(tokens), torch.randn(2, 2 * heads[1], past, heads[2]) if past else None)
        for past, tokens in ((0, 9), (12, 1), (0, 3), (5, 17), (5, 2), (0, 9))
    ]
    blocks = WholeContexts(shape.windows, 64, shape.dtype, torch.device("cpu"))
    ours, other = VarlenPrefill(shape, contexts), PrefillAttention(shape, contexts, blocks)
    qkv = torch.randn(ours.count, heads[0] + 2 * heads[1], heads[2])
    lengths = [len(context.tokens) for context in contexts]
    by_context = qkv.split(lengths)
    # The other one runs contexts in an order of its own.
    theirs = torch.cat([by_context[index] for index in other._order])
    for layer in range(2):
        got = ours.attend(layer, qkv).split(lengths)
        expected = other.attend(layer, theirs).split([lengths[index] for index in other._order])
        for index, one in zip(other._order, expected, strict=True):
            torch.testing.assert_close(got[index], one, atol=1e-5, rtol=0)
    for mine, of_other in zip(ours.kv(), other.kv(), strict=True):
        assert torch.equal(mine, of_other)


# ------------------------------------------------------------------------------------------ where it is used


SHAPE = AttentionShape(8, 2, 64, Windows(None, (False,)), torch.bfloat16)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device whose kind may have the kernel."""
    monkeypatch.setattr(type(CPU), "varlen_attention", True)
    return torch.device("cpu")


@crossed(("family", "dtype"), FAMILIES, varlen_attention.DTYPES)
def test_a_kernel_that_computes_attention_is_used(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype, family: str
) -> None:
    monkeypatch.setattr(varlen_attention, "_flash", Kernel())
    forward = best_forward(make_model(family, head_dim=16).to(dtype), 64)
    assert isinstance(forward, FusedForward) and forward.varlen


def refused(*args: Any, **settings: Any) -> tuple[torch.Tensor]:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


@pytest.mark.parametrize(
    ("kernel", "family", "dtype", "said"),
    [
        (refused, "qwen3", torch.bfloat16, "Ampere"),
        (Kernel(from_the_top=True), "qwen3", torch.bfloat16, "differs from the module"),
        (Kernel(has_windows=False), "mistral", torch.bfloat16, "differs from the module"),
        (Kernel(), "qwen3", torch.float32, "torch.float32"),
    ],
    ids=["refused", "wrong", "windows", "dtype"],
)
def test_without_a_kernel_that_works_a_line_says_so_and_the_other_path_runs(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: torch.device,
    kernel: Any,
    family: str,
    dtype: torch.dtype,
    said: str,
) -> None:
    monkeypatch.setattr(varlen_attention, "_flash", kernel)
    model = make_model(family, head_dim=16).to(dtype)
    with caplog.at_level(logging.WARNING):
        forward = best_forward(model, 64)
    assert isinstance(forward, FusedForward) and not forward.varlen
    assert [said in message for message in caplog.messages] == [True]


def test_a_cpu_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    assert not has_varlen(SHAPE, torch.device("cpu"))
    assert not caplog.messages
