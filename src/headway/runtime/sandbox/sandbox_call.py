"""One call in the sandbox, from its first process to the end of its last one.

started ── output within its bound, limits kept ─▶ the program ends ─▶ ended: nothing of it is left
   └────── a limit, or `stop` ────────────────────────────────────────▶ ended
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from headway.errors import SandboxFailed
from headway.runtime.sandbox.sandbox_limits import Limit, SandboxLimits, SandboxResult

LOOKS_S = 0.02
"""Seconds between two looks at what the processes take."""
ENDS_S = 10.0
"""Seconds for the kernel to end all processes of a call, whose memory is limited."""
CHUNK = 1 << 16
KILLED = 128 + signal.SIGKILL
EVENTS = select.POLLIN | select.POLLHUP | select.POLLERR
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def sealed(content: bytes, held: ExitStack) -> int:
    """Descriptor, at its beginning, of a sealed file in memory that holds ``content``."""
    file = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    held.callback(os.close, file)
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    return file


class SandboxCall:
    """One call: `run` in any thread, `stop` from any other. Subclasses say how its program is started and ended."""

    tells: int | None = None
    """Descriptor that can be read where `hear` is to be called."""

    def __init__(self, limits: SandboxLimits, files: Mapping[str, bytes]) -> None:
        """Prepare a call. ``files``: names in the scratch space → contents."""
        self._limits, self._files = limits, files
        self._lock = threading.Lock()
        self._was_stopped = False
        self._stopped: int | None = None
        """Descriptor that can be read once the call is to end; None while it does not run."""
        self._texts: dict[int, bytearray] = {}
        self._printed = 0

    def start(self, program: Sequence[str], stdin: bytes, held: ExitStack) -> subprocess.Popen[bytes]:
        """Start ``program``; what it needs until its end is entered into ``held``. Raises `OSError`."""
        raise NotImplementedError

    def hear(self) -> bool:
        """Take what the surroundings tell. Returns False where they will tell no more."""
        return False

    def exceeded(self) -> Limit | None:
        """Return the limit that was gone beyond, or None."""
        return None

    def end(self) -> bool:
        """End all processes of the call that are left, and wait until they are gone.

        Returns:
            False where they are not, after `ENDS_S`: what they did keeps the kernel busy.

        Raises:
            SandboxFailed: the program was never started, and what was to start it does not end.
        """
        raise NotImplementedError

    def code(self, returned: int, said: str) -> int:
        """Return the program's exit code, from what the first process ``returned``. Raises `SandboxFailed` where no
        program was started; ``said`` is its standard error.
        """
        return returned if returned >= 0 else 128 - returned

    def stop(self) -> None:
        """End the call, now or when it begins, as if its program had been killed."""
        with self._lock:
            self._was_stopped = True
            if self._stopped is not None:
                os.eventfd_write(self._stopped, 1)

    def run(self, program: Sequence[str], stdin: bytes) -> SandboxResult:
        """Run ``program`` to its end, and return what came of it.

        Raises:
            SandboxFailed: the surroundings could not be made.
        """
        with ExitStack() as held:
            with self._lock:
                if self._was_stopped:
                    return SandboxResult("", "", KILLED)
                self._stopped = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            held.callback(self._forget_stop)
            try:
                started = time.monotonic()
                process = self.start(program, stdin, held)
            except OSError as cause:
                raise SandboxFailed(f"a call in the sandbox could not be started: {cause}") from cause
            held.callback(process.wait, ENDS_S)
            held.callback(process.kill)
            held.callback(self.end)  # runs first, whatever happens
            assert process.stdout is not None and process.stderr is not None
            held.enter_context(process.stdout)
            held.enter_context(process.stderr)
            outputs = process.stdout.fileno(), process.stderr.fileno()
            self._texts = {output: bytearray() for output in outputs}
            for output in outputs:
                os.set_blocking(output, False)
            limit = self._watch(process, started)
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
            if limit is not None or self._was_stopped:
                return SandboxResult(stdout, stderr, KILLED, limit)
            code = self.code(returned, stderr)
            return SandboxResult(stdout, stderr, code, "cpu" if code == 128 + signal.SIGXCPU else None)

    def _watch(self, process: subprocess.Popen[bytes], started: float) -> Limit | None:
        """Read output and keep limits until the first process has ended, or is to."""
        ended, tells, stopped = os.pidfd_open(process.pid), self.tells, self._stopped
        poll = select.poll()
        for descriptor in (*self._texts, ended, stopped, tells):
            if descriptor is not None:
                poll.register(descriptor, EVENTS)
        last_look = started
        try:
            while True:
                now = time.monotonic()
                left = started + self._limits.wall_s - now
                if left <= 0:
                    return "wall"
                if now - last_look >= LOOKS_S:
                    last_look = now
                    if (limit := self.exceeded()) is not None:
                        return limit
                wait = min(left, max(0.0, last_look + LOOKS_S - now))
                for descriptor, _ in poll.poll(wait * 1000 + 1):
                    if descriptor in (ended, stopped):
                        return None
                    goes_on = self.hear() if descriptor == tells else self._read(descriptor)
                    if not goes_on:
                        poll.unregister(descriptor)
                    if self._over_output():
                        return "output"
        finally:
            os.close(ended)

    def _read(self, output: int) -> bool:
        """Take what is there to read, up to a bound. Returns False at the end of the output."""
        while self._over_output() is None:
            try:
                chunk = os.read(output, CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            room = (self._limits.output_kib << 10) - self._printed
            self._texts[output] += chunk[: max(0, room)]
            self._printed += len(chunk)
        return True

    def _over_output(self) -> Limit | None:
        return "output" if self._printed > self._limits.output_kib << 10 else None

    def _forget_stop(self) -> None:
        with self._lock:
            if self._stopped is not None:
                os.close(self._stopped)
            self._stopped = None
