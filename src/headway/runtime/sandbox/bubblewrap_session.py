"""The surroundings of a call that bubblewrap makes: started, watched and ended through the room's first process."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from headway.errors import SandboxFailed, cut
from headway.runtime.sandbox.bubblewrap import SCRATCH, Bubblewrap, own_uid
from headway.runtime.sandbox.memory_files import sealed
from headway.runtime.sandbox.resource_usage import exceeded, processes_in
from headway.runtime.sandbox.sandbox_call import CHUNK, ENDS_S
from headway.runtime.sandbox.sandbox_limits import Limit, SandboxLimits


class BubblewrapRoom:
    """Surroundings of bubblewrap's making."""

    def __init__(self, found: Bubblewrap, refused: bytes, files: Mapping[str, bytes]) -> None:
        """
        Args:
            found: the programs that make it.
            refused: the filter of system calls.
            files: names in the scratch space → contents.
        """
        self._found, self._refused, self._files = found, refused, files
        self._limits = SandboxLimits()
        self._status = -1
        self._told = b""
        self._first: int | None = None
        """Descriptor of the room's first process, with which the kernel ends all others."""
        self._root = ""
        self._door: socket.socket | None = None
        """Here the first process says that it is there. It starts the program when it is told a line, and does not
        where this process ends before."""

    def start(
        self, program: Sequence[str], limits: SandboxLimits, stdin: bytes, held: ExitStack
    ) -> subprocess.Popen[bytes]:
        self._limits = limits
        uid = held.enter_context(own_uid())
        self._status, told_here = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        held.callback(os.close, self._status)
        with ExitStack() as ours:
            ours.callback(os.close, told_here)
            files = {name: sealed(content, ours) for name, content in self._files.items()}
            refused = sealed(self._refused, ours)
            given = sealed(stdin, ours)
            self._door, inside = (held.enter_context(end) for end in socket.socketpair())
            ours.callback(inside.close)
            command = self._found.command(
                program, limits, uid=uid, status=told_here, seccomp=refused, stdin=given, files=files
            )
            return subprocess.Popen(
                command,
                stdin=inside.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},  # the room's first process keeps the one that it is started with, for all in there to read
                cwd="/",
                pass_fds=(told_here, refused, given, *files.values()),
            )

    @property
    def tells(self) -> int | None:
        return self._status

    def hear(self) -> bool:
        goes_on = self._hear()
        self._find_first()
        return goes_on and not self._root

    def exceeded(self) -> Limit | None:
        self._find_first()
        proc = f"{self._root}/proc"
        try:
            if self._first is None or Path(proc).stat().st_dev == Path("/proc").stat().st_dev:
                return None  # it is still being set up
        except OSError:
            return None
        return exceeded(processes_in(proc), f"{self._root}{SCRATCH}", self._limits)

    def end(self) -> bool:
        until = time.monotonic() + ENDS_S
        while self.hear():  # before it is known, the room's first process could not be ended
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._status], [], [], left)[0]:
                raise SandboxFailed(f"bwrap did not say within {ENDS_S:g} s what it has started")
        if self._first is None:
            return True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)
        poll = select.poll()
        poll.register(self._first, select.POLLIN)
        gone = bool(poll.poll(ENDS_S * 1000))
        os.close(self._first)
        self._first = None
        return gone

    def code(self, returned: int, said: str) -> int:
        self._hear()
        for line in self._told.splitlines():
            if (code := json.loads(line).get("exit-code")) is not None:
                return int(code)
        raise SandboxFailed(f"the sandbox could not be set up: {cut(' '.join(said.split()), 300) or returned}")

    def _find_first(self) -> None:
        """Learn the room's first process, once bwrap has told it."""
        self._hear()
        if self._root or b"\n" not in self._told:
            return
        pid = json.loads(self._told.splitlines()[0])["child-pid"]
        self._root = f"/proc/{pid}/root"
        with suppress(OSError):
            first = os.pidfd_open(pid)
            if _is_first(pid):
                self._first = first
                self._let_go()
            else:
                os.close(first)

    def _let_go(self) -> None:
        """Let the program start: from here on the room ends with this process.

        Not before the first process is there. Until then bwrap could end with this process, and the room not with it.
        """
        assert self._door is not None
        if not select.select([self._door], [], [], ENDS_S)[0]:
            raise SandboxFailed(f"bwrap has not set a room up within {ENDS_S:g} s")
        with suppress(ConnectionError):
            if self._door.recv(1):
                self._door.send(b"\n")

    def _hear(self) -> bool:
        """Take what bwrap tells. Returns False where it has ended."""
        try:
            while chunk := os.read(self._status, CHUNK):
                self._told += chunk
        except BlockingIOError:
            return True
        return False


def _is_first(pid: int) -> bool:
    """Tell whether a process is the first one of a namespace, and not another one that has its number by now."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    numbers = status.partition("NSpid:")[2].partition("\n")[0].split()
    return len(numbers) > 1 and numbers[-1] == "1"
