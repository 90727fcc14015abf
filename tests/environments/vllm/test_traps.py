"""What is known to go wrong around vLLM, and what the engine makes of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import psutil
import pytest

from headway.data.interfaces.rollout import OnUpdate
from headway.engines.rollout.vllm.engine import VllmEngine, check_manifest, prepare_environment
from headway.engines.weights.weight_layout import Manifest, TensorSlot
from headway.errors import ConfigError, ModelError, RunError, UpdateFailed, WorkerDied
from tests.engines.contract.harness import CONTEXT, endless, make_calls, tokens_of
from tests.engines.rollout.serving import manifest_of
from tests.environments.vllm.serving import TOLERANCE, WAIT_S, Served, drains, tiny

Slots = list[tuple[str, list[int], str, int, int]]


def without_three(slots: Slots) -> Slots:
    return slots[:-3]


def with_a_stranger(slots: Slots) -> Slots:
    return [*slots, ("model.stranger.weight", [4], "float32", 0, 16)]


def with_half_a_tensor(slots: Slots) -> Slots:
    name, (rows, *rest), dtype, offset, nbytes = slots[5]
    return [*slots[:5], (name, [rows // 2, *rest], dtype, offset, nbytes // 2), *slots[6:]]


@pytest.mark.parametrize("spoil", [without_three, with_a_stranger, with_half_a_tensor])
async def test_a_load_that_fails_half_way_is_refused_and_the_next_version_heals(served: Served, spoil: object) -> None:
    """vLLM is left in the middle of a reload; requests that are in flight have to outlive that."""
    task = await served.submit(*(endless(row, n=3) for row in range(2)))
    await served.sampled(40)
    await connect(served, spoil)  # type: ignore[arg-type]
    version = await served.stage()
    await served.engine.pause(OnUpdate.INTERRUPT)
    with pytest.raises(UpdateFailed, match=f"load version {version}"):
        await served.engine.activate(version)
    with pytest.raises(RunError, match="torn"):
        await served.engine.resume()
    with pytest.raises(RunError, match="torn"):
        await served.engine.probe()
    await connect(served, lambda slots: slots)
    await served.engine.stage_weights(version)
    await served.engine.activate(version)
    served.version = version
    np.testing.assert_allclose(await served.engine.probe(), served.probe_reference(), atol=TOLERANCE, rtol=0)
    await served.engine.resume()
    answers = await task
    served.assert_logprobs(answers)
    assert {len(answer.versions) for answer in answers} == {2}


async def connect(served: Served, change: object) -> None:
    """Let the workers believe that the buffers that they map hold something else than they do."""
    engine = served.engine
    assert engine._core is not None
    slots = [(s.name, list(s.shape), s.dtype, s.offset, s.nbytes) for s in served.source.manifest.slots]
    await engine._ask(lambda core: core.state.connect(served.source.manifest.nbytes, change(slots)))


async def test_prompts_that_do_not_fit_into_one_step_together_are_prefilled_one_by_one(served: Served) -> None:
    """In parts, each with a seed of its own, they would end vLLM on a CPU: its generators cannot be turned back."""
    parts = [make_calls(row, n=2, length=CONTEXT - 10, max_tokens=8) for row in range(5)]
    together = await served.collect(*parts)
    served.assert_logprobs(together)
    alone = [answer for part in parts for answer in await served.collect(part)]
    assert tokens_of(together) == tokens_of(alone)


async def test_the_death_of_vllms_processes_reaches_whoever_waits(tmp_path: Path) -> None:
    """Over 5 s: vLLM is started."""
    served = Served(tmp_path / "model")
    resource_tracker.ensure_running()  # Python's own, of this process
    before = set(psutil.Process().children(recursive=True))
    await served.engine.start()
    mine = set(psutil.Process().children(recursive=True)) - before
    try:
        calls: list[asyncio.Task[object]] = [await served.submit(endless(1))]  # type: ignore[list-item]
        await served.sampled(8)
        (core,) = (process for process in mine if "EngineCore" in f"{process.name()} {process.cmdline()}")
        core.suspend()
        calls.append(asyncio.create_task(served.engine.pause(OnUpdate.DRAIN)))
        await served.until(lambda: drains(served))
        calls.append(asyncio.create_task(served.engine.probe()))  # vLLM will never answer this
        core.kill()
        async with asyncio.timeout(WAIT_S):
            for call in calls:
                with pytest.raises(WorkerDied, match="ended"):
                    await call
        with pytest.raises(WorkerDied):
            await served.engine.pause(OnUpdate.KEEP)
    finally:
        await served.engine.close()
    await served.engine.close()  # twice is harmless
    with pytest.raises(RunError, match="closed"):
        await served.engine.stats()
    _, alive = psutil.wait_procs(mine, timeout=20)
    assert [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []


async def test_an_engine_that_has_not_started_says_so(tmp_path: Path) -> None:
    engine = Served(tmp_path / "model").engine
    with pytest.raises(RunError, match=r"await start\(\)"):
        await engine.pause(OnUpdate.KEEP)
    await engine.close()


async def test_settings_that_vllm_does_not_know_are_named(tmp_path: Path) -> None:
    served = Served(tmp_path / "model", options={"no_such_setting": 1})
    with pytest.raises(ConfigError, match="no_such_setting"):
        await served.engine.start()
    await served.engine.close()


@pytest.fixture
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_the_environment_is_prepared_where_the_user_left_it_open(environment: None) -> None:
    for name in ("TORCHDYNAMO_DISABLE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_NO_USAGE_STATS"):
        os.environ.pop(name, None)
    os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
    prepare_environment(on_cpu=True)
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"  # or a first request for log-probs compiles for half a minute
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    os.environ.pop("TORCHDYNAMO_DISABLE")
    prepare_environment(on_cpu=False)
    assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_the_rest_of_headway_runs_without_vllm() -> None:
    """Over 5 s: a process that imports torch and transformers."""
    code = "import sys, headway.api.run, headway.engines.rollout.vllm.engine; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": "src"}, check=True)


def test_updates_have_to_bring_each_weight_of_the_folder_in_its_shape(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path)
    manifest = manifest_of(model)
    check_manifest(manifest, tmp_path)
    slots = manifest.slots
    with pytest.raises(ModelError, match="leave out 1 weights"):
        check_manifest(Manifest(slots[1:]), tmp_path)
    with pytest.raises(ModelError, match="no such tensor"):
        check_manifest(Manifest((*slots, TensorSlot("stranger", (4,), "float32", 0, 16))), tmp_path)
    with pytest.raises(ModelError, match=r"shape \(7,\)"):
        check_manifest(Manifest((replace(slots[0], shape=(7,)), *slots[1:])), tmp_path)


def test_an_engine_without_vllm_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        VllmEngine(tmp_path, name="r", seed=0, slots=1, max_context=8)


async def test_a_model_that_vllm_cannot_compute_with_is_refused_at_the_start(tmp_path: Path) -> None:
    """Attention on CPUs takes some sizes of heads only, and vLLM itself would find that out at the first request."""
    served = Served(tmp_path / "model", shape={"head_dim": 16})
    with pytest.raises(ModelError, match="head_dim=16"):
        await served.engine.start()
    await served.engine.close()


async def test_closing_while_busy_answers_everybody(tmp_path: Path) -> None:
    """Over 5 s: vLLM is started."""
    served = Served(tmp_path / "model")
    await served.engine.start()
    calls = [await served.submit(endless(1), endless(2), endless(3))]
    await served.sampled(20)
    calls.append(asyncio.create_task(served.engine.pause(OnUpdate.DRAIN)))
    await served.until(lambda: drains(served))
    calls.append(await served.submit(endless(4)))
    await served.engine.close()
    for call in calls:
        with pytest.raises(RunError, match="closed"):
            await call
