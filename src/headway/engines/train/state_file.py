"""The ``state.json`` of a checkpoint: everything that is not a tensor, so that it can be read without torch.

{"optimizer_steps": …, "extra": what the driver gave, "files": each other file's name and its bytes}

The last lets whoever reads it tell a file that is missing or cut off. Checkpoints that were written without it pass.
The checkpoint of version 0 has no other file: ranks that load it keep the initial model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.errors import ModelError

STATE_FILE = "state.json"
KEYS = ("optimizer_steps", "extra")
START = "initial_model"
"""Key of a checkpoint without tensors."""
REMOVE = "Remove it, to resume from the one before"


def files_of(path: Path) -> dict[str, int]:
    """Return the size in bytes of each file in the folder ``path``, by name. Raises `OSError`."""
    return {file.name: file.stat().st_size for file in sorted(path.iterdir())}


def write_start(path: Path, extra: Mapping[str, Any]) -> None:
    """Write the checkpoint of version 0, which has ``extra`` alone, to the folder ``path``. Raises `OSError`."""
    draft = path.with_name(f".{path.name}.partial")
    draft.mkdir(parents=True, exist_ok=True)
    state = {"optimizer_steps": 0, "extra": extra, "files": {}, START: True}
    (draft / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
    draft.rename(path)


def is_start(state: Mapping[str, Any]) -> bool:
    """Tell whether the ``state`` of a checkpoint is that of version 0, as `write_start` writes it."""
    return state.get(START) is True


def read_state(path: Path) -> dict[str, Any]:
    """Read the state of the checkpoint in the folder ``path``.

    Raises:
        ModelError: there is no complete checkpoint, the file is damaged, or another one is missing or cut off.
    """
    file = path / STATE_FILE
    if not file.is_file():
        raise ModelError(f"{path}: no checkpoint there (a complete one has {STATE_FILE})")
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ModelError(
            f"{path}: the checkpoint is damaged: {STATE_FILE} cannot be read: {cause}. {REMOVE}"
        ) from cause
    if not isinstance(state, dict) or (missing := [key for key in KEYS if key not in state]):
        lacks = f"lacks {missing[0]}" if isinstance(state, dict) else "holds no object"
        raise ModelError(f"{path}: the checkpoint is damaged: {STATE_FILE} {lacks}. {REMOVE}")
    for name, size in state.get("files", {}).items():
        there = (path / name).stat().st_size if (path / name).is_file() else None
        if there != size:
            found = "is missing" if there is None else f"has {there} bytes, and was written with {size}"
            raise ModelError(f"{path}: the checkpoint is damaged: {name} {found}. {REMOVE}")
    return state
