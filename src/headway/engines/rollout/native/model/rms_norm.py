"""RMSNorm in few operations (Zhang & Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, eq. 4).

On GPUs PyTorch has one kernel for it. On CPUs its ``rms_norm`` is made of nine operations, and at a few rows the time
of an operation is its call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RmsNorm:
    """(x [.., D], weight, broadcast against x) ↦ x / √(mean(x²) + ε) · weight, over the last dimension."""

    def __init__(self, eps: float, device: torch.device, dtype: torch.dtype) -> None:
        self._eps = eps
        # In lower precision the sum of squares has to be taken in another dtype than x's: left to PyTorch.
        self._by_hand = device.type == "cpu" and dtype == torch.float32
        self._eps_tensor = torch.tensor([eps], dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        if not self._by_hand:
            return F.rms_norm(x, (size,), None, self._eps) * weight
        squares = (x * x).sum(-1, keepdim=True)
        return (x * torch.add(self._eps_tensor, squares, alpha=1 / size).rsqrt_()).mul_(weight)
