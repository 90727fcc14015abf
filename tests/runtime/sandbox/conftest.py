"""Calls in the sandbox, as the user of the tests and, where that is root, as one without rights too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

import headway
from headway.runtime.sandbox.sandbox import Sandbox
from headway.runtime.sandbox.sandbox_call import SandboxLimits, SandboxResult, SandboxSpec

SMALL = SandboxLimits(wall_s=30.0, cpu_s=10.0, memory_mib=256, processes=16, output_kib=16, scratch_mib=8)
"""Limits of calls that are to end by themselves, even on a busy machine."""
NOBODY = 65533
SYSTEM_PYTHON = "/usr/bin/python3"
SOURCES = str(Path(headway.__file__).parent.parent)
ONE_CALL = """
import json, sys
from dataclasses import asdict
from headway.runtime.sandbox.sandbox_call import SandboxLimits, SandboxSpec
from headway.runtime.sandbox.sandbox import Sandbox
job = json.load(sys.stdin)
ran = Sandbox(SandboxSpec()).run_blocking(job["code"], stdin=job["stdin"], limits=SandboxLimits(**job["limits"]))
json.dump(asdict(ran), sys.stdout)
"""
Run = Callable[..., SandboxResult]


@cache
def a_user_without_rights() -> list[str] | None:
    """The command of a Python that another user than root runs, with Headway's sources; None where there is none."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return None
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    command = [*become, SYSTEM_PYTHON, "-B", "-c"]
    tried = subprocess.run(
        [*command, "import headway.runtime.sandbox.sandbox"], env=variables(), cwd="/", capture_output=True, check=False
    )
    return command if tried.returncode == 0 else None


def variables() -> dict[str, str]:
    return {"PYTHONPATH": SOURCES, "PATH": os.environ["PATH"]}


def in_another_process(code: str, *, stdin: str = "", limits: SandboxLimits = SMALL) -> SandboxResult:
    command = a_user_without_rights()
    assert command is not None
    job = json.dumps({"code": code, "stdin": stdin, "limits": asdict(limits)})
    done = subprocess.run(
        [*command, ONE_CALL],
        input=job,
        capture_output=True,
        text=True,
        env=variables(),
        cwd="/",
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: Mapping[str, object] = json.loads(done.stdout)
    return SandboxResult(**told)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    if shutil.which("bwrap") is None:
        pytest.skip("there is no bwrap here: apt install bubblewrap")
    made = Sandbox(SandboxSpec())
    made.probe()
    return made


@pytest.fixture(params=["as who tests", "as a user without rights"])
def run(request: pytest.FixtureRequest, sandbox: Sandbox) -> Run:
    """Run code in the sandbox: run(code, stdin="", limits=SMALL)."""
    if request.param == "as a user without rights":
        if a_user_without_rights() is None:
            pytest.skip("the tests run as such a user, or no system Python can read these sources")
        return lambda code, **arguments: in_another_process(dedent(code), **arguments)
    return lambda code, **arguments: sandbox.run_blocking(dedent(code), **{"limits": SMALL, **arguments})


@pytest.fixture
def here(sandbox: Sandbox) -> Run:
    """Run code in the sandbox as who tests, where it makes no difference who that is."""
    return lambda code, **arguments: sandbox.run_blocking(dedent(code), **{"limits": SMALL, **arguments})


def running(mark: str) -> list[int]:
    """Numbers of this machine's processes whose arguments have ``mark``."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and int(place.name) != os.getpid():
            try:
                arguments = (place / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark.encode() in arguments:
                found.append(int(place.name))
    return found
