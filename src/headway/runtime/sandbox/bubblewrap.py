"""Sandbox made by ``bwrap`` for one call: `Bubblewrap` builds its command, `BubblewrapCall` starts and ends it.

    [setpriv ─▶] bwrap ─▶ sh, the first process in there ─▶ prlimit ─▶ the program
     where we    makes     waits until it is let go, so that nothing starts of a
     are root    all       caller that has ended; all that runs ends with it

The sandbox has /usr and the interpreter, read-only, its own /proc and /dev, and one writable place: /tmp, in memory.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

from headway.errors import ConfigError, SandboxFailed, cut
from headway.runtime.sandbox.interpreter import Interpreter, base_python, interpreter, open_way_to, programs
from headway.runtime.sandbox.sandbox_call import (
    CHUNK,
    ENDS_S,
    Limit,
    SandboxCall,
    SandboxLimits,
    exceeded,
    processes_in,
    sealed,
)

UID_INSIDE = 1000
HOSTNAME = "headway-sandbox"
FIRST_UID, UIDS = 64000, 1000
"""First user id under which root runs sandboxes, and the number of ids: each open sandbox has its own."""
COUNTS_BY_NAMESPACE = (5, 14)
"""First Linux version that counts a user's processes per user namespace, and not on the whole machine."""
SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Directories beside /usr; on most systems links into /usr."""
FROM_ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("null", "full", "random", "urandom")
"""Devices of the sandbox. Not zero: its shared mappings are memory that belongs to no process."""
MOST_OPEN = 64
"""Maximum number of open files of a process."""
MOST_SIGNALS = 256
"""Maximum number of pending signals for all processes of a call. Each timer counts as one."""
SCRATCH = "/tmp"
INPUT = "/input"
FIRST = (
    "/bin/sh",
    "-c",
    f'echo >&0; read -r go || exit 1; exec <{INPUT}; echo 1000 >/proc/self/oom_score_adj; "$@"; exit $?',
)
"""First process of the sandbox, which the kernel ends before others when memory is short. It reports that it is there,
so that it ends with bwrap from then on. It starts the program when Headway's process tells it to, and never after the
end of that. When it ends, so does everything in the sandbox."""


@dataclass(frozen=True)
class Bubblewrap:
    """Programs of this machine that build sandboxes."""

    bwrap: str
    prlimit: str
    setpriv: str
    python: str
    """Interpreter from which a venv is made, without installed packages."""

    @classmethod
    def here(cls) -> Bubblewrap:
        """Find the programs. Raises `ConfigError` with what to install."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ConfigError(
                "sandbox: there is no bwrap on this machine, in which code of the model's could run; install it (apt "
                "install bubblewrap), or choose sandbox=process_limits, which protects from much less (docs/sandbox.md)"
            )
        return cls(bwrap, **programs("prlimit", "setpriv"), python=base_python())

    @cached_property
    def interpreter(self) -> Interpreter:
        """Interpreter with the files that it needs in a sandbox. Raises `ConfigError` if it fails to start."""
        return interpreter(self.python)

    @cached_property
    def counts_processes(self) -> bool:
        """True if the kernel counts a sandbox's processes separately from all others of its user."""
        numbers = platform.release().split("-")[0].split(".")[:2]
        return os.geteuid() == 0 or tuple(map(int, numbers)) >= COUNTS_BY_NAMESPACE

    def command(
        self,
        program: Sequence[str],
        limits: SandboxLimits,
        *,
        uid: int | None,
        status: int,
        seccomp: int,
        stdin: int,
        files: Mapping[str, int],
    ) -> list[str]:
        """Return the command that runs ``program`` in a new sandbox.

        Args:
            program: the program and its arguments, with paths of the sandbox.
            uid: user of this machine under which it runs, if this process is root's.
            status: descriptor to which bwrap writes the id of the sandbox's process, and how the program ended.
            seccomp: descriptor of the filter of system calls.
            stdin: descriptor of the program's standard input.
            files: names in the scratch space → descriptors of their contents.
        """
        names = "--unshare-user --unshare-pid --unshare-ipc --unshare-uts --unshare-net --unshare-cgroup-try"
        apart = "--disable-userns --as-pid-1 --die-with-parent --new-session --cap-drop ALL --clearenv"
        who = ["--uid", str(UID_INSIDE), "--gid", str(UID_INSIDE), "--hostname", HOSTNAME]
        devices = [word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]
        links = ["--symlink", "/proc/self/fd", "/dev/fd", "--symlink", SCRATCH, "/dev/shm"]
        scratch = ["--size", str(limits.scratch_mib << 20), "--perms", "0700", "--tmpfs", SCRATCH]
        contents = [
            word for name, fd in files.items() for word in ("--perms", "0600", "--file", str(fd), f"{SCRATCH}/{name}")
        ]
        variables = {"PATH": "/usr/bin:/bin", "HOME": SCRATCH, "TMPDIR": SCRATCH, "LANG": "C.UTF-8"}
        # bwrap mounts in this order: later places cover earlier ones, and --size and --perms apply only to the next
        # one.
        made = [
            *(self.bwrap, *names.split(), *apart.split(), *who, *self._read_only()),
            *("--proc", "/proc", "--tmpfs", "/dev", *devices, *links, "--remount-ro", "/dev"),
            *(*scratch, *contents, "--perms", "0400", "--file", str(stdin), INPUT),
            *(*self._python(), "--remount-ro", "/", "--chdir", SCRATCH),
            *(word for name, value in variables.items() for word in ("--setenv", name, value)),
            *("--json-status-fd", str(status), "--seccomp", str(seccomp), "--"),
            # Inside the sandbox: there only its own processes are counted.
            *(*FIRST, HOSTNAME, self.prlimit, *rlimits(limits, counts_processes=self.counts_processes), "--", *program),
        ]
        return made if uid is None else [*self._become(uid), *made]

    @cached_property
    def _way(self) -> IO[bytes] | None:
        """Namespace in which all users can reach the interpreter; None if they can reach it without one."""
        return open_way_to([*self.interpreter.parts.values()])

    def _become(self, uid: int) -> list[str]:
        """Return the beginning of a command that runs as another user, who can reach the interpreter."""
        if self._way is None:
            return [self.setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
        namespace = f"/proc/{os.getpid()}/fd/{self._way.fileno()}"  # not inherited: the sandbox would have it
        return [str(shutil.which("nsenter")), f"--mount={namespace}", f"--setuid={uid}", f"--setgid={uid}", "--"]

    def _read_only(self) -> Iterator[str]:
        yield from ("--ro-bind", "/usr", "/usr")
        for path in SYSTEM:
            if Path(path).is_symlink():
                yield from ("--symlink", str(Path(path).readlink()), path)
            elif Path(path).exists():
                yield from ("--ro-bind", path, path)
        yield from ("--perms", "0755", "--dir", "/etc")
        for path in FROM_ETC:
            yield from ("--ro-bind-try", path, path)

    def _python(self) -> Iterator[str]:
        """Yield arguments that mount the interpreter. They follow the scratch space, which could hide it."""
        made: set[Path] = set()
        for part, source in self.interpreter.parts.items():
            for parent in [*part.parents][-2::-1]:  # else these have the same permissions as outside
                if parent not in made:
                    yield from ("--perms", "0755", "--dir", str(parent))
            made.update(part.parents)
            yield from ("--ro-bind", str(source), str(part))
        for packages in self.interpreter.hidden:
            yield from ("--tmpfs", str(packages), "--remount-ro", str(packages))


def rlimits(limits: SandboxLimits, *, counts_processes: bool) -> Iterator[str]:
    """Yield the arguments of prlimit(1) for each process of a call."""
    seconds = max(1, round(limits.cpu_s + 0.5))
    # At the first limit SIGXCPU, which a program may ignore; at the second SIGKILL.
    yield f"--cpu={seconds}:{seconds + 1}"
    yield f"--as={limits.memory_mib << 20}"
    yield f"--fsize={limits.scratch_mib << 20}"
    yield f"--nofile={MOST_OPEN}"
    yield f"--sigpending={MOST_SIGNALS}"
    yield from ("--core=0", "--memlock=0", "--msgqueue=0", "--rtprio=0", "--nice=0")
    if counts_processes:
        yield f"--nproc={limits.processes + 1}"  # the sandbox's own first process counts, too


@contextmanager
def own_uid() -> Iterator[int | None]:
    """Hold a user id of this machine that no other open sandbox has, if this process is root's; else yield None.

    The lock is an abstract socket named after the id: the kernel frees it when the process ends.

    Raises:
        SandboxFailed: all ids are taken.
    """
    if os.geteuid() != 0:
        yield None
        return
    with socket.socket(socket.AF_UNIX) as lock:
        for place in range(UIDS):
            # Each process begins at a different id: otherwise all would first try the taken ones.
            uid = FIRST_UID + (os.getpid() * 7 + place) % UIDS
            try:
                lock.bind(f"\0headway-sandbox-{uid}")
            except OSError:
                continue
            # Held for the whole block: the socket's name is the lock.
            yield uid
            return
        raise SandboxFailed(f"{UIDS} sandboxes are open on this machine, and there is a user for no more")


class BubblewrapCall(SandboxCall):
    """One call in a sandbox made by bubblewrap."""

    def __init__(self, limits: SandboxLimits, files: Mapping[str, bytes], found: Bubblewrap, refused: bytes) -> None:
        """Prepare a call. ``found``: programs that make the sandbox; ``refused``: filter of system calls."""
        super().__init__(limits, files)
        self._found, self._refused = found, refused
        self._told = b""
        self._first: int | None = None
        """Descriptor of the sandbox's first process; when it is killed, the kernel kills all others."""
        self._root = ""
        self._door: socket.socket | None = None
        """Connection to the first process, which reports here that it is there. It starts the program when it gets a
        line, and not if this process ends before."""

    def start(self, program: Sequence[str], stdin: bytes, held: ExitStack) -> subprocess.Popen[bytes]:
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
                program, self._limits, uid=uid, status=told_here, seccomp=refused, stdin=given, files=files
            )
            return subprocess.Popen(
                command,
                stdin=inside.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},  # the sandbox's first process keeps its environment, which all programs in there can read
                cwd="/",
                pass_fds=(told_here, refused, given, *files.values()),
            )

    def begin(self) -> None:
        until = time.monotonic() + ENDS_S
        while b"\n" not in self._told:
            if not select.select([self._status], [], [], max(0.0, until - time.monotonic()))[0]:
                raise SandboxFailed(f"bwrap did not say within {ENDS_S:g} s what it has started")
            if not self._hear():
                return  # it has ended: `code` tells the reason
        pid = json.loads(self._told.splitlines()[0])["child-pid"]
        self._root = f"/proc/{pid}/root"
        with suppress(OSError):
            # Opened before it is checked: the id may be reused by then, the descriptor cannot.
            first = os.pidfd_open(pid)
            if _is_first(pid):
                self._first = first
                self._let_go()
            else:
                os.close(first)

    def exceeded(self) -> Limit | None:
        proc = f"{self._root}/proc"
        try:
            if self._first is None or Path(proc).stat().st_dev == Path("/proc").stat().st_dev:
                return None  # it has ended
        except OSError:
            return None
        return exceeded(processes_in(proc), f"{self._root}{SCRATCH}", self._limits)

    def end(self) -> bool:
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
        # The exit code may have arrived with the end itself.
        self._hear()
        for line in self._told.splitlines():
            if (code := json.loads(line).get("exit-code")) is not None:
                return int(code)
        raise SandboxFailed(f"the sandbox could not be set up: {cut(' '.join(said.split()), 300) or returned}")

    def _let_go(self) -> None:
        """Let the program start: from now on the sandbox ends with this process.

        Not before the first process is there: until then bwrap could end with this process, and leave its child
        running.
        """
        assert self._door is not None
        if not select.select([self._door], [], [], ENDS_S)[0]:
            raise SandboxFailed(f"bwrap has not set a sandbox up within {ENDS_S:g} s")
        with suppress(ConnectionError):
            if self._door.recv(1):
                self._door.send(b"\n")

    def _hear(self) -> bool:
        """Read bwrap's messages. Returns False if bwrap has ended."""
        try:
            while chunk := os.read(self._status, CHUNK):
                self._told += chunk
        except BlockingIOError:
            return True
        return False


def _is_first(pid: int) -> bool:
    """Tell whether a process is the first one of a namespace, and not another one that now has its id."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    numbers = status.partition("NSpid:")[2].partition("\n")[0].split()
    return len(numbers) > 1 and numbers[-1] == "1"
