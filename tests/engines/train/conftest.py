"""Small models, rows and process groups for the tests of the train engines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headway.config.sections.model_section import MakeModelConfig
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.models.made_model import make_model
from tests.shared import shared

TIMEOUT = timedelta(seconds=120)
"""Limit of a rank's wait for the others, who may wait for a core; a defect raises, or hangs for ever."""
MOST_RANKS = 3
MESH_RANKS = 4
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocabulary": "0123456789abcdef",
}


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``model_path(architecture, tie)``: a folder with a tiny model, made once."""
    root = tmp_path_factory.mktemp("models")

    def path(architecture: str = "qwen3", tie: bool = True) -> str:
        folder = root / f"{architecture}-{tie}"
        if not folder.exists():
            config = MakeModelConfig.model_validate({**TINY, "architecture": architecture, "tie_word_embeddings": tie})
            make_model(config, seed=1, path=folder)
        return str(folder)

    return path


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """``run_ranks(world, function, args)``: call ``function(*args)`` on every rank; the ranks' results, in order.

    The processes are started once, one for each rank: torch caches what it derived from a mesh, the own rank included,
    beyond the life of a process group, so a process keeps its rank.
    """
    return shared("ranks", lambda: _ranks(tmp_path_factory.mktemp("rendezvous")))


@contextmanager
def _ranks(root: Path) -> Iterator[RunRanks]:
    context = get_context("forkserver")  # pays the imports once; nothing has run there yet, so forking is safe
    context.set_forkserver_preload(["headway.engines.train.fsdp.engine"])
    calls = 0

    def run(world: int, function: Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
        nonlocal calls
        calls += 1
        store = str(root / str(calls))
        ranks = enumerate(pools[:world])
        futures = [pool.submit(_on_rank, rank, world, store, function, args) for rank, pool in ranks]
        return [future.result(timeout=TIMEOUT.total_seconds()) for future in futures]

    with ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, mp_context=context)) for _ in range(MOST_RANKS)]
        yield run


@pytest.fixture(scope="module")
def on_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """``on_mesh(function, args)``: call ``function(*args)`` on each of four ranks; the ranks' results, in order.

    Their process group is made once: torch keeps what it derived from a mesh, and would look for its groups in another.
    So is each mesh. The ranks end with their file's tests: a group of Gloo's has three threads, and one of them looks
    for work a hundred times a second.
    """
    store = str(tmp_path_factory.mktemp("rendezvous") / "mesh")
    context = get_context("forkserver")
    context.set_forkserver_preload(["headway.engines.train.fsdp.engine"])

    def run(function: Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
        futures = [pool.submit(function, *args) for pool in pools]
        return [future.result(timeout=2 * TIMEOUT.total_seconds()) for future in futures]

    with ExitStack() as stack:
        pools = [
            stack.enter_context(
                ProcessPoolExecutor(1, mp_context=context, initializer=_stay, initargs=(rank, MESH_RANKS, store))
            )
            for rank in range(MESH_RANKS)
        ]
        yield run


def _join(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=TIMEOUT)


def _stay(rank: int, world: int, store: str) -> None:
    _join(rank, world, store)
    TrainMesh.make = cache(TrainMesh.make)  # type: ignore[method-assign]


def _on_rank(rank: int, world: int, store: str, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    _join(rank, world, store)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
