"""The policy as it was at the start of a version: the anchor of the trust region, while the policy moves on.

proximal (v) ─▶ step ─▶ proximal (v) ─▶ step ─▶ …        the first one finds the policy as it is, and copies it
                           └─ the copy takes the policy's place for a forward pass
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from headway.errors import RunError


class ProximalWeights:
    """One rank's shards of the policy at the start of a version, copied to host memory. While they are restored, a
    second copy holds the present ones.
    """

    def __init__(self, module: nn.Module, *, keeps_copy: bool) -> None:
        """Track the weights of ``module``. Without ``keeps_copy`` a version's start is lost at its first step."""
        self._module = module
        self._keeps_copy = keeps_copy
        self._known: int | None = None
        """The version whose start is known: as the present policy, or as the copy."""
        self._stepped: int | None = None
        """The version that the last optimizer step belongs to."""
        self._copy: list[torch.Tensor] = []

    def stepping(self, version: int) -> None:
        """Note that an optimizer step of ``version`` follows."""
        self._stepped = version

    @contextmanager
    def restored(self, version: int) -> Iterator[None]:
        """Context in which the module holds the policy at the start of ``version``. Raises `RunError` if unknown."""
        if self._stepped is None or version > self._stepped:  # no step of it was made: the policy is where it starts
            if self._known != version and self._keeps_copy:
                self._copy = self._snapshot()
            self._known = version
            yield
            return
        if self._known != version or not self._keeps_copy:
            raise RunError(
                f"log-probs under the policy at the start of version {version} were asked for after its first "
                "optimizer step, and nobody had asked before it; ask at the version's first fetch"
            )
        now = self._snapshot()
        self._write(self._copy)
        try:
            yield
        finally:
            self._write(now)

    @torch.no_grad()
    def _snapshot(self) -> list[torch.Tensor]:
        return [shard.to("cpu", copy=True) for shard in self._shards()]

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for shard, value in zip(self._shards(), values, strict=True):
            shard.copy_(value)

    def _shards(self) -> list[torch.Tensor]:
        parameters = [parameter.detach() for parameter in self._module.parameters()]
        return [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
