"""Linear layers by oneDNN: as exact as torch's own, against float64, and the same but for the order of sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headway.models import cpu_linear
from headway.models.cpu_linear import linear, onednn_is_quicker, use_quickest


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Have oneDNN compute all products, on any processor; the shapes that it was given."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("torch is built without oneDNN")
    given: list[tuple[int, ...]] = []
    right = torch.ops.mkldnn._linear_pointwise

    def counted(inputs: Tensor, *more: object) -> Tensor:
        given.append(tuple(inputs.shape))
        result: Tensor = right(inputs, *more)
        return result

    monkeypatch.setattr(cpu_linear, "LEAST_PRODUCTS", 0)
    monkeypatch.setattr(cpu_linear, "onednn_is_quicker", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    return given


def computed(layer: nn.Linear, inputs: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Result and gradients of all inputs, for a gradient that is the same in every dtype."""
    layer, inputs = layer.to(dtype), inputs.detach().to(dtype).requires_grad_()
    layer.zero_grad()
    result = layer(inputs)
    result.backward(torch.linspace(-1, 1, result.numel()).view_as(result).to(dtype))
    grads = [inputs.grad, *(parameter.grad for parameter in layer.parameters())]
    return [result.detach(), *(grad.clone() for grad in grads if grad is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 70, 33), (3, 5, 33), (40, 33), (1, 1, 33)], ids=str)
def test_results_and_gradients_are_as_exact_as_torchs(
    shape: tuple[int, ...], bias: bool, everywhere: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(33, 21, bias=bias), torch.randn(shape)
    exact = [tensor.float() for tensor in computed(layer, inputs, torch.float64)]
    own = computed(layer, inputs, torch.float32)
    use_quickest(layer)
    quick = computed(layer, inputs, torch.float32)
    assert len(everywhere) == 3
    for e, o, q in zip(exact, own, quick, strict=True):
        assert q.shape == e.shape
        limit = max(2 * float((o - e).abs().max()), 1e-6 * float(e.abs().max()))
        assert float((q - e).abs().max()) <= limit


def test_the_same_is_computed_each_time() -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(200, 64), torch.randn(96, 64)
    assert torch.equal(linear(inputs, weight), linear(inputs, weight))
    assert torch.equal(linear(weight.t(), inputs.new_ones(8, 96)), linear(weight.t(), inputs.new_ones(8, 96)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype, everywhere: list[tuple[int, ...]]) -> None:
    inputs, weight = torch.randn(20, 8, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    assert torch.equal(linear(inputs, weight), nn.functional.linear(inputs, weight))
    assert not everywhere


def test_small_products_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, everywhere: list[tuple[int, ...]]) -> None:
    monkeypatch.setattr(cpu_linear, "LEAST_PRODUCTS", 20 * 8 * 6)
    linear(torch.randn(19, 8), torch.randn(6, 8))
    assert not everywhere
    linear(torch.randn(20, 8), torch.randn(6, 8))
    assert everywhere


def test_a_frozen_layer_has_no_gradient_of_its_own(everywhere: list[tuple[int, ...]]) -> None:
    layer = nn.Linear(8, 6).requires_grad_(False)
    use_quickest(layer)
    inputs = torch.randn(4, 8, requires_grad=True)
    layer(inputs).sum().backward()
    assert inputs.grad is not None
    assert layer.weight.grad is None
    assert len(everywhere) == 2


@pytest.mark.parametrize(
    ("told", "capability", "expected"),
    [
        ("vendor_id : AuthenticAMD", "AVX512", True),
        ("vendor_id : AuthenticAMD", "AVX2", False),
        ("vendor_id : GenuineIntel", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_onednn_is_quicker_on_amds_processors_with_avx512(
    told: str | None, capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if told is not None:
        (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(cpu_linear, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert onednn_is_quicker.__wrapped__() is expected
