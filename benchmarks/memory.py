"""``python -m benchmarks.memory``: memory of training processes against the arithmetic of ``headway doctor``.

Four ranks over Gloo on this machine open a random model of 0.5 B parameters (``--small``: of 10 M), train, gather and
export it. What counts is anonymous memory as the kernel counts it (``/proc``), above that of a worker that has its
libraries and its process group and no model. Peaks are the kernel's own high-water marks, so no short one is missed.

torch's memory on a CPU is malloc's, which keeps small blocks: processes start with thresholds that give all others
back.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import memory_of_process, parser
from benchmarks.shapes import Shape, random_row
from benchmarks.table import Ratio, Rows, report
from headway.config.schema import Config
from headway.config.sizing.model_shape import FLOAT, ModelShape
from headway.config.sizing.process_memory import Mesh, ProcessMemory, TrainingStep, trainer, update

RANKS = 4
LARGE = Shape("0.5b", 32_000, 1024, 28, heads=16, kv_heads=2, intermediate=4096)
SMALL = Shape("10m", 32_000, 256, 6, heads=4, kv_heads=2, intermediate=1024)
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Settings under which freed blocks of 64 KiB and more leave the process at once."""
PATIENCE_S = 3600
BUCKET = 64 * 2**20
Measured = dict[str, tuple[int, int]]
"""Bytes above an idle worker's, by phase: at its end, and at most."""


def main() -> None:
    chosen = parser(
        "memory",
        __doc__,
        tokens={"type": int, "default": 64, "help": "tokens of a micro-batch on each rank"},
        small={"action": "store_true", "help": "a model of 10 M parameters"},
    ).parse_args()
    os.environ.update(MALLOC, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    with tempfile.TemporaryDirectory(prefix="headway-memory-") as folder:
        (SMALL if chosen.small else LARGE).make(Path(folder), "bfloat16", "0123456789abcdef")
        shape = ModelShape.of(json.loads((Path(folder) / "config.json").read_text()))
        assert shape is not None
        rows = table(on_ranks(folder, chosen.tokens), expected(shape, chosen.tokens))
    title = f"{shape.parameters / 1e6:,.0f} M parameters, {RANKS} ranks, {chosen.tokens} tokens in a micro-batch"
    report("memory", {title: rows})


def expected(shape: ModelShape, tokens: int) -> Measured:
    """Bytes of a rank by phase, by arithmetic: at its end, and at most."""

    def of(recompute: bool) -> ProcessMemory:
        return trainer(shape, TrainingStep(Mesh(RANKS, Config().actor.parallel), tokens, FLOAT, recompute=recompute))

    plain = of(recompute=False)
    between = ProcessMemory((plain.held[0], plain.held[2]), {}).device
    buckets = update(shape, FLOAT, BUCKET, senders=RANKS, copy=False, on_cpu=True).device
    return {
        "step": (between, plain.device),
        "step, recomputed": (between, of(recompute=True).device),
        "gather": (between, between + buckets),
        "export": (between, between + 2 * FLOAT * shape.largest),
    }


def table(ranks: Sequence[Measured], expected: Mapping[str, tuple[int, int]]) -> Rows:
    """A line for each phase, summed over the ranks: measured, expected, and the first over the second."""
    rows = []
    for phase, wanted in expected.items():
        row: dict[str, Any] = {"phase": phase}
        for at, title in enumerate(("at its end", "at most")):
            measured, by_arithmetic = sum(rank[phase][at] for rank in ranks), RANKS * wanted[at]
            row |= {f"{title} MB": measured / 1e6, f"expected {title}": by_arithmetic / 1e6}
            row[f"÷ expected {title}"] = Ratio(measured / by_arithmetic)
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------ the ranks


def on_ranks(folder: str, tokens: int) -> list[Measured]:
    """Train in a process for each rank; returns what they measured, in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:  # each waits for the others
        ranks = [pool.submit(train, rank, port, folder, tokens) for rank in range(RANKS)]
        return [rank.result(PATIENCE_S) for rank in ranks]


def train(rank: int, port: int, folder: str, tokens: int) -> Measured:
    """Open, train, gather and export, as one rank of the default process group."""
    import torch
    import torch.distributed as dist

    from benchmarks.train_sides import train_engine  # an idle worker has its libraries
    from headway.data.interfaces.training import StepContext

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE_S))
    dist.all_reduce(torch.ones(2**20))
    gc.collect()
    idle = memory_of_process()["RssAnon"]
    measured: Measured = {}

    def phase(name: str, work: Callable[[], Any]) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        work()
        now = memory_of_process()
        files = now["RssFile"] + now["RssShmem"]  # mapped files do not count
        gc.collect()
        measured[name] = (memory_of_process()["RssAnon"] - idle, now["VmHWM"] - files - idle)

    engine = train_engine(Path(folder), steps=10, actor={"ppo_max_token_len_per_gpu": tokens})
    engine.train_step(rows(1, 16), StepContext())  # makes the moments
    phase("step", lambda: engine.train_step(rows(2, tokens), StepContext()))
    engine._policy.recompute_activations()
    phase("step, recomputed", lambda: engine.train_step(rows(2, tokens), StepContext()))
    manifest = engine.manifest(torch.float32, most_senders=RANKS)
    phase("gather", lambda: deque(engine.gather(manifest, BUCKET), maxlen=0))
    phase("export", lambda: engine.export(Path(folder) / "exported"))
    dist.barrier()
    dist.destroy_process_group()
    return measured


def rows(count: int, tokens: int) -> list[Any]:
    """Rows of random tokens, each of which fills a micro-batch."""
    noise = np.random.default_rng(0)
    ids = noise.integers(2, LARGE.vocabulary, (count, tokens))
    return [random_row(one[:1], one[1:], noise.standard_normal(tokens - 1), -10.0) for one in ids]


if __name__ == "__main__":
    main()
