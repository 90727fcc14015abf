"""Roles of the data plane's benchmark: an episode worker that writes tokens, and training ranks that touch rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.runner import memory_of_process
from headway.cluster.machine.token_files import TokenFile, TokenFiles, TokenPlace
from headway.cluster.roles.role import Role
from headway.cluster.worker_group import Collect, Dispatch, register
from headway.data.interfaces.training import StepContext, StepReport
from headway.data.types import GroupTokens, Outcomes, RowTokens, Sample, SampledTokens


class Writer(Role):
    """The episode worker's part: tokens of finished groups, left in files."""

    def write(self, directory: Path, first: int, shapes: Sequence[tuple[int, NDArray[np.int64]]]) -> list[TokenFile]:
        """Write a group for each prompt length and lengths of answers; ``first``: the number of the first group."""
        files = TokenFiles(f"{self.name}-{first}", TokenPlace(self._host, directory), self._host)
        rng = np.random.default_rng(first)
        return [files.write(_group_tokens(rng, prompt, lengths)) for prompt, lengths in shapes]


class Rank(Role):
    """A training rank that touches its rows instead of computing on them."""

    def __init__(self, **common: Any) -> None:
        fetch = common.pop("fetch")
        super().__init__(**common, fetch=self._counted)
        self._brings = fetch
        self._read = 0
        self._fetch_s = 0.0

    def _counted(self, handles: Sequence[Any]) -> list[Any]:
        before, started = _read_so_far(), time.perf_counter()
        brought = self._brings(handles)
        self._read += _read_so_far() - before
        self._fetch_s += time.perf_counter() - started
        return brought

    @register(Dispatch.SPLIT, Collect.COLUMNS)
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        return [row.logprobs * np.float32(0.9) for row in self._rows(samples)]

    @register(Dispatch.RANK_ZERO)
    def outcome_advantages(self, outcomes: Outcomes) -> NDArray[np.float32] | None:
        from headway.engines.train.batch_advantages import FetchAdvantages

        return FetchAdvantages(self._config.algorithm).of_outcomes(outcomes)

    @register(Dispatch.SPLIT)
    def train_step(self, samples: Sequence[Sample], context: StepContext) -> StepReport:
        total = 0.0
        for row in self._rows(samples):
            arrays = (row.input_ids, row.logprobs, row.versions, row.loss_mask, *row.columns.values())
            total += sum(float(array.sum()) for array in arrays)
        return StepReport(skipped=False, metrics={"total": total})

    def used(self) -> dict[str, float]:
        """Bytes that were read in fetches, their seconds, and this process's own memory, in bytes."""
        return {"read": self._read, "fetch_s": self._fetch_s, "own": memory_of_process()["RssAnon"]}


def _read_so_far() -> int:
    """Bytes that all reads of this process have brought, as the kernel counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _group_tokens(rng: np.random.Generator, prompt: int, lengths: NDArray[np.int64]) -> GroupTokens:
    ids = rng.integers(0, 150_000, prompt, dtype=np.int32)

    def answer(n: int) -> SampledTokens:
        logprobs = -rng.random(n, dtype=np.float32)
        return SampledTokens(rng.integers(0, 150_000, n, dtype=np.int32), logprobs, np.zeros(n, np.int32))

    return tuple(RowTokens.answer(ids, answer(int(n))) for n in lengths)
