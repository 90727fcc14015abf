"""Functions in the directory of a run that was moved since its ``config.yaml`` was written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.config.layers import Layer


def with_own_code(layer: Layer) -> Layer:
    """Return a file's layer in which functions of the folder ``code`` beside the file are named where they lie now.

    These are ones that were given as objects: ``/somewhere/code/score.py:score``, with ``score.pkl`` beside it.
    """
    if layer.file is None:
        return layer
    code = layer.file.absolute().parent / "code"
    return replace(layer, values={key: _found(value, code) for key, value in layer.values.items()})


def _found(value: Any, code: Path) -> Any:
    match value:
        case str() if value.endswith(".py", 0, value.rfind(":")):
            path, _, name = value.rpartition(":")
            written = Path(path).is_absolute() and Path(path).parts[-2:] == (code.name, f"{name}.py")
            return f"{code / name}.py:{name}" if written and (code / f"{name}.pkl").is_file() else value
        case list():
            return [_found(item, code) for item in value]
        case dict():
            return {name: _found(item, code) for name, item in value.items()}
    return value
