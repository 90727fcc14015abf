"""Rows of Hugging Face datasets, by name or from a folder.

The library ``datasets`` is imported when a dataset is read. Files that its ``save_to_disk`` writes:

FOLDER/dataset_dict.json             names of splits, each a folder of its own; not there where there is one dataset
FOLDER/[SPLIT/]dataset_info.json     types of the columns
FOLDER/[SPLIT/]state.json            names of the dataset's files
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.data.files import Columns, Row, check_columns
from headway.errors import ConfigError, DataError, boundary, said_by

if TYPE_CHECKING:
    from headway.config.schema import SourceConfig

SPLITS, STATE, INFO = "dataset_dict.json", "state.json", "dataset_info.json"


def is_saved(folder: Path) -> bool:
    """Tell whether ``save_to_disk`` wrote ``folder``."""
    return (folder / SPLITS).is_file() or all((folder / name).is_file() for name in (STATE, INFO))


def splits_of(folder: Path) -> list[str]:
    """Return the names of a saved folder's splits; empty if it holds one unnamed dataset.

    Raises `OSError`, `ValueError`, `KeyError` or `TypeError` if the folder is damaged.
    """
    file = folder / SPLITS
    return list(json.loads(file.read_text(encoding="utf-8"))["splits"]) if file.is_file() else []


MOST_SHOWN = 400
"""Maximum number of characters of a library's message that are passed on."""


def dataset_rows(dataset: str, source: SourceConfig, columns: Columns | None, *, default_split: str) -> Iterator[Row]:
    """Return an iterator over the rows of one split, unchanged and in order.

    ``dataset`` is a name on the Hub (``openai/gsm8k``), a folder for ``load_dataset``, or a folder that
    ``save_to_disk`` wrote. If that has a single split, ``default_split`` is not used. ``columns``: columns that are
    needed; None: any.

    Raises:
        ConfigError: the library is not installed.
        DataError: the dataset is not available, has no such split, is empty, or lacks a column.
    """
    where = f"dataset {dataset}, {source.split or default_split}"
    names, size, rows = _load(dataset, source, default_split)
    if not size:
        raise DataError(f"{where}: the split has no rows")
    check_columns(names, columns, where)
    return _placed(rows, where)


def _placed(rows: Iterable[Any], where: str) -> Iterator[Row]:
    with boundary(f"{where} cannot be read", DataError):
        for number, row in enumerate(rows):
            yield f"{where}, row {number}", row


def _load(dataset: str, source: SourceConfig, default_split: str) -> tuple[list[str], int, Iterable[Any]]:
    """Return the names of a split's columns, the number of its rows, and the rows."""
    folder, split = Path(dataset).expanduser(), source.split or default_split
    given = {"subset": source.subset, "revision": source.revision}
    try:
        check_library(dataset)
        import datasets

        if is_saved(folder):
            if useless := [key for key, value in given.items() if value is not None]:
                raise DataError(f"dataset {dataset}: a saved folder has no {' or '.join(useless)}; drop that key")
            table = datasets.load_from_disk(str(_place_of(dataset, folder, source.split, default_split)))
        else:
            table = datasets.load_dataset(
                str(folder) if folder.is_dir() else dataset, source.subset, split=split, revision=source.revision
            )
        return table.column_names, len(table), table.with_format(None)  # a saved format would give arrays
    except (ConfigError, DataError):  # these already say what to do
        raise
    except Exception as cause:
        asked = ", ".join(f"{key} {value}" for key, value in {**given, "split": split}.items() if value)
        check = "its files, split and subset"
        if not folder.is_dir():
            check = (
                "its name, split and subset, and that this machine reaches the Hub; offline, name a folder or a "
                ".jsonl, .csv or .parquet file"
            )
        raise DataError(f"dataset {dataset} ({asked}) cannot be loaded: {_said(cause)}. Check {check}") from cause


def _place_of(dataset: str, folder: Path, split: str | None, default_split: str) -> Path:
    """Return the folder of the requested split in a folder of `save_to_disk`, which has named splits or a single
    unnamed one.
    """
    if not (splits := splits_of(folder)):
        if split is not None:
            raise DataError(f"dataset {dataset}: the folder holds one split without a name; drop split: {split}")
        return folder
    wanted = split or default_split
    if wanted not in splits:
        raise DataError(
            f"dataset {dataset}: there is no split {wanted!r}; there are {', '.join(splits)}. Set split, or name "
            f"its folder, like {folder / splits[0]}"
        )
    return folder / wanted


def check_library(dataset: str) -> None:
    """Raise `ConfigError` if the library that reads ``dataset`` is not installed. Does not import it."""
    if find_spec("datasets") is None:
        raise ConfigError(
            f"dataset {dataset}: Hugging Face datasets are read with the library datasets, which is not installed; "
            "pip install 'headway[datasets]', or give a .jsonl, .csv or .parquet file"
        )


def _said(error: BaseException) -> str:
    """Describe an error and its first cause in one line: a ``DatasetGenerationError`` alone does not name the cause."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    causes = [error] if root is error else [error, root]
    return ", from ".join(said_by(one, MOST_SHOWN).rstrip(".") for one in causes)
