"""The sandbox itself: how its calls end, where it cannot be had, and the limits that stand in for it."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.errors import ConfigError, SandboxFailed
from headway.runtime.process_tree import GUARDED, python_command
from headway.runtime.sandbox import bubblewrap, seccomp
from headway.runtime.sandbox import sandbox as door
from headway.runtime.sandbox.bubblewrap import FIRST_UID, UIDS, BubblewrapCall, own_uid
from headway.runtime.sandbox.sandbox import Sandbox
from headway.runtime.sandbox.sandbox_call import Kind, SandboxCall, SandboxResult, SandboxSpec
from tests.runtime.sandbox.conftest import SMALL, SOURCES, running
from tests.tiers import mostly_slow

WITHOUT = SandboxSpec("process_limits", SMALL)


def a_long_sleep(mark: str) -> list[str]:
    return ["/usr/bin/sleep", mark]


def name_of(pid: int) -> str:
    """The name of the program that a process runs; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def user_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def wait_for(holds: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, otherwise
        time.sleep(0.002)


async def until_it_runs(mark: str) -> list[int]:
    end = time.monotonic() + 30
    while not (found := running(mark)):
        assert time.monotonic() < end, "the program did not start within 30 s"
        await asyncio.sleep(0.005)
    return found


# ---------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("kind", ["bubblewrap", "process_limits"])
async def test_a_call_that_is_cancelled_leaves_nothing(sandbox: Sandbox, kind: str) -> None:
    mark = f"2{os.getpid()}01.{len(kind)}"
    runs = sandbox if kind == "bubblewrap" else Sandbox(WITHOUT)
    task = asyncio.create_task(runs.run(a_long_sleep(mark), limits=SMALL))
    await until_it_runs(mark)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running(mark) == []


async def test_a_call_that_is_cancelled_at_once_leaves_nothing(sandbox: Sandbox) -> None:
    mark = f"2{os.getpid()}02.5"
    for turns in range(8):
        task = asyncio.create_task(sandbox.run(a_long_sleep(mark), limits=SMALL))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert running(mark) == []


async def test_calls_run_side_by_side(sandbox: Sandbox) -> None:
    ran = await asyncio.gather(*(sandbox.run(f"print({n})", limits=SMALL) for n in range(6)))
    assert [one.stdout for one in ran] == [f"{n}\n" for n in range(6)]


async def test_calls_that_sleep_do_not_hold_up_others(sandbox: Sandbox) -> None:
    asleep = [asyncio.create_task(sandbox.run(a_long_sleep("60"), limits=SMALL)) for _ in range(16)]
    await asyncio.sleep(0)
    ran = await sandbox.run("print(1)", limits=SMALL)
    ended = [task.done() for task in asleep]
    for task in asleep:
        task.cancel()
    await asyncio.wait(asleep)
    assert ran.stdout == "1\n"
    assert not any(ended)


class SlowToEnd(SandboxCall):
    """A call whose processes are killed, and not gone for long."""

    def start(self, program: Sequence[str], stdin: bytes, held: ExitStack) -> subprocess.Popen[bytes]:
        return subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def end(self) -> bool:
        return False


def test_a_call_whose_processes_do_not_end_has_gone_beyond_its_time_and_is_no_failure_of_the_sandbox() -> None:
    """Else a model could choose to have its episode or its score tried again, instead of a bad one."""
    ran = SlowToEnd(SMALL, {}).run(["/bin/echo", "done"], b"")
    assert (ran.stdout, ran.code, ran.limit) == ("done\n", 137, "wall")


def test_a_call_that_is_stopped_before_it_begins_starts_nothing() -> None:
    call = SlowToEnd(SMALL, {})
    call.stop()
    assert call.run(["/bin/no-such-program"], b"") == SandboxResult("", "", 137)


def test_a_bwrap_that_never_says_what_it_has_started_is_waited_for_so_long_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bubblewrap, "ENDS_S", 0.05)
    silent: Any = SimpleNamespace(command=lambda *_, **__: ["/bin/sleep", "2"])
    with pytest.raises(SandboxFailed, match=r"did not say within 0\.05 s"):
        BubblewrapCall(SMALL, {}, silent, b"").run(["/bin/true"], b"")


async def test_calls_at_once_are_users_of_their_own_where_we_are_root(sandbox: Sandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be several users")
    mark = f"2{os.getpid()}03.5"
    tasks = [asyncio.create_task(sandbox.run(a_long_sleep(mark), limits=SMALL)) for _ in range(2)]
    users: set[int] = set()
    while len(users) < 2:
        users |= {user_of(pid) for pid in await until_it_runs(mark) if name_of(pid) == "sleep"}
        await asyncio.sleep(0.005)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert len(users) == 2
    assert all(FIRST_UID <= user < FIRST_UID + UIDS for user in users)


def killed_when(there: Callable[[str], bool], mark: str, *, by_guard: bool = False) -> None:
    """Ask for a call in another process, and kill that when the call is so far, or have its guard end it."""
    code = (
        "from headway.runtime.sandbox.sandbox import Sandbox\n"
        "from headway.runtime.sandbox.sandbox_call import SandboxSpec\n"
        f"Sandbox(SandboxSpec()).run_blocking(['/usr/bin/sleep', '{mark}'])"
    )
    command = python_command(GUARDED + code) if by_guard else [sys.executable, "-c", code]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": SOURCES}) as asking:
        wait_for(lambda: there(mark), "the call did not begin")
        asking.send_signal(signal.SIGTERM if by_guard else signal.SIGKILL)


def test_a_call_ends_with_the_process_that_asked_for_it(sandbox: Sandbox) -> None:
    mark = f"2{os.getpid()}04.1"
    killed_when(lambda mark: any(name_of(pid) == "sleep" for pid in running(mark)), mark)
    wait_for(lambda: not running(mark), "a process of the call has outlived the one that asked for it")


@pytest.mark.slow
def test_a_call_that_was_being_set_up_ends_with_the_guard_of_who_asked_for_it(sandbox: Sandbox) -> None:
    """Takes seconds: five processes import, are ended while they set a call up, and so is all that they have made."""
    for turn in range(5):
        mark = f"2{os.getpid()}05.{1 + turn}"
        killed_when(lambda mark: bool(running(mark)), mark, by_guard=True)
        assert not running(mark)


ASK_AND_BE_KILLED = """
import os, random, sys, time
from headway.runtime.sandbox.sandbox_call import SandboxSpec
from headway.runtime.sandbox.sandbox import Sandbox
runs, times = Sandbox(SandboxSpec()), random.Random(0)
runs.run_blocking("pass")
for _ in range(100):
    if (asking := os.fork()) == 0:
        runs.run_blocking(["/usr/bin/sleep", sys.argv[1]])
    time.sleep(times.uniform(0.004, 0.04))
    os.kill(asking, 9)
    os.waitpid(asking, 0)
"""


@pytest.mark.slow
def test_no_program_outlives_who_asked_for_it_whenever_that_is_killed(sandbox: Sandbox) -> None:
    """Kills a hundred processes at all moments of a room's beginning, which takes some seconds."""
    mark = f"2{os.getpid()}07.5"
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    subprocess.run([sys.executable, "-c", ASK_AND_BE_KILLED, mark], env=environment, check=True, timeout=120)
    wait_for(lambda: not any(name_of(pid) == "sleep" for pid in running(mark)), "a program goes on")


def test_descriptors_do_not_add_up(sandbox: Sandbox) -> None:
    sandbox.run_blocking("pass", limits=SMALL)
    gc.collect()  # what nobody holds any more is closed now, and not meanwhile
    before = len([*Path("/proc/self/fd").iterdir()])
    for code in ("pass", "1 / 0", "while True: print('x' * 1000)"):
        sandbox.run_blocking(code, limits=SMALL)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


# ---------------------------------------------------------------------------------------------- users


def test_no_two_calls_are_the_same_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with own_uid() as first, own_uid() as second:
        assert first is not None and second is not None
        assert first != second
        with socket.socket(socket.AF_UNIX) as third, pytest.raises(OSError, match="in use"):
            third.bind(f"\0headway-sandbox-{first}")


def test_there_are_only_so_many_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(bubblewrap, "UIDS", 1)
    with own_uid(), pytest.raises(SandboxFailed, match="1 sandboxes are open"), own_uid():
        pass


def test_a_user_without_rights_stays_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with own_uid() as uid:
        assert uid is None


# ---------------------------------------------------------------------------------------------- where it cannot be had


def test_a_machine_without_bwrap_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"apt install bubblewrap.*sandbox=process_limits"):
        Sandbox(SandboxSpec())


def test_a_machine_without_prlimit_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "bwrap").symlink_to("/bin/true")
    with pytest.raises(ConfigError, match=r"prlimit .*setpriv .*util-linux"):
        Sandbox(SandboxSpec())
    with pytest.raises(ConfigError, match=r"sandbox=process_limits: .*prlimit"):
        Sandbox(WITHOUT)


def bwrap_that_says(said: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    if shutil.which("prlimit") is None or shutil.which("setpriv") is None:
        pytest.skip("there is no util-linux here")
    bwrap = folder / "bwrap"
    bwrap.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    for place in (folder, *folder.parents):
        if place.stat().st_uid == os.geteuid() and place.name.startswith(("test_", "pytest-", "popen-")):
            place.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_machine_that_forbids_namespaces_is_told_what_to_allow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bwrap_that_says("bwrap: No permissions to create new namespace", monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=r"bwrap: No permissions.*user\.max_user_namespaces.*--privileged") as refused:
        Sandbox(SandboxSpec()).probe()
    assert "\n" not in str(refused.value)


def test_a_bwrap_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bwrap_that_says("bwrap: Unknown option --disable-userns", monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=r"Unknown option --disable-userns; install bubblewrap 0\.8 or later"):
        Sandbox(SandboxSpec()).probe()


@mostly_slow("kind", ["bubblewrap", "process_limits"], quick=["process_limits"])
def test_a_machine_where_nothing_can_be_measured_is_refused(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    for module in (bubblewrap, door):
        monkeypatch.setattr(module, "exceeded", lambda *_: None)
    with pytest.raises(ConfigError, match=r"cannot be measured .*SYS_PTRACE"):
        Sandbox(SandboxSpec(kind)).probe()


def test_an_interpreter_that_all_can_reach_is_run_as_another_user_all_the_same(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0 or not Path("/usr/bin/python3").exists():
        pytest.skip("only root becomes another user, and this needs a system Python")
    monkeypatch.setattr(sys, "_base_executable", "/usr/bin/python3")
    runs = Sandbox(SandboxSpec())
    runs.probe()
    code = "import os, sys; print(os.getuid(), os.getgroups(), sys.executable.startswith('/usr/bin/'))"
    assert runs.run_blocking(code, limits=SMALL).stdout == "1000 [] True\n"


def test_a_machine_of_an_unknown_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match=r"x86_64 and aarch64, .*riscv64"):
        seccomp.seccomp_filter()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filters_jumps_stay_within_it(machine: str) -> None:
    steps = list(seccomp._steps(machine))
    returns = 0x06
    for place, (operation, yes, no, _) in enumerate(steps):
        assert operation == returns or place + 1 + max(yes, no) < len(steps)
    assert steps[-1][0] == returns
    assert len(steps) < 4096  # the kernel's limit


def test_an_interpreter_that_does_not_start_is_told(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_base_executable", "/usr/bin/no-such-python")
    with pytest.raises(ConfigError, match="code 127: prlimit: failed to execute"):
        Sandbox(SandboxSpec()).probe()


def test_a_call_that_cannot_be_started_is_told(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(bubblewrap, "sealed", refuse)
    with pytest.raises(SandboxFailed, match="not be started: Too many open files"):
        sandbox.run_blocking("pass")


# ---------------------------------------------------------------------------------------------- limits alone


def test_limits_alone_run_code_in_a_directory_of_its_own_that_is_gone_afterwards() -> None:
    runs = Sandbox(WITHOUT)
    runs.probe()
    ran = runs.run_blocking("import os; print(os.getcwd(), open('a').read(), dict(os.environ))", files={"a": "b"})
    where, content, variables = ran.stdout.split(maxsplit=2)
    assert content == "b"
    assert not Path(where).exists()
    assert "PYTHONPATH" not in variables


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("import time; time.sleep(60)", "wall"),
        pytest.param("while True: print('x' * 1000)", "output", marks=pytest.mark.slow),
        ("import os, time\nfor _ in range(8):\n  if os.fork() == 0: x = b'x' * (30 << 20); time.sleep(60)\n"
         "time.sleep(60)", "memory"),
        ("import os, time\nfor _ in range(40):\n  if os.fork() == 0: time.sleep(60)\ntime.sleep(60)", "processes"),
        ("import os, time\nfor n in range(9): open(str(n), 'wb').write(b'x' * (1 << 20))\ntime.sleep(60)", "scratch"),
        pytest.param("while True: pass", "cpu", marks=pytest.mark.slow),
    ],
    ids=["time", "output", "memory", "processes", "files", "processor"],
)  # fmt: skip
def test_limits_alone_end_code_and_its_session(
    code: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    less: dict[str, dict[str, Any]] = {"wall": {"wall_s": 0.5}, "cpu": {"cpu_s": 0.5}, "memory": {"memory_mib": 128}}
    assert Sandbox(WITHOUT).run_blocking(code, limits=replace(SMALL, **less.get(limit, {}))).limit == limit
    assert processes_in(tmp_path) == []
    assert [*tmp_path.iterdir()] == []


def test_limits_alone_tell_a_signal_as_a_shell_does() -> None:
    assert Sandbox(WITHOUT).run_blocking("import os; os.kill(os.getpid(), 9)").code == 128 + signal.SIGKILL


def processes_in(directory: Path) -> list[int]:
    """Processes that work in ``directory`` or below it."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                if (place / "cwd").readlink().is_relative_to(directory):
                    found.append(int(place.name))
            except OSError:
                continue
    return found


def test_no_process_is_left_for_others_to_reap(sandbox: Sandbox) -> None:
    """Containers often have no init: what nobody waits for would add up there."""

    def zombies() -> set[str]:
        found = set()
        for place in Path("/proc").iterdir():
            if place.name.isdigit() and name_of(int(place.name)) in ("bwrap", "sh", "prlimit"):
                try:
                    if (place / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                        found.add(place.name)
                except OSError:
                    continue
        return found

    before = zombies()
    for code in ("pass", "import os, time\nif os.fork() == 0: time.sleep(60)", "import time; time.sleep(60)"):
        sandbox.run_blocking(code, limits=replace(SMALL, wall_s=0.5))
    assert zombies() <= before


async def test_a_call_that_is_cancelled_before_a_thread_is_free_never_runs(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = ThreadPoolExecutor(1)
    monkeypatch.setattr(door, "_threads", lambda _: threads)
    first = asyncio.create_task(sandbox.run(a_long_sleep(f"2{os.getpid()}06.5"), limits=replace(SMALL, wall_s=1.0)))
    second = asyncio.create_task(sandbox.run("print('ran')", limits=SMALL))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not first.done()
    assert (await first).limit == "wall"


@pytest.mark.slow
def test_a_call_is_given_what_is_its_own_whatever_descriptors_are_free(sandbox: Sandbox) -> None:
    """Small ones, such as that of a closed input, are those that a shell on the way might take for itself."""
    code = "import sys; print(sys.stdin.read(), *(open(str(n)).read() for n in range(8)))"
    code = (
        "from headway.runtime.sandbox.sandbox import Sandbox\n"
        "from headway.runtime.sandbox.sandbox_call import SandboxSpec\n"
        f"files = {{str(n): str(n) for n in range(8)}}\n"
        f"print(Sandbox(SandboxSpec()).run_blocking({code!r}, stdin='in', files=files).stdout)"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "in 0 1 2 3 4 5 6 7"
