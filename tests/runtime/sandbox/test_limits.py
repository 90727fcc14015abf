"""What code in the sandbox may take: time, memory, processes, output, files. And how its ends are told."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headway.runtime.sandbox import sandbox_call
from headway.runtime.sandbox.bubblewrap import MOST_SIGNALS
from headway.runtime.sandbox.sandbox import Sandbox
from headway.runtime.sandbox.sandbox_call import MOST_FILES, Limit, exceeded
from tests.runtime.sandbox.conftest import SMALL, Run

SHORT = replace(SMALL, wall_s=0.5)
LITTLE = replace(SMALL, memory_mib=128)


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("import time; time.sleep(60)", "wall"),
        pytest.param("import os, time; os.close(1); os.close(2); time.sleep(60)", "wall", marks=pytest.mark.slow),
        ("import signal, time\nfor n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, lambda *_: 0)\n"
         "while True: time.sleep(1)", "wall"),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "wall", marks=pytest.mark.slow),
        pytest.param("input('is there anybody?')\nimport sys, time\nsys.stdin.read(); time.sleep(60)", "wall",
                     marks=pytest.mark.slow),
    ],
    ids=["sleeps", "closes its outputs", "ignores signals", "stops itself", "reads on"],
)  # fmt: skip
def test_code_that_does_not_end_is_ended(here: Run, code: str, limit: Limit) -> None:
    ran = here(code, limits=SHORT, stdin="\n")
    assert (ran.limit, ran.code) == (limit, 137)


def test_time_of_the_processor_is_counted_over_all_processes(run: Run) -> None:
    """Takes as long as eight processes need for the time that they have together, on cores that others use, too."""
    code = """
    import os
    for _ in range(3):
        os.fork()
    while True:
        pass
    """
    assert run(code, limits=replace(SMALL, cpu_s=0.5)).limit == "cpu"


@pytest.mark.slow
def test_time_of_the_processor_is_counted_where_signals_are_ignored(here: Run) -> None:
    """Takes as long as a process needs for its time on cores that others use, too."""
    code = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert here(code, limits=replace(SMALL, cpu_s=0.5)).limit == "cpu"


def test_one_process_gets_no_more_memory_than_there_is(run: Run) -> None:
    ran = run("x = [bytearray(1 << 20) for _ in range(1000)]")
    assert ran.stderr.endswith("MemoryError\n")
    assert ran.code == 1


def test_many_processes_get_no_more_memory_together(run: Run) -> None:
    code = """
    import os, time
    for _ in range(8):
        if os.fork() == 0:
            x = b"x" * (30 << 20)
            time.sleep(60)
    time.sleep(60)
    """
    assert run(code, limits=LITTLE).limit == "memory"


def test_memory_that_processes_share_counts_once(run: Run) -> None:
    code = """
    import os, sys
    x = b"x" * (40 << 20)
    children = []
    for _ in range(6):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        children.append((pid, write))
    import time
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    for pid, write in children:
        os.close(write)
    print("done")
    """
    ran = run(code, limits=LITTLE)
    assert (ran.stdout, ran.limit) == ("done\n", None)


def test_memory_that_is_shared_and_only_partly_seen_by_each_counts(run: Run) -> None:
    code = """
    import mmap, os, time
    for _ in range(3):
        if os.fork() == 0:
            own = mmap.mmap(-1, 50 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for _ in range(50):
                own.write(bytes(1 << 20))
            time.sleep(60)
    time.sleep(60)
    """
    assert run(code, limits=LITTLE).limit == "memory"


@pytest.mark.parametrize(
    "way",
    [
        "[mmap.mmap(-1, 200 << 20) for _ in range(10)]",
        "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 200 << 20)",
        "os.memfd_create('x')",
        "socket.socket(socket.AF_INET)",
        "socket.socket(socket.AF_INET6)",
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)",
        "mmap.mmap(-1, 1 << 20, flags=0x22).madvise(21)",
    ],
    ids=["shared mapping", "of zero", "memfd", "IPv4", "IPv6", "a larger buffer", "to swap"],
)
def test_memory_that_is_nobodys_cannot_be_had(here: Run, way: str) -> None:
    ran = here(f"import mmap, os, socket\ntry: {way}\nexcept OSError: print('refused')")
    assert ran.stdout == "refused\n", ran


def test_what_sockets_hold_is_memory_of_the_call(run: Run) -> None:
    code = """
    import os, socket, time
    for _ in range(12):
        if os.fork() == 0:
            pairs = [socket.socketpair() for _ in range(28)]
            for end in [end for pair in pairs for end in pair]:
                end.setblocking(False)
                try:
                    while True:
                        end.send(bytes(1 << 16))
                except BlockingIOError:
                    pass
            time.sleep(60)
    time.sleep(60)
    """
    assert run(code, limits=replace(SMALL, memory_mib=160)).limit == "memory"


def test_where_the_machine_is_short_of_memory_the_room_goes_first(run: Run) -> None:
    ran = run("print(*(open(f'/proc/{pid}/oom_score_adj').read().strip() for pid in ('1', 'self')))")
    assert ran.stdout == "1000 1000\n"


@pytest.mark.parametrize("where", ["/tmp", "/dev/shm", "."])
def test_files_have_no_more_room_than_the_scratch_space(run: Run, where: str) -> None:
    code = f"""
    with open("{where}/file", "wb") as file:
        for _ in range(1000):
            file.write(b"x" * (1 << 20))
            file.flush()
    """
    ran = run(code)
    assert ran.code == 1
    assert "OSError" in ran.stderr


@pytest.mark.parametrize(
    "code",
    [
        "while True: open(str(n := n + 1), 'w').close()",
        "while True: os.mkdir('d'); os.chdir('d')",
    ],
    ids=["files", "directories"],
)
def test_there_are_only_so_many_files_so_that_removing_them_does_not_hold_up_the_end(run: Run, code: str) -> None:
    assert run(f"import os; n = 0\n{code}").limit == "scratch"


def test_empty_files_take_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(f_blocks=0, f_bfree=0, f_frsize=4096, f_files=MOST_FILES, f_ffree=0)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert exceeded([], "/tmp", replace(SMALL, memory_mib=16)) == "memory"
    assert exceeded([], "/tmp", replace(SMALL, memory_mib=32)) is None


@pytest.mark.parametrize(("looks", "limit"), [([300, 300], "memory"), ([300, 200], None), ([200], None)])
def test_memory_counts_that_is_found_at_two_looks(
    looks: list[int], limit: Limit | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When processes that share pages end during a look, it finds more than there is."""
    found = iter(looks)
    monkeypatch.setattr(sandbox_call, "_exact", lambda _: next(found) << 20)
    process = sandbox_call.ProcEntry("/proc/none", False, 1, 1, 0.0, 300 << 20)
    assert exceeded([process], "/nowhere", replace(SMALL, memory_mib=256)) == limit
    assert next(found, None) is None


def test_timers_are_few_for_all_processes_together(run: Run) -> None:
    number = {"x86_64": 222, "aarch64": 107}[platform.machine()]
    code = f"""
    import ctypes, os
    libc, timer = ctypes.CDLL(None), ctypes.c_int()
    def made():
        n = 0
        while n < 1000 and libc.syscall({number}, 1, None, ctypes.byref(timer)) == 0:
            n += 1
        return n
    print(made(), flush=True)
    if os.fork() == 0:
        print(made(), flush=True)
        os._exit(0)
    os.wait()
    """
    first, second = map(int, run(code).stdout.split())
    assert 0 < first <= MOST_SIGNALS
    assert second == 0


def test_deleted_files_that_are_open_take_room_too(here: Run) -> None:
    code = """
    import os, tempfile
    held = [tempfile.TemporaryFile() for _ in range(20)]
    for file in held:
        file.write(b"x" * (1 << 20))
        file.flush()
    """
    assert "No space left" in here(code).stderr


@pytest.mark.parametrize("bomb", ["processes", "threads"])
def test_a_bomb_of_processes_or_threads_gets_as_many_as_there_may_be(run: Run, bomb: str) -> None:
    start = {
        "processes": "if os.fork() == 0: time.sleep(60)",
        "threads": "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    }[bomb]
    code = f"""
    import os, threading, time
    threading.stack_size(1 << 16)
    n = 1
    try:
        while True:
            {start}
            n += 1
    except (OSError, RuntimeError):
        print(n, flush=True)
        os._exit(0)
    """
    ran = run(code)
    assert int(ran.stdout) == SMALL.processes


def test_a_bomb_that_goes_on_is_ended_with_all_of_its_processes(run: Run) -> None:
    code = """
    import os
    while True:
        try:
            os.fork()
        except OSError:
            pass
    """
    assert run(code, limits=SHORT).limit in ("wall", "cpu")


@pytest.mark.parametrize("output", ["stdout", "stderr"])
def test_output_beyond_its_bound_ends_the_call_and_keeps_what_came_before(here: Run, output: str) -> None:
    ran = here(f"import sys\nwhile True: print('x' * 1000, file=sys.{output})")
    assert ran.limit == "output"
    assert len(ran.stdout) + len(ran.stderr) == SMALL.output_kib << 10


def test_output_is_bounded_where_all_of_it_comes_at_the_end(here: Run) -> None:
    ran = here(f"import os; os.write(1, b'x' * ({SMALL.output_kib << 10} + 1)); os._exit(0)")
    assert ran.limit == "output"


@pytest.mark.slow
def test_what_unpacks_to_much_more_than_it_was_is_stopped_in_memory_and_on_disk(here: Run) -> None:
    code = """
    import io, zipfile, zlib
    packer = zlib.compressobj(1)
    zeros = bytes(1 << 20)
    packed = b"".join([*(packer.compress(zeros) for _ in range(150)), packer.flush()])
    try:
        zlib.decompress(packed)
    except MemoryError:
        print("memory")
    with zipfile.ZipFile("bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for n in range(10):
            archive.writestr(str(n), zeros)
    try:
        zipfile.ZipFile("bomb.zip").extractall("out")
    except OSError:
        print("disk")
    """
    assert here(code, limits=LITTLE).stdout == "memory\ndisk\n"


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import ctypes; ctypes.string_at(0)", 139),
        ("(" * 10000, 1),
    ],
)
def test_the_exit_code_is_the_programs(here: Run, code: str, ended: int) -> None:
    ran = here(code)
    assert (ran.code, ran.limit) == (ended, None)


def test_output_that_is_no_text_is_told_as_far_as_it_is(here: Run) -> None:
    assert here("import os; os.write(1, b'\\xff\\x00ok')").stdout == "�\0ok"


def test_input_and_files_arrive_unchanged(sandbox: Sandbox) -> None:
    text = "ä\n" * 100_000
    ran = sandbox.run_blocking(
        "import sys; print(sys.stdin.read() == open('ä.txt').read(), len(open('ä.txt').read()), open('b.txt').read())",
        stdin=text, files={"ä.txt": text, "b.txt": ""}, limits=SMALL,
    )  # fmt: skip
    assert ran.stdout == "True 200000 \n"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", ".", "..", "a/b", "a\0b"])
def test_a_file_has_a_plain_name(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(ValueError, match="no plain name"):
        sandbox.run_blocking("pass", files={name: ""})


def test_any_program_of_the_system_runs(sandbox: Sandbox) -> None:
    assert sandbox.run_blocking(["/usr/bin/cat", "-"], stdin="hello").stdout == "hello"


def test_a_program_that_is_not_there_is_told_as_shells_do(sandbox: Sandbox) -> None:
    ran = sandbox.run_blocking(["/usr/bin/no-such-program"])
    assert ran.code == 127
    assert "No such file" in ran.stderr
