"""The tutorials run as they stand there, block by block, one after the other in one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, Block, blocks

ORDER = ("own-task", "own-loss", "agent", "cluster", "reading")
"""The first leaves what most others begin with."""
LIMIT_S = 1200
"""A tutorial takes 20 to 60 s on two cores, and ten times as long where much other work runs beside it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S), pytest.mark.xdist_group("tutorials")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tutorials")


def test_every_tutorial_is_tried() -> None:
    assert {page.stem for page in (DOCS / "tutorials").glob("*.md")} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_tutorial_runs_as_it_stands(folder: Path, name: str) -> None:
    """Real runs of tiny models, a dozen in all; the agent's is warmed up first, one is on Ray: 20 to 60 s a page."""
    page = blocks(DOCS / "tutorials" / f"{name}.md")
    assert any(block.language == "sh" for block in page)
    for block in page:
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif arguments := _run_by(block):
            _run(arguments, folder)


def _run_by(block: Block) -> list[str] | None:
    """What runs a block: settings to look at, and commands for other machines, are not run."""
    match block.language:
        case "sh":
            return ["bash", "-euo", "pipefail", "-c", block.text]
        case "python":
            return [sys.executable, "-c", block.text]
    return None


def _run(arguments: list[str], folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, f"{arguments[-1]}\n{ended.stdout}\n{ended.stderr}"


def test_what_the_tutorials_promise_came_out(folder: Path) -> None:
    """The agent learns to ask, the sick run collapses, the good one learns."""

    def rewards(run: str) -> list[float]:
        rows = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").open()]
        return [row["reward/mean"] for row in rows if "reward/mean" in row]

    assert max(rewards("agent")[-2:]) > rewards("agent")[0]
    assert rewards("first")[-1] > 1.5 * rewards("first")[0]
    assert rewards("sick")[-1] < 0.5 * rewards("first")[-1]
