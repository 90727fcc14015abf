"""Machines made of Linux namespaces: each has a network card, a /tmp, a /dev/shm, a host name and processes of its own.

    a namespace with a bridge ── veth ── node A (Ray's head, where the driver runs)    10.77.0.1
                              ├─ veth ── node B                                        10.77.0.2
                              └─ veth ── node C                                        10.77.0.3

The bridge lies in a network namespace that has no other way out, so nothing outside it is touched or can be reached,
and several of these may exist at once. Every process is killed with the one that made it: whatever happens to the
tests, nothing is left. All machines see ``/tmp/shared``, and the checkout with its Python, but nothing else below /tmp.
Ray answers only to those who have the token of these machines.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
ADDRESSES = {"A": "10.77.0.1", "B": "10.77.0.2", "C": "10.77.0.3"}
RAY = f"{ADDRESSES['A']}:6379"
"""Ray's address for the drivers of runs, which are on node A."""
PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "mount")
START_S = 120.0
"""For a machine, or for Ray on all of them, to be up."""
TOKEN = secrets.token_hex(16)
"""Ray's token, without which no program joins the machines of this process."""


def why_not() -> str | None:
    """Why such machines cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "-n", "-m", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(slots=True)
class Machine:
    """One node, from the outside."""

    name: str
    process: subprocess.Popen[bytes]
    pid: int
    """That its first process has outside of it."""
    python: Path
    """Interpreter of Ray and of all that is run there."""

    def command(self, *args: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-m", "-p", "-u", "-i", "-n", "--wd=/tmp", *args]

    def run(self, *args: str, timeout_s: float = START_S, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program on this machine, to its end. ``variables``: of its environment, in place of `environment`'s."""
        env = environment(self.python) | variables
        return subprocess.run(
            self.command(*args), env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def start(self, *args: str, output: Path) -> subprocess.Popen[bytes]:
        """Start a program on this machine; what it prints goes to ``output``, a file outside."""
        with output.open("wb") as file:
            return subprocess.Popen(
                self.command(*args),
                env=environment(self.python),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def processes(self, title: str) -> list[int]:
        """Processes on this machine with ``title`` in their command lines, by their numbers outside of it."""
        found: list[int] = []
        try:
            own = Path(f"/proc/{self.pid}/ns/pid").readlink()
        except OSError:  # it has ended
            return found
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "ns" / "pid").readlink() == own and title in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
        return found

    @property
    def is_up(self) -> bool:
        """False once its first process, Ray's, has ended, and all others with it."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End all its processes at once, as a machine that loses its power; its network card goes with them."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class Machines:
    """A bridge, and the machines on it."""

    scratch: Path
    """Outside of all machines: their output, and the folder that they share."""
    bridge: subprocess.Popen[bytes]
    python: Path = field(default_factory=lambda: Path(sys.executable))
    """Interpreter of machines that are booted from now on."""
    by_name: dict[str, Machine] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Machine:
        return self.by_name[name]

    @property
    def shared(self) -> Path:
        """What is ``/tmp/shared`` on every machine."""
        return Path(f"/proc/{self.bridge.pid}/root{self.scratch.resolve()}/shared")

    def boot(self, name: str, cpus: int) -> Machine:
        """Start machine ``name`` with Ray on it; A is the head. Returns before Ray is up."""
        ray = [str(self.python.with_name("ray")), "start", "--disable-usage-stats", "--block"]
        ray += [f"--node-ip-address={ADDRESSES[name]}", f"--num-cpus={cpus}", "--object-store-memory=200000000"]
        ray += ["--head", "--port=6379", "--include-dashboard=false"] if name == "A" else [f"--address={RAY}"]
        inner = [
            "bash",
            str(HERE / "inner.sh"),
            f"node{name}",
            ADDRESSES[name],
            str(self.scratch / "shared"),
            ":".join(below_tmp(self.python)),
        ]
        unshare = ["unshare", "-n", "-m", "-p", "-u", "-i", "-f", "--mount-proc", "--kill-child"]
        with (self.scratch / f"node{name}.txt").open("wb") as output:
            process = subprocess.Popen(
                [*self._in_bridge(), "setpriv", "--pdeathsig", "KILL", *unshare, *inner, *ray],
                env=environment(self.python),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.by_name[name] = machine = Machine(name, process, first_child(process), self.python)
        with suppress(subprocess.CalledProcessError):  # it is there only where the machine was killed a moment ago
            self._ip("link", "delete", f"to{name}")
        self._ip("link", "add", f"to{name}", "type", "veth", "peer", "name", "eth0", "netns", str(machine.pid))
        self._ip("link", "set", f"to{name}", "master", "br0", "up")
        return machine

    def wait_for_ray(self, nodes: int) -> None:
        """Until Ray counts so many nodes that are alive."""
        listening = f"exec 3<>/dev/tcp/{RAY.replace(':', '/')}"
        wait_until(lambda: self["A"].run("bash", "-c", listening).returncode == 0)
        self._ray(f'import time\nwhile sum(n["Alive"] for n in ray.nodes()) != {nodes}: time.sleep(0.1)\n')

    def fill(self, left: float) -> None:
        """Take all but ``left`` of each machine's one CPU, so that as many workers fit there as have room in that."""
        addresses = [ADDRESSES[name] for name in self.by_name]
        self._ray(
            "from ray.util.placement_group import placement_group\n"
            f'bundles = [{{"CPU": {1 - left}, f"node:{{a}}": 0.001}} for a in {addresses}]\n'
            'group = placement_group(bundles, lifetime="detached", name="fill")\n'
            "assert group.wait(60)\n"
        )

    def empty(self) -> None:
        """Give back what `fill` took."""
        self._ray(
            "from ray.util import get_placement_group, remove_placement_group\n"
            'remove_placement_group(get_placement_group("fill"))\n'
        )

    def silence(self, name: str) -> Callable[[], object]:
        """Pull machine ``name``'s network cable: it does not even refuse a connection any more. Returns what puts it
        back."""
        self._link(name, "down")
        return lambda: self._link(name, "up")

    def isolate(self, name: str) -> Callable[[], object]:
        """Let machine ``name`` see no other isolated one; returns what ends that."""
        self._link(name, "type", "bridge_slave", "isolated", "on")
        return lambda: self._link(name, "type", "bridge_slave", "isolated", "off")

    def slow(self, name: str, rate: str) -> Callable[[], object]:
        """Let no more than ``rate``, such as ``4mbit``, go to and from machine ``name``; returns what ends that."""
        inner = ["nsenter", "-t", str(self[name].pid), "-n"]
        limit = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]

        def tc(what: str, *settings: str) -> None:
            for inside, device in ((self._in_bridge(), f"to{name}"), (inner, "eth0")):
                command = [*inside, "tc", "qdisc", what, "dev", device, *settings]
                subprocess.run(command, check=what == "replace", capture_output=True, timeout=10)

        tc("replace", *limit)
        return lambda: tc("del", "root")

    def _link(self, name: str, *settings: str) -> None:
        """Change a machine's link, where it is still there."""
        with suppress(subprocess.CalledProcessError):
            self._ip("link", "set", f"to{name}", *settings)

    def close(self) -> None:
        for machine in self.by_name.values():
            machine.kill()
        self.bridge.kill()
        self.bridge.wait()

    def _ray(self, script: str) -> None:
        """Run a few lines of Python on A, connected to Ray. Once more where Ray, which is starting, did not answer."""
        options = (
            'namespace="tests", logging_level=logging.ERROR, log_to_driver=False'  # names are those of a namespace
        )
        connect = f'import logging, ray\nray.init("{RAY}", {options})\n'
        for _ in range(2):
            ran = self["A"].run(str(self["A"].python), "-c", connect + script)
            if ran.returncode == 0:
                return
        raise AssertionError(f"Ray: {ran.stderr[-2000:]}")

    def _in_bridge(self) -> list[str]:
        return ["nsenter", "-t", str(self.bridge.pid), "-n", "-m"]

    def _ip(self, *args: str) -> None:
        subprocess.run([*self._in_bridge(), "ip", *args], check=True, capture_output=True, timeout=10)


@contextmanager
def machines(
    scratch: Path, cpus: dict[str, int], python: Path | None = None, disk: Path | None = None
) -> Iterator[Machines]:
    """Machines with Ray on them until the block ends. ``cpus``: as many as Ray is told that each machine has.
    ``python``: their interpreter, by default this process's own. ``disk``: image of the file system that they share,
    in place of a folder."""
    (scratch / "shared").mkdir(parents=True, exist_ok=True)
    bridge = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", "-n", "-m", "sleep", "infinity"])
    made = Machines(scratch, bridge, python or Path(sys.executable))
    try:
        wait_until(lambda: Path(f"/proc/{bridge.pid}/comm").read_text() == "sleep\n")
        if disk is not None:
            subprocess.run([*made._in_bridge(), "mount", "-o", "loop", disk, scratch / "shared"], check=True)
        made._ip("link", "add", "br0", "type", "bridge")
        made._ip("link", "set", "br0", "up")
        made.boot("A", cpus["A"])
        made.wait_for_ray(1)
        for name in [name for name in cpus if name != "A"]:
            made.boot(name, cpus[name])
        made.wait_for_ray(len(cpus))
        yield made
    finally:
        made.close()


def below_tmp(python: Path) -> list[str]:
    """Folders below /tmp, of which each machine has its own, that programs need all the same."""
    ask = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
    prefixes = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split("\n")
    needed = {str(REPOSITORY), *prefixes[:2]}
    return sorted(path for path in needed if Path(path).is_relative_to("/tmp"))


def environment(python: Path) -> dict[str, str]:
    """Environment variables of programs on a machine whose interpreter is ``python``."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
    return keep | {
        "HOME": "/tmp/home",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
    }


def first_child(process: subprocess.Popen[bytes]) -> int:
    """The number of the process that ``unshare`` forked, which is the first one of its namespace."""
    found: list[int] = []

    def look() -> bool:
        found[:] = [
            int(pid)
            for children in Path(f"/proc/{process.pid}/task").glob("*/children")
            for pid in children.read_text().split()
        ]
        assert process.poll() is None, "the machine's first process has ended"
        return bool(found)

    wait_until(look)
    return found[0]


def wait_until(what: Callable[[], bool], timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"not so within {timeout_s:g} s"
        time.sleep(0.05)
