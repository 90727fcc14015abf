"""What code in the sandbox tries, and does not get: files, network, other processes, the kernel."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import threading
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from headway.runtime.sandbox.seccomp import (
    AUDIT_ARCH,
    CLONE,
    CLONE3,
    IOCTL,
    MADVISE,
    MMAP,
    PRCTL,
    REFUSED,
    SETSOCKOPT,
    SOCKET,
)
from tests.runtime.sandbox.conftest import SMALL, Run, running

SECRET = "a-secret-of-the-host"
TRIES = """
    import ctypes, json, os, socket, sys
    def tried(what, *arguments, **named):
        try:
            return repr(what(*arguments, **named))
        except BaseException as error:
            return type(error).__name__
    libc = ctypes.CDLL(None, use_errno=True)
    def call(*arguments):
        ctypes.set_errno(0)
        return libc.syscall(*map(ctypes.c_long, arguments)), ctypes.get_errno()
"""
"""Beginning of code that tries something."""


def told(run: Run, code: str, **arguments: object) -> object:
    ran = run(dedent(TRIES) + dedent(code), **arguments)
    assert ran.code == 0, ran.stderr
    return json.loads(ran.stdout)


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("run", ["as who tests", "as a user without rights"], indirect=True)
def test_files_of_the_host_are_not_there(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    tmp_path.chmod(0o755)
    (tmp_path / "secret").chmod(0o644)
    hidden = [tmp_path / "secret", Path(__file__), Path.cwd(), Path("/etc/shadow"), Path("/etc/passwd"), Path("/home")]
    hidden += [Path("/var"), Path("/run"), Path("/sys"), Path("/opt"), Path("/proc/1/root") / str(tmp_path)[1:]]
    found = told(run, f"print(json.dumps([path for path in {[str(one) for one in hidden]} if os.path.exists(path)]))")
    assert found == []


def test_the_home_has_nothing_but_the_way_to_an_interpreter(run: Run) -> None:
    code = f"""
    seen = []
    for where, directories, files in os.walk({str(Path.home())!r}):
        if where == os.path.dirname(os.__file__):
            directories.clear()
            continue
        seen += [file for file in files if os.path.join(where, file) != sys.executable and ".so" not in file]
    print(json.dumps(seen))
    """
    assert told(run, code) == []


def test_the_environment_is_not_there_neither_in_its_own_process_nor_in_the_first_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_TEST_SECRET", SECRET)
    code = """
    seen = [repr(dict(os.environ))]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        seen.append(open(f"/proc/{pid}/environ").read())
    print(json.dumps(seen))
    """
    seen = told(run, code)
    assert isinstance(seen, list)
    assert len(seen) >= 3  # the first process and this one
    assert not any(SECRET in one or "PYTHONPATH" in one for one in seen)


def test_nothing_can_be_written_but_in_the_scratch_space(run: Run) -> None:
    code = """
    written = []
    for where, directories, files in os.walk("/"):
        if where.startswith(("/proc", "/tmp", "/usr/")):
            directories.clear()
            continue
        try:
            open(os.path.join(where, "new"), "w").close()
            written.append(where)
        except OSError:
            pass
    for path in [sys.executable, "/usr/bin/env", "/usr/lib/new", os.__file__]:
        for change in (lambda: open(path, "a"), lambda: os.chmod(path, 0o777), lambda: os.unlink(path)):
            try:
                change()
                written.append(path)
            except OSError:
                pass
    print(json.dumps(written))
    """
    assert told(run, code) == []


def test_links_lead_nowhere(run: Run, tmp_path: Path) -> None:
    code = f"""
    os.symlink({str(tmp_path)!r}, "out")
    os.symlink("/proc/1/root" + {str(tmp_path)!r}, "root")
    os.symlink("/proc/1/cwd/../../../../" + {str(tmp_path)!r}, "cwd")
    print(json.dumps([
        tried(os.listdir, "out"), tried(os.listdir, "root"), tried(os.listdir, "cwd"),
        tried(os.link, "/usr/bin/env", "/tmp/env"), tried(os.rename, "/usr/bin/env", "/tmp/env"),
    ]))
    """
    got = told(run, code)
    assert got == [*["FileNotFoundError"] * 3, "OSError", "OSError"]


def test_no_descriptor_is_inherited(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    held = os.open(tmp_path / "secret", os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        code = """
        links = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    links[f"{pid} {fd}"] = os.readlink(f"/proc/{pid}/fd/{fd}")
                except OSError:
                    pass
        print(json.dumps([os.getpid(), links]))
        """
        got = told(run, code)
    finally:
        os.close(held)
    assert isinstance(got, list)
    assert {name.split()[1] for name in got[1] if name.split()[0] == str(got[0])} <= {"0", "1", "2", "3"}
    assert not any(str(tmp_path) in link or "socket" in link for link in got[1].values())


def test_its_input_cannot_be_changed_behind_its_back(run: Run) -> None:
    code = """
    print(json.dumps([tried(os.write, 0, b"x"), tried(open, "/proc/self/fd/0", "w"), sys.stdin.read()]))
    """
    got = told(run, code, stdin="given")
    assert got in (["OSError", error, "given"] for error in ("OSError", "PermissionError"))


# ---------------------------------------------------------------------------------------------- network


def test_neither_the_hosts_loopback_nor_its_sockets_can_be_reached(run: Run, tmp_path: Path) -> None:
    tcp, unix, abstract = (socket.socket(family) for family in (socket.AF_INET, socket.AF_UNIX, socket.AF_UNIX))
    tcp.bind(("127.0.0.1", 0))
    path, name = str(tmp_path / "s"), f"\0headway-test-{os.getpid()}"
    unix.bind(path)
    abstract.bind(name)
    reached: list[object] = []
    for one in (tcp, unix, abstract):
        one.listen()
        one.settimeout(30)

        def accept(listener: socket.socket = one) -> None:
            with suppress(OSError):
                reached.append(listener.accept())

        threading.Thread(target=accept, daemon=True).start()
    code = f"""
    def connect(family, address):
        with socket.socket(family) as one:
            one.settimeout(5)
            one.connect(address)
    print(json.dumps([
        tried(connect, socket.AF_INET, ("127.0.0.1", {tcp.getsockname()[1]})),
        tried(connect, socket.AF_UNIX, {path!r}), tried(connect, socket.AF_UNIX, {name!r}),
        tried(connect, socket.AF_INET, ("192.0.2.1", 80)), tried(socket.getaddrinfo, "example.com", 80),
        sorted(line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]),
    ]))
    """
    try:
        got = told(run, code)
    finally:
        for one in (tcp, unix, abstract):
            one.shutdown(socket.SHUT_RDWR)
            one.close()
    refused = ["OSError", "FileNotFoundError", "ConnectionRefusedError", "OSError", "gaierror"]
    assert got == [*refused, ["lo"]]
    assert not reached


def test_no_socket_of_another_world_can_be_made(run: Run) -> None:
    """Of a virtual machine's host (vsock), of the kernel's ciphers, of its tables, of raw packets."""
    families = {"vsock": 40, "alg": 38, "netlink": 16, "packet": 17, "bluetooth": 31, "can": 29, "xdp": 44}
    got = told(run, f"print(json.dumps([tried(socket.socket, family, 3) for family in {list(families.values())}]))")
    assert got == ["OSError"] * len(families)
    raw = told(run, "print(json.dumps(tried(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)))")
    assert raw == "OSError"


# ---------------------------------------------------------------------------------------------- other processes


def test_other_processes_cannot_be_seen_or_signalled(run: Run) -> None:
    code = f"""
    pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
    print(json.dumps([
        len(pids) <= 4, os.getppid() in (0, 1), tried(os.kill, {os.getpid()}, 9), tried(os.kill, {os.getppid()}, 9),
        tried(os.kill, 1, 9), os.path.exists("/proc/1"),
    ]))
    """
    got = told(run, code)
    assert isinstance(got, list)
    assert got[:2] == [True, True]
    assert set(got[2:4]) == {"ProcessLookupError"}
    assert got[5] is True  # the room's first process is not ended by a signal from within


def test_killing_everybody_finds_nobody_outside(run: Run) -> None:
    """The kernel spares the process itself and the room's first one; there are no others to be found."""
    assert told(run, "print(json.dumps(tried(os.kill, -1, 9)))") == "ProcessLookupError"


def test_its_first_process_cannot_be_traced_nor_freed_from_its_parent(run: Run) -> None:
    code = """
    PTRACE_ATTACH, PTRACE_TRACEME, SET_PDEATHSIG = 16, 0, 1
    print(json.dumps([libc.ptrace(PTRACE_ATTACH, 1, 0, 0), libc.ptrace(PTRACE_TRACEME, 0, 0, 0),
                      libc.prctl(SET_PDEATHSIG, 0, 0, 0, 0)]))
    """
    assert told(run, code) == [-1, -1, -1]


def test_its_first_process_into_which_it_can_look_has_no_more_than_it_has_itself(run: Run) -> None:
    code = """
    def rights(pid):
        lines = open(f"/proc/{pid}/status").read().splitlines()
        return [line for line in lines if line.startswith(("Cap", "NoNewPrivs", "Seccomp", "Uid", "Gid", "Groups"))]
    def files(pid):
        return [os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")[0] for fd in os.listdir(f"/proc/{pid}/fd")]
    print(json.dumps([rights(1) == rights("self"), sorted(files(1))]))
    """
    assert told(run, code) == [True, ["/input", "pipe", "pipe"]]


# ---------------------------------------------------------------------------------------------- rights and the kernel


def test_it_has_no_rights_and_gets_none(run: Run) -> None:
    """There is no other user in the room: to become one is not refused, but means nothing (EINVAL)."""
    code = """
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    print(json.dumps([status["CapEff"], status["CapPrm"], status["CapBnd"], status["CapAmb"], status["NoNewPrivs"],
        status["Seccomp"], os.getuid() != 0, tried(os.setuid, 0), tried(os.setgid, 0), tried(os.setgroups, [0]),
        tried(os.nice, -5), tried(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))]))
    """
    got = told(run, code)
    assert got == [*["0" * 16] * 4, "1", "2", True, "OSError", "OSError", *["PermissionError"] * 3]


def test_limits_cannot_be_raised(run: Run) -> None:
    code = """
    import resource
    names = ["RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE"]
    print(json.dumps([tried(resource.setrlimit, getattr(resource, name), (-1, -1)) for name in names]))
    """
    assert told(run, code) == ["ValueError"] * 5


def test_programs_that_change_the_user_do_not(run: Run) -> None:
    code = """
    import shutil, subprocess
    shutil.copy("/usr/bin/id", "id")
    os.chmod("id", 0o6755)
    said = subprocess.run(["./id", "-u"], capture_output=True, text=True).stdout.strip()
    mounts = [line.split() for line in open("/proc/self/mounts")]
    kept = [where for _, where, _, options, *_ in mounts if "nosuid" not in options]
    print(json.dumps([said == str(os.getuid()), kept]))
    """
    assert told(run, code) == [True, []]


def test_each_refused_system_call_is_refused(run: Run) -> None:
    which = list(AUDIT_ARCH).index(platform.machine())
    numbers = {name: number[which] for name, number in REFUSED.items() if number[which] is not None}
    got = told(run, f"print(json.dumps({{name: call(n, 0, 0, 0, 0, 0, 0) for name, n in {numbers}.items()}}))")
    assert got == {name: [-1, 1] for name in numbers}


def test_no_namespace_can_be_made(run: Run) -> None:
    which = list(AUDIT_ARCH).index(platform.machine())
    flags = [0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x08000000, 0x04000000, 0x02000000]
    code = f"""
    made = [call({CLONE[which]}, flag | 17, 0, 0, 0, 0, 0) for flag in {flags}] + [call({CLONE3[which]}, 0, 0)]
    print(json.dumps(made))
    """
    assert told(run, code) == [*[[-1, 1]] * len(flags), [-1, 38]]


def test_calls_of_another_machine_type_end_the_process(run: Run) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("only x86-64 has further sets of system calls")
    ran = run(dedent(TRIES) + "print(call(0x40000000 + 39))")
    assert ran.code == 128 + 31  # SIGSYS


def test_the_kernels_settings_cannot_be_written(run: Run) -> None:
    code = """
    paths = ["/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/core_pattern",
             "/proc/sysrq-trigger", "/proc/sys/user/max_user_namespaces", "/proc/1/oom_score_adj"]
    def write(path):
        with open(path, "w") as file:
            file.write("-1000")
    print(json.dumps([tried(write, path) for path in paths] + [tried(socket.sethostname, "x")]))
    """
    got = told(run, code)
    assert isinstance(got, list)
    assert set(got) <= {"PermissionError", "OSError", "FileNotFoundError"}


def test_no_terminal_can_be_typed_on(run: Run) -> None:
    code = """
    import fcntl, pty
    print(json.dumps([tried(open, "/dev/tty"), tried(open, "/dev/console"), tried(pty.openpty),
                      tried(fcntl.ioctl, 0, 0x5412, b"x")]))
    """
    got = told(run, code)
    assert got == ["FileNotFoundError", "FileNotFoundError", "OSError", "PermissionError"]


def test_devices_are_the_harmless_ones_and_none_can_be_made(run: Run) -> None:
    code = """
    import stat
    made = tried(os.mknod, "/tmp/disk", stat.S_IFBLK | 0o600, os.makedev(8, 0))
    print(json.dumps([sorted(os.listdir("/dev")), made]))
    """
    assert told(run, code) == [["fd", "full", "null", "random", "shm", "urandom"], "PermissionError"]


def test_system_calls_have_the_numbers_of_the_kernels_headers() -> None:
    files = {0: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), 1: Path("/usr/include/asm-generic/unistd.h")}
    if not all(file.exists() for file in files.values()):
        pytest.skip("the kernel's headers are not installed")
    own = {"clone": CLONE, "clone3": CLONE3, "socket": SOCKET, "prctl": PRCTL, "ioctl": IOCTL}
    own |= {"mmap": MMAP, "madvise": MADVISE, "setsockopt": SETSOCKOPT}
    for which, file in files.items():
        found = dict(re.findall(r"#define __NR_(\w+) (\d+)", file.read_text()))
        for name, numbers in (REFUSED | own).items():
            if name in found:  # headers may be older than a call
                assert numbers[which] == int(found[name]), (name, file)


def test_nothing_of_a_daemon_outlives_the_call(run: Run) -> None:
    mark = f"1{os.getpid()}987.5"
    code = f"""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in (0, 1, 2):
                os.close(fd)
            os.execv("/usr/bin/sleep", ["sleep", "{mark}"])
        os._exit(0)
    os.wait()
    while not any("{mark}" in open(f"/proc/{{pid}}/cmdline").read() for pid in os.listdir("/proc") if pid.isdigit()):
        pass
    print(json.dumps("there"))
    """
    assert told(run, code, limits=SMALL) == "there"
    assert running(mark) == []
