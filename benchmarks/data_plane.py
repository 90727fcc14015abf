"""The data plane at size: what a fetch of random tokens costs the driver and the trainer's ranks. No model.

    python -m benchmarks.data_plane [--prompts 512] [--answers 16] [--tokens 3277] [--ranks 8]

An episode worker's process writes token files; ranks are processes on Ray that read and touch the rows that they would
train on. Worker group, assignment, files, columns and advantages are those of a run. With the defaults, the number of
groups and rows is that of 512 prompts × 16 answers × 32k tokens, and each answer has a tenth of the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.data_plane_roles import Rank, Writer
from benchmarks.runner import memory_of_process, parser
from benchmarks.table import report
from headway.cluster.machine.token_files import BYTES_PER_TOKEN, SHARED_MEMORY, TokenFile
from headway.cluster.on_ray.ray_cluster import RayCluster
from headway.cluster.on_ray.ray_worker import RayWorker
from headway.cluster.worker_engines import TrainGroup, reference_of
from headway.cluster.worker_group import WorkerGroup
from headway.cluster.worker_plan import ClusterPlan, WorkerSpec
from headway.config.schema import Config
from headway.config.sizing.placement import node_shares
from headway.data.assignment import Cost
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.interfaces.training import StepContext
from headway.data.types import ColumnName, FinishReason, Prompt, RowAt, Sample, Trajectory
from headway.pipeline.admission.fetches import Fetch, outcomes, samples_of
from headway.pipeline.stages.actor_train import COLUMNS

MINI_BATCHES, EPOCHS = 4, 2
FULL_TOKENS = 32768
"""Tokens of an answer in the fetch that the arithmetic is for."""
HIDDEN = 4096


def _shapes(given: argparse.Namespace) -> list[tuple[int, NDArray[np.int64]]]:
    """Long-tailed answers: log-normal, up to ten times the mean. Prompts of a few hundred tokens."""
    rng = np.random.default_rng(0)
    drawn = np.minimum(rng.lognormal(0.0, 0.8, (given.prompts, given.answers)), 10.0)
    lengths = np.maximum(drawn * given.tokens / drawn.mean(), 16).astype(np.int64)
    return [(int(rng.integers(100, 600)), of_group) for of_group in lengths]


def _group(number: int, prompt_length: int, lengths: NDArray[np.int64], file: TokenFile) -> Group:
    prompt = Prompt(0, number, 0, "random", "", np.zeros(prompt_length, np.int32))
    trajectories = tuple(
        Trajectory(
            id=prompt.trajectory_id(k),
            replica="rollout-0",
            text="",
            prompt_length=prompt_length,
            length=int(n),
            finish_reason=FinishReason.STOP,
            version_spans=[[0, 0]],
            started=0.0,
            finished=1.0,
            rows=(RowAt(k, prompt_length, int(n)),),
        )
        for k, n in enumerate(lengths)
    )
    rewards = np.random.default_rng(number).integers(0, 2, len(lengths)).astype(np.float32)
    return Group(
        number, prompt, len(lengths), SamplingParams(1), trajectories=trajectories, tokens=file, rewards=rewards
    )


async def _one_fetch(
    train: TrainGroup, ranks: WorkerGroup, fetch: Fetch, look: Callable[[], Awaitable[None]]
) -> Counter[str]:
    """Do what `ActorTrain` does with a fetch that has a reference; return the phases' seconds. ``look``: at its end."""
    phases: Counter[str] = Counter()
    at = time.perf_counter()

    def over(name: str) -> None:
        nonlocal at
        at, before = time.perf_counter(), at
        phases[name] += at - before  # type: ignore[assignment]

    size = len(fetch.groups) // MINI_BATCHES
    mini_batches = [fetch.groups[i : i + size] for i in range(0, len(fetch.groups), size)]
    await train.begin_fetch([samples_of(mini_batch) for mini_batch in mini_batches])
    over("assignment")
    fetch.add(ColumnName.REF_LOGPROBS, await reference_of(ranks).forward_logprobs(fetch.samples()))
    over("first pass over all rows: tokens are read")
    computed = await train.advantages(fetch.samples((ColumnName.REF_LOGPROBS,)), outcomes(fetch.groups))
    for name, columns in computed.items():
        fetch.add(name, columns)
    over("advantages")
    for epoch in range(EPOCHS):
        for mini_batch in mini_batches:
            await train.train_step(samples_of(mini_batch, COLUMNS), StepContext())
        over(f"epoch {epoch + 1}, {MINI_BATCHES} mini-batches")
    await look()
    await train.end_fetch()
    return phases


async def measure(given: argparse.Namespace, directory: Path) -> None:
    """Start an episode worker and ranks, have one fetch written and trained on, and report."""
    config = Config(
        cluster={"device": "cpu"},
        rollout={"n": given.answers},
        data={"max_prompt_length": 600, "max_response_length": 10 * given.tokens},
        actor={"ppo_mini_batch_size": given.prompts // MINI_BATCHES, "ppo_epochs": EPOCHS},
        async_training={"require_batches": MINI_BATCHES},
    )
    # Columns go through Ray's object store, whose size follows the longest answer that may come: here, the mean.
    sized = config.model_copy(update={"data": config.data.model_copy(update={"max_response_length": given.tokens})})
    cluster = RayCluster(sized, directory)
    common = {"config": config, "model_path": ""}
    specs = [WorkerSpec(f"rank-{rank}", Rank, rank, 1, common) for rank in range(given.ranks)]
    specs.append(WorkerSpec("episode-worker-0", Writer, given.ranks, 1, common))
    workers: list[RayWorker] = []
    try:
        await cluster.connect()
        shares = node_shares("rank", range(len(specs)), len(specs))
        plan = ClusterPlan(tuple(specs), *[()] * 6, inside_fetch=frozenset(), shared=False, shares=shares)
        await cluster.reserve(plan)
        workers = [cluster.launch(spec) for spec in specs]
        for worker in workers:
            await worker.up()
        await _measured(given, directory, workers[:-1], workers[-1])
    finally:
        for worker in workers:
            await worker.kill()
        await cluster.stop()


async def _measured(given: argparse.Namespace, directory: Path, ranks: Sequence[RayWorker], writer: RayWorker) -> None:
    shapes, files, at = _shapes(given), list[TokenFile](), time.perf_counter()
    for first in range(0, len(shapes), 32):
        files += await writer.call("write", directory, first, shapes[first : first + 32])
    written_s = time.perf_counter() - at
    idle = [await rank.call("used") for rank in ranks]
    driver_before = memory_of_process()["RssAnon"]
    groups = [_group(number, *shape, file) for number, (shape, file) in enumerate(zip(shapes, files, strict=True))]
    of_metadata = memory_of_process()["RssAnon"] - driver_before
    group = WorkerGroup(Rank, ranks, Cost(HIDDEN))
    train = TrainGroup(group, None)  # type: ignore[arg-type]  # no weights are sent here
    fetch = Fetch(0, 0, groups)
    await group.outcome_advantages(outcomes(groups[:1]))  # imports torch, as a trainer's rank has long before
    held: list[dict[str, float]] = []
    owners: list[list[int]] = []

    async def look() -> None:
        held.extend([await rank.call("used") for rank in ranks])
        owners.extend(await group._shares(fetch.samples()))

    started = time.perf_counter()
    phases = await _one_fetch(train, group, fetch, look)
    total = time.perf_counter() - started
    after = [await rank.call("used") for rank in ranks]
    samples = fetch.samples()
    shares = [_share([samples[i] for i in share]) for share in owners]
    whole = _share(samples)
    tokens = sum(sample.length for sample in samples)
    ratios = [used["read"] / share for used, share in zip(after, shares, strict=True)]
    scale, driver_after = FULL_TOKENS / given.tokens, memory_of_process()["RssAnon"]
    holds = [(one["own"] - before["own"]) / 2**20 for one, before in zip(held[1:], idle[1:], strict=True)]
    left = [(one["own"] - before["own"]) / 2**20 for one, before in zip(after[1:], idle[1:], strict=True)]
    read_s = max(used["fetch_s"] for used in after)
    metadata_s = total - read_s - sum(seconds for name, seconds in phases.items() if name.startswith("epoch"))
    title = f"{given.prompts} prompts × {given.answers} answers: {tokens / 1e6:.1f} M tokens, {given.ranks} ranks"
    phases = {"written by one episode worker, tokens drawn included": written_s, **phases}
    report(
        "data_plane",
        {title: [{"phase": name, "seconds": seconds} for name, seconds in phases.items()]},
        [
            f"files: {whole / 2**20:.0f} MiB; shares of {min(shares) / 2**20:.2f} to {max(shares) / 2**20:.2f} MiB",
            f"bytes read per rank, files, over its share: {min(ratios):.4f} to {max(ratios):.4f}",
            f"all ranks together read {sum(used['read'] for used in after) / whole:.4f} × the files",
            f"cost of the longest rank over the mean: {_balance(owners, samples):.4f}",
            f"a rank reads its share in {min(u['fetch_s'] for u in after):.2f} to {read_s:.2f} s, all ranks at once",
            f"a rank holds {min(holds):.0f} to {max(holds):.0f} MiB; its allocator keeps up to {max(left):.0f} for the "
            "next fetch",
            f"driver: {of_metadata / 2**20:.1f} MiB of metadata, {driver_after / 2**20:.0f} MiB in all, "
            f"{(driver_after - driver_before) / 2**20:.1f} MiB more than before the fetch",
            f"× {scale:.3g} for answers of {FULL_TOKENS} tokens: files {whole * scale / 2**30:.2f} GiB, a rank reads "
            f"{max(shares) * scale / 2**20:.0f} MiB in {read_s * scale:.1f} s and holds {max(holds) * scale:.0f} MiB; "
            f"what depends on the number of rows alone stays: {metadata_s:.1f} s",
        ],
    )


def _share(samples: Sequence[Sample]) -> float:
    """Bytes of the samples' tokens, the prompt of each group once."""
    prompts = {sample.episode[:3]: sample.prompt_length for sample in samples}
    return BYTES_PER_TOKEN * sum(sample.length for sample in samples) + 4 * sum(prompts.values())


def _balance(owners: Sequence[Sequence[int]], samples: Sequence[Sample]) -> float:
    """The longest rank's cost over the mean."""
    cost, loads = Cost(HIDDEN), list[float]()
    for share in owners:
        own = [samples[i] for i in share]
        prompts = {sample.episode[:3]: sample.prompt_length for sample in own}
        loads.append(
            sum(map(cost.prompt, prompts.values()))
            + sum(cost.response(sample.prompt_length, sample.length) for sample in own)
        )
    return max(loads) / (sum(loads) / len(loads))


def main() -> None:
    sizes = {"prompts": 512, "answers": 16, "tokens": 3277, "ranks": 8}
    options = {name: {"type": int, "default": size} for name, size in sizes.items()}
    given = parser("data_plane", __doc__, **options).parse_args()
    with tempfile.TemporaryDirectory(prefix="data-plane-", dir=SHARED_MEMORY) as directory:
        asyncio.run(measure(given, Path(directory)))


if __name__ == "__main__":
    main()
