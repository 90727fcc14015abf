"""Rows of Hugging Face datasets, by name or from a folder.

The library ``datasets`` is imported when one is read; most folders that it saved are read without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headway.data.files import Columns, Record, Row, check_columns, records_of
from headway.data.saved import is_plain, is_saved, saved_rows, saved_table, splits_of
from headway.errors import ConfigError, DataError, boundary

MOST_SHOWN = 400
"""Most characters of a library's message that are passed on."""


def read_dataset(
    dataset: str, columns: Columns, *, split: str | None, default_split: str, subset: str | None, revision: str | None
) -> list[Record]:
    """All rows of one split, in order.

    ``dataset`` is a name on the Hub (``openai/gsm8k``), a folder that ``load_dataset`` takes, or one that
    ``save_to_disk`` wrote. Where that holds a single split, ``default_split`` is not asked for.

    ``source`` is as for files (`headway.data.files.read_records`), with the dataset's name in the place of the file's.

    Raises:
        ConfigError: the library is not installed.
        DataError: the dataset cannot be had, has no such split, is empty, or has rows that cannot be used.
    """
    rows = dataset_rows(dataset, columns, split=split, default_split=default_split, subset=subset, revision=revision)
    folder = Path(dataset).expanduser()
    return list(records_of(rows, columns, default_source=folder.name if folder.is_dir() else dataset, columnar=True))


def dataset_rows(
    dataset: str,
    columns: Columns | None,
    *,
    split: str | None,
    default_split: str,
    subset: str | None,
    revision: str | None,
) -> Iterator[Row]:
    """Return an iterator over the rows of one split as they are. ``columns``: those that it needs; None: any.

    Raises `ConfigError` and `DataError` as `read_dataset` does.
    """
    where = f"dataset {dataset}, {split or default_split}"
    names, size, rows = _load(dataset, split, default_split, subset, revision)
    if not size:
        raise DataError(f"{where}: the split has no rows")
    check_columns(names, columns, where)
    return _placed(rows, where)


def _placed(rows: Iterable[Any], where: str) -> Iterator[Row]:
    with boundary(f"{where} cannot be read", DataError):
        for number, row in enumerate(rows):
            yield f"{where}, row {number}", row


def _load(
    dataset: str, split: str | None, default_split: str, subset: str | None, revision: str | None
) -> tuple[list[str], int, Iterable[Any]]:
    """Return the names of a split's columns, the number of its rows, and the rows."""
    folder = Path(dataset).expanduser()
    given = {"subset": subset, "revision": revision}
    try:
        if is_saved(folder):
            if useless := [key for key, value in given.items() if value is not None]:
                raise DataError(f"dataset {dataset}: a saved folder has no {' or '.join(useless)}; drop that key")
            place = _place_of(dataset, folder, split, default_split)
            if is_plain(place):
                table = saved_table(place)
                return table.column_names, len(table), saved_rows(table, place)
            table = _library(dataset).load_from_disk(str(place))
        else:
            table = _library(dataset).load_dataset(
                str(folder) if folder.is_dir() else dataset, subset, split=split or default_split, revision=revision
            )
        return table.column_names, len(table), table.with_format(None)  # a saved format would give arrays
    except (ConfigError, DataError):
        raise
    except Exception as cause:
        given["split"] = split or default_split
        asked = ", ".join(f"{key} {value}" for key, value in given.items() if value)
        check = "its files, split and subset"
        if not folder.is_dir():
            check = (
                "its name, split and subset, and that this machine reaches the Hub; offline, name a folder or a "
                ".jsonl, .csv or .parquet file"
            )
        raise DataError(f"dataset {dataset} ({asked}) cannot be loaded: {_said(cause)}. Check {check}") from cause


def _place_of(dataset: str, folder: Path, split: str | None, default_split: str) -> Path:
    """Return the folder of the asked-for split of what `save_to_disk` left: some splits, or one without a name."""
    if not (splits := splits_of(folder)):
        if split is not None:
            raise DataError(f"dataset {dataset}: the folder holds one split without a name; drop split: {split}")
        return folder
    wanted = split or default_split
    if wanted not in splits:
        raise DataError(f"dataset {dataset}: there is no split {wanted!r}; there are {', '.join(splits)}. Set split")
    return folder / wanted


def _library(dataset: str) -> Any:
    try:
        import datasets
    except ImportError as cause:
        raise ConfigError(
            f"dataset {dataset}: Hugging Face datasets are read with the library datasets, which is not installed; "
            "pip install 'headway[datasets]', or give a .jsonl, .csv or .parquet file"
        ) from cause
    return datasets


def _said(error: BaseException) -> str:
    """Describe an error and its first cause in one line: a ``DatasetGenerationError`` does not tell the cause."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    causes = [error] if root is error else [error, root]
    return ", from ".join(
        f"{type(one).__name__}: {' '.join(str(one).split())[:MOST_SHOWN].rstrip('.')}" for one in causes
    )
