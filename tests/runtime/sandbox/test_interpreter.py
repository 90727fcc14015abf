"""The interpreter of a room, wherever it is installed: it runs there, and what lies beside it is not there."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.runtime.sandbox.interpreter import base_python, interpreter
from headway.runtime.sandbox.sandbox import Sandbox
from headway.runtime.sandbox.sandbox_call import SandboxSpec
from tests.runtime.sandbox.conftest import SMALL

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
LIBRARY = Path(json.__file__).parent.parent
LOOK = """
import ctypes, json, os, sys
home = os.path.dirname(os.path.dirname(sys.executable))
library = os.path.dirname(os.__file__)
found = [(where, files) for where, _, files in os.walk(home) if not where.startswith(library)]
seen = [os.path.join(where, file) for where, files in found for file in files]
packages = os.path.join(library, "site-packages")
print(json.dumps([seen, os.listdir(packages) if os.path.isdir(packages) else [], sys.prefix]))
"""


NOT_COPIED = ("site-packages", "test", "tests", "__pycache__", "config-*", "idlelib", "ensurepip", "lib2to3", "tkinter")


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A Python without packages, in a folder that other users cannot enter."""
    with tempfile.TemporaryDirectory(dir=request.param, prefix="home ") as made:
        home = Path(made).resolve()
        (home / "bin").mkdir()
        shutil.copy(base_python(), home / "bin" / VERSION)
        library = home / "lib" / VERSION
        shutil.copytree(LIBRARY, library, ignore=shutil.ignore_patterns(*NOT_COPIED))
        (library / "site-packages").mkdir()
        yield home


@pytest.fixture
def home(installed: Path) -> Iterator[Path]:
    """A home that Python was installed to; one of them is below the scratch space."""
    with tempfile.TemporaryDirectory(dir=installed.parent, prefix="home ") as made:
        home = Path(made).resolve()
        shutil.copytree(installed, home, dirs_exist_ok=True, copy_function=os.link)
        (home / ".ssh").mkdir()
        for place in (".ssh/id_rsa", "bin/own", "lib/notes", "notes", f"lib/{VERSION}/site-packages/own.py"):
            (home / place).write_text("a secret")
        yield home


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["/tmp", "/var/tmp"], indirect=True)
def test_an_interpreter_in_a_home_runs_without_the_home(
    sandbox: Sandbox, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "_base_executable", str(home / "bin" / VERSION))
    runs = Sandbox(SandboxSpec())
    runs.probe()
    ran = runs.run_blocking(LOOK, limits=SMALL)
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout) == [[str(home / "bin" / VERSION)], [], str(home)]


@pytest.mark.parametrize("installed", [pytest.param("/tmp", marks=pytest.mark.slow), "/var/tmp"], indirect=True)
def test_a_link_to_an_interpreter_or_to_its_library_is_followed(
    sandbox: Sandbox, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moved = tmp_path / "library"
    shutil.move(home / "lib" / VERSION, moved)
    (home / "lib" / VERSION).symlink_to(moved)
    (tmp_path / "python").symlink_to(home / "bin" / VERSION)
    monkeypatch.setattr(sys, "_base_executable", str(tmp_path / "python"))
    ran = Sandbox(SandboxSpec()).run_blocking(LOOK, limits=SMALL)
    assert ran.code == 0, ran.stderr
    assert json.loads(ran.stdout) == [[str(home / "bin" / VERSION)], [], str(home)]


def test_an_interpreter_that_needs_more_than_its_files_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no library >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"does not start .*code 3: no library"):
        interpreter(str(python))


def test_a_library_that_holds_the_interpreter_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '[\"{tmp_path}\"]'\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"not a directory of its own"):
        interpreter(str(python))


def test_an_interpreter_of_the_system_needs_nothing_more() -> None:
    assert not interpreter("/usr/bin/python3").parts
