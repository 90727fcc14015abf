"""Chunked log-probs against a plain softmax in float64, finite differences and a Hugging Face model."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.models import logprobs
from headway.models.logits import LogitRule
from headway.models.logprobs import chunked_logprobs, default_chunk_tokens
from tests.tiers import searched


def problem(tokens: int = 13, hidden: int = 5, vocabulary: int = 11, bias: bool = True) -> dict[str, Any]:
    """Float64 inputs with gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    return {
        "hidden": normal(tokens, hidden),
        "weight": normal(vocabulary, hidden),
        "bias": normal(vocabulary) if bias else None,
        "targets": torch.randint(vocabulary, (tokens,), generator=generator),
    }


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def gradients(outputs: tuple[Tensor, Tensor], inputs: dict[str, Any]) -> list[Tensor]:
    """Of a sum with different factors for every token, so that no error can cancel."""
    factors = torch.linspace(-1, 1, outputs[0].numel(), dtype=torch.float64).view_as(outputs[0])
    total = (factors * outputs[0] + factors.flip(0) * outputs[1]).sum()
    return list(torch.autograd.grad(total, [v for v in inputs.values() if v is not None and v.requires_grad]))


@searched(
    100,
    tokens=st.integers(0, 9),
    vocabulary=st.integers(1, 7),
    chunk=st.integers(1, 12),
    temperature=st.floats(0.1, 3.0),
    bias=st.booleans(),
)
def test_values_and_gradients_are_those_of_a_plain_softmax(
    tokens: int, vocabulary: int, chunk: int, temperature: float, bias: bool
) -> None:
    inputs = problem(tokens=tokens, vocabulary=vocabulary, bias=bias)
    actual = chunked_logprobs(**inputs, temperature=temperature, chunk_tokens=chunk)
    expected = plain(**inputs, temperature=temperature)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_are_finite_differences() -> None:
    inputs = problem(tokens=4, hidden=3, vocabulary=5)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return chunked_logprobs(hidden, weight, bias, inputs["targets"], 0.7, chunk_tokens=3)

    assert torch.autograd.gradcheck(function, (inputs["hidden"], inputs["weight"], inputs["bias"]))


def test_the_gradient_of_log_probs_alone_and_of_entropy_alone() -> None:
    inputs = problem()
    for which in (0, 1):
        actual = chunked_logprobs(**inputs, temperature=0.9, chunk_tokens=4)[which].sum()
        expected = plain(**inputs, temperature=0.9)[which].sum()
        for name in ("hidden", "weight", "bias"):
            ours, theirs = (torch.autograd.grad(t, inputs[name], retain_graph=True)[0] for t in (actual, expected))
            torch.testing.assert_close(ours, theirs)


def test_any_leading_shape_is_kept() -> None:
    inputs = problem(tokens=12)
    flat = chunked_logprobs(**inputs)
    shaped = chunked_logprobs(
        inputs["hidden"].view(3, 4, -1), inputs["weight"], inputs["bias"], inputs["targets"].view(3, 4)
    )
    for ours, theirs in zip(shaped, flat, strict=True):
        assert ours.shape == (3, 4)
        assert torch.equal(ours.flatten(), theirs)


def test_half_precision_inputs_have_float32_results_close_to_the_exact_ones() -> None:
    inputs = problem(tokens=64, hidden=32, vocabulary=100, bias=False)
    half = {k: v.detach().bfloat16().requires_grad_() for k, v in inputs.items() if k in ("hidden", "weight")}
    logprobs, entropy = chunked_logprobs(half["hidden"], half["weight"], None, inputs["targets"], 2.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = plain(half["hidden"].double(), half["weight"].double(), None, inputs["targets"], 2.0)
    torch.testing.assert_close(logprobs.double(), expected[0], atol=0.1, rtol=0)
    logprobs.sum().backward()
    assert half["weight"].grad.dtype == torch.bfloat16
    [exact] = torch.autograd.grad(expected[0].sum(), half["weight"])
    torch.testing.assert_close(half["weight"].grad, exact, atol=0.05, rtol=0.05)


def test_an_impossible_token_adds_nothing() -> None:
    inputs = problem()
    bias = inputs["bias"].detach().clone()
    bias[3] = -torch.inf
    inputs["bias"] = bias
    inputs["targets"][inputs["targets"] == 3] = 4
    logprobs, entropy = chunked_logprobs(**inputs, chunk_tokens=4)
    assert torch.isfinite(entropy).all()
    grads = torch.autograd.grad((logprobs + entropy).sum(), [inputs["hidden"], inputs["weight"]])
    assert all(torch.isfinite(g).all() for g in grads)


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.elements = max([self.elements, *(t.numel() for t in made if isinstance(t, Tensor))])
        return result


def test_tokens_times_vocabulary_is_never_held() -> None:
    inputs = problem(tokens=256, hidden=4, vocabulary=512, bias=False)
    with LargestTensor() as largest:
        logprobs, entropy = chunked_logprobs(**inputs, chunk_tokens=16)
        (logprobs + entropy).sum().backward()
    assert largest.elements <= 16 * 512


def test_temperature_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="positive"):
        chunked_logprobs(**problem(), temperature=0.0)


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.5, cap=2.0)], ids=str)
def test_the_size_of_a_chunk_changes_nothing(rule: LogitRule) -> None:
    inputs = problem(tokens=37, hidden=16, vocabulary=50)
    single = {k: v.detach().float().requires_grad_() for k, v in inputs.items() if k != "targets"}
    whole = chunked_logprobs(**single, targets=inputs["targets"], chunk_tokens=37, rule=rule)
    expected = gradients(whole, single)
    for chunk in (1, 8, 36, 1000):
        results = chunked_logprobs(**single, targets=inputs["targets"], chunk_tokens=chunk, rule=rule)
        for ours, theirs in zip([*results, *gradients(results, single)], [*whole, *expected], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_gradients_through_scale_and_cap_are_finite_differences() -> None:
    inputs = problem(tokens=4, hidden=3, vocabulary=5)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        rule = LogitRule(scale=1.7, cap=1.3)
        return chunked_logprobs(hidden, weight, bias, inputs["targets"], 0.7, chunk_tokens=3, rule=rule)

    assert torch.autograd.gradcheck(function, (inputs["hidden"], inputs["weight"], inputs["bias"]))


def test_a_chunk_suits_the_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_chunk_tokens(152_000, torch.device("cpu")) == 110
    for gib, tokens in ((80, 4096), (24, 1324), (1, 110)):
        memory = SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device, memory=memory: memory)
        assert default_chunk_tokens(152_000, torch.device("cuda")) == tokens


@pytest.mark.slow
@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.5, cap=3.0)], ids=["plain", "capped"])
def test_compiled_log_probs_have_the_values_and_gradients_of_others(
    monkeypatch: pytest.MonkeyPatch, rule: LogitRule
) -> None:
    """Slow, as torch's compiler is imported and traces. The graphs run as they are, without kernels of their own."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    logprobs._compiled.cache_clear()
    for tokens in (1, 9, 13):  # the last chunk of 9 and of 13 tokens has one
        inputs = problem(tokens=tokens)
        actual = chunked_logprobs(**inputs, temperature=0.7, chunk_tokens=4, rule=rule, compiled=True)
        expected = chunked_logprobs(**inputs, temperature=0.7, chunk_tokens=4, rule=rule)
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        for ours, theirs in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
            torch.testing.assert_close(ours, theirs)
