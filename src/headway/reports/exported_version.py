"""The version number that an exported model's folder carries."""

from __future__ import annotations

import json
from pathlib import Path

FILE = "headway.json"
"""Name of the version's file in the model's folder, beside what Hugging Face writes."""


def write_version(model: Path, version: int) -> None:
    (model / FILE).write_text(json.dumps({"version": version}), encoding="utf-8")


def version_of(model: Path) -> int | None:
    """The version of an exported model; None where the folder does not say, or is not there."""
    try:
        version = json.loads((model / FILE).read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) else None
