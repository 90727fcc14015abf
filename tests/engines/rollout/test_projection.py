"""Linear layers and norms of the fused forward: packed or not, they compute the same from the same weights."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from headway.data.interfaces.rollout import OnUpdate
from headway.engines.rollout.native.fused_forward import FusedForward, Projection, RmsNorm, can_pack
from tests.engines.rollout.support import FAMILIES, activate, assert_logprobs, finish, make_core, make_model, steps
from tests.engines.rollout.support import make_request as request
from tests.tiers import mostly_slow

PACKED_FROM = "headway.engines.rollout.native.fused_forward.PACKED_FROM"
packed_or_not = pytest.mark.parametrize("packed_from", [0, 10**9], ids=["packed", "as they are"])


@packed_or_not
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 70])
@torch.inference_mode()
def test_a_projection_is_a_matrix_product(
    packed_from: int, biased: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PACKED_FROM, packed_from)
    noise = torch.Generator().manual_seed(rows)
    weight, x, residual = (torch.randn(*shape, generator=noise) for shape in ((24, 40), (rows, 40), (rows, 24)))
    bias = torch.randn(24, generator=noise) if biased else None
    projection = Projection(weight, bias)
    expected = x.double().numpy() @ weight.double().numpy().T + (0 if bias is None else bias.double().numpy())
    np.testing.assert_allclose(projection(x).numpy(), expected, atol=1e-5)
    added = projection.added_to(residual, x).numpy()
    np.testing.assert_allclose(added, residual.double().numpy() + expected, atol=1e-5)


@packed_or_not
@torch.inference_mode()
def test_a_projection_has_the_new_weights_once_it_is_refreshed(
    packed_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PACKED_FROM, packed_from)
    weight = torch.eye(8)
    projection = Projection(weight, None)
    weight.mul_(3)
    projection.refresh()
    assert torch.equal(projection(torch.ones(2, 8)), torch.full((2, 8), 3.0))


def test_small_and_whole_number_weights_are_not_packed() -> None:
    assert not can_pack(torch.zeros(100, 100))
    assert not can_pack(torch.zeros(1000, 1000, dtype=torch.int64))
    assert not can_pack(torch.zeros(1000, 1000, device="meta"))


def test_bfloat16_is_packed_only_where_the_cpu_has_kernels_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert not can_pack(torch.zeros(1000, 1000, dtype=torch.bfloat16))
    assert can_pack(torch.zeros(1000, 1000))


@mostly_slow(
    ("family", "policy"),
    product(FAMILIES, OnUpdate),
    quick=[("llama", OnUpdate.DRAIN), ("mistral", OnUpdate.INTERRUPT), ("qwen3", OnUpdate.KEEP)],
)
def test_with_packed_weights_every_token_has_the_log_prob_of_its_version(
    family: str, policy: OnUpdate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PACKED_FROM, 0)
    old, new = make_model(family), make_model(family, seed=3)
    core = make_core(old)
    forward = core._runner._forward
    assert isinstance(forward, FusedForward)
    assert forward._head._packed is not None
    core.ask([request(i, stop_token_ids=()) for i in range(2)], "owner")
    done = steps(core, 5)
    core.pause(policy)
    done += finish(core)  # a drain's
    activate(core, 1, new)
    core.resume()
    core.ask([request(2)], "owner")
    done += finish(core)
    if policy is OnUpdate.KEEP:  # the old version's keys and values are part of what the new one read
        done = [group for group in done if group.number == 2]
    assert_logprobs(done, {0: old, 1: new})
    assert {group.number for group in done} >= {2}


@pytest.mark.parametrize("shape", [(1, 7), (5, 32), (3, 4, 16)])
def test_a_norm_divides_by_the_root_of_the_mean_square(shape: tuple[int, ...]) -> None:
    noise = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*shape, generator=noise) * 5, torch.randn(shape[-1], generator=noise)
    wide = x.double().numpy()
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * weight.double().numpy()
    normed = RmsNorm(1e-3, x.device, torch.float32)(x, weight)
    np.testing.assert_allclose(normed.numpy(), expected, rtol=1e-5, atol=1e-6)
    low = RmsNorm(1e-3, x.device, torch.bfloat16)(x.bfloat16(), weight.bfloat16())
    np.testing.assert_allclose(low.float().numpy(), expected, rtol=0.03, atol=0.03)
