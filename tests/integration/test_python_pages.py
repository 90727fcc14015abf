"""The page on Python and the notebook say what is so: their code runs, in order, as a reader would run it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support import finish, start

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "python.md"
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The page's blocks, one after another, in a folder that has the recipes."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "page.py"
    path.write_text("\n".join(blocks))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return path


def test_the_pages_blocks_run_in_order(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains three times."""
    monkeypatch.chdir(script.parent)
    code, output = finish(start(str(script)), timeout_s=500)
    assert code == 0, output
    assert "rollout.m: unknown key (in Python); did you mean rollout.n?" in output
    assert "/code/score.py:score" in output
    assert not list(script.parent.glob("code"))


def test_the_pages_blocks_pass_a_strict_check_of_types(script: Path) -> None:
    """mypy reads torch's types, too, where its cache is empty."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), script.name]
    found = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=500, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_notebook_runs_and_its_run_is_shown_in_one_output_that_is_replaced(tmp_path: Path) -> None:
    """It trains twice."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "examples").mkdir()
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path / "examples")}}
    nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", resources=resources).execute()
    (trained,) = (cell for cell in notebook.cells if "run = headway.train(\n    RECIPE" in cell.source)
    shown, returned = trained.outputs
    assert "Completed" in shown["data"]["text/html"]
    assert "128/128 groups" in shown["data"]["text/plain"]
    assert "completed" in returned["data"]["text/plain"]
    assert len(nbformat.writes(notebook)) < 1_000_000
