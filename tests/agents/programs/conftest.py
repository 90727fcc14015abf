"""Files of a user's, written for a test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from headway.agents.adapters.program_loader import ProgramSpec

Write = Callable[..., ProgramSpec]


@pytest.fixture(autouse=True)
def modules_of_its_own(tmp_path: Path) -> Iterator[None]:
    """Forget what a test has imported by name from its folder: the next one has other files of these names."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in sys.modules.copy().items():
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)) and "headway_user" not in name:
            del sys.modules[name]


@pytest.fixture
def environment(tmp_path: Path) -> Write:
    """Write ``game.py``, or another ``file``; returns the spec of ``Game`` in it, or of another ``name``."""

    def write(code: str, name: str = "Game", file: str = "game.py", **more: object) -> ProgramSpec:
        path = tmp_path / file
        path.write_text(dedent(code))
        return ProgramSpec(environment=f"{path}:{name}", **more)  # type: ignore[arg-type]

    return write


@pytest.fixture
def program(tmp_path: Path) -> Write:
    """Write ``agent.py``; returns the spec of ``run`` in it, or of another ``name``."""

    def write(code: str, name: str = "run", **more: object) -> ProgramSpec:
        file = tmp_path / "agent.py"
        file.write_text(dedent(code))
        return ProgramSpec(program=f"{file}:{name}", **more)  # type: ignore[arg-type]

    return write


@pytest.fixture
def tools(tmp_path: Path) -> Write:
    """Write ``tools.py``; returns the spec of the tools named."""

    def write(code: str, *names: str) -> ProgramSpec:
        file = tmp_path / "tools.py"
        file.write_text(dedent(code))
        return ProgramSpec(tools=tuple(f"{file}:{name}" for name in names))

    return write
