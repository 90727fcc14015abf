"""What a run reads, before any tokenizer saw it: records of training and of validation, each with a row number.

files, datasets ─▶ one source after the other ─┬─▶ training records   (and how they are mixed: `Part`)
task            ─▶ problems, made on demand   ─┴─▶ held-out records
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, overload

import xxhash

from headway.data.files import Columns, Record, read_records
from headway.data.hub import read_dataset
from headway.data.mixing import SPLIT_KEY, Part, generator
from headway.data.tasks import Problem, split_task
from headway.errors import ConfigError, DataError

if TYPE_CHECKING:
    from headway.config.schema import Config, DataConfig, SourceConfig

TRAIN_SPLIT, VAL_SPLIT = "train", "test"
"""Of a dataset, where its ``split`` is not given."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Records of the two parts, with the row number of each: all numbers are below ``len(train) + len(val)``."""

    train: Sequence[Record]
    train_rows: Sequence[int]
    val: Sequence[Record]
    val_rows: Sequence[int]
    parts: tuple[Part, ...]
    """Of ``train``: its sources, one after the other."""
    digest: str = ""
    """Of the training prompts in their order; empty for a task, which its settings determine."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of further columns that each training source has, by its first row: what a reward may ask for."""
        first = accumulate((part.rows for part in self.parts[:-1]), initial=0)
        found = [self.train[i].extra for i, part in zip(first, self.parts, strict=True) if part.rows]
        return tuple(name for name in found[0] if all(name in extra for extra in found))


def read_rows(config: Config) -> Rows:
    """The run's records, from the sources of ``data.train`` or from ``data.task``.

    Held out are: ``data.val``, or ``data.val_size`` rows of ``data.train`` chosen by ``run.seed``, or the task's own.

    Raises:
        ConfigError: neither ``data.train`` nor ``data.task``, or a task that cannot be made.
        DataError: files or datasets that cannot be used.
    """
    data, seed = config.data, config.run.seed
    return _source_rows(data, seed) if data.train_sources else _task_rows(data, seed)


def _task_rows(data: DataConfig, seed: int) -> Rows:
    if data.task is None:
        raise ConfigError("there is nothing to train on: give data.train (a file) or data.task (a procedural task)")
    task = data.task
    own = not data.held_out_sources
    split = split_task(task.name, task.params, seed=seed, size=task.size, val_size=task.val_size if own else 0)
    val = [_record(problem, task.name) for problem in split.val] if own else _held_out(data)
    train, parts = _TaskRecords(split.train, task.name), (Part(task.name, task.size),)
    return Rows(train, range(task.size), val, _rows_after(task.size, val), parts)


def _source_rows(data: DataConfig, seed: int) -> Rows:
    sources = data.train_sources
    read = [_read(source, data, TRAIN_SPLIT) for source in sources]
    records = [record for records in read for record in records]
    if data.held_out_sources:
        val = _held_out(data)
        parts = tuple(_part(source, len(records)) for source, records in zip(sources, read, strict=True))
        return Rows(records, range(len(records)), val, _rows_after(len(records), val), parts, _digest(records))
    if data.val_size >= len(records):
        raise DataError(
            f"{' and '.join(source.label for source in sources)}: data.val_size={data.val_size} held-out rows leave "
            f"nothing of {len(records)} rows to train on; make data.val_size smaller, or give data.val"
        )
    order = generator(seed, SPLIT_KEY, 0).permutation(len(records))
    val_rows = sorted(order[: data.val_size].tolist())
    train_rows = sorted(order[data.val_size :].tolist())
    ends = list(accumulate(map(len, read)))
    parts = tuple(
        _part(source, sum(start <= row < end for row in train_rows))
        for source, start, end in zip(sources, [0, *ends], ends, strict=False)
    )
    train, val = ([records[i] for i in rows] for rows in (train_rows, val_rows))
    return Rows(train, train_rows, val, val_rows, parts, _digest(train))


def _digest(records: Sequence[Record]) -> str:
    digest = xxhash.xxh3_64()
    for record in records:
        digest.update(f"{record.prompt!r}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def _held_out(data: DataConfig) -> list[Record]:
    return [record for source in data.held_out_sources for record in _read(source, data, VAL_SPLIT)]


def _read(source: SourceConfig, data: DataConfig, default_split: str) -> list[Record]:
    prompt_key, answer_key = source.prompt_key or data.prompt_key, source.answer_key or data.answer_key
    if source.path is not None:
        return read_records(source.path, prompt_key=prompt_key, answer_key=answer_key, name=source.name)
    assert source.dataset is not None, "the schema asks for one of path and dataset"
    return read_dataset(
        source.dataset,
        Columns(prompt_key, answer_key, source.name),
        split=source.split,
        default_split=default_split,
        subset=source.subset,
        revision=source.revision,
    )


def _part(source: SourceConfig, rows: int) -> Part:
    return Part(source.label, rows, source.weight)


def _rows_after(training_rows: int, val: Sequence[Record]) -> range:
    """Row numbers that no training prompt has: rows key the sampling's randomness."""
    return range(training_rows, training_rows + len(val))


class _TaskRecords(Sequence[Record]):
    """A task's training problems as records, made when asked for."""

    def __init__(self, problems: Sequence[Problem], source: str) -> None:
        self._problems = problems
        self._source = source

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [_record(problem, self._source) for problem in self._problems[index]]
        return _record(self._problems[index], self._source)


def _record(problem: Problem, source: str) -> Record:
    return Record(problem.prompt, problem.answer, source, problem.extra)
