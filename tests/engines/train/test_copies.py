"""What a micro-batch costs beside its computing: copies from host memory, and reads that wait for the device.

The device is torch's ``meta`` in place of a GPU: tensors on it have no numbers, so that reading any is an error, as is
an operation whose result has a size that depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import Shape
from headway import devices
from headway.config.schema import Config
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow, Pack, Packing
from headway.engines import host_copies
from headway.engines.train.fsdp.column_engines import FsdpCritic
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.train.fsdp.learner import Sums, count
from headway.engines.train.fsdp.objective import Objective, SplitEpisodes
from headway.engines.train.fsdp.sharded_module import PolicyModule, ValueModule
from headway.models.attention import flex_attention
from headway.models.attention.packable import use_packed_attention
from tests.engines.train.episodes import dealt, whole
from tests.engines.train.test_episode_losses import CORRECTIONS, LOSS_MODES, configured

META = torch.device("meta")
SHAPE = Shape("tiny", 64, 64, 1, heads=4, kv_heads=2, intermediate=64)


class LikeGpu(devices.Accelerator):
    name = "meta"
    pins_host_memory = True
    flex_attention = True

    def total_memory(self, device: devices.Device) -> int:
        return 8 * 2**30

    def side_stream(self, device: devices.Device) -> None:
        return None


class Copies(TorchDispatchMode):
    """Copies of tensors from host memory to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy") and result.device == META:
            source = args[1] if name == "copy_" else args[0]
            if source.device.type == "cpu":
                self.sources.append(source)
        return result


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The page-locked buffers that are taken, by their addresses."""
    taken: list[int] = []

    def host_buffer(nbytes: int, *, pinned: bool) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if pinned:
            taken.append(buffer.data_ptr())
        return buffer

    def kernel(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
        return _attend if function is flex_attention.flex_attention else function

    monkeypatch.setitem(devices.KINDS, "meta", LikeGpu())
    monkeypatch.setattr(host_copies, "host_buffer", host_buffer)
    monkeypatch.setattr(flex_attention, "_kernel", kernel)
    # Of padded rows transformers itself reads one flag, in each forward pass.
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)
    return taken


def _attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, Any]:
    each = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(each, dim=1) for tensor in (key, value))
    return scaled_dot_product_attention(query, keys, values), SimpleNamespace()


def one_copy(part: Callable[[], tuple[Tensor, Sums]], pinned: list[int]) -> None:
    """Compute a micro-batch's part of a step, which is to make one copy, of page-locked memory."""
    pinned.clear()
    with Copies() as copies:
        loss, sums = part()
        loss.backward()
    assert [source.data_ptr() for source in copies.sources] == pinned
    assert len(pinned) == 1
    assert all(value.device == META for value in sums.values())


def trainer(config: Config, *, packed: bool = True) -> FsdpEngine:
    engine = object.__new__(FsdpEngine)
    engine._device, engine._objective = META, Objective(config)
    engine._policy = policy(packed)
    return engine


@cache
def policy(packed: bool) -> PolicyModule:
    lm = SHAPE.random().eval()
    assert not packed or use_packed_attention(lm) is None
    return PolicyModule(lm.to(META), 1.0)


def packs_of(
    rows: Sequence[CollatedRow], budget: int = 60, *, packed: bool = True
) -> list[tuple[list[CollatedRow], Pack]]:
    return [([rows[i] for i in pack.rows], pack) for pack in Packing(budget, packed=packed)(rows)]


CONFIGS = {
    **{loss: configured(loss, "seq-mean-token-mean", {}) for loss in [*LOSS_MODES, "t_ppo"]},
    **{f"correction {i}": configured("ppo_clip", "token-mean", of) for i, of in enumerate(CORRECTIONS)},
    "loglinear": configured("ppo_clip", "token-mean", {}, prox_logp_method="loglinear"),
}


@pytest.mark.parametrize(("name", "packed"), [*product(CONFIGS, [True]), ("ppo_clip", False)])
def test_a_micro_batch_is_one_page_locked_copy_and_reads_nothing(name: str, packed: bool, pinned: list[int]) -> None:
    """Of most losses one micro-batch: several differ in their rows alone."""
    rows, _ = whole(0)
    engine, totals = trainer(CONFIGS[name], packed=packed), count(rows)
    packs = packs_of(rows, packed=packed)
    assert len(packs) > 1
    for own, pack in packs if name in ("ppo_clip", "gspo") else packs[:1]:
        one_copy(partial(engine._part, StepContext(version=4), own, pack.trees, totals), pinned)


def test_rows_of_other_micro_batches_are_in_the_same_copy(pinned: list[int]) -> None:
    rows = list(chain.from_iterable(dealt(row, 3) for row in whole(0)[0]))
    config = configured("gspo", "seq-mean-token-mean", {})
    engine, totals = trainer(config), count(rows)
    apart, seen = SplitEpisodes(rows, [row.columns["now"] for row in rows]), 0
    for own, pack in packs_of(rows, 12):
        if seen < 2 and apart.beside(own).rows:
            part = partial(engine._part, StepContext(version=4), own, pack.trees, totals, apart=apart)
            one_copy(part, pinned)
            seen += 1
    assert seen == 2


def test_functions_of_the_users_own_read_nothing_for_their_padded_rows(pinned: list[int], tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def loss(inputs, params):\n    return -inputs.logprobs * inputs.advantages, {}\n")
    config = configured({"loss_mode": f"{file}:loss"}, "token-mean", {})
    rows, _ = whole(0)
    engine, totals = trainer(config), count(rows)
    for own, pack in packs_of(rows):
        one_copy(partial(engine._part, StepContext(version=4), own, pack.trees, totals), pinned)


def test_a_micro_batch_of_the_critic_is_one_page_locked_copy_and_reads_nothing(pinned: list[int]) -> None:
    rows, _ = whole(0)
    rows = [replace(row, columns={**row.columns, "returns": row.columns["now"]}) for row in rows]
    lm = SHAPE.random().eval()
    assert use_packed_attention(lm) is None
    critic = object.__new__(FsdpCritic)
    critic._device, critic._cliprange = META, 0.5
    critic._module = ValueModule(lm).to(META)
    for own, pack in packs_of(rows):
        one_copy(partial(critic._part, own, pack.trees, count(rows)), pinned)
