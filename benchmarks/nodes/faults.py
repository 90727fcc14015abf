"""Faults of a run on machines of namespaces: what is done to a process, a machine or a disk, and undone after a while.

kill, stop, memory      one process: SIGKILL; SIGSTOP, until it is continued; at most `MEMORY` more bytes
kill, stop              a whole machine
partition, slow         a machine's link: down; `RATE`.  peers: two machines do not see each other, but the head
full                    the disk of the run's directory; a machine's own /tmp and /dev/shm
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.nodes.machines import Machine, Machines
from headway.runtime.process_tree import descendants

PROCESSES = ("driver", "actor", "rollout", "episode-worker", "reward", "raylet")
FAULTS = (
    *(f"{kind}:{victim}" for kind in ("kill", "stop") for victim in (*PROCESSES, "machine")),
    *(f"memory:{victim}" for victim in PROCESSES[:5]),
    *("partition:machine", "partition:peers", "slow:machine", "full:run", "full:machine"),
)
MEMORY = 1 << 20
RATE = "4mbit"
CGROUPS = Path("/sys/fs/cgroup")
Undo = Callable[[], object]
Strike = Callable[[], Undo]
"""Function that does a fault, and returns the one that undoes it."""


def aim(name: str, machines: Machines, attending: int, chance: random.Random) -> tuple[str, Strike]:
    """Return what ``KIND:VICTIM`` hits, and the function that does it at once.

    ``attending`` is the process of ``headway train … --restarts``. The driver's own machine, which has Ray's head, is
    never hit as a whole. Raises `LookupError` where there is no such victim now.
    """
    kind, _, victim = name.partition(":")
    workers = [machine for machine in machines.by_name.values() if machine.name != "A" and machine.is_up]
    machine = chance.choice(workers)
    match kind, victim:
        case "partition", "peers":
            return victim, lambda: undo_all([machines.isolate(peer.name) for peer in workers])
        case "partition", _:
            return machine.name, lambda: machines.silence(machine.name)
        case "slow", _:
            return machine.name, lambda: machines.slow(machine.name, RATE)
        case "full", "run":
            return victim, lambda: fill_disk(machines.shared)
        case "full", _:
            return machine.name, lambda: undo_all([fill_memory(machine, folder) for folder in ("/tmp", "/dev/shm")])
        case "kill", "machine":
            return machine.name, lambda: cut_power(machine)
        case "stop", "machine":
            return machine.name, lambda: undo_all([hit(pid, kind) for pid in machine.processes("")])
    pid = chance.choice(processes(machines, attending, victim))
    return f"process {pid}", lambda: hit(pid, kind)


def cut_power(machine: Machine) -> Undo:
    machine.kill()
    return undo_all(())  # it is booted again when it is seen to be down


def undo_all(undos: Sequence[Undo]) -> Undo:
    return lambda: [undo() for undo in undos]


def hit(pid: int, kind: str) -> Undo:
    """Hit a process; returns what ends it."""
    if kind != "memory":
        send(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return lambda: send(pid, signal.SIGCONT)
    old = CGROUPS / "memory"
    group = (old if old.is_dir() else CGROUPS) / f"headway-chaos-{pid}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(MEMORY))
    procs = group / "cgroup.procs"
    with suppress(ProcessLookupError):
        procs.write_text(str(pid))

    def lift() -> None:
        for left in procs.read_text().split():
            with suppress(OSError):
                (group.parent / "cgroup.procs").write_text(left)
        with suppress(OSError):  # one that is being killed holds it
            group.rmdir()

    return lift


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def fill_disk(folder: Path) -> Undo:
    """Take all of a disk's room; returns what gives it back."""
    filler = folder / "filler"
    with filler.open("wb") as file, suppress(OSError):
        while size := os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize:
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(4096, size - size % 4096))
    return lambda: filler.unlink(missing_ok=True)


def fill_memory(machine: Machine, folder: str) -> Undo:
    """Leave a file system in memory no room; returns what gives it back."""
    there = os.statvfs(f"/proc/{machine.pid}/root{folder}")
    used, whole = (there.f_blocks - there.f_bfree) * there.f_frsize, there.f_blocks * there.f_frsize

    def resize(size: int) -> None:
        command = ["nsenter", "-t", str(machine.pid), "-m", "mount", "-o", f"remount,size={size}", folder]
        subprocess.run(command, capture_output=True, timeout=10, check=False)  # the machine may be gone meanwhile

    resize(used + 65536)
    return lambda: resize(whole)


def processes(machines: Machines, attending: int, victim: str) -> list[int]:
    """Ids of the processes of one kind, on all machines. The driver is attended, as is one that waits for its end."""
    family = descendants(attending)
    drivers = [pid for pid in family if b"headway" in title(pid) and stat(pid, PARENT) == attending]
    everywhere = [pid for machine in machines.by_name.values() for pid in machine.processes("")]
    match victim:
        case "driver":
            return sorted(drivers, key=lambda pid: stat(pid, STARTED))[:1]
        case "reward":
            return [pid for pid in family if b"workers.worker_main" in title(pid)]
        case "raylet":
            return [
                pid
                for machine in machines.by_name.values()
                if machine.name != "A"
                for pid in machine.processes("")
                if title(pid).split(b"\0")[0].endswith(b"/raylet")
            ]
        case _:
            return [pid for pid in everywhere if title(pid).startswith(f"ray::{victim}-".encode())]


PARENT, STARTED = 1, 19
"""Fields of proc(5)'s ``stat`` behind the process's name."""


def stat(pid: int, field: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field])
    except (OSError, IndexError):
        return 0


def title(pid: int) -> bytes:
    """Command line of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
