"""A benchmark's figures: shown as a table, and written to ``build/bench/<name>.json``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OUT = Path("build/bench")


def report(name: str, title: str, rows: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> None:
    """``rows`` share their keys; numbers are shown with three significant digits and written in full."""
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.3g}" for value in row.values()))
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note)
    console.print(f"written to {write(name, {'rows': list(rows), 'notes': list(notes)})}")


def write(name: str, content: Mapping[str, Any]) -> Path:
    """``build/bench/<name>.json``: ``content``, and what it was measured on."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    hardware = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "cpu": _cpu()}
    path.write_text(json.dumps({"name": name, "hardware": hardware, **content}, indent=2), encoding="utf-8")
    return path


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
