"""Calls in the sandbox, as the user of the tests and, where that is root, as one without rights too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
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
CALLS = """
import json, sys
from dataclasses import asdict
from headway.runtime.sandbox.sandbox_call import SandboxLimits, SandboxSpec
from headway.runtime.sandbox.sandbox import Sandbox
runs = Sandbox(SandboxSpec())
for line in sys.stdin:
    job = json.loads(line)
    ran = runs.run_blocking(job["code"], stdin=job["stdin"], limits=SandboxLimits(**job["limits"]))
    print(json.dumps(asdict(ran)), flush=True)
"""
Run = Callable[..., SandboxResult]


@pytest.fixture(scope="session")
def a_user_without_rights() -> Iterator[Run]:
    """Calls of a process that another user than root runs, by a Python of the system with Headway's sources."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("the tests run as such a user")
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--", SYSTEM_PYTHON, "-B", "-c"]
    variables = {"PYTHONPATH": SOURCES, "PATH": os.environ["PATH"]}
    tried = [*become, "import headway.runtime.sandbox.sandbox"]
    if subprocess.run(tried, env=variables, cwd="/", capture_output=True, check=False).returncode != 0:
        pytest.skip("no system Python can read these sources")
    with subprocess.Popen(
        [*become, CALLS], env=variables, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as other:

        def call(code: str, *, stdin: str = "", limits: SandboxLimits = SMALL) -> SandboxResult:
            print(json.dumps({"code": code, "stdin": stdin, "limits": asdict(limits)}), file=other.stdin)
            assert other.stdout is not None
            return SandboxResult(**json.loads(other.stdout.readline()))

        yield call


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    if shutil.which("bwrap") is None:
        pytest.skip("there is no bwrap here: apt install bubblewrap")
    made = Sandbox(SandboxSpec())
    made.probe()
    return made


@pytest.fixture(params=["as who tests", pytest.param("as a user without rights", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, sandbox: Sandbox) -> Run:
    """Run code in the sandbox: run(code, stdin="", limits=SMALL)."""
    if request.param == "as a user without rights":
        call = request.getfixturevalue("a_user_without_rights")
        return lambda code, **arguments: call(dedent(code), **arguments)
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
