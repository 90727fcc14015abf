"""``python -m benchmarks.data_plane``: what a batch of random tokens costs driver and trainer. No model.

Token files as an episode worker writes them; processes that read the rows of their share, all at once; assignment and
advantages as a run computes them. With the defaults, the numbers of groups and rows are those of 512 prompts × 16
answers × 32k tokens, and each answer has a tenth of the tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.runner import memory_of_process, parser, timed
from benchmarks.table import report
from headway.cluster.machine.batch_cache import BatchCache
from headway.cluster.machine.token_files import SHARED_MEMORY, TokenFiles, TokenPlace, read_rows
from headway.config.sections.learning import AlgorithmConfig
from headway.config.sizing.run_memory import BYTES_PER_TOKEN
from headway.data.assignment import Cost, assign, split
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import SamplingParams
from headway.data.types import FinishReason, Prompt, RowAt, RowTokens, SampledTokens, TrainSample, Trajectory
from headway.engines.train.batch_advantages import BatchAdvantages
from headway.pipeline.actor_critic import add_column, outcomes, samples_of

MINI_BATCHES = 4
COST = Cost(4096)


def write(number: int, lengths: Sequence[int], files: TokenFiles) -> Group:
    """Write a group's tokens, and return the group, scored."""
    noise = np.random.default_rng(number)

    def ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return noise.integers(0, 150_000, count, dtype=np.int32)

    prompt = Prompt(0, number, 0, "random", "", ids(int(noise.integers(100, 600))))
    size = len(prompt.token_ids)
    answers = [SampledTokens(ids(n), -noise.random(n, dtype=np.float32), np.zeros(n, np.int32)) for n in lengths]
    trajectories = tuple(
        Trajectory(
            id=prompt.trajectory_id(k),
            replica="rollout-0",
            text="",
            prompt_length=size,
            length=n,
            finish_reason=FinishReason.STOP,
            version_spans=[[0, 0]],
            started=0.0,
            finished=1.0,
            rows=(RowAt(k, size, n),),
        )
        for k, n in enumerate(lengths)
    )
    tokens = files.write(tuple(RowTokens.answer(prompt.token_ids, answer) for answer in answers))
    rewards = noise.integers(0, 2, len(lengths)).astype(np.float32)
    asked = (number, prompt, len(lengths), SamplingParams(1))
    return Group(*asked, trajectories=trajectories, tokens=tokens, rewards=rewards)


def advantages(groups: Sequence[Group]) -> None:
    """Give each row its advantage, from rewards alone, as rank zero and the driver do."""
    of = outcomes(groups)
    computed = BatchAdvantages(AlgorithmConfig()).of_outcomes(of)
    assert computed is not None
    add_column(groups, "advantages", computed[of.episode_of].tolist())


def read(samples: Sequence[TrainSample]) -> tuple[float, int]:
    """Read a rank's rows, in the rank's process; returns its seconds, and the bytes of its own memory with the rows."""
    before, cache = (
        memory_of_process()["RssAnon"],
        BatchCache(lambda parts: [read_rows(part.file, part.rows) for part in parts]),
    )
    cache.begin()
    seconds = timed(lambda: [row.input_ids.sum() for row in cache.rows(samples)])
    return seconds, memory_of_process()["RssAnon"] - before


def measure(given: argparse.Namespace, directory: Path) -> None:
    """Write a batch, assign it, read it and compute advantages; report."""
    # Log-normal lengths, up to ten times the mean.
    drawn = np.minimum(np.random.default_rng(0).lognormal(0.0, 0.8, (given.prompts, given.answers)), 10.0)
    lengths = np.maximum(drawn * given.tokens / drawn.mean(), 16).astype(np.int64).tolist()
    files, began, before = TokenFiles("bench", TokenPlace("", directory), ""), time.perf_counter(), memory_of_process()
    groups = [write(number, of_group, files) for number, of_group in enumerate(lengths)]
    took = {"written by one process, tokens drawn included": time.perf_counter() - began}
    metadata, size = memory_of_process()["RssAnon"] - before["RssAnon"], len(groups) // MINI_BATCHES
    samples, owners = samples_of(groups), {}
    batches = [samples_of(groups[start : start + size]) for start in range(0, len(groups), size)]
    took["assignment"] = timed(lambda: owners.update(assign(batches, given.ranks, COST)))
    took["advantages"] = timed(lambda: advantages(groups))
    shares = [[samples[i] for i in share] for share in split(samples, owners, given.ranks)]
    with ProcessPoolExecutor(given.ranks, get_context("spawn"), initializer=read, initargs=([],)) as ranks:
        list(ranks.map(time.sleep, [1.0] * given.ranks))  # all processes are there
        seconds, held = zip(*ranks.map(read, shares), strict=True)
    took[f"read by {given.ranks} ranks at once, the slowest"] = max(seconds)
    loads = [sum(COST.response(sample.prompt_length, sample.length) for sample in share) for share in shares]
    tokens = sum(sample.length for sample in samples)
    report(
        "data_plane",
        {
            f"{given.prompts} prompts × {given.answers} answers: {tokens / 1e6:.1f} M tokens, {given.ranks} ranks": [
                {"phase": name, "seconds": s} for name, s in took.items()
            ]
        },
        [
            f"files: {tokens * BYTES_PER_TOKEN / 2**20:.0f} MiB and prompts; {metadata / 2**20:.1f} MiB of metadata",
            f"cost of the longest rank over the mean: {max(loads) * given.ranks / sum(loads):.4f}",
            f"a rank reads in {min(seconds):.2f} to {max(seconds):.2f} s, and holds up to {max(held) / 2**20:.0f} MiB",
        ],
    )


def main() -> None:
    given = parser("data_plane", __doc__, prompts=512, answers=16, tokens=3277, ranks=8).parse_args()
    with tempfile.TemporaryDirectory(prefix="data-plane-", dir=SHARED_MEMORY) as directory:
        measure(given, Path(directory))


if __name__ == "__main__":
    main()
