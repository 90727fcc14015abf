"""Rows that a run reads, before they are tokenised: training and validation records, each with a row number.

files, datasets ─▶ one source after the other ─┬─▶ training records   (and how they are mixed: `SourceShare`)
task            ─▶ problems, made on demand   ─┴─▶ held-out records

`settings_named` says what one text means: a task, a file, a saved folder, or a dataset.
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
"""Number of stretches of the training rows with their own digest in a checkpoint."""
TRAIN_SPLIT, VAL_SPLIT = "train", "test"
"""Splits of a dataset for training and validation, where ``split`` is not given."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Records of training and validation with their row numbers, which are below ``len(train) + len(val)``."""

    train: Sequence[Record]
    train_rows: Sequence[int]
    val: Sequence[Record]
    val_rows: Sequence[int]
    parts: tuple[SourceShare, ...]
    """The sources of ``train``, one after the other."""
    digests: tuple[str, ...] = ()
    """Digests of the training prompts in their order, of `DIGESTS` equal stretches; none for a task, which its settings
    determine."""
    val_parts: tuple[SourceShare, ...] = ()
    """The sources of ``val``, where it has its own."""
    val_failures: tuple[LeftOut, ...] = ()
    """Held-out problems that the task could not make; others are in their places."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of further columns that every row has, held-out ones included: those that a reward may use."""
        return tuple(name for name, where in self._lacking().items() if where is None)

    @property
    def lacked(self) -> dict[str, str]:
        """Further columns that only some rows have → the first row that lacks each, for messages."""
        return {name: where for name, where in self._lacking().items() if where is not None}

    def _lacking(self) -> dict[str, str | None]:
        """Return every further column → the first row without it, or None.

        Of a task's training problems, which are made on demand, the first is looked at alone.
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
                lacking.setdefault(name, first)  # new in this row: the first one lacked it
            first = first or where
        return lacking


def by_source(parts: Sequence[SourceShare]) -> Iterator[tuple[str, range]]:
    """Each source's name and the indices of its records, of which the sources have one stretch after the other."""
    for part, end in zip(parts, accumulate(part.rows for part in parts), strict=True):
        yield part.name, range(end - part.rows, end)


def read_rows(config: Config) -> Rows:
    """Return the run's records, from the sources of ``data.train`` or from ``data.task``.

    Held out are: ``data.val``, or ``data.val_size`` rows of ``data.train`` chosen by ``run.seed``, or the task's own.

    Raises:
        ConfigError: neither ``data.train`` nor ``data.task``, or a task that cannot be made.
        DataError: files or datasets that cannot be used.
    """
    data, seed = config.data, config.run.seed
    return _source_rows(data, seed) if data.train_sources else _task_rows(data, seed)


def first_rows(source: SourceConfig, most: int) -> list[Any]:
    """Return the first ``most`` rows of a source of training prompts, unchanged, with any columns.

    Raises `ConfigError` and `DataError` as `read_rows` does, but for what is wrong with columns.
    """
    return [row for _, row in islice(rows_of(source, TRAIN_SPLIT), most)]


def rows_of(source: SourceConfig, default_split: str, columns: Columns | None = None) -> Iterator[Row]:
    """Return the rows of a source, unchanged, each with its place. ``columns``: those that a row needs; None: any.

    Raises `ConfigError` and `DataError` as `read_rows` does, but for what is wrong with further columns.
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
    # Numbers of the whole file: so training and held-out rows have none in common.
    return Rows(train, train_rows, val, val_rows, parts, digests([record.prompt for record in train]))


def split(rows: int, val_size: int, seed: int) -> tuple[list[int], list[int]]:
    """Choose ``val_size`` of ``rows`` by the seed. Returns the numbers of the training and of the held-out rows."""
    # A stream of its own: the held-out rows stay the same when shuffling changes
    order = generator(seed, SPLIT_KEY, 0).permutation(rows)
    # Sorted: both keep the order of the file.
    return sorted(order[val_size:].tolist()), sorted(order[:val_size].tolist())


def _shares(parts: Sequence[SourceShare], kept: Sequence[int]) -> tuple[SourceShare, ...]:
    """Return the sources with as many rows as are left of them, where the rows ``kept`` are."""
    own = (places for _, places in by_source(parts))
    return tuple(replace(part, rows=sum(row in there for row in kept)) for part, there in zip(parts, own, strict=True))


def _read_held_out(data: DataConfig, seed: int) -> tuple[list[Record], tuple[SourceShare, ...]]:
    """Return the records of ``data.val``, ``data.val_max_samples`` of them at most, and each source's share."""
    records, parts = _read_all(data.held_out_sources, data, VAL_SPLIT)
    if data.val_max_samples is None or data.val_max_samples >= len(records):
        return records, parts
    # Key 1: `split` draws by 0, and one key would give both one stream.
    kept = sorted(generator(seed, SPLIT_KEY, 1).permutation(len(records))[: data.val_max_samples].tolist())
    return [records[i] for i in kept], _shares(parts, kept)


def digests(rows: Sequence[Any]) -> tuple[str, ...]:
    """Return digests of the rows' content, for `DIGESTS` stretches of equal length."""
    length, found = max(1, -(-len(rows) // DIGESTS)), []
    for start in range(0, len(rows), length):
        digest = xxhash.xxh3_64()
        for row in rows[start : start + length]:
            # Half of a surrogate pair is text of a row, too, and is refused only where it is tokenised
            digest.update(f"{row!r}\n".encode(errors="surrogatepass"))
        found.append(digest.hexdigest())
    return tuple(found)


def _read_all(
    sources: Sequence[SourceConfig], data: DataConfig, default_split: str
) -> tuple[list[Record], tuple[SourceShare, ...]]:
    """Return all records, one source after the other, and each source's share."""
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
    # columnar: in Arrow a field that one row has is there in all others, as null.
    return list(records_of(rows, columns, default_source=folder.name if folder.is_dir() else dataset, columnar=True))


def _dataset_of(source: SourceConfig) -> str | None:
    """Return the dataset that a source names, also by the path of a folder that one was saved to; None for a file."""
    if source.path is not None and is_saved(Path(source.path).expanduser()):
        return source.path
    return source.dataset


def _rows_after(training_rows: int, val: Sequence[Record]) -> range:
    """Row numbers of held-out prompts, which no training prompt has: rows key the sampling's randomness."""
    return range(training_rows, training_rows + len(val))


class _TaskRecords(Sequence[Record]):
    """A task's training problems as records, made when asked for."""

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
"""Endings of files that cannot be read, which are no part of a dataset's name."""


def settings_named(data: str, *splits: str) -> Mapping[str, Any]:
    """Return the one setting that ``data`` stands for: ``data.task.name``, or ``data.train``, a file's name or a
    mapping with the dataset and its split.

    ``splits``: those wanted of a dataset, the best first. Of a saved folder the first that is there is named, else the
    only one, else none; of a dataset on the hub the first. Raises `DataError` for a damaged folder.
    """
    if is_task(data):
        return {"data.task.name": data}
    path = Path(data).expanduser()
    if path.is_dir():
        with boundary(f"{data} cannot be read as a dataset", DataError):
            there = splits_of(path) if is_saved(path) else []
        return _dataset(data, next((one for one in splits if one in there), there[0] if len(there) == 1 else None))
    # A file that is missing is told as one, by its ending, and not looked for on the hub.
    is_file = path.exists() or path.suffix.lower() in (*FILE_ENDINGS, *OTHER_ENDINGS)
    if is_file or data.startswith((".", "/", "~")) or data.count("/") > 1 or not data.strip():
        return {"data.train": data}
    return _dataset(data, splits[0])


def _dataset(name: str, split: str | None) -> Mapping[str, Any]:
    return {"data.train": {"dataset": name} | ({} if split is None else {"split": split})}
