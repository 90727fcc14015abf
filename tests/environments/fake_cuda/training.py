"""A trainer of one rank whose operations are counted: FSDP's streams and collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from headway import devices
from headway.config.schema import Config
from headway.config.sections.learning import ParallelConfig
from headway.data.packing import CollatedRow, Packing
from headway.engines.train.fsdp import learner, micro_batches
from headway.engines.train.fsdp.device_mesh import FSDP, TrainMesh, reduce_numbers
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.train.fsdp.learner import Learner
from headway.engines.train.fsdp.objective import Objective
from headway.engines.train.fsdp.sharded_module import PolicyModule, _shard
from headway.models.attention.packed_attention import NAME
from tests.environments.fake_cuda.counting import CUDA, fake_model


def rows_of(lengths: list[int], prompt: int = 200) -> list[CollatedRow]:
    """Rows with so many response tokens, and prompts that differ."""
    rng = np.random.default_rng(0)
    return [
        CollatedRow(
            input_ids=rng.integers(2, 1000, prompt + length).astype(np.int32),
            prompt_length=prompt,
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
            loss_mask=np.ones(length, np.bool_),
            columns={"advantages": np.ones(length, np.float32)},
        )
        for length in lengths
    ]


def _mesh() -> tuple[TrainMesh, DeviceMesh]:
    """Make the mesh of this rank alone, and what weights are sharded over: torch reads numbers of it."""
    group = dist.new_group
    of_fakes = patch.object(dist, "new_group", lambda *of, backend=None, **rest: group(*of, backend="fake", **rest))
    with _disable_current_modes(), of_fakes:
        mesh = TrainMesh.make(ParallelConfig(), torch.device("cpu"))
        dense = init_device_mesh("cuda", (1, 1, 1, 1), mesh_dim_names=mesh.dense.mesh_dim_names)
        return replace(mesh, device=CUDA, dense=dense, experts=dense), dense[FSDP]


def _reduced(numbers: Sequence[float], *args: Any) -> list[float]:
    """Reduce ``numbers`` over this rank alone. What is read from a fake device is not what was written to it."""
    reduce_numbers(numbers, *args)
    return list(numbers)


def _leave_gradients(policy: PolicyModule) -> None:
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)


@contextmanager
def trainer(cls: Any, shape: Any, config: Config) -> Iterator[FsdpEngine]:
    """Context with a trainer of a model of ``cls``, which `shape` describes. To be entered in `on_fake_cuda`.

    Its backward pass leaves gradients and computes nothing: autograd needs a device that is there. What a backward pass
    would do is counted on `META`.
    """
    handle = devices.KINDS["cuda"]._torch
    with ExitStack() as stack:
        for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
            stack.enter_context(patch.object(module, "_get_device_handle", lambda _: handle))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(patch.object(device_mesh, "_get_device_handle", lambda _: handle))
        mesh, over = _mesh()
        stack.enter_context(patch.object(TrainMesh, "sharding", lambda *_, **__: over))
        lm = fake_model(cls, shape, torch.float32)
        lm.set_attn_implementation(NAME)
        policy = PolicyModule(lm, config.rollout.temperature, mesh)
        _shard(policy, [], config, mesh)
        policy.packing = Packing.of(config)
        stack.enter_context(patch.object(torch.Tensor, "backward", lambda _: _leave_gradients(policy)))
        for module in (learner, micro_batches):
            stack.enter_context(patch.object(module, "reduce_numbers", _reduced))
        engine = object.__new__(FsdpEngine)
        engine._config, engine._mesh, engine._device, engine._policy = config, mesh, mesh.device, policy
        engine._objective = Objective(config)
        engine.learner = Learner(policy, config.actor, total_steps=10)
        yield engine
