"""The door to the sandbox: calls from an event loop or without one, and the trial at the start."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

from headway.errors import ConfigError, SandboxFailed
from headway.runtime.sandbox.bubblewrap import Bubblewrap, BubblewrapRoom
from headway.runtime.sandbox.interpreter import ISOLATED, base_python
from headway.runtime.sandbox.process_limits import ProcessLimits, prlimit
from headway.runtime.sandbox.sandbox_call import KILLED, Room, SandboxCall
from headway.runtime.sandbox.sandbox_limits import SandboxLimits, SandboxResult, SandboxSpec
from headway.runtime.sandbox.seccomp import seccomp_filter

AT_ONCE = max(32, 2 * (os.cpu_count() or 1))
"""Most calls at once of a process's event loop; further ones wait. Many more than processors: a call that sleeps takes
none, and is not to hold up others."""
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
    """Runs untrusted programs, each in a new room. May be used from several threads."""

    def __init__(self, spec: SandboxSpec) -> None:
        """Find what it needs on this machine; nothing is started.

        Raises:
            ConfigError: a program is missing; says what to install.
        """
        self._spec = spec
        self._found: Bubblewrap | None = None
        self._refused = b""
        if spec.kind == "bubblewrap":
            self._found, self._refused = Bubblewrap.here(), seccomp_filter()
        else:
            prlimit()

    def probe(self) -> None:
        """Run a program of one line, and one that is to be ended by a limit that is measured from outside.

        Raises:
            ConfigError: it does not run here, or what it takes cannot be measured; says why, and what to change.
        """
        try:
            ran = self.run_blocking("print('here')", limits=TRIAL)
        except SandboxFailed as cause:
            said = " ".join(str(cause).split())
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
        """Run a program to its end. Cancelling this ends the program, and waits until nothing of it is left.

        Args:
            program: Python code, or a program with its arguments, as the room has them: absolute paths of /usr.
            stdin: its standard input.
            files: plain names in its working directory → contents.
            limits: the call's limits; None for the sandbox's own.

        Raises:
            SandboxFailed: the call could not be made, whatever the program was.
        """
        call, arguments = self._call(program, files or {}, limits or self._spec.limits)
        work = _threads(os.getpid()).submit(call.run, arguments, _encoded(stdin))
        running = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            call.stop()
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
        """`run`, for code without an event loop."""
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
        room: Room
        room = ProcessLimits(contents) if self._found is None else BubblewrapRoom(self._found, self._refused, contents)
        return SandboxCall(room, limits), program

    def python(self, *arguments: str) -> list[str]:
        """The command that runs the room's Python with ``arguments``."""
        return [base_python() if self._found is None else self._found.python, *ISOLATED, *arguments]


CODE = "main.py"
"""Name of the file that Python code is run from."""


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of ``process`` that see calls through. They live as long as it, for a room ends with its thread."""
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sandbox")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")
