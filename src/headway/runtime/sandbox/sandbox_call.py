"""One call in the sandbox, from its first process to the end of its last one: limits, resource usage, outcome.

started ── output within its bound, limits kept ─▶ the program ends ─▶ ended: nothing of it is left
   └────── a limit, or `stop` ────────────────────────────────────────▶ ended

The processes' resource usage is read from /proc.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway.errors import SandboxFailed

Limit = Literal["wall", "cpu", "memory", "processes", "output", "scratch"]
"""A limit that ended a call: ``wall_s``, ``cpu_s``, ``memory_mib``, ``processes``, ``output_kib``, ``scratch_mib``."""
MOST_FILES = 20_000
"""Maximum number of files and directories in a call's scratch space: removing more would delay its end."""
Kind = Literal["bubblewrap", "process_limits"]


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one call, over all of its processes together."""

    wall_s: float = 10.0
    """Seconds of wall-clock time."""
    cpu_s: float = 10.0
    """Seconds of processor time."""
    memory_mib: int = 512
    """Memory in MiB, files in the scratch space included."""
    processes: int = 32
    """Number of simultaneous processes and threads."""
    output_kib: int = 64
    """KiB of standard output and standard error together."""
    scratch_mib: int = 64
    """MiB of files in the scratch space."""

    def said(self, limit: Limit) -> str:
        """Say which limit ended a call: ``it took longer than 10 s``."""
        return {
            "wall": f"it took longer than {self.wall_s:g} s",
            "cpu": f"it took more than {self.cpu_s:g} s of processor time",
            "memory": f"it took more than {self.memory_mib} MiB of memory",
            "processes": f"it had more than {self.processes} processes and threads",
            "output": f"it printed more than {self.output_kib} KiB",
            "scratch": f"its files took more than {self.scratch_mib} MiB, or were more than {MOST_FILES}",
        }[limit]


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Sandbox of a run: its kind, and the default limits of a call. Pickles."""

    kind: Kind = "bubblewrap"
    limits: SandboxLimits = SandboxLimits()


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of one call."""

    stdout: str
    stderr: str
    code: int
    """The program's exit code; 128 + n if signal n ended it, as in shells."""
    limit: Limit | None = None
    """Limit that ended the call; None if the program ended by itself."""


TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
SOCKET = 320 << 10
"""Maximum bytes of kernel memory of a socket, overhead included."""
INODE = 1024
"""Minimum bytes of kernel memory of a file, even an empty one."""
SPARE = 2
"""Number of a call's processes that only set it up."""


@dataclass(frozen=True, slots=True)
class ProcEntry:
    """One process, read from its directory in /proc."""

    place: str
    is_zombie: bool
    session: int
    threads: int
    seconds: float
    """Seconds of processor time, including that of reaped children."""
    resident: int
    """Bytes in memory, including shared ones."""

    @property
    def pid(self) -> int:
        """The process's id, in the namespace of the mounted /proc."""
        return int(self.place.rpartition("/")[2])


def processes_in(proc: str) -> list[ProcEntry]:
    """Return the processes of the mounted ``proc``; processes that end meanwhile are left out."""
    found = []
    with suppress(OSError):
        for name in os.listdir(proc):  # noqa: PTH208  # many times a second
            if name.isdigit():
                with suppress(OSError, IndexError, ValueError):
                    found.append(_process(f"{proc}/{name}"))
    return found


def _process(place: str) -> ProcEntry:
    stat = _text(f"{place}/stat").rpartition(")")[2].split()  # behind the name, which may hold brackets
    seconds = sum(map(int, stat[11:15])) / TICKS  # utime, stime, cutime, cstime of proc(5)
    return ProcEntry(place, stat[0] == "Z", int(stat[3]), int(stat[17]), seconds, int(stat[21]) * PAGE)


def exceeded(processes: Iterable[ProcEntry], scratch: str, limits: SandboxLimits) -> Limit | None:
    """Return the limit that a call's processes and scratch files have exceeded; None if there is none."""
    processes = list(processes)
    if sum(one.threads for one in processes) > limits.processes + SPARE:
        return "processes"
    if sum(one.seconds for one in processes) > limits.cpu_s:
        return "cpu"
    number, files = used_by_files(scratch)
    if number > MOST_FILES:
        return "scratch"
    most = limits.memory_mib << 20
    files += SOCKET * sum(map(_sockets, processes))
    if files + sum(one.resident for one in processes) <= most:
        return None
    # Forked processes share pages: only the exact figure counts, which takes longer. It must exceed the limit twice:
    # when processes end during a reading, the shares of later ones grow, and the sum is too high.
    return "memory" if all(files + sum(map(_exact, processes)) > most for _ in range(2)) else None


def _sockets(process: ProcEntry) -> int:
    """Return the number of open sockets."""
    count = 0
    with suppress(OSError):  # it has ended
        for name in os.listdir(f"{process.place}/fd"):  # noqa: PTH208  # as above
            with suppress(OSError):
                count += os.readlink(f"{process.place}/fd/{name}").startswith("socket:")  # noqa: PTH115  # as above
    return count


def used_by_files(scratch: str) -> tuple[int, int]:
    """Return the number of files in the file system ``scratch``, and their bytes of memory; 0 if it is not visible."""
    try:
        info = os.statvfs(scratch)
    except OSError:
        return 0, 0
    number = info.f_files - info.f_ffree
    return number, (info.f_blocks - info.f_bfree) * info.f_frsize + number * INODE


def used_by_directory(directory: Path) -> int:
    """Return the bytes of the files in ``directory``, as far as it can be read."""
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(f"{where}/{name}").st_blocks * 512
    return total


def _exact(process: ProcEntry) -> int:
    """Return the process's bytes in memory, with only its share of shared pages."""
    with suppress(OSError, ValueError, StopIteration):
        lines = _text(f"{process.place}/smaps_rollup").splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) << 10
    return 0  # it has ended


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  # as above
        return file.read()


LOOKS_S = 0.02
"""Seconds between two measurements of the processes' resource usage."""
ENDS_S = 10.0
"""Limit in seconds for the kernel to end all processes of a call, whose memory is limited."""
CHUNK = 1 << 16
KILLED = 128 + signal.SIGKILL
EVENTS = select.POLLIN | select.POLLHUP | select.POLLERR
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def sealed(content: bytes, held: ExitStack) -> int:
    """Return the descriptor, at position 0, of a sealed file in memory with ``content``."""
    file = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    held.callback(os.close, file)
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)  # a process that inherits the descriptor reads from its position
    # Sealed last: a sealed file refuses all writes, also by the call's processes.
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    return file


class SandboxCall:
    """One call: `run` in any thread, `stop` from any other. Subclasses define how its program is started and ended."""

    def __init__(self, limits: SandboxLimits, files: Mapping[str, bytes]) -> None:
        """Prepare a call. ``files``: names in the scratch space → contents."""
        self._limits, self._files = limits, files
        self._stopped = threading.Event()
        self._texts: dict[int, bytearray] = {}
        self._printed = 0

    def start(self, program: Sequence[str], stdin: bytes, held: ExitStack) -> subprocess.Popen[bytes]:
        """Start ``program``; ``held`` gets the resources that it needs until its end. Raises `OSError`."""
        raise NotImplementedError

    def begin(self) -> None:
        """Wait until the sandbox is ready, and let the program begin. Here it has begun already.

        Raises:
            SandboxFailed: the sandbox is not ready in time.
        """

    def exceeded(self) -> Limit | None:
        """Return the exceeded limit, or None."""
        return None

    def end(self) -> bool:
        """End all remaining processes of the call, and wait until they are gone.

        Returns:
            False if some are left after `ENDS_S`, since the kernel is busy with them.
        """
        raise NotImplementedError

    def code(self, returned: int, said: str) -> int:
        """Return the program's exit code, from the result ``returned`` by the first process. Raises `SandboxFailed` if
        no program was started; ``said`` is the standard error.
        """
        return returned if returned >= 0 else 128 - returned

    def stop(self) -> None:
        """End the call, now or when it begins, as if its program were killed."""
        self._stopped.set()

    def run(self, program: Sequence[str], stdin: bytes) -> SandboxResult:
        """Run ``program`` to its end, and return its result.

        Raises:
            SandboxFailed: the sandbox could not be made.
        """
        if self._stopped.is_set():
            return SandboxResult("", "", KILLED)
        with ExitStack() as held:
            try:
                started = time.monotonic()
                process = self.start(program, stdin, held)
            except OSError as cause:
                raise SandboxFailed(f"a call in the sandbox could not be started: {cause}") from cause
            # They run in reverse: all of the call's processes end, then the first one is killed and reaped.
            held.callback(process.wait, ENDS_S)
            held.callback(process.kill)
            held.callback(self.end)  # runs first, whatever happens
            assert process.stdout is not None and process.stderr is not None
            held.enter_context(process.stdout)
            held.enter_context(process.stderr)
            outputs = process.stdout.fileno(), process.stderr.fileno()
            self._texts = {output: bytearray() for output in outputs}
            for output in outputs:
                # A surviving process may hold the pipe: a read must never wait for its end.
                os.set_blocking(output, False)
            self.begin()
            limit = self._watch(process, started)
            # Before the rest of the output is read: leftover processes would keep writing.
            if not self.end():
                process.kill()  # it would wait for them, too
                limit = limit or "wall"  # of its own making: to fail would be a way out of a bad result
            try:
                returned = process.wait(ENDS_S)
            except subprocess.TimeoutExpired as cause:
                text = f"a call's processes are gone, and what started them has not ended in {ENDS_S:g} s"
                raise SandboxFailed(text) from cause
            for output in outputs:
                self._read(output)
            limit = limit or self._over_output()
            stdout, stderr = (bytes(self._texts[output]).decode(errors="replace") for output in outputs)
            if limit is not None or self._stopped.is_set():
                return SandboxResult(stdout, stderr, KILLED, limit)
            code = self.code(returned, stderr)
            return SandboxResult(stdout, stderr, code, "cpu" if code == 128 + signal.SIGXCPU else None)

    def _watch(self, process: subprocess.Popen[bytes], started: float) -> Limit | None:
        """Read output and enforce limits until the first process has ended, or must end."""
        ended = os.pidfd_open(process.pid)
        poll = select.poll()
        for descriptor in (*self._texts, ended):
            poll.register(descriptor, EVENTS)
        last_look = started
        try:
            while not self._stopped.is_set():
                now = time.monotonic()
                left = started + self._limits.wall_s - now
                if left <= 0:
                    return "wall"
                if now - last_look >= LOOKS_S:
                    last_look = now
                    if (limit := self.exceeded()) is not None:
                        return limit
                wait = min(left, max(0.0, last_look + LOOKS_S - now))
                # Rounded up: poll takes whole milliseconds, and would return at once again and again in the last one.
                for descriptor, _ in poll.poll(wait * 1000 + 1):
                    if descriptor == ended:
                        return None
                    if not self._read(descriptor):
                        poll.unregister(descriptor)
                    if self._over_output():
                        return "output"
            return None
        finally:
            os.close(ended)

    def _read(self, output: int) -> bool:
        """Read available output, up to a bound. Returns False at the end of the output."""
        while self._over_output() is None:
            try:
                chunk = os.read(output, CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            left = (self._limits.output_kib << 10) - self._printed
            # All bytes count, but only those up to the limit are kept: endless output takes no memory here.
            self._texts[output] += chunk[: max(0, left)]
            self._printed += len(chunk)
        return True

    def _over_output(self) -> Limit | None:
        return "output" if self._printed > self._limits.output_kib << 10 else None
