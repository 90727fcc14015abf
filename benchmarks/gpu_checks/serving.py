"""A replica's life on a device: updates while it decodes, sleep that frees memory, and waking up the same."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from benchmarks.gpu_checks.models import checked_shape, manifest_of, on_device, peaked_model, receive_from, requests
from benchmarks.gpu_checks.setting import Finding, Findings, Setting, require
from benchmarks.rollout_engines import native_engine
from benchmarks.shapes import Shape
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import OnUpdate
from headway.engines.rollout.native.engine import NativeEngine

TOLERANCE = 2e-3
"""Nats, in float32."""
BUCKET = 65_536
WAIT_S = 60.0
"""Limit for a version to be received, and for an answer to be written."""
LEAST_FREED = 0.9
"""Least share of weights and KV cache that sleep frees, as the device counts its memory. Allocators round."""
SLEEPER = Shape("sleeper", 32_000, 1024, 8, heads=16, kv_heads=8, intermediate=4096, context=2048)
"""About 170 M parameters."""
SMALL_SLEEPER = Shape("small-sleeper", 900, 128, 8, heads=8, kv_heads=8, intermediate=448, context=256)
"""No matrix of it is so large that the engine keeps a second copy on a CPU."""
SLOTS = 16


# ---------------------------------------------------------------------------------------- updates


def update(setting: Setting) -> Findings:
    """Weights that arrive while a replica decodes: every token is of one version, and says which."""
    folders = [peaked_model(setting, seed=seed) for seed in (0, 1)]
    models = [on_device(folder, setting) for folder in folders]
    references = [on_device(folder, Setting("cpu", setting.scratch)) for folder in folders]
    for dual_buffer in (True, False):
        groups, probed = asyncio.run(_updated(setting, folders[0], models[1], dual_buffer))
        worst = max(
            float(np.abs(r.logprobs[mine] - of_reference(references[version], group, k)[mine]).max())
            for group in groups
            for k, r in enumerate(group.tokens)
            for version in np.unique(r.versions)
            for mine in [r.versions == version]
        )
        way = "beside decoding" if dual_buffer else "over the weights"
        versions = {int(v) for group in groups for r in group.tokens for v in r.versions}
        require(versions == {0, 1}, f"received {way}: tokens are of versions {sorted(versions)}, expected 0 and 1")
        require(
            worst <= TOLERANCE,
            f"received {way}: a token's log-prob is {worst:.2g} nats off that of its version's weights "
            f"(limit {TOLERANCE:g})",
        )
        off = float(np.abs(probed - asyncio.run(_probe(setting, folders[1]))).max())
        require(off <= TOLERANCE, f"received {way}: the probe is {off:.2g} nats off that of the weights that were sent")
        answers = sum(len(group.tokens) for group in groups)
        yield Finding(way, f"{answers} answers in mid-flight, every token within {worst:.1g} nats of its version's")


async def _updated(
    setting: Setting, folder: Path, new: PreTrainedModel, dual_buffer: bool
) -> tuple[list[Group], NDArray[np.float32]]:
    """Answers that begin under version 0 and end under version 1, and the probe of version 1."""
    context = checked_shape(setting).context
    asked = requests([5, 30, 60], checked_shape(setting).vocabulary, n=2, tokens=300 if setting.small else context - 64)
    receive = receive_from(dict(new.named_parameters()), BUCKET)
    more = {"receive": receive, "manifest": manifest_of(new), "dual_buffer": dual_buffer}
    async with _serving(setting, on_device(folder, setting), context, **more) as engine, asyncio.timeout(WAIT_S):
        answering = asyncio.create_task(_answers(engine, asked))
        while not (await engine.stats()).generated_tokens:  # answered between two steps
            pass
        if not dual_buffer:
            await engine.pause(OnUpdate.INTERRUPT)
        await engine.stage_weights(1)
        if dual_buffer:
            await engine.pause(OnUpdate.INTERRUPT)
        await engine.activate(1)
        await engine.resume()
        groups = await answering
        probed = await engine.probe()
        assert probed is not None
        return groups, probed


async def _probe(setting: Setting, folder: Path) -> NDArray[np.float32]:
    async with _serving(setting, on_device(folder, setting), checked_shape(setting).context) as engine:
        probed = await engine.probe()
        assert probed is not None
        return probed


def of_reference(model: PreTrainedModel, group: Group, k: int) -> NDArray[np.float32]:
    """[T] log-probs of an answer by one plain forward pass on the CPU."""
    prompt, response = group.tokens[0].prompt_ids, group.tokens[k].ids
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    with torch.no_grad():
        logp = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    chosen: NDArray[np.float32] = logp[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]).squeeze(1).numpy()
    return chosen


# ---------------------------------------------------------------------------------------- sleep


def sleep(setting: Setting) -> Findings:
    """What sleep frees by the device's own count, with weights that are kept and that are given up, and waking up."""
    for keep in (True, False):
        found = asyncio.run(_slept(setting, keep))
        title = "weights kept" if keep else "weights given up"
        if not (keep and not setting.on_gpu):  # on a CPU they stay where they are
            share = found["freed"] / found["held"]
            require(
                share >= LEAST_FREED,
                f"{title}: sleep freed {found['freed'] / 2**20:.0f} MiB of {found['held'] / 2**20:.0f} MiB of weights "
                f"and KV cache ({share:.0%}, at least {LEAST_FREED:.0%} expected), by the device's own count",
            )
        require(
            found["off"] <= TOLERANCE,
            f"{title}: after waking up the probe is {found['off']:.2g} nats off that of before (limit {TOLERANCE:g})",
        )
        text = f"{found['freed'] / 2**20:.0f} of {found['held'] / 2**20:.0f} MiB free in sleep"
        yield Finding(title, f"{text}; awake again, the probe is within {found['off']:.1g} nats")


async def _slept(setting: Setting, keep: bool) -> dict[str, float]:
    shape = SMALL_SLEEPER if setting.small else SLEEPER
    model = shape.random().eval().to(setting.device)
    manifest = manifest_of(model)
    weights = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
    asked = requests([40] * 4, shape.vocabulary, tokens=16)
    # In place: a back buffer is host memory, which a GPU does not see, and a CPU would count.
    more = {
        "receive": receive_from(weights),
        "manifest": manifest,
        "dual_buffer": False,
        "kv_cache_bytes": _kv_bytes(shape),
    }
    async with _serving(setting, model, shape.context, **more) as engine, asyncio.timeout(WAIT_S):
        await _answers(engine, asked)
        before = await engine.probe()
        held = manifest.nbytes * keep * setting.on_gpu + manifest.nbytes * (not keep) + _kv_bytes(shape)
        await engine.pause(OnUpdate.INTERRUPT)
        awake = free_bytes(setting)
        await engine.sleep(keep_weights=keep)
        freed = free_bytes(setting) - awake
        if not keep:
            await engine.stage_weights(1)
            await engine.activate(1)
        await engine.wake()
        await engine.resume()
        after = await engine.probe()
        answers = await _answers(engine, asked)
        require(len(answers) == len(asked), f"{len(answers)} of {len(asked)} requests answered after waking up")
    assert before is not None and after is not None
    return {"freed": float(freed), "held": float(held), "off": float(np.abs(after - before).max())}


def free_bytes(setting: Setting) -> int:
    """Memory that nobody has, by the device's own count; on a CPU, relative to what this process has."""
    if setting.on_gpu:
        setting.wait()
        return torch.cuda.mem_get_info()[0]
    ctypes.CDLL(None).malloc_trim(0)  # else what is free may stay with the C library
    return -int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _kv_bytes(shape: Shape) -> int:
    """Size of the engine's cache, in float32."""
    head_dim = shape.hidden // shape.heads
    return SLOTS * shape.context * shape.layers * 2 * shape.kv_heads * head_dim * 4


# ---------------------------------------------------------------------------------------- shared


@asynccontextmanager
async def _serving(setting: Setting, model: PreTrainedModel, context: int, **more: Any) -> AsyncIterator[NativeEngine]:
    sizes = {"slots": SLOTS, "max_context": context, "max_batched_tokens": 512, "consume_bucket_bytes": BUCKET}
    engine = native_engine(model, **sizes, **more)
    try:
        yield engine
    finally:
        await engine.close()


async def _answers(engine: NativeEngine, asked: Sequence[Group]) -> list[Group]:
    async with local_episode_worker(engine) as worker:
        return [group async for group in worker.generate(asked)]
