"""Mixtures of experts: vLLM fuses what the files have by expert, and on a CPU packs it in an order of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from headway.data.interfaces.rollout import OnUpdate
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.rollout.vllm.engine import VllmEngine
from headway.engines.weights.outgoing_version import Staged
from headway.engines.weights.transports.disk import write_files
from tests.engines.contract.harness import CONTEXT, endless, make_calls
from tests.engines.train.rows import random_rows
from tests.engines.train.test_logprob_copy import BUCKET, TEMPERATURE, Pair
from tests.environments.vllm.serving import SLOTS, TOLERANCE, Served

UNTIED = {"family": "qwen3_moe", "tied": False, "moe_intermediate_size": 32}


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


async def test_experts_of_a_size_that_is_padded_are_packed_anew_with_each_version(tmp_path: Path) -> None:
    """Over 5 s: vLLM is started. Its kernel takes multiples of 32."""
    served = Served(tmp_path / "model", shape={**UNTIED, "moe_intermediate_size": 24})
    await served.engine.start()
    try:
        served.assert_logprobs(await served.collect(make_calls(0)))
        for policy in (OnUpdate.INTERRUPT, OnUpdate.DRAIN, OnUpdate.KEEP):
            await served.update(policy)
            served.assert_logprobs(await served.collect(make_calls(1, n=2), endless(2, n=2)))
    finally:
        await served.engine.close()


async def test_in_bfloat16_which_has_kernels_of_its_own_each_version_is_served_too(tmp_path: Path) -> None:
    """Over 5 s: vLLM is started. Versions are nats apart."""
    served = Served(tmp_path / "model", shape={**UNTIED, "hidden_size": 64}, dtype="bfloat16")
    await served.engine.start()
    try:
        np.testing.assert_allclose(await served.engine.probe(), served.probe_reference(), atol=0.5, rtol=0)
        for _ in range(2):
            before, version = served.probe_reference(), await served.stage()
            await served.engine.pause(OnUpdate.INTERRUPT)
            await served.engine.activate(version)
            served.version = version
            assert np.abs(served.probe_reference() - before).max() > 2
            np.testing.assert_allclose(await served.engine.probe(), served.probe_reference(), atol=0.5, rtol=0)
            await served.engine.resume()
    finally:
        await served.engine.close()


async def test_vllm_opens_an_export_in_shards_and_serves_each_version_that_is_trained_on(
    one_rank: None, tmp_path: Path
) -> None:
    """Over 5 s: vLLM is started."""
    made = Served(tmp_path / "made", shape=UNTIED)  # the folder alone is used
    both = Pair(str(tmp_path / "made"))
    both.trainer.train_step(random_rows(4), StepContext())
    folder = tmp_path / "export"
    shutil.copytree(tmp_path / "made", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    layout = both.manifest
    write_files(folder, layout, both.trainer.gather(layout, BUCKET), most=layout.nbytes // 3)
    assert len([*folder.glob("model-*.safetensors")]) >= 3
    staged = Staged(layout, BUCKET, with_delta=True)
    engine = VllmEngine(
        folder,
        name="replica-0",
        seed=7,
        slots=SLOTS,
        max_context=CONTEXT,
        dtype="float32",
        receive=both.link.receive,
        manifest=layout,
        temperature=TEMPERATURE,
        kv_cache_gib=0.1,
    )
    made.engine = engine
    await engine.start()
    try:
        await assert_serves_the_trainers(made, both, 0)
        for version in (1, 2, 3):
            both.trainer.train_step(random_rows(4, seed=version), StepContext(version=version - 1))
            staged.gather(version, both.trainer.gather(layout, BUCKET))
            both.link.outgoing[version] = staged.outgoing(version, to=version - 1 if version > 1 else None)
            await engine.stage_weights(version)
            await engine.pause(OnUpdate.INTERRUPT)
            await engine.activate(version)
            await engine.resume()
            await assert_serves_the_trainers(made, both, version)
        assert both.link.deltas > 0
    finally:
        await engine.close()
        both.copy.close()


async def assert_serves_the_trainers(served: Served, both: Pair, version: int) -> None:
    """Its probe, and the log-probs of what it samples."""
    expected = both.trainer.probe()
    np.testing.assert_allclose(await served.engine.probe(), expected, atol=TOLERANCE, rtol=0)
    for answer in await served.collect(*(make_calls(row, n=2, temperature=TEMPERATURE) for row in range(3))):
        tokens = answer.tokens
        assert answer.versions == [version]
        ids = np.concatenate([answer.prompt, tokens.ids])
        row = CollatedRow(ids, len(answer.prompt), tokens.logprobs, tokens.versions, np.ones(len(tokens.ids), np.bool_))
        (again,) = both.trainer.forward_logprobs([row])
        np.testing.assert_allclose(tokens.logprobs, again, atol=TOLERANCE, rtol=0)
