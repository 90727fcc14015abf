"""What ranks read of a batch: their own groups from files, once, and columns of these alone."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.cluster.machine.batch_cache import BatchCache, BatchShare
from headway.cluster.machine.token_files import TokenFile, TokenFiles, TokenPart, TokenPlace, read_rows
from headway.cluster.roles.role import Role
from headway.cluster.worker_group import Collect, Dispatch, WorkerGroup, register
from headway.data.types import Column, RowTokens, SampledTokens, TrainSample, TrajectoryId
from tests.cluster.fakes import group_tokens, sample

RANKS = 4


class TrainerLike(Role):
    """Calls of a trainer's rank, which only read."""

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def forward(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        return [row.logprobs + 1 for row in self.batch.rows(samples)]

    @register(Dispatch.SPLIT)
    def step(self, samples: Sequence[TrainSample]) -> None:
        for row in self.batch.rows(samples):
            assert (row.columns["prox_logprobs"] == row.logprobs + 1).all()
            assert (row.columns["advantages"] == np.float32(0.1)).all()


class Rank:
    """A rank in this process, which counts the bytes that it reads."""

    def __init__(self, rank: int) -> None:
        self.name = f"rank-{rank}"
        self.files = self.columns = self.fetches = 0
        """Bytes of token files, bytes of lists of columns, and handles that it fetched."""
        self.role = TrainerLike(
            config=None, model_path="", name=self.name, device="cpu", threads=1, fetch=self._fetch, put=lambda x: x
        )  # type: ignore[arg-type]

    def _fetch(self, handles: Sequence[Any]) -> list[Any]:
        self.fetches += len(handles)
        self.columns += sum(a.nbytes for h in handles if not isinstance(h, TokenPart) for a in h)
        before = bytes_read()
        read = [read_rows(handle.file, handle.rows) if isinstance(handle, TokenPart) else handle for handle in handles]
        self.files += bytes_read() - before
        return read

    async def call(self, method: str, *args: Any) -> Any:
        return attrgetter(method)(self.role)(*args)

    async def keep(self, method: str, parts: Sequence[Sequence[int]], *args: Any) -> list[Any]:
        result = await self.call(method, *args)
        return [[result[place] for place in part] for part in parts]


def bytes_read() -> int:
    """The bytes that all reads of this process have brought so far, as the kernel counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def fetch_of(groups: Sequence[tuple[int, Sequence[int]]], files: TokenFiles) -> list[list[TrainSample]]:
    """The samples of each group, whose tokens are in a file."""
    rng = np.random.default_rng(0)
    made = []
    for number, (prompt, lengths) in enumerate(groups):
        prompt_ids = rng.integers(0, 99, prompt).astype(np.int32)
        rows = [
            RowTokens.answer(
                prompt_ids,
                SampledTokens(np.zeros(n, np.int32), rng.standard_normal(n).astype(np.float32), np.zeros(n, np.int32)),
            )
            for n in lengths
        ]
        tokens = files.write(tuple(rows))
        made.append([TrainSample(tokens, k, prompt, n, TrajectoryId(0, number, 0, k)) for k, n in enumerate(lengths)])
    return made


@pytest.mark.parametrize("few", [False, True], ids=["groups stay whole", "groups are cut"])
async def test_a_rank_reads_its_share_of_a_batch_once_whatever_is_computed_from_it(tmp_path: Path, few: bool) -> None:
    rng = np.random.default_rng(1)
    count, mini = (3, 3) if few else (32, 8)
    groups = [(int(rng.integers(200, 900)), rng.integers(1000, 8000, 8).tolist()) for _ in range(count)]
    fetch = fetch_of(groups, TokenFiles("episode-worker-0", TokenPlace("here", tmp_path), "here"))
    mini_batches = [list(chain(*fetch[i : i + mini])) for i in range(0, count, mini)]
    ranks = [Rank(rank) for rank in range(RANKS)]
    trainer = WorkerGroup(TrainerLike, ranks)  # type: ignore[arg-type]

    await trainer.begin_batch(mini_batches)
    samples = list(chain(*mini_batches))
    columns: list[Column] = await trainer.forward(samples)
    await trainer.forward(samples)
    by_episode = {sample.episode: column for sample, column in zip(samples, columns, strict=True)}
    for _ in range(2):
        for mini_batch in mini_batches:
            await trainer.step(
                [
                    replace(
                        one, columns={"prox_logprobs": by_episode[one.episode], "advantages": float(np.float32(0.1))}
                    )
                    for one in mini_batch
                ]
            )
    owners = trainer._owners
    assert owners is not None
    for number, rank in enumerate(ranks):
        own = [sample for sample in samples if owners[sample.episode] == number]
        share = 13 * sum(sample.length for sample in own) + 4 * sum(
            {sample.episode[:3]: sample.prompt_length for sample in own}.values()
        )
        assert own and share <= rank.files <= 1.05 * share
        assert rank.columns == 4 * sum(sample.length for sample in own), "of its own columns alone"
    whole = 13 * sum(sample.length for sample in samples) + 4 * sum(prompt for prompt, _ in groups)
    assert sum(rank.files for rank in ranks) <= (1.1 if few else 1.02) * whole
    await trainer.end_batch()
    await trainer.begin_batch([fetch[0]])
    await trainer.forward(fetch[0])
    assert sum(len(rank.role.batch._rows) for rank in ranks) == len(fetch[0]), "the batch before was forgotten"
    assert all(not rank.role.batch._columns for rank in ranks)
    await trainer.end_batch()
    before = [rank.fetches for rank in ranks]
    await trainer.forward(samples)
    assert all(rank.fetches > fetches for rank, fetches in zip(ranks, before, strict=True)), "it was forgotten"
    assert sum(len(rank.role.batch._rows) for rank in ranks) == len(fetch[0]), "without a batch nothing is held"


def test_what_is_asked_for_once_is_not_held_and_what_is_held_is_not_fetched_for_it() -> None:
    fetched: list[int] = []

    def fetch(handles: Sequence[Any]) -> list[Any]:
        fetched.append(len(handles))
        return list(handles)

    held = BatchCache(fetch)
    one, two = (sample(group_tokens(n, 1.0), n) for n in (2, 3))
    held.rows(BatchShare([one], 0))
    assert [len(row.logprobs) for row in held.rows(BatchShare([one, two], 0), once=True)] == [2, 3]
    held.rows(BatchShare([one, two], 0))
    assert fetched == [1, 1, 1]
    held.rows(BatchShare([one, two], 0), once=True)
    assert fetched == [1, 1, 1], "all of it is held"


def test_a_column_that_is_asked_for_once_stays_borrowed_until_the_batch_ends() -> None:
    class Reference:
        """Handle that can be hashed, as Ray's."""

    tokens, values = Reference(), Reference()
    behind: dict[Any, Any] = {tokens: group_tokens(2, 1.0), values: [np.zeros(2, np.float32)]}
    held = BatchCache(lambda handles: [behind[handle] for handle in handles])
    one = replace(sample(tokens, 2), columns={"values": Column(values, 0)})
    held.rows(BatchShare([one], 0), once=True)
    behind.clear()
    borrowed = weakref.ref(values)
    del one, values
    gc.collect()
    assert borrowed() is not None
    held.rows(BatchShare([], 1))
    gc.collect()
    assert borrowed() is None


def test_objects_that_are_told_apart_by_their_address_live_as_long_as_their_rows() -> None:
    class Listed(list[Any]):
        """A list to which there can be a weak reference."""

    held = BatchCache(list)
    tokens, columns = Listed(group_tokens(2, 1.0)), Listed([np.zeros(2, np.float32)])
    alive = [weakref.ref(tokens), weakref.ref(columns)]
    held.rows(BatchShare([replace(sample(tokens, 2), columns={"values": Column(columns, 0)})], 0))
    del tokens, columns
    gc.collect()
    assert all(one() is not None for one in alive), "another object at the address would be taken for this one"
    held.rows(BatchShare([], 1))
    gc.collect()
    assert all(one() is None for one in alive)


def test_samples_of_one_row_may_be_masked_in_one_call_and_not_in_another() -> None:
    held = BatchCache(list)
    one = sample(group_tokens(2, 1.0), 2)
    calls = [BatchShare([replace(one, masked=masked)], 0) for masked in (False, True, False)]
    assert [held.rows(call)[0].loss_mask.any() for call in calls] == [1, 0, 1]


@pytest.mark.parametrize("column", [0.5, Column("a handle", 3)], ids=["a number", "behind a handle"])
def test_a_share_tells_of_its_batch_in_another_process(column: float | Column) -> None:
    one = replace(sample(TokenFile("here", "file"), 2), columns={"advantages": column})
    share = pickle.loads(pickle.dumps(BatchShare([one], 7)))
    assert (type(share), share.batch, share) == (BatchShare, 7, [one])
