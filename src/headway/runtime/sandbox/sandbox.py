"""The sandbox's interface: calls with or without an event loop, and a check at the start."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from headway.errors import ConfigError, SandboxFailed
from headway.runtime.sandbox.bubblewrap import Bubblewrap, BubblewrapCall, rlimits
from headway.runtime.sandbox.interpreter import ISOLATED, base_python, programs
from headway.runtime.sandbox.sandbox_call import (
    ENDS_S,
    KILLED,
    Limit,
    ProcEntry,
    SandboxCall,
    SandboxLimits,
    SandboxResult,
    SandboxSpec,
    exceeded,
    processes_in,
    sealed,
    used_by_directory,
)
from headway.runtime.sandbox.seccomp import seccomp_filter

AT_ONCE = max(32, 2 * (os.cpu_count() or 1))
"""Maximum number of concurrent calls of a process; further calls wait. It exceeds the number of processors, because a
sleeping call uses none and should not hold up others."""
FILE_NAME = re.compile(r"[\w.-]{1,100}")
TRIAL = SandboxLimits(wall_s=10.0, cpu_s=5.0, memory_mib=256, processes=8, output_kib=16, scratch_mib=1)
REFUSED = (
    "sandbox: bwrap cannot make a sandbox here: {said}. It needs user namespaces. On this machine allow them (sysctl "
    "user.max_user_namespaces above 0; kernel.unprivileged_userns_clone=1 and "
    "kernel.apparmor_restrict_unprivileged_userns=0 where they exist); in a container start it with --privileged, or "
    "with --cap-add SYS_ADMIN --cap-add SYS_PTRACE --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined. Or choose sandbox=process_limits, which protects from much less (docs/sandbox.md)"
)


class Sandbox:
    """Runs untrusted programs, each in a new sandbox. May be used from several threads."""

    def __init__(self, spec: SandboxSpec) -> None:
        """Find the needed programs on this machine. Nothing is started.

        Raises:
            ConfigError: a program is missing; says what to install.
        """
        self._spec = spec
        self._found: Bubblewrap | None = None
        self._refused = b""
        if spec.kind == "bubblewrap":
            self._found, self._refused = Bubblewrap.here(), seccomp_filter()
        else:
            programs("prlimit", kind="sandbox=process_limits")

    def probe(self) -> None:
        """Check by two programs: one of one line, and one that must be ended by a limit measured from outside.

        Raises:
            ConfigError: a program does not run here, or its resources cannot be measured; the message says what to
            change.
        """
        try:
            ran = self.run_blocking("print('here')", limits=TRIAL)
        except SandboxFailed as cause:
            said = " ".join(str(cause).split())
            if "Unknown option" in said:
                raise ConfigError(f"sandbox: {said}; install bubblewrap 0.8 or later") from cause
            refused = REFUSED.format(said=said) if self._found is not None else f"sandbox=process_limits: {said}"
            raise ConfigError(refused) from cause
        if ran.stdout != "here\n":
            said = "" if ran.limit is None else f" ({TRIAL.said(ran.limit)})"
            raise ConfigError(
                f"sandbox={self._spec.kind}: a program of one line ended with code {ran.code}: "
                f"{' '.join(ran.stderr.split())}{said}. It was run by {self.python()[0]}, from which Headway's venv is "
                "made: make the venv from another Python, such as the system's; where it took too long, try again"
            )
        ran = self.run_blocking("while True: pass", limits=replace(TRIAL, cpu_s=0.05))
        if (ran.limit, ran.code) != ("cpu", KILLED):  # the kernel's own limit is longer
            raise ConfigError(
                "sandbox: what a call takes cannot be measured here, so that its limits would not hold: /proc does not "
                "tell of processes of other users. In a container, start it with --cap-add SYS_PTRACE"
            )

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a program to its end. Cancelling this ends the program, and waits until all of it has ended.

        Args:
            program: Python code, or a program with its arguments, with paths of the sandbox: absolute ones in /usr.
            stdin: its standard input.
            files: plain names in its working directory → contents.
            limits: the call's limits; None for the sandbox's own.

        Raises:
            SandboxFailed: the sandbox itself failed, whatever the program.
        """
        call, arguments = self._call(program, files or {}, limits or self._spec.limits)
        work = _threads(os.getpid()).submit(call.run, arguments, _encoded(stdin))
        running = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            call.stop()
            # Stopped before it is cancelled: a call that begins in between ends at once.
            if not work.cancel():  # it has begun
                await asyncio.wait([running])
                running.exception()  # seen: what matters is that it is over
            raise

    def run_blocking(
        self,
        program: str | Sequence[str],
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Do the same as `run`, for code without an event loop."""
        call, arguments = self._call(program, files or {}, limits or self._spec.limits)
        return call.run(arguments, _encoded(stdin))

    def _call(
        self, program: str | Sequence[str], files: Mapping[str, str], limits: SandboxLimits
    ) -> tuple[SandboxCall, Sequence[str]]:
        if bad := [name for name in files if not FILE_NAME.fullmatch(name) or name.startswith(".")]:
            raise ValueError(f"{bad[0]!r} is no plain name of a file")
        contents = {name: _encoded(content) for name, content in files.items()}
        if isinstance(program, str):
            contents[CODE] = _encoded(program)
            program = self.python(CODE)
        if self._found is None:
            return ProcessLimitsCall(limits, contents), program
        return BubblewrapCall(limits, contents, self._found, self._refused), program

    def python(self, *arguments: str) -> list[str]:
        """Return the command that runs the sandbox's Python with ``arguments``."""
        return [base_python() if self._found is None else self._found.python, *ISOLATED, *arguments]


CODE = "main.py"
"""Name of the file from which Python code is run."""


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads for calls of ``process``. They live as long as it: a sandbox ends with its thread."""
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sandbox")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


TELLS = (
    "sandbox=process_limits: what the model writes runs as this user, without a sandbox. It can read this user's "
    "files, reach the network, and signal this user's processes; only its time, memory and output are bounded"
)
"""Message to the user of `process_limits` at the start."""
PAUSE_S = 0.005


class ProcessLimitsCall(SandboxCall):
    """One call without bubblewrap: only limits, a new session and a new directory.

    The program has the user's rights: it can read the user's files, reach the network and signal the user's processes.
    A process that leaves its session outlives the call.
    """

    _directory = Path()
    _session = -1

    def start(self, program: Sequence[str], stdin: bytes, held: ExitStack) -> subprocess.Popen[bytes]:
        self._directory = Path(tempfile.mkdtemp(prefix="headway-sandbox-"))
        held.callback(shutil.rmtree, self._directory, ignore_errors=True)
        for name, content in self._files.items():
            (self._directory / name).write_bytes(content)
        here = str(self._directory)
        process = subprocess.Popen(
            [programs("prlimit")["prlimit"], *rlimits(self._limits, counts_processes=False), "--", *program],
            stdin=sealed(stdin, held),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "HOME": here, "TMPDIR": here, "LANG": "C.UTF-8"},
            cwd=here,
            # By their session all processes of the call are found, also those that left its process group.
            start_new_session=True,
        )
        self._session = process.pid
        return process

    def exceeded(self) -> Limit | None:
        if used_by_directory(self._directory) > self._limits.scratch_mib << 20:
            return "scratch"
        return exceeded(self._members(), "", self._limits)

    def end(self) -> bool:
        if self._session < 0:
            return True
        until = time.monotonic() + ENDS_S
        while True:
            # Repeated in each round: a process may fork faster than it is listed.
            with suppress(ProcessLookupError):
                os.killpg(self._session, signal.SIGKILL)
            left = [one for one in self._members() if not one.is_zombie]
            if not left:
                break
            for one in left:  # of the session, but not of its first group
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
            if time.monotonic() > until:
                break
            time.sleep(PAUSE_S)
        self._session = -1
        return not left

    def _members(self) -> list[ProcEntry]:
        return [one for one in processes_in("/proc") if one.session == self._session]
