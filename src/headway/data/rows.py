"""Rows that a run reads, before tokenisation: training and validation records, each with a row number.

files, datasets ─▶ one source after the other ─┬─▶ training records   (and how they are mixed: `SourceShare`)
task            ─▶ problems, made on demand   ─┴─▶ held-out records

`settings_named` tells the meaning of a text: a task, a file, a saved folder, or a dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import xxhash

from headway.data.files import ARCHIVES, FILE_ENDINGS, Columns, Record, Row, file_rows, read_records, records_of
from headway.data.hub import dataset_rows, is_saved, splits_of
from headway.data.mixing import SPLIT_KEY, SourceShare, generator
from headway.data.problems import Problem
from headway.data.tasks import TrainingProblems, is_task, split_task
from headway.data.tokenize import LeftOut, Reason
from headway.errors import ConfigError, DataError, boundary

if TYPE_CHECKING:
    from headway.config.schema import Config, DataConfig, SourceConfig

DIGESTS = 64
"""Number of stretches of the training rows for which a checkpoint has a digest each."""
TRAIN_SPLIT, VAL_SPLIT = "train", "test"
"""Splits of a dataset for training and validation, if ``split`` is not given."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Training and validation records with their row numbers, which are below ``len(train) + len(val)``."""

    train: Sequence[Record]
    train_rows: Sequence[int]
    val: Sequence[Record]
    val_rows: Sequence[int]
    parts: tuple[SourceShare, ...]
    """Sources of ``train``, one after the other."""
    digests: tuple[str, ...] = ()
    """Digests of `DIGESTS` equal stretches of the training prompts, in order; empty for a task, which its settings
    determine."""
    val_parts: tuple[SourceShare, ...] = ()
    """Sources of ``val``, if it has its own."""
    val_failures: tuple[LeftOut, ...] = ()
    """Held-out problems that the task could not make; others took their places."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Further columns that every row has, held-out ones included: columns that a reward may use."""
        return tuple(name for name, where in self._lacking().items() if where is None)

    @property
    def lacked(self) -> dict[str, str]:
        """Further column that only some rows have → the first row without it, for messages."""
        return {name: where for name, where in self._lacking().items() if where is not None}

    def _lacking(self) -> dict[str, str | None]:
        """Further column → the first row without it, or None.

        A task's training problems are made on demand: only the first one is checked.
        """
        train = [self.train[0]] if isinstance(self.train, _TaskRecords) else self.train
        lacking: dict[str, str | None] = {}
        first: str | None = None
        seen: set[tuple[str, ...]] = set()
        for record in chain(train, self.val):
            names = tuple(record.extra)
            if names in seen:
                continue
            seen.add(names)
            where = record.where or f"a problem of {record.source}"
            lacking |= {name: where for name, already in lacking.items() if already is None and name not in names}
            for name in names:
                lacking.setdefault(name, first)  # new in this row: the first row lacked it
            first = first or where
        return lacking


def by_source(parts: Sequence[SourceShare]) -> Iterator[tuple[str, range]]:
    """Yield each source's name, and the indices of its records, which are consecutive."""
    for part, end in zip(parts, accumulate(part.rows for part in parts), strict=True):
        yield part.name, range(end - part.rows, end)


def read_rows(config: Config) -> Rows:
    """Return the run's records, from the sources of ``data.train`` or from ``data.task``.

    Held-out records: ``data.val``, or ``data.val_size`` rows of ``data.train`` chosen by ``run.seed``, or the task's
    own.

    Raises:
        ConfigError: neither ``data.train`` nor ``data.task``, or a task that cannot be made.
        DataError: files or datasets that cannot be used.
    """
    data, seed = config.data, config.run.seed
    return _source_rows(data, seed) if data.train_sources else _task_rows(data, seed)


def first_rows(source: SourceConfig, most: int) -> list[Any]:
    """Return the first ``most`` rows of a source of training prompts, unchanged, with any columns.

    Raises `ConfigError` and `DataError` as `read_rows` does, except for faults of columns.
    """
    return [row for _, row in islice(rows_of(source, TRAIN_SPLIT), most)]


def rows_of(source: SourceConfig, default_split: str, columns: Columns | None = None) -> Iterator[Row]:
    """Return the rows of a source, unchanged, each with its place. ``columns``: columns that a row needs; None: any.

    Raises `ConfigError` and `DataError` as `read_rows` does, except for faults of further columns.
    """
    dataset = _dataset_of(source)
    if dataset is None:
        return file_rows(source.path or "", columns)
    return dataset_rows(dataset, source, columns, default_split=default_split)


def _task_rows(data: DataConfig, seed: int) -> Rows:
    if data.task is None:
        raise ConfigError("there is nothing to train on: give data.train (a file) or data.task (a procedural task)")
    task = data.task
    own = not data.held_out_sources
    split = split_task(task.name, task.params, seed=seed, size=task.size, val_size=task.val_size if own else 0)
    val, val_parts = _read_held_out(data, seed)
    if own:
        val = [_record(problem, task.name) for problem in split.val]
    train, parts = _TaskRecords(split.train, task.name), (SourceShare(task.name, task.size),)
    failures = tuple(LeftOut(Reason.TASK, task.name, why) for why in split.failures)
    return Rows(
        train, range(task.size), val, _rows_after(task.size, val), parts, val_parts=val_parts, val_failures=failures
    )


def _source_rows(data: DataConfig, seed: int) -> Rows:
    sources = data.train_sources
    records, parts = _read_all(sources, data, TRAIN_SPLIT)
    if data.held_out_sources:
        val, val_parts = _read_held_out(data, seed)
        numbers = range(len(records))
        said = digests([record.prompt for record in records])
        return Rows(records, numbers, val, _rows_after(len(records), val), parts, said, val_parts)
    if data.val_size >= len(records):
        raise DataError(
            f"{' and '.join(source.label for source in sources)}: data.val_size={data.val_size} held-out rows leave "
            f"nothing of {len(records)} rows to train on; make data.val_size smaller, or give data.val"
        )
    train_rows, val_rows = split(len(records), data.val_size, seed)
    parts = _shares(parts, train_rows)
    train, val = ([records[i] for i in rows] for rows in (train_rows, val_rows))
    # Numbers count the whole file: so training and held-out rows never share one.
    return Rows(train, train_rows, val, val_rows, parts, digests([record.prompt for record in train]))


def split(rows: int, val_size: int, seed: int) -> tuple[list[int], list[int]]:
    """Choose ``val_size`` of ``rows`` by the seed. Returns the numbers of training rows and of held-out rows."""
    # A separate stream: the held-out rows stay the same when shuffling changes
    order = generator(seed, SPLIT_KEY, 0).permutation(rows)
    # Sorted: both keep the order of the file.
    return sorted(order[val_size:].tolist()), sorted(order[:val_size].tolist())


def _shares(parts: Sequence[SourceShare], kept: Sequence[int]) -> tuple[SourceShare, ...]:
    """Return the sources with the number of their rows among the rows ``kept``."""
    own = (places for _, places in by_source(parts))
    return tuple(replace(part, rows=sum(row in there for row in kept)) for part, there in zip(parts, own, strict=True))


def _read_held_out(data: DataConfig, seed: int) -> tuple[list[Record], tuple[SourceShare, ...]]:
    """Return the records of ``data.val``, at most ``data.val_max_samples`` of them, and each source's share."""
    records, parts = _read_all(data.held_out_sources, data, VAL_SPLIT)
    if data.val_max_samples is None or data.val_max_samples >= len(records):
        return records, parts
    # Key 1: `split` draws with key 0, and the same key would give both the same stream.
    kept = sorted(generator(seed, SPLIT_KEY, 1).permutation(len(records))[: data.val_max_samples].tolist())
    return [records[i] for i in kept], _shares(parts, kept)


def digests(rows: Sequence[Any]) -> tuple[str, ...]:
    """Return digests of the rows' content, for `DIGESTS` stretches of equal length."""
    length, found = max(1, -(-len(rows) // DIGESTS)), []
    for start in range(0, len(rows), length):
        digest = xxhash.xxh3_64()
        for row in rows[start : start + length]:
            # A lone surrogate may occur in a row, and is refused only by tokenisation
            digest.update(f"{row!r}\n".encode(errors="surrogatepass"))
        found.append(digest.hexdigest())
    return tuple(found)


def _read_all(
    sources: Sequence[SourceConfig], data: DataConfig, default_split: str
) -> tuple[list[Record], tuple[SourceShare, ...]]:
    """Return the records of all sources, one source after the other, and each source's share."""
    read = [_read(source, data, default_split) for source in sources]
    parts = tuple(
        SourceShare(source.label, len(records), source.weight) for source, records in zip(sources, read, strict=True)
    )
    return list(chain.from_iterable(read)), parts


def _read(source: SourceConfig, data: DataConfig, default_split: str) -> list[Record]:
    columns = Columns(source.prompt_key or data.prompt_key, source.answer_key or data.answer_key, source.name)
    if (dataset := _dataset_of(source)) is None:
        return read_records(source.path or "", columns)
    folder, rows = Path(dataset).expanduser(), rows_of(source, default_split, columns)
    # columnar: in Arrow a field of one row is null in all others.
    return list(records_of(rows, columns, default_source=folder.name if folder.is_dir() else dataset, columnar=True))


def _dataset_of(source: SourceConfig) -> str | None:
    """Return the dataset that a source names, or the path of a folder with a saved one; None for a file."""
    if source.path is not None and is_saved(Path(source.path).expanduser()):
        return source.path
    return source.dataset


def _rows_after(training_rows: int, val: Sequence[Record]) -> range:
    """Return row numbers for held-out prompts that no training prompt has: row numbers key the sampling's
    randomness.
    """
    return range(training_rows, training_rows + len(val))


class _TaskRecords(Sequence[Record]):
    """A task's training problems as records, made on demand."""

    def __init__(self, problems: TrainingProblems, source: str) -> None:
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
            return [self[row] for row in range(*index.indices(len(self)))]
        return _record(self._problems[index], self._source)


def _record(problem: Problem, source: str) -> Record:
    return Record(problem.prompt, problem.answer, source, problem.extra)


OTHER_ENDINGS = (*ARCHIVES, ".json", ".txt", ".tsv", ".xls", ".xlsx", ".arrow", ".yaml", ".yml", ".py")
"""Endings of files that cannot be read, and that are not part of a dataset's name."""


def settings_named(data: str, *splits: str) -> Mapping[str, Any]:
    """Return the setting that ``data`` means: ``data.task.name``, or ``data.train`` with a file's name or a mapping of
    the dataset and its split.

    ``splits``: wanted splits of a dataset, the best first. For a saved folder the first that it has is named, else
    its only split, else none; for a dataset on the hub the first. Raises `DataError` for a damaged folder.
    """
    if is_task(data):
        return {"data.task.name": data}
    path = Path(data).expanduser()
    if path.is_dir():
        with boundary(f"{data} cannot be read as a dataset", DataError):
            there = splits_of(path) if is_saved(path) else []
        return _dataset(data, next((one for one in splits if one in there), there[0] if len(there) == 1 else None))
    # A missing file is reported as a file, by its ending, and not searched on the hub.
    is_file = path.exists() or path.suffix.lower() in (*FILE_ENDINGS, *OTHER_ENDINGS)
    if is_file or data.startswith((".", "/", "~")) or data.count("/") > 1 or not data.strip():
        return {"data.train": data}
    return _dataset(data, splits[0])


def _dataset(name: str, split: str | None) -> Mapping[str, Any]:
    return {"data.train": {"dataset": name} | ({} if split is None else {"split": split})}
