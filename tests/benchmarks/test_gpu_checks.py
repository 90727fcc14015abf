"""Every check of `python -m benchmarks.gpu` in its CPU form: passes as things are, and finds what is planted."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu_checks import demo, engine, serving, speed, training, transports
from benchmarks.gpu_checks.lanes import CHECKS
from benchmarks.gpu_checks.models import HALF_BILLION
from benchmarks.gpu_checks.setting import CheckFailed, Findings, Setting
from benchmarks.shapes import work
from headway.config.transport_facts import TRANSPORTS
from headway.data.interfaces.rollout import Paused
from headway.data.interfaces.training import StepReport
from headway.data.packing import Segments
from headway.devices import Compute
from headway.engines.rollout.native import decode_batch
from headway.engines.rollout.native.decode_batch import DecodeRows
from headway.engines.rollout.native.kv_cache import SlotCache
from headway.engines.rollout.native.model_runner import ModelRunner
from headway.engines.rollout.native.native_core import EngineCore
from headway.engines.train.fsdp import engine as fsdp_engine
from headway.engines.train.fsdp import learner, sharded_module
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.train.fsdp.sharded_module import ShardedModule
from headway.engines.weights.buckets import Tensors
from headway.engines.weights.served_weights import WeightMemory
from headway.engines.weights.transports.broadcast import BroadcastSender
from headway.models.attention.packed_layout import PackedLayout
from tests.tiers import mostly_slow

Made = Callable[[Setting], Findings]
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting("cpu", tmp_path_factory.mktemp("gpu-checks"), small=True)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at how long they take."""
    monkeypatch.setattr(speed, "STEPS", 1)
    monkeypatch.setattr(speed, "DECODE_STEPS", 4)


# ---------------------------------------------------------------------------------------- as things are


@mostly_slow(
    "check",
    [
        engine.logprobs,
        engine.decoding,
        training.training,
        training.compiled,
        training.gradients,
        training.fsdp,
        transports.transports,
        transports.updating_speed,
        serving.update,
        serving.sleep,
        speed.training_speed,
        speed.decoding_speed,
        speed.steps,
    ],
    quick=[training.fsdp, transports.transports, transports.updating_speed, speed.decoding_speed],
    ids=lambda check: check.__name__,
)
def test_a_check_passes_in_its_cpu_form_and_says_what_it_found(
    check: Made, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some checks train or decode a small model for seconds. Layers are compiled in `test_gpu_bench`'s slow test."""
    monkeypatch.setattr(ShardedModule, "compile_parts", lambda self: None)
    found = list(check(setting))
    function = f"{check.__module__.rpartition('.')[2]}:{check.__name__}"
    (listed,) = (one for one in CHECKS.values() if one.function == function)
    assert {one.name for one in found} == set(listed.findings)
    assert all(one.text for one in found)
    assert all(isinstance(line, str) for one in found for line in one.lines)
    if check is transports.transports:
        assert {one.text.partition(":")[0] for one in found if one.name == "transports"} == set(TRANSPORTS)


# ---------------------------------------------------------------------------------------- planted defects


def trainer_forgets_the_temperature(patch: pytest.MonkeyPatch) -> None:
    right = sharded_module.chunked_logprobs
    patch.setattr(sharded_module, "chunked_logprobs", lambda *given, **named: right(*given[:4], 1.0, **named))


def engine_serves_other_weights_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    right = engine.on_device

    def wrong(folder: Path, setting: Setting, dtype: torch.dtype = torch.float32) -> Any:
        model = right(folder, setting, dtype)
        if dtype is torch.bfloat16:
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight.mul_(0.5)
        return model

    patch.setattr(engine, "on_device", wrong)


def graphs_are_not_replayed(patch: pytest.MonkeyPatch) -> None:
    def record(self: object, compute: Compute) -> Compute:
        compute()
        return lambda: None

    patch.setattr(engine.RunsAgain, "record", record)


def graphs_are_right_once(patch: pytest.MonkeyPatch) -> None:
    def record(self: object, compute: Compute) -> Compute:
        replays = iter([compute])

        def replay() -> None:
            next(replays, lambda: None)()

        return replay

    patch.setattr(engine.RunsAgain, "record", record)


def contexts_that_come_back_are_damaged(patch: pytest.MonkeyPatch) -> None:
    right, filled = SlotCache.fill, WeakKeyDictionary[SlotCache, int]()

    def wrong(self: SlotCache, rows: range, kv: torch.Tensor) -> None:
        filled[self] = filled.get(self, 0) + 1
        right(self, rows, kv if filled[self] <= 4 else 1.5 * kv)  # four prompts

    patch.setattr(SlotCache, "fill", wrong)


def running_ahead_looks_at_what_was_read(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: DecodeRows, steps: int) -> Any:
        a = self.active
        return decode_batch.uniforms(self._keys[:a], self._written[:a] + np.arange(steps)[:, None])

    patch.setattr(DecodeRows, "uniforms", wrong)


def only_some_are_interrupted(patch: pytest.MonkeyPatch) -> None:
    right = EngineCore.pause
    patch.setattr(EngineCore, "pause", lambda self, policy: Paused(right(self, policy).interrupted - 1))


def attention_goes_by_another_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "ATTENTION", re.compile("no such kernel"))


def a_gpu_has_no_sampling_kernel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Setting, "on_gpu", True)


def a_gpu_has_no_varlen_attention(patch: pytest.MonkeyPatch) -> None:
    right = engine.sampled_rows
    patch.setattr(engine, "has_kernel", lambda device: True)

    def on_a_gpu_if_bfloat16(setting: Setting, folder: Path, dtype: str) -> Any:
        with patch.context() as here:
            here.setattr(Setting, "on_gpu", dtype == "bfloat16")
            return right(setting, folder, dtype)

    patch.setattr(engine, "sampled_rows", on_a_gpu_if_bfloat16)


def greedy_takes_the_least_likely(patch: pytest.MonkeyPatch) -> None:
    right = decode_batch.sample
    patch.setattr(
        decode_batch, "sample", lambda logits, how, u: right(-logits if how.greedy is not None else logits, how, u)
    )


def filters_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = decode_batch.sample
    patch.setattr(decode_batch, "sample", lambda logits, how, u: right(logits, replace(how, top_p=None), u))


def contexts_of_one_step_are_mixed_up(patch: pytest.MonkeyPatch) -> None:
    right = ModelRunner.step

    def wrong(self: ModelRunner, tokens: Any, positions: Any, lengths: Any, contexts: Any, *more: Any) -> Any:
        logits, prefilled = right(self, tokens, positions, lengths, contexts, *more)
        return logits, prefilled[::-1] if len(contexts) == len(engine.MIXED) else prefilled

    patch.setattr(ModelRunner, "step", wrong)


def predictors_are_off_by_one(patch: pytest.MonkeyPatch) -> None:
    right = fsdp_engine.collate

    def wrong(*given: Any) -> Any:
        batch = right(*given)
        object.__setattr__(batch, "predictors", batch.predictors.roll(1))
        return batch

    patch.setattr(fsdp_engine, "collate", wrong)


def steps_are_twice_as_long(patch: pytest.MonkeyPatch) -> None:
    right = learner.learning_rate
    patch.setattr(learner, "learning_rate", lambda *given: 2 * right(*given))


def off_by_a_hundredth(method: str) -> Plant:
    """Layers are not what they were once ``method`` of the module has wrapped them."""

    def wrong(self: ShardedModule) -> None:
        for layer in self.decoder_layers:
            layer.forward = lambda *given, right=layer.forward, **more: 1.01 * right(*given, **more)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ShardedModule, method, wrong)

    plant.__name__ = f"{method}_is_off"
    return plant


def windows_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = PackedLayout.parts
    patch.setattr(PackedLayout, "parts", lambda self, window: right(self, None))


def answers_see_each_other(patch: pytest.MonkeyPatch) -> None:
    right = fsdp_engine.collate

    def wrong(*given: Any) -> Any:
        batch = right(*given)
        if batch.layout is not None:  # each token after all that stand before it in the line
            tokens = len(batch.layout.positions)
            one = Segments(*(np.array([value]) for value in (0, -1, tokens)))
            object.__setattr__(batch, "layout", PackedLayout(one, batch.layout.positions))
        return batch

    patch.setattr(fsdp_engine, "collate", wrong)


def gathering_leaves_bytes_out(patch: pytest.MonkeyPatch) -> None:
    right = fsdp_engine.gather

    def wrong(*given: Any, **more: Any) -> Any:
        for offset, data in right(*given, **more):
            data[-8:] = 0
            yield offset, data

    patch.setattr(fsdp_engine, "gather", wrong)


def checkpoints_are_not_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(learner.Learner, "load", lambda self, path: {"step": 0})


def the_last_value_is_not_written(patch: pytest.MonkeyPatch) -> None:
    right = Tensors.write
    patch.setattr(Tensors, "write", lambda self, offset, data: right(self, offset, data[:-64]))


def new_weights_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    right = EngineCore.activate
    patch.setattr(EngineCore, "activate", lambda self, version, load: right(self, version, lambda: None))


def tokens_keep_the_old_version(patch: pytest.MonkeyPatch) -> None:
    right = EngineCore.activate

    def wrong(self: EngineCore, version: int, load: Callable[[], None]) -> float:
        seconds = right(self, version, load)
        self.version = 0
        return seconds

    patch.setattr(EngineCore, "activate", wrong)


def sleep_keeps_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotCache, "release", lambda self: None)


def sleep_keeps_the_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightMemory, "drop", lambda self: None)


def other_weights_wake_up(patch: pytest.MonkeyPatch) -> None:
    right = serving.receive_from
    patch.setattr(serving, "receive_from", lambda weights, *more: right({n: 0.5 * w for n, w in weights.items()}))


def losses_are_not_finite(patch: pytest.MonkeyPatch) -> None:
    report = StepReport(skipped=True, metrics={"loss": float("nan")})
    patch.setattr(FsdpEngine, "train_step", lambda *given: report)


def nothing_is_interrupted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineCore, "pause", lambda self, policy: Paused(0))


def answers_are_cut_short(patch: pytest.MonkeyPatch) -> None:
    right = speed.Native.run
    patch.setattr(speed.Native, "run", lambda self, asked: [length - 1 for length in right(self, asked)])


PLANTED: list[tuple[Made, Plant, str]] = [
    (engine.logprobs, trainer_forgets_the_temperature, "engine and trainer differ: head size 128 float32"),
    (engine.logprobs, engine_serves_other_weights_in_bfloat16, "engine and trainer differ: head size 128 bfloat16"),
    (engine.decoding, graphs_are_not_replayed, "gave CUDA graphs up"),
    (engine.decoding, graphs_are_right_once, "with CUDA graphs .*, .* without"),
    (engine.decoding, contexts_that_come_back_are_damaged, "prefilled again after an interrupt"),
    (engine.logprobs, attention_goes_by_another_name, "the profile has no attention"),
    (engine.logprobs, a_gpu_has_no_sampling_kernel, "float32: the engine fell back from the kernel that samples;"),
    (engine.logprobs, a_gpu_has_no_varlen_attention, r"bfloat16: the engine fell back from attention .* \(varlen\);"),
    (engine.decoding, only_some_are_interrupted, "11 of 12 were interrupted"),
    (engine.decoding, running_ahead_looks_at_what_was_read, "with 1 steps launched ahead"),
    (engine.decoding, greedy_takes_the_least_likely, "greedy, .* by transformers.generate"),
    (engine.decoding, filters_are_forgotten, "top-p: a log-prob is"),
    (engine.decoding, contexts_of_one_step_are_mixed_up, "prefilled together, .* one by one|differs from token"),
    (training.training, predictors_are_off_by_one, "float32: the gradient is off by"),
    (training.training, steps_are_twice_as_long, "AdamW's step is off by 1 of its norm"),
    (training.training, off_by_a_hundredth("recompute_activations"), "with recomputation: the gradient is off by"),
    (training.compiled, off_by_a_hundredth("compile_parts"), "float32: the gradient is off by"),
    (training.gradients, answers_see_each_other, "packed, float32: the gradient is off by"),
    (training.gradients, windows_are_forgotten, "windows rows are padded: its hidden states"),
    (training.fsdp, gathering_leaves_bytes_out, "gathered from the ranks are not those of the model's folder"),
    (training.fsdp, checkpoints_are_not_read, "brought other weights back"),
    (transports.transports, the_last_value_is_not_written, "version 1 .* came with other bits"),
    (serving.update, new_weights_are_not_loaded, "off that of its version's weights|cannot"),
    (serving.update, tokens_keep_the_old_version, "tokens are of versions"),
    (serving.sleep, sleep_keeps_the_cache, r"sleep freed \d+ MiB of"),
    (serving.sleep, sleep_keeps_the_weights, r"sleep freed \d+ MiB of"),
    (serving.sleep, other_weights_wake_up, "after waking up"),
    (speed.training_speed, losses_are_not_finite, "a loss of nan"),
    (speed.decoding_speed, answers_are_cut_short, "tokens, not"),
    (speed.steps, nothing_is_interrupted, "could be interrupted"),
    (transports.updating_speed, the_last_value_is_not_written, "0.5 B, beside decoding: .* have other bits"),
]

SECONDS = (engine.logprobs, training.gradients, serving.sleep)
"""Checks that train or decode for so long, and share most of their code with others."""


@mostly_slow(
    ("check", "plant", "said"),
    PLANTED,
    quick=[one for one in {of[0]: of for of in reversed(PLANTED)}.values() if one[0] not in SECONDS],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_check_finds_what_is_planted_and_names_it(
    check: Made, plant: Plant, said: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some checks find it after seconds of training or decoding."""
    plant(monkeypatch)
    with pytest.raises(CheckFailed, match=said):
        list(check(setting))


# ---------------------------------------------------------------------------------------- the demo's verdict


SUMMARY: dict[str, Any] = {
    "status": "completed",
    "reason": None,
    "balanced": True,
    "groups": {"trained": 16},
    "skipped_steps": 0,
    "optimizer_steps": 8,
    "version": 2,
    "param_update": {"count": 2},
    "throughput": {"generated_tokens_per_s": 100.0},
    "eval": [{"accuracy": 0.25}, {"accuracy": 0.5}],
}


def finished_run(directory: Path, **changes: Any) -> Path:
    for number, folder in enumerate(("initial_model", "model")):
        (directory / folder).mkdir(parents=True)
        save_file({"weight": torch.tensor([float(number)])}, directory / folder / "model.safetensors")
    (directory / "summary.json").write_text(json.dumps({**SUMMARY, **changes}))
    rows = [{"version": 0}, {"reward/generated_mean": 0.1}, {"reward/generated_mean": 0.2}]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return directory


def test_a_run_that_did_what_was_asked_for_passes(tmp_path: Path) -> None:
    found = list(demo.verdict(finished_run(tmp_path / "run"), 16, seconds=1.0, learns=True))
    assert [one.name for one in found] == list(CHECKS["demo"].findings)
    assert [one.text for one in found[1:]] == ["0.10 → 0.20", "0.25 → 0.50"]


def test_a_run_that_was_told_to_end_passes_with_what_it_did(tmp_path: Path) -> None:
    told = finished_run(tmp_path / "run", status="interrupted", groups={"trained": 3})
    assert "3 groups" in next(demo.verdict(told, None, seconds=1.0, learns=True)).text
    with pytest.raises(CheckFailed, match="'interrupted'"):
        list(demo.verdict(told, 16, seconds=1.0, learns=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"status": "failed", "reason": "a worker died"}, "'failed': a worker died"),
        ({"balanced": False}, "does not balance"),
        ({"groups": {"trained": 15}}, "15 groups were trained; 16"),
        ({"skipped_steps": 1}, "1 optimizer steps .*not finite"),
        ({"param_update": {"count": 1}}, "1 updates .*version 2"),
        ({"eval": [{"accuracy": 0.5}, {"accuracy": 0.5}]}, "validation did not rise: 0.50 → 0.50"),
        ({"eval": [{"accuracy": 0.5}]}, "validation did not rise: 0.50"),
    ],
)
def test_a_run_that_did_something_else_fails(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckFailed, match=said):
        list(demo.verdict(finished_run(tmp_path / "run", **changes), 16, seconds=1.0, learns=True))


def test_a_run_that_moved_no_weight_or_has_no_rewards_fails(tmp_path: Path) -> None:
    directory = finished_run(tmp_path / "run")
    (directory / "metrics.jsonl").write_text('{"reward/generated_mean": NaN}')
    with pytest.raises(CheckFailed, match=r"no rewards, .*\[nan\]"):
        list(demo.verdict(directory, 16, seconds=1.0, learns=True))
    shutil.copy(directory / "initial_model" / "model.safetensors", directory / "model")
    with pytest.raises(CheckFailed, match="weights as they were"):
        list(demo.verdict(directory, 16, seconds=1.0, learns=True))


def test_validation_is_asked_of_a_model_that_can_learn_and_had_the_time(tmp_path: Path) -> None:
    flat = [{"accuracy": 0.0}, {"accuracy": 0.0}]
    assert list(demo.verdict(finished_run(tmp_path / "small", eval=flat), 16, seconds=1.0, learns=False))
    told = finished_run(tmp_path / "told", status="interrupted", eval=flat[:1])
    assert list(demo.verdict(told, None, seconds=1.0, learns=True))


def test_a_run_without_a_model_or_a_summary_fails(tmp_path: Path) -> None:
    directory = finished_run(tmp_path / "run")
    (directory / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckFailed, match="no exported model"):
        list(demo.verdict(directory, 16, seconds=1.0, learns=True))
    with pytest.raises(CheckFailed, match="no summary"):
        list(demo.verdict(tmp_path, 16, seconds=1.0, learns=True))


@pytest.mark.slow
def test_a_run_that_does_not_start_fails_with_what_it_printed() -> None:
    with pytest.raises(CheckFailed, match=r"exit code \d+: .*nonsense"):
        demo.train(["nonsense.key=1"])


# ---------------------------------------------------------------------------------------- figures


def test_the_flops_of_a_step_are_six_for_each_weight_and_token_and_those_of_attention() -> None:
    rows = speed.rows_of_length(HALF_BILLION, 1, 64)
    weights = 493_961_216  # without norms and biases; the embedding is the head
    head = 151_936 * 896
    by_hand = 6.0 * ((weights - head) * 64 + head * 48) + 6.0 * 24 * 896 * 64**2
    assert work("packed", rows, 64).flops(HALF_BILLION) == pytest.approx(by_hand, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA A100-SXM4-40GB", 312.0), ("GTX 9", None)],
)
def test_the_peak_that_is_assumed_goes_by_the_devices_name(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert speed.peak_tflops(Setting("cuda", tmp_path)) == peak


# ---------------------------------------------------------------------------------------- several processes


@pytest.mark.slow
def test_two_ranks_and_two_processes_pass_and_what_is_planted_in_one_of_them_is_found(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 5 s: starts eight processes, each of which imports torch."""
    two = Setting("cpu", setting.scratch, small=True, ranks=2)
    assert "2 ranks, Gloo" in next(training.fsdp(two)).text
    assert "2 processes" in next(transports.broadcast(setting)).text
    right_rows, right_payload = training.random_rows, transports.payload
    expected = training.reference(training.peaked_model(setting), right_rows(setting))
    monkeypatch.setattr(training, "reference", lambda folder, rows: expected)  # the rows below are others
    monkeypatch.setattr(training, "random_rows", lambda setting: right_rows(setting)[1:])
    with pytest.raises(CheckFailed, match=r"on 2 ranks: float32: .*gradient"):
        list(training.fsdp(two))
    monkeypatch.setattr(transports, "payload", lambda version, *more: right_payload(version + 1, *more))
    with pytest.raises(CheckFailed, match="other bytes than were sent"):
        list(transports.broadcast(setting))


@pytest.mark.slow
def test_a_broadcast_of_versions_that_is_slower_than_plain_collectives_is_found(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 5 s: starts a process that imports torch, and lets each bucket wait."""
    right = BroadcastSender._header

    def slowly(self: BroadcastSender, *numbers: Any) -> None:
        time.sleep(0.6)
        right(self, *numbers)

    monkeypatch.setattr(BroadcastSender, "_header", slowly)
    with pytest.raises(CheckFailed, match=r"sent at .* GB/s, plain collectives"):
        list(transports.broadcast(setting))
