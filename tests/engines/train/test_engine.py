"""The engine on one rank: steps, log-probs, weights and files."""

from __future__ import annotations

import contextvars
import dataclasses
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.config.schema import Config, RolloutConfig
from headway.config.sections.learning import ActorConfig, AlgorithmConfig, OptimConfig, ParallelConfig
from headway.config.sections.model_section import ModelConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.train.fsdp import checkpoint, sharded_module
from headway.engines.train.fsdp.checkpoint import save
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.train.fsdp.micro_batches import collate
from headway.engines.train.fsdp.sharded_module import forward_sharded, frozen_policy
from headway.errors import ModelError, RunError
from headway.models.pretrained import load_model
from headway.runtime.progress import Progress, count_for
from tests.engines.train.rows import plain_loss, random_rows, response_logprobs, with_columns, without_column
from tests.engines.weights.versions import view
from tests.tiers import crossed, mostly_slow

pytestmark = pytest.mark.usefixtures("one_rank")
CPU = torch.device("cpu")
ModelPath = Callable[..., str]


def engine(path: str, config: Config | None = None, steps: int = 10) -> FsdpEngine:
    config = config or configured()
    return FsdpEngine(
        model_path=path, config=config, total_optimizer_steps=steps, mesh=TrainMesh.make(ParallelConfig(), CPU)
    )


def configured(**actor: object) -> Config:
    actor = {"optim": OptimConfig(lr=1e-2), "ppo_max_token_len_per_gpu": 64, **actor}
    return Config(actor=ActorConfig.model_validate(actor), rollout=RolloutConfig(temperature=0.7))


def weights(of: FsdpEngine) -> dict[str, torch.Tensor]:
    """The weights as `gather` sends them."""
    manifest = of.manifest(torch.float32)
    flat = torch.cat([bucket.clone() for _, bucket in of.gather(manifest, bucket_bytes=4096)])
    return {slot.name: view(slot, flat) for slot in manifest.slots}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


class Counting(Progress):
    """Remembers every place that it was told, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def advance(self, place: str = "") -> None:
        self.places.append(place)


@mostly_slow("recompute", [True, False], quick=[True])
def test_each_layer_of_a_step_counts_as_progress_forward_and_backward(model_path: ModelPath, recompute: bool) -> None:
    """Two layers, and rows that make two micro-batches."""
    progress = Counting()

    def steps() -> None:
        count_for(progress)
        model = ModelConfig(enable_gradient_checkpointing=recompute)
        trainer = engine(model_path("qwen3"), configured().model_copy(update={"model": model}))
        progress.places.clear()
        rows = [with_columns(row) for row in random_rows(4)]
        trainer.train_step(rows, StepContext())
        batches = sum(place.endswith("micro-batches done") for place in progress.places)
        assert batches > 1
        layers = ["", "", "", ""]
        done = [f"{number} of {batches} micro-batches done" for number in range(1, batches + 1)]
        assert progress.places == [place for end in done for place in [*layers, end]]
        progress.places.clear()
        trainer.forward_logprobs(rows)
        assert progress.places == [place for end in done for place in ["", "", end]]

    contextvars.copy_context().run(steps)


def test_files_and_weights_on_their_way_count_as_progress_too(model_path: ModelPath, tmp_path: Path) -> None:
    progress = Counting()

    def places_of(work: Callable[[], object]) -> str:
        progress.places.clear()
        work()
        return "\n".join(progress.places)

    def works() -> None:
        count_for(progress)
        trainer, there = engine(model_path("qwen3")), tmp_path / "version_1"
        assert f"writing {tmp_path / '.version_1.'}" in places_of(lambda: trainer.learner.save(there, {}))
        assert f"reading {there}, " in places_of(lambda: trainer.learner.load(there))
        exported = places_of(lambda: trainer.export(tmp_path / "model"))
        assert " MB gathered\n" in exported
        assert f"writing {tmp_path / '.model.partial'}" in exported
        manifest = trainer.manifest(torch.float32)
        buckets = places_of(lambda: deque(trainer.gather(manifest, 4096), maxlen=0))
        assert buckets.count("MB gathered") == -(-manifest.nbytes // 4096)

    contextvars.copy_context().run(works)


@crossed(("architecture", "tie"), ["qwen3", "qwen2", "llama"], [True, False])
def test_log_probs_are_those_of_the_hugging_face_model(model_path: ModelPath, architecture: str, tie: bool) -> None:
    rows = random_rows(7)
    model = load_model(model_path(architecture, tie), dtype=torch.float64)
    actual = engine(model_path(architecture, tie)).forward_logprobs(rows)
    for row, logprobs in zip(rows, actual, strict=True):
        assert logprobs.dtype == np.float32
        expected, _ = response_logprobs(model, row, temperature=0.7)
        np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=1e-5)


def test_no_rows_give_no_log_probs(model_path: ModelPath) -> None:
    assert engine(model_path()).forward_logprobs([]) == []


def test_a_response_without_tokens_is_allowed(model_path: ModelPath) -> None:
    [full] = random_rows(1)
    nothing = np.zeros(0, dtype=np.float32)
    columns = {"advantages": nothing}
    empty = CollatedRow(full.input_ids[:3], 3, nothing, nothing.astype(np.int32), nothing.astype(np.bool_), columns)
    trainer = engine(model_path())
    short, long = trainer.forward_logprobs([empty, full])
    assert len(short) == 0 and len(long) == len(full.logprobs)
    assert not trainer.train_step([empty, full], StepContext()).skipped
    assert trainer.forward_logprobs([empty])[0].shape == (0,)


def test_three_steps_are_those_of_a_plain_loop(model_path: ModelPath) -> None:
    config = configured(optim=OptimConfig(lr=1e-2, lr_scheduler_type="linear", weight_decay=0.1), grad_clip=0.05)
    batches = [random_rows(5, seed=seed) for seed in range(3)]
    trainer = engine(model_path(), config, steps=3)
    reports = [trainer.train_step(rows, StepContext()) for rows in batches]

    model = load_model(model_path(), dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for rows, lr, report in zip(batches, [1e-2, 5e-3, 0.0], reports, strict=True):
        optimizer.zero_grad()
        loss = plain_loss(model, rows, config)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        assert norm > 0.05
        assert report.metrics["lr"] == pytest.approx(lr)
        assert report.metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-4)
        assert report.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    for row, logprobs in zip(batches[0], trainer.forward_logprobs(batches[0]), strict=True):
        expected, _ = response_logprobs(model, row, temperature=0.7)
        np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=1e-3)


def test_a_step_reports_how_far_off_policy_it_was(model_path: ModelPath) -> None:
    trainer, rows = engine(model_path()), random_rows(6)
    on_policy = [
        dataclasses.replace(row, logprobs=logprobs)
        for row, logprobs in zip(rows, trainer.forward_logprobs(rows), strict=True)
    ]
    metrics = trainer.train_step(on_policy, StepContext()).metrics
    assert metrics["offpolicy/ess"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["offpolicy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["offpolicy/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == metrics["offpolicy/clip_fraction"] == 0.0
    assert 0 < metrics["entropy"] <= np.log(18)
    after = trainer.train_step(rows, StepContext()).metrics
    assert after["offpolicy/ess"] < 1.0 < after["offpolicy/ratio_max"]
    assert after["offpolicy/clip_fraction"] > 0.0


def test_a_loss_that_is_not_finite_leaves_everything_as_it_was(model_path: ModelPath) -> None:
    rows = random_rows(4)
    broken = with_columns(
        dataclasses.replace(rows[1], loss_mask=rows[1].loss_mask | True),
        advantages=np.full_like(rows[1].logprobs, np.nan),
    )
    trainer, twin = engine(model_path()), engine(model_path())
    for each in (trainer, twin):
        each.train_step(rows, StepContext())
    before = weights(trainer)
    report = trainer.train_step([rows[0], broken], StepContext())
    assert report.skipped
    assert np.isnan(report.metrics["loss"])
    assert_same(weights(trainer), before)
    # neither gradient nor optimizer state of the skipped step is left
    assert not trainer.train_step(rows, StepContext()).skipped
    twin.train_step(rows, StepContext())
    assert_same(weights(trainer), weights(twin))


def test_log_probs_after_a_step_are_those_of_the_new_weights(model_path: ModelPath, tmp_path: Path) -> None:
    trainer, rows = engine(model_path()), random_rows(3)
    trainer.learner.save(tmp_path / "start", {})
    before = trainer.forward_logprobs(rows)
    trainer.train_step(rows, StepContext())
    after = trainer.forward_logprobs(rows)
    assert not np.array_equal(after[0], before[0])
    trainer.learner.load(tmp_path / "start")
    for restored, original in zip(trainer.forward_logprobs(rows), before, strict=True):
        assert np.array_equal(restored, original)


def test_a_checkpoint_is_of_the_moment_of_its_copy_though_steps_were_made_before_it_was_written(
    model_path: ModelPath, tmp_path: Path
) -> None:
    trainer = engine(model_path())
    trainer.train_step(random_rows(4), StepContext())
    trainer.learner.copy_state()
    at_copy, expected = weights(trainer), trainer.train_step(random_rows(4, seed=1), StepContext()).metrics
    writing = ThreadPoolExecutor(1).submit(trainer.learner.save, tmp_path / "version_1", {"version": 1})
    for seed in range(2, 5):
        trainer.train_step(random_rows(4, seed=seed), StepContext())
    writing.result()
    resumed = engine(model_path())
    assert resumed.learner.load(tmp_path / "version_1") == {"version": 1}
    assert_same(weights(resumed), at_copy)
    assert resumed.train_step(random_rows(4, seed=1), StepContext()).metrics == expected


def test_nothing_is_copied_over_what_is_being_written(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, begun, go_on = engine(model_path()), Event(), Event()

    def slow(*args: Any, **kwargs: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        save(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", slow)
    trainer.learner.copy_state()
    writing = ThreadPoolExecutor(1).submit(trainer.learner.save, tmp_path / "version_1", {})
    assert begun.wait(60)
    with pytest.raises(RunError, match="still being written"):
        trainer.learner.copy_state()
    go_on.set()
    writing.result()
    trainer.learner.copy_state()


def test_training_resumes_bit_for_bit(model_path: ModelPath, tmp_path: Path) -> None:
    config = configured(optim=OptimConfig(lr=1e-2, lr_warmup_steps=2, lr_scheduler_type="cosine"))
    batches = [random_rows(5, seed=seed) for seed in range(5)]
    trainer = engine(model_path(), config)
    for rows in batches[:2]:
        trainer.train_step(rows, StepContext())
    trainer.learner.save(tmp_path / "checkpoint", {"version": 3, "ledger": {"trained": [1, 2]}})
    expected = [trainer.train_step(rows, StepContext()).metrics for rows in batches[2:]]

    resumed = engine(model_path(), config)
    assert resumed.learner.load(tmp_path / "checkpoint") == {"version": 3, "ledger": {"trained": [1, 2]}}
    assert [resumed.train_step(rows, StepContext()).metrics for rows in batches[2:]] == expected
    assert_same(weights(resumed), weights(trainer))


def test_the_optimizers_settings_are_those_of_the_run_that_resumes(model_path: ModelPath, tmp_path: Path) -> None:
    """Its state is the checkpoint's; what is configured anew has an effect."""
    rows = random_rows(5)
    trainer = engine(model_path(), configured(optim=OptimConfig(lr=1e-2, weight_decay=0.1)))
    trainer.train_step(rows, StepContext())
    trainer.learner.save(tmp_path / "checkpoint", {})

    def after_a_step(weight_decay: float) -> dict[str, torch.Tensor]:
        resumed = engine(model_path(), configured(optim=OptimConfig(lr=1e-2, weight_decay=weight_decay)))
        resumed.learner.load(tmp_path / "checkpoint")
        before = weights(resumed)
        resumed.train_step(rows, StepContext())
        return {name: after - before[name] * (1 - 1e-2 * weight_decay) for name, after in weights(resumed).items()}

    # AdamW decays apart from its step: what is left once the decay is taken off is the same step.
    little, much = after_a_step(0.1), after_a_step(0.5)
    for name, step in little.items():
        torch.testing.assert_close(much[name], step, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_replaces_the_one_before_it(model_path: ModelPath, tmp_path: Path) -> None:
    trainer = engine(model_path())
    trainer.learner.save(tmp_path / "latest", {"version": 1})
    trainer.train_step(random_rows(2), StepContext())
    trainer.learner.save(tmp_path / "latest", {"version": 2})
    assert engine(model_path()).learner.load(tmp_path / "latest") == {"version": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["latest"]


def test_a_folder_without_a_checkpoint_is_an_error(model_path: ModelPath, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no checkpoint there"):
        engine(model_path()).learner.load(tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_an_error(model_path: ModelPath, tmp_path: Path) -> None:
    engine(model_path("qwen3")).learner.save(tmp_path / "checkpoint", {})
    with pytest.raises(ModelError, match="does not fit this model"):
        engine(model_path("qwen2")).learner.load(tmp_path / "checkpoint")


@mostly_slow(("architecture", "tie"), [("qwen3", True), ("qwen2", False), ("llama", True)], quick=[("qwen3", True)])
def test_an_exported_folder_opens_with_hugging_face_alone(
    model_path: ModelPath, tmp_path: Path, architecture: str, tie: bool
) -> None:
    trainer, rows = engine(model_path(architecture, tie)), random_rows(3)
    trainer.train_step(rows, StepContext())
    trainer.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("0a1b").input_ids) == "0a1b"
    assert dict(model.named_parameters()).keys() == weights(trainer).keys()
    for row, logprobs in zip(rows, trainer.forward_logprobs(rows), strict=True):
        expected, _ = response_logprobs(model, row, temperature=0.7)
        np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=1e-5)


def test_a_model_of_which_transformers_marks_no_layer_is_refused(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be gathered as a whole, and nothing of it computed again."""
    monkeypatch.setattr(sharded_module, "GradientCheckpointingLayer", Event)
    with pytest.raises(ModelError, match="has no layers that transformers marks as a decoder's"):
        engine(model_path())


def test_an_exported_folder_has_the_dtype_that_is_trained_in(model_path: ModelPath, tmp_path: Path) -> None:
    config = configured()
    half = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    engine(model_path(), half).export(tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {parameter.dtype for parameter in exported.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("tie", [True, False])
def test_gathered_buckets_carry_every_weight_once(model_path: ModelPath, tie: bool) -> None:
    model = load_model(model_path("llama", tie), dtype=torch.float32)
    assert_same(weights(engine(model_path("llama", tie))), {n: p.detach() for n, p in model.named_parameters()})
    assert ("lm_head.weight" in weights(engine(model_path("llama", tie)))) is not tie


def test_the_reference_stays_where_it_was_while_the_policy_moves(model_path: ModelPath) -> None:
    config, rows = configured(), random_rows(4)
    trainer = engine(model_path(), config)
    reference = frozen_policy(model_path(), config, TrainMesh.make(ParallelConfig(), CPU))
    before = forward_sharded(reference, rows)
    for logprobs, ours in zip(before, trainer.forward_logprobs(rows), strict=True):
        assert np.array_equal(logprobs, ours)
    trainer.train_step(rows, StepContext())
    for logprobs, again in zip(before, forward_sharded(reference, rows), strict=True):
        assert np.array_equal(logprobs, again)


def test_a_row_that_lacks_what_the_loss_needs_is_an_error(model_path: ModelPath) -> None:
    [row] = random_rows(1)
    with pytest.raises(ValueError, match="has no advantages"):
        engine(model_path()).train_step([without_column(row, "advantages")], StepContext())
    with pytest.raises(ValueError, match="has no ref_logprobs"):
        engine(model_path(), configured(use_kl_loss=True)).train_step([row], StepContext())


def test_a_step_after_one_that_failed_starts_from_nothing(model_path: ModelPath) -> None:
    trainer, twin, rows = engine(model_path()), engine(model_path()), random_rows(6)
    shortest = min(range(6), key=lambda i: len(rows[i].input_ids))  # the last micro-batch
    broken = [without_column(row, "advantages") if i == shortest else row for i, row in enumerate(rows)]
    with pytest.raises(ValueError, match="has no advantages"):
        trainer.train_step(broken, StepContext())
    assert trainer.train_step(rows, StepContext()) == twin.train_step(rows, StepContext())
    assert_same(weights(trainer), weights(twin))


def test_a_step_without_rows_is_an_error(model_path: ModelPath) -> None:
    with pytest.raises(ValueError, match="needs rows"):
        engine(model_path()).train_step([], StepContext())


def test_half_precision_computes_and_serves_so_but_keeps_float32_weights(model_path: ModelPath) -> None:
    rows, config = random_rows(6), configured().model_copy(update={"model": ModelConfig(dtype="bfloat16")})
    trainer = engine(model_path(), config)
    model = load_model(model_path(), dtype=torch.float32)
    for row, logprobs in zip(rows, trainer.forward_logprobs(rows), strict=True):
        expected, _ = response_logprobs(model, row, temperature=0.7)
        np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=0.02)
    assert not trainer.train_step(rows, StepContext()).skipped
    assert {slot.dtype for slot in trainer.manifest(torch.bfloat16).slots} == {"bfloat16"}
    assert {p.dtype for p in trainer._policy.parameters()} == {torch.float32}


def test_an_empty_prompt_is_an_error() -> None:
    [row] = random_rows(1)
    with pytest.raises(ValueError, match="empty prompt"):
        collate([dataclasses.replace(row, prompt_length=0)])


def test_a_loss_of_ones_own_is_told_the_clip_range_and_its_own_keys(model_path: ModelPath, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def loss(inputs, params):\n"
        "    told = params.own.strength + params.clip_low + 10 * params.clip_high\n"
        "    return 0 * inputs.logprobs, {'told': 0 * inputs.logprobs.detach() + told}\n"
    )
    own = {"policy_loss": {"loss_mode": f"{tmp_path}/mine.py:loss", "strength": 3}}
    config = configured(clip_ratio=0.25, clip_ratio_high=0.5)
    config = config.model_copy(update={"algorithm": AlgorithmConfig.model_validate(own)})
    report = engine(model_path(), config).train_step(random_rows(4), StepContext())
    assert report.metrics["told"] == pytest.approx(3 + 0.25 + 5)
