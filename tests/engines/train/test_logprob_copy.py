"""The copy that recomputes log-probs: the trainer's own numbers, of just the version that it serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from headway.config.schema import Config, RolloutConfig
from headway.config.sections.learning import ActorConfig, OptimConfig, ParallelConfig
from headway.config.sections.model_section import ModelConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.train.fsdp.column_engines import LogProbCopy
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.weights.outgoing_version import Staged, Stream
from headway.engines.weights.protocols import IncomingWeights, OutgoingWeights
from headway.errors import ModelError, RunError, UpdateFailed
from headway.models.pretrained import load_model
from tests.engines.train.rows import random_rows, response_logprobs
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_rank")
ModelPath = Callable[..., str]
BUCKET = 4096
TEMPERATURE = 0.7
BUDGET = 64


@dataclass
class Link:
    """Hands over what is put into it, as a transport would; or fails after so many buckets."""

    outgoing: dict[int, OutgoingWeights] = field(default_factory=dict)
    fails_after: int | None = None
    nbytes: int = 0
    """Payload of the last version."""
    deltas: int = 0
    """Buckets of it that came as one."""
    hold: threading.Event | None = None
    held: threading.Event = field(default_factory=threading.Event)

    def receive(self, version: int, incoming: IncomingWeights) -> None:
        (sink,) = incoming.expect([incoming.manifest])
        weights = self.outgoing[version]
        self.nbytes = self.deltas = 0
        for chunk in weights:
            if chunk.header.index == self.fails_after:
                raise UpdateFailed("the trainer died")
            if chunk.header.index == 2 and self.hold is not None:
                self.held.set()
                assert self.hold.wait(60), "nobody let the transfer go on"
            sink.room(chunk.header).copy_(chunk.payload)
            sink.filled(chunk.header)
            self.nbytes += chunk.header.payload_nbytes
            self.deltas += chunk.header.base >= 0
        sink.ended(weights.digests)


class Pair:
    """A trainer and a copy of its policy."""

    def __init__(self, path: str, dtype: str = "float32") -> None:
        config = Config(
            actor=ActorConfig(ppo_max_token_len_per_gpu=BUDGET, optim=OptimConfig(lr=1e-2)),
            rollout=RolloutConfig(temperature=TEMPERATURE, param_update_consume_bucket_size_mb=1024 / 2**20),
            model=ModelConfig.model_validate({"dtype": dtype}),
        )
        self.dtype = getattr(torch, dtype)
        self.trainer = FsdpEngine(
            model_path=path,
            config=config,
            total_optimizer_steps=10,
            mesh=TrainMesh.make(ParallelConfig(), torch.device("cpu")),
        )
        self.manifest = self.trainer.manifest(self.dtype)
        self.link = Link()
        self.copy = LogProbCopy(
            model_path=path,
            config=config,
            mesh=TrainMesh.make(ParallelConfig(), torch.device("cpu")),
            name="logp-0",
            manifest=self.manifest,
            receive=self.link.receive,
        )

    def step(self, version: int) -> None:
        """A step of the version before, and the new one on its way."""
        self.trainer.train_step(random_rows(4, seed=version), StepContext(version=version - 1))
        self.send(version)

    def send(self, version: int) -> None:
        self.link.outgoing[version] = Stream(self.manifest, self.trainer.gather(self.manifest, BUCKET))

    async def update(self, version: int) -> None:
        await self.copy.stage_weights(version)
        self.copy.activate(version)

    def agree(self, version: int, rows: list[CollatedRow]) -> bool:
        """To the last bit."""
        ours, theirs = self.copy.proximal_logprobs(rows, version), self.trainer.forward_logprobs(rows)
        assert all(a.dtype == np.float32 for a in ours)
        return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def pair(model_path: ModelPath) -> Any:
    made: list[Pair] = []

    def make(*args: Any, architecture: str = "qwen3", tie: bool = True, **named: Any) -> Pair:
        made.append(Pair(model_path(architecture, tie), *args, **named))
        return made[-1]

    yield make
    for each in made:
        each.copy.close()


@mostly_slow(
    ("architecture", "tie"),
    [("qwen3", True), ("qwen3", False), ("llama", True), ("qwen2", False)],
    quick=[("qwen3", True), ("qwen2", False)],
)
async def test_its_log_probs_are_those_of_the_trainer_and_of_the_hugging_face_model(
    pair: Any, model_path: ModelPath, architecture: str, tie: bool
) -> None:
    both, rows = pair(architecture=architecture, tie=tie), random_rows(9)
    assert both.agree(0, rows)
    model = load_model(model_path(architecture, tie), dtype=torch.float64)
    for row, logprobs in zip(rows, both.copy.proximal_logprobs(rows, 0), strict=True):
        expected, _ = response_logprobs(model, row, TEMPERATURE)
        np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=1e-5)


async def test_after_an_update_it_serves_the_new_version_and_no_other(pair: Any) -> None:
    both, rows = pair(), random_rows(5)
    for version in (1, 2, 3):
        before = both.copy.proximal_logprobs(rows, version - 1)
        both.step(version)
        report = await both.copy.stage_weights(version)
        assert report.nbytes == both.manifest.nbytes
        both.copy.activate(version)
        assert both.agree(version, rows)
        assert not np.array_equal(both.copy.proximal_logprobs(rows, version)[0], before[0])
        for other in (version - 1, version + 1):
            with pytest.raises(RunError, match=rf"logp-0 .*version {version}\b.* version {other};"):
                both.copy.proximal_logprobs(rows, other)


async def test_before_any_update_it_has_version_zero_alone(pair: Any) -> None:
    with pytest.raises(RunError, match=r"version 0\b.*log-probs .*version 1\b"):
        pair().copy.proximal_logprobs(random_rows(1), 1)


async def test_its_probe_is_the_trainers(pair: Any) -> None:
    both = pair()
    for version in (0, 1):
        if version:
            both.step(version)
            await both.update(version)
        expected = both.trainer.probe()
        assert np.array_equal(both.copy.probe(), expected)
        assert expected.shape == (8,)


async def test_half_precision_agrees_as_far_as_that_goes(pair: Any) -> None:
    both, rows = pair("bfloat16"), random_rows(6)
    both.step(1)
    await both.update(1)
    assert {p.dtype for p in both.copy._policy.parameters()} == {torch.bfloat16}
    for ours, theirs in zip(both.copy.proximal_logprobs(rows, 1), both.trainer.forward_logprobs(rows), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.02)


async def test_no_rows_give_no_log_probs_and_no_tokens_an_empty_array(pair: Any) -> None:
    both, [full] = pair(), random_rows(1)
    nothing = np.zeros(0, dtype=np.float32)
    empty = CollatedRow(full.input_ids[:3], 3, nothing, nothing.astype(np.int32), nothing.astype(np.bool_))
    assert both.copy.proximal_logprobs([], 0) == []
    assert [len(a) for a in both.copy.proximal_logprobs([empty, full], 0)] == [0, len(full.logprobs)]


# ---------------------------------------------------------------------------------------------- updates that go wrong


async def test_the_old_version_is_served_until_the_new_one_is_activated(pair: Any) -> None:
    both, rows = pair(), random_rows(2)
    before = both.copy.proximal_logprobs(rows, 0)
    both.step(1)
    await both.copy.stage_weights(1)
    assert np.array_equal(both.copy.proximal_logprobs(rows, 0)[0], before[0])
    with pytest.raises(UpdateFailed, match="activate version 2"):
        both.copy.activate(2)
    both.copy.activate(1)
    assert both.agree(1, rows)


async def test_a_failed_transfer_leaves_the_old_version_in_service(pair: Any) -> None:
    both, rows = pair(), random_rows(3)
    before = both.copy.proximal_logprobs(rows, 0)
    both.step(1)
    both.link.fails_after = 3
    with pytest.raises(UpdateFailed, match="the trainer died"):
        await both.copy.stage_weights(1)
    assert np.array_equal(both.copy.proximal_logprobs(rows, 0)[0], before[0])
    both.link.fails_after = None
    both.send(1)
    await both.update(1)
    assert both.agree(1, rows)


async def test_bytes_that_are_not_the_trainers_are_never_served(pair: Any) -> None:
    both, rows = pair(), random_rows(2)
    both.step(1)
    windows = [(start, data.clone()) for start, data in both.trainer.gather(both.manifest, BUCKET)]
    honest = Stream(both.manifest, windows)
    list(honest)
    windows[1][1][7] ^= 1

    class Altered:
        digests = honest.digests

        def __iter__(self) -> Any:
            return iter(Stream(both.manifest, windows))

    both.link.outgoing[1] = Altered()
    before = both.copy.proximal_logprobs(rows, 0)
    with pytest.raises(UpdateFailed, match="not those that the trainer sent"):
        await both.copy.stage_weights(1)
    with pytest.raises(RunError, match="serves version 0"):
        both.copy.proximal_logprobs(rows, 1)
    assert np.array_equal(both.copy.proximal_logprobs(rows, 0)[0], before[0])


async def test_while_a_version_arrives_the_old_one_is_computed_with_and_nothing_is_activated(pair: Any) -> None:
    both, rows = pair(), random_rows(2)
    before = both.copy.proximal_logprobs(rows, 0)
    both.step(1)
    both.link.hold = threading.Event()
    staging = asyncio.create_task(both.copy.stage_weights(1))
    await asyncio.to_thread(both.link.held.wait, 10)
    try:
        assert np.array_equal(both.copy.proximal_logprobs(rows, 0)[0], before[0])
        with pytest.raises(UpdateFailed, match="still receiving version 1"):
            both.copy.activate(1)
    finally:
        both.link.hold.set()
    await staging
    both.copy.activate(1)
    assert both.agree(1, rows)


# ---------------------------------------------------------------------------------------------- deltas


def touched(both: Pair) -> None:
    """A step that moves little: one row of the embedding, as a small learning rate in bfloat16 would."""
    weight = both.trainer._policy.lm.get_input_embeddings().weight
    with torch.no_grad():
        weight.to_local()[3] += 0.25


async def test_it_takes_deltas_to_the_version_that_it_holds(pair: Any) -> None:
    both, rows = pair(), random_rows(4)
    staged = Staged(both.manifest, BUCKET, with_delta=True)
    for version in (1, 2, 3):
        touched(both)
        staged.gather(version, both.trainer.gather(both.manifest, BUCKET))
        both.link.outgoing[version] = staged.outgoing(version, to=version - 1 if version > 1 else None)
        await both.update(version)
        assert both.agree(version, rows)
        if version == 1:
            assert both.link.deltas == 0 and both.link.nbytes == both.manifest.nbytes
        else:
            assert both.link.deltas > 0 and both.link.nbytes < 0.05 * both.manifest.nbytes


async def test_a_delta_to_a_version_that_it_does_not_hold_changes_nothing(pair: Any) -> None:
    both, rows = pair(), random_rows(3)
    before = both.copy.proximal_logprobs(rows, 0)
    staged = Staged(both.manifest, BUCKET, with_delta=True)
    for version in (1, 2):
        touched(both)
        staged.gather(version, both.trainer.gather(both.manifest, BUCKET))
    both.link.outgoing[2] = staged.outgoing(2, to=1)
    with pytest.raises(UpdateFailed, match=r"delta to version 1, .*nothing complete"):
        await both.copy.stage_weights(2)
    assert np.array_equal(both.copy.proximal_logprobs(rows, 0)[0], before[0])
    both.link.outgoing[2] = staged.outgoing(2, to=None)
    await both.update(2)
    assert both.agree(2, rows)


# ---------------------------------------------------------------------------------------------- what it refuses


def test_the_layout_of_another_model_is_refused(model_path: ModelPath) -> None:
    other = Pair(model_path("qwen2", False))
    with pytest.raises(ModelError, match="receiving model"):
        LogProbCopy(
            model_path=model_path("qwen3", True),
            config=Config(),
            mesh=TrainMesh.make(ParallelConfig(), torch.device("cpu")),
            name="logp-0",
            manifest=other.manifest,
            receive=other.link.receive,
        )
    other.copy.close()
