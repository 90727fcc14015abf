"""Matrix products of linear layers on a CPU: by oneDNN on processors where MKL, torch's default, is slow.

On AMD's processors MKL always uses AVX2; oneDNN uses AVX-512 if there is any. Both compute in the dtype of their
arguments, and differ only in the order of their sums. Small products are left to MKL: oneDNN makes a kernel for each
new shape, and lines of tokens differ in length.

Shape suffixes: N inputs of any shape before their last dimension, K features in, O features out.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

LEAST_PRODUCTS = 1 << 27
"""Least number of multiplications that oneDNN computes: it saves 1.5 ms then, and making the kernel takes 0.4 ms."""
CPU_INFO = Path("/proc/cpuinfo")


@cache
def onednn_is_quicker() -> bool:
    """Tell whether this is an AMD processor with AVX-512, and torch has oneDNN's products."""
    try:
        amd = "AuthenticAMD" in CPU_INFO.read_text(encoding="utf-8")
    except OSError:
        return False
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    # On these processors MKL uses half of AVX-512.
    return amd and wide and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(
    inputs: Float[Tensor, "*N K"], weight: Float[Tensor, "O K"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "*N O"]:
    """Compute inputs · weightᵀ + bias, as `torch.nn.functional.linear` does. Builds no graph."""
    if inputs.dtype != torch.float32 or inputs.device.type != "cpu" or weight.dtype != inputs.dtype:
        return functional.linear(inputs, weight, bias)
    if inputs.numel() * len(weight) < LEAST_PRODUCTS or not onednn_is_quicker():
        return functional.linear(inputs, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result


class _Linear(torch.autograd.Function):
    """`linear`, with a gradient of the same kind."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        grad_NO = grads[0].flatten(0, -2)
        return (
            linear(grads[0], weight.t()) if of_inputs else None,
            linear(grad_NO.t(), inputs.flatten(0, -2).t()) if of_weight else None,
            grad_NO.sum(0) if of_bias else None,
        )


def use_quickest(module: nn.Module) -> None:
    """Let the linear layers of ``module`` compute by `linear`. Weights must be whole tensors in the forward pass."""
    if onednn_is_quicker():
        for layer in module.modules():
            if type(layer) is nn.Linear:  # not isinstance: a subclass may have a forward pass of its own
                layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    result: Tensor = _Linear.apply(inputs, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return result
