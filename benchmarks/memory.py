"""Measured memory of training processes against the arithmetic of ``headway doctor``.

    python -m benchmarks.memory [--tokens 64] [--small]

Four ranks over Gloo on this machine train a model of 0.5 B parameters (``--small``: of 10 M) with random weights:
opened, trained for three steps, gathered and exported; then opened as a reference policy in bfloat16. What counts is
anonymous memory as the kernel counts it (``/proc``), above that of a worker that has its libraries and its process
group and no model. Peaks are the kernel's own high-water marks, so no short one is missed.

torch's memory on a CPU is malloc's, which keeps small blocks: processes start with thresholds that give all others
back.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import memory_of_process, parser
from benchmarks.table import Ratio, Rows, report
from headway.config.schema import Config
from headway.config.sizing.model_shape import FLOAT, ModelShape
from headway.config.sizing.process_memory import Mesh, ProcessMemory, TrainingStep, reference, trainer, update

RANKS = 4
VOCABULARY = 32_000
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 28, "num_attention_heads": 16}
SMALL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
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
        make_folder(Path(folder), {**(SMALL if chosen.small else SIZES), "num_key_value_heads": 2})
        shape = ModelShape.of(json.loads((Path(folder) / "config.json").read_text()))
        assert shape is not None
        rows = table(on_ranks(train, folder, chosen.tokens), expected_of_trainer(shape, chosen.tokens))
        held = reference(shape, step_of(chosen.tokens, itemsize=2)).held[0].nbytes
        rows = [*rows, *table(on_ranks(refer, folder, chosen.tokens), {"reference, opened": (held, 0)})]
    title = f"{shape.parameters / 1e6:,.0f} M parameters, {RANKS} ranks, {chosen.tokens} tokens in a micro-batch"
    report("memory", {title: rows}, [f"load of the machine: {os.getloadavg()[0]:.1f}"])


def step_of(tokens: int, *, itemsize: int = FLOAT, recompute: bool = False) -> TrainingStep:
    return TrainingStep(Mesh(RANKS, Config().actor.parallel), tokens, itemsize, recompute=recompute)


def expected_of_trainer(shape: ModelShape, tokens: int) -> dict[str, tuple[int, int]]:
    """Bytes of a rank by phase, by arithmetic: at its end, and at most; 0 where nothing is said."""
    plain = trainer(shape, step_of(tokens))
    share = plain.held[0].nbytes
    between = ProcessMemory((plain.held[0], plain.held[2]), {})
    buckets = update(shape, FLOAT, BUCKET, senders=RANKS, copy=False, on_cpu=True).device
    return {
        "opened": (share, 0),
        "step": (between.device, plain.device),
        "step, recomputed": (between.device, trainer(shape, step_of(tokens, recompute=True)).device),
        "gather": (between.device, between.device + buckets),
        "export": (between.device, between.device + 2 * FLOAT * shape.largest),
    }


def table(ranks: Sequence[Measured], expected: Mapping[str, tuple[int, int]]) -> Rows:
    """A line for each phase, summed over the ranks: measured, expected, and the first over the second."""
    rows = []
    for phase in ranks[0]:
        row: dict[str, Any] = {"phase": phase}
        for at, title in enumerate(("at its end", "at most")):
            measured, wanted = sum(rank[phase][at] for rank in ranks), RANKS * expected.get(phase, (0, 0))[at]
            row |= {f"{title} MB": measured / 1e6, f"expected {title}": wanted / 1e6 if wanted else None}
            row[f"÷ expected {title}"] = Ratio(measured / wanted) if wanted else None
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------ a rank


class Gauge:
    """Anonymous memory of this process, by phase."""

    def __init__(self) -> None:
        gc.collect()
        self._idle = memory_of_process()["RssAnon"]
        self.measured: Measured = {}

    def phase(self, name: str, work: Callable[[], Any]) -> Any:
        """Run ``work``, and note the memory of its end and its peak. Files that it maps do not count."""
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        result = work()
        now = memory_of_process()
        files = now["RssFile"] + now["RssShmem"]
        gc.collect()
        self.measured[name] = (memory_of_process()["RssAnon"] - self._idle, now["VmHWM"] - files - self._idle)
        return result


def train(folder: str, tokens: int) -> Measured:
    """Open, train, gather and export on this rank of the default process group."""
    from collections import deque

    import torch

    from headway.data.interfaces.training import StepContext
    from headway.engines.train.fsdp.device_mesh import TrainMesh
    from headway.engines.train.fsdp.engine import FsdpEngine

    config = Config.model_validate({"actor": {"ppo_max_token_len_per_gpu": tokens}})
    mesh = TrainMesh.make(config.actor.parallel, torch.device("cpu"))
    gauge = Gauge()
    engine = gauge.phase(
        "opened", lambda: FsdpEngine(model_path=folder, config=config, total_optimizer_steps=10, mesh=mesh)
    )
    engine.train_step(rows(1, 16), StepContext())  # makes the moments
    gauge.phase("step", lambda: engine.train_step(rows(2, tokens), StepContext()))
    engine._policy.recompute_activations()
    gauge.phase("step, recomputed", lambda: engine.train_step(rows(2, tokens), StepContext()))
    manifest = engine.manifest(torch.float32, most_senders=RANKS)
    gauge.phase("gather", lambda: deque(engine.gather(manifest, BUCKET), maxlen=0))
    gauge.phase("export", lambda: engine.export(Path(folder) / "exported"))
    return gauge.measured


def refer(folder: str, tokens: int) -> Measured:
    """Open the reference policy in bfloat16 on this rank of the default process group."""
    import torch

    from headway.engines.train.fsdp.device_mesh import TrainMesh
    from headway.engines.train.fsdp.policy_copies import ReferenceEngine

    config = Config.model_validate({"actor": {"ppo_max_token_len_per_gpu": tokens}, "model": {"dtype": "bfloat16"}})
    mesh = TrainMesh.make(config.actor.parallel, torch.device("cpu"))
    gauge = Gauge()
    gauge.phase("reference, opened", lambda: ReferenceEngine(model_path=folder, config=config, mesh=mesh))
    return gauge.measured


def rows(count: int, tokens: int) -> list[Any]:
    """Rows of random tokens, each of which fills a micro-batch."""
    from headway.data.packing import CollatedRow

    rng, answer = np.random.default_rng(0), tokens - 1
    return [
        CollatedRow(
            input_ids=rng.integers(2, VOCABULARY, tokens).astype(np.int32),
            prompt_length=1,
            logprobs=np.full(answer, -10.0, dtype=np.float32),
            versions=np.zeros(answer, dtype=np.int32),
            loss_mask=np.ones(answer, dtype=np.bool_),
            columns={"advantages": rng.standard_normal(answer).astype(np.float32)},
        )
        for _ in range(count)
    ]


# ------------------------------------------------------------------------------------------ processes and files


def on_ranks(work: Callable[..., Measured], folder: str, tokens: int) -> list[Measured]:
    """Run ``work`` in a process for each rank; returns what they measured, in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:  # each waits for the others
        ranks = [pool.submit(_rank, rank, port, work, folder, tokens) for rank in range(RANKS)]
        return [rank.result(PATIENCE_S) for rank in ranks]


def _rank(rank: int, port: int, work: Callable[..., Measured], folder: str, tokens: int) -> Measured:
    import torch
    import torch.distributed as dist

    import headway.engines.train.fsdp.engine
    import headway.engines.train.fsdp.policy_copies  # noqa: F401  # an idle worker has its libraries

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE_S))
    dist.all_reduce(torch.ones(2**20))
    measured = work(folder, tokens)
    dist.barrier()
    dist.destroy_process_group()
    return measured


def make_folder(folder: Path, sizes: dict[str, int]) -> None:
    """Write a model with random weights in bfloat16 to ``folder``, one file for each layer, none of it all at once."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3Config

    from headway.models.made_model import character_tokenizer

    config = Qwen3Config(
        **sizes,
        vocab_size=VOCABULARY,
        head_dim=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype=torch.bfloat16,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    files: dict[str, list[str]] = {}
    parameters = dict(model.named_parameters())
    for name in parameters:
        layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file, names in files.items():
        tensors = {name: torch.empty_like(parameters[name], device="cpu").normal_(0, 0.02) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    places = {name: file for file, names in files.items() for name in names}
    total = 2 * sum(parameter.numel() for parameter in parameters.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    character_tokenizer("0123456789abcdef", 4096).save_pretrained(folder)


if __name__ == "__main__":
    main()
