"""Rows that a rank holds while its role works on a batch: what several calls ask for is fetched once.

begin ─▶ rows, rows, …: each row and column is fetched when it is first asked for ─▶ end: all are forgotten

Held are the rank's own rows of one batch, and no more. Without a batch a call's rows are forgotten with the call.

Also here: time limits for work with files, by its progress: checkpoints that are saved or loaded, a model that is
exported.

The limit follows bytes and not the clock: work may take as long as it likes while bytes move. Nothing may stand still
for longer than two minutes plus the time that a disk of 20 MB/s takes for the bytes so far (`file_quiet_s`), which may
all have to leave the system's cache before the next one moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from typing import Any, TypeVar

from headway.cluster.machine.token_files import TokenFile, TokenPart
from headway.config.sizing.timeouts import FILE_QUIET_S, FILE_RATE, file_quiet_s
from headway.data.packing import CollatedRow, row_of, with_columns
from headway.data.types import Handle, Sample
from headway.errors import StallError
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.recovery.run_monitor import SHORTEST_S, WorkerAnswers, ask
from headway.runtime.progress import Living
from headway.runtime.task_groups import failure_ignored

Fetch = Callable[[Sequence[Handle[Any]]], list[Any]]
"""Function that returns the objects of handles, side by side."""


class BatchCache:
    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._holds = False
        # Each value has its handle beside it: the key of some is their address, which must not become another's.
        self._rows: dict[tuple[Hashable, int], tuple[Handle[Any], CollatedRow]] = {}
        self._columns: dict[Hashable, tuple[Handle[Any], Any]] = {}
        """Lists of columns by handle."""
        self._borrowed: dict[Hashable, Handle[Any]] = {}
        """Handles of all columns that the batch's calls asked for, those asked for once as well: once in a while Ray
        never delivered an object whose reference had been given back and borrowed again."""

    def begin(self) -> None:
        """Hold from now on what is asked for; forget what was held."""
        self.end()
        self._holds = True

    def end(self) -> None:
        """Forget everything, and hold no more."""
        self._holds = False
        self._rows, self._columns, self._borrowed = {}, {}, {}

    def rows(self, samples: Sequence[Sample], *, once: bool = False) -> list[CollatedRow]:
        """Return the samples with their arrays. What is not held is fetched at once; ``once``: and not held then."""
        rows, columns = self._rows, self._columns
        if once or not self._holds:
            rows, columns = dict(rows), dict(columns)
        tokens: dict[Hashable, tuple[Handle[Any], dict[int, Sample]]] = {}
        handles: dict[Hashable, Handle[Any]] = {}
        for sample in samples:
            key = _key(sample.tokens)
            if (key, sample.index) not in rows:
                tokens.setdefault(key, (sample.tokens, {}))[1][sample.index] = sample
            for column in sample.columns.values():
                if not isinstance(column, float) and _key(column.handle) not in columns:
                    handles[_key(column.handle)] = column.handle
        if self._holds:
            self._borrowed |= handles
        wanted = [_part(handle, tuple(missing)) for handle, missing in tokens.values()]
        fetched: Iterator[Any] = iter(self._fetch([*wanted, *handles.values()]) if wanted or handles else ())
        for (key, (handle, missing)), group in zip(tokens.items(), fetched, strict=False):
            rows.update(((key, i), (handle, row_of(sample, group[i]))) for i, sample in missing.items())
        columns.update((key, (handle, next(fetched))) for key, handle in handles.items())
        return [
            with_columns(
                rows[_key(sample.tokens), sample.index][1],
                sample,
                lambda column: columns[_key(column.handle)][1][column.index],
            )
            for sample in samples
        ]


def _part(handle: Handle[Any], rows: tuple[int, ...]) -> Handle[Any]:
    """Return a handle of no more than these rows, where there can be one."""
    return TokenPart(handle, rows) if isinstance(handle, TokenFile) else handle


def _key(handle: Handle[Any]) -> Hashable:
    """Return the handle itself, or its address where it is the object, as within one process."""
    try:
        hash(handle)
    except TypeError:
        return id(handle)
    return handle


T = TypeVar("T")


async def while_bytes_move(work: Coroutine[Any, Any, T], ranks: Sequence[Living], what: str) -> T:
    """Return the result of ``work``, which ``ranks`` do with files. ``what``: the work in words, with the path.

    Raises:
        StallError: no rank made progress for as long as work with files may stand still. The ranks are not stopped.
    """

    def stuck(answers: WorkerAnswers) -> str:
        return (
            f"{what} is stuck: nothing was read or written for longer than {FILE_QUIET_S:g} s and 1 s for "
            f"each {FILE_RATE / 1e6:g} MB of it ({answers}). Look at the disk, or the file system of the "
            "path, and at whether it answers on the worker's machine"
        )

    return await while_ranks_move(work, ranks, FILE_QUIET_S, file_quiet_s, stuck)


async def while_ranks_move(
    work: Coroutine[Any, Any, T],
    ranks: Sequence[Living],
    quiet_s: float,
    with_files_s: Callable[[int], float],
    stuck: Callable[[WorkerAnswers], str],
) -> T:
    """Return the result of ``work``, which ``ranks`` do. They may stand still as `WorkerAnswers.deadline` says.

    Raises `StallError`, with what ``stuck`` says of the ranks' answers, where they do so for longer. They go on.
    """
    task = failure_ignored(asyncio.ensure_future(work))
    deadline = now() + quiet_s
    try:
        while not task.done():
            await asyncio.wait([task], timeout=max(SHORTEST_S, deadline - now()))
            if not task.done() and now() >= deadline:
                answers = await ask(ranks)
                deadline = answers.deadline(quiet_s, with_files_s)
                if not task.done() and now() >= deadline:
                    raise StallError(stuck(answers))
        return task.result()
    finally:
        task.cancel()
