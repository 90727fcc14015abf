"""Mixtures of experts on their way from the trainer to whoever serves them, under the names of their files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import OnUpdate
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.rollout.native.engine import NativeEngine
from headway.engines.weights.outgoing_version import Staged
from headway.models.pretrained import load_model
from tests.engines.rollout.serving import collect
from tests.engines.rollout.support import CONTEXT, decode, make_request
from tests.engines.train.families import make_family
from tests.engines.train.rows import VOCABULARY, random_rows
from tests.engines.train.test_logprob_copy import BUCKET, TEMPERATURE, Pair
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_rank")
VERSIONS = (1, 2)
FAMILIES = ("qwen3-moe", "mixtral")
Send = Callable[[int], None]


def sending(both: Pair, encoding: str) -> Send:
    """Train the trainer of ``both`` into a version, and send it."""
    staged = Staged(both.manifest, BUCKET, with_delta=encoding == "delta")

    def send(version: int) -> None:
        both.trainer.train_step(random_rows(4, seed=version), StepContext(version=version - 1))
        staged.gather(version, both.trainer.gather(both.manifest, BUCKET))
        both.link.outgoing[version] = staged.outgoing(version, to=version - 1 if version > 1 else None)

    return send


def request(number: int) -> Group:
    asked = make_request(number, n=2, temperature=TEMPERATURE, stop_token_ids=())
    return replace(asked, prompt=replace(asked.prompt, token_ids=2 + asked.prompt.token_ids % (VOCABULARY - 2)))


async def assert_serves_the_trainers(engine: NativeEngine, both: Pair, version: int) -> None:
    """Its probe, and the log-probs of what it samples."""
    expected = both.trainer.probe()
    np.testing.assert_allclose(await engine.probe(), expected, atol=1e-5, rtol=0)
    for group in await collect(engine, [request(number) for number in range(4)]):
        for row in group.tokens:
            assert set(row.versions.tolist()) == {version}
            ids = np.concatenate([row.prompt_ids, row.ids])
            again = CollatedRow(ids, len(row.prompt_ids), row.logprobs, row.versions, row.loss_mask)
            np.testing.assert_allclose(row.logprobs, both.trainer.forward_logprobs([again])[0], atol=1e-5, rtol=0)


@mostly_slow(
    ("family", "dual_buffer", "encoding"),
    [(family, *way) for family in FAMILIES for way in ((True, "full"), (False, "full"), (True, "delta"))],
    quick=[("qwen3-moe", True, "delta")],
)
async def test_a_native_engine_serves_each_version_of_a_mixture(
    family: str, dual_buffer: bool, encoding: str, tmp_path: Path
) -> None:
    path = make_family(family, tmp_path / family)
    both = Pair(path)
    send = sending(both, encoding)
    engine = NativeEngine(
        load_model(path, dtype=torch.float32),
        name="rollout-0",
        seed=7,
        slots=8,
        max_context=CONTEXT,
        max_batched_tokens=64,
        decode=decode,
        receive=both.link.receive,
        manifest=both.manifest,
        dual_buffer=dual_buffer,
        consume_bucket_bytes=1024,
        temperature=TEMPERATURE,
    )
    try:
        await assert_serves_the_trainers(engine, both, 0)
        before = await engine.probe()
        for version in VERSIONS:
            send(version)
            await engine.pause(OnUpdate.INTERRUPT)
            await engine.stage_weights(version)
            await engine.activate(version)
            await engine.resume()
            await assert_serves_the_trainers(engine, both, version)
        assert np.abs(await engine.probe() - before).max() > 0.01
        assert (both.link.deltas > 0) == (encoding == "delta")
    finally:
        await engine.close()
        both.copy.close()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "encoding"), list(product(FAMILIES, ["full", "delta"])))
async def test_a_copy_recomputes_the_log_probs_of_each_version_of_a_mixture(
    family: str, encoding: str, tmp_path: Path
) -> None:
    both = Pair(make_family(family, tmp_path / family))
    send, rows = sending(both, encoding), random_rows(9)
    try:
        for version in VERSIONS:
            before = both.copy.proximal_logprobs(rows, version - 1)
            send(version)
            await both.update(version)
            assert both.agree(version, rows)
            assert not np.array_equal(both.copy.proximal_logprobs(rows, version)[0], before[0])
    finally:
        both.copy.close()
