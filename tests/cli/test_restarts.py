"""``headway train --restarts N``, over processes that end as they are told. Real runs are in tests/integration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from headway.cli import cli, restarts
from headway.runtime.process_tree import IMPORTS_AS_HERE
from tests.tiers import mostly_slow

TOLD = """
import pathlib
run = pathlib.Path(sys.argv[-1])
told = run / "told"
lines = told.read_text().splitlines() if told.exists() else []
told.write_text("\\n".join([*lines, " ".join(sys.argv[1:-1])]) + "\\n")
ends = (run / "ends").read_text().split()
end = int(ends[len(lines)])
(run / "checkpoints" / f"version_{len(lines) + 1}").mkdir(parents=True, exist_ok=True)
import os, signal
os.kill(os.getpid(), -end) if end < 0 else sys.exit(end)
"""
"""A program that notes its arguments, saves a checkpoint, and ends as the next word of ``ends`` says."""


def attend(run: Path, most: int, program: str) -> subprocess.Popen[str]:
    """A process that keeps the run of ``program`` going: it becomes the parent of what that leaves behind."""
    attends = (
        "import sys, pathlib; from headway.cli import restarts; restarts.AGAIN_S = 0.1; "
        f"restarts.HEADWAY = {IMPORTS_AS_HERE + program!r}; "
        f"sys.exit(restarts.keep_going(['train', 'recipe.yaml', {str(run)!r}], pathlib.Path({str(run)!r}), {most}))"
    )
    return subprocess.Popen([sys.executable, "-c", attends], stderr=subprocess.PIPE, text=True)


def kept_going(run: Path, most: int, program: str) -> tuple[int, str]:
    """The exit code, and what was said."""
    attending = attend(run, most, program)
    said = attending.communicate(timeout=240)[1]
    return attending.returncode, said


def after(run: Path, ends: str, most: int) -> tuple[int, list[str], str]:
    """The exit code, the arguments of each process, and what was said, where processes end like this."""
    (run / "ends").write_text(ends)
    code, said = kept_going(run, most, TOLD)
    return code, (run / "told").read_text().splitlines(), said


@pytest.mark.slow
@pytest.mark.parametrize("end", ["1", f"-{signal.SIGKILL:d}", f"-{signal.SIGSEGV:d}"])
def test_a_run_that_fails_or_is_killed_is_resumed(tmp_path: Path, end: str) -> None:
    code, told, said = after(tmp_path, f"{end} 0", 3)
    assert code == 0
    assert told == ["train recipe.yaml", "train --resume"]
    assert "going on from version 1, restart 1 of 3" in said


@mostly_slow("end", [0, 2, 3, 130], quick=[2])
def test_what_would_end_again_in_the_same_way_is_not_resumed(tmp_path: Path, end: int) -> None:
    assert after(tmp_path, f"{end} 0", 3) == (end, ["train recipe.yaml"], "")


def test_a_resumption_that_is_refused_before_the_run_went_on_is_tried_again(tmp_path: Path) -> None:
    code, told, said = after(tmp_path, "-9 2 0", 3)
    assert code == 0
    assert told == ["train recipe.yaml", "train --resume", "train --resume"]
    assert "the run ended (exit code 2); going on from version 2 in 0.1 s, restart 2 of 3" in said


def test_a_run_that_lacks_something_after_version_0_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/version_1").mkdir(parents=True)
    line = json.dumps({"kind": "version.reached", "time": 0.0, "groups": {}, "episodes": {}, "version": 1}) + "\n"
    append = f"open({str(tmp_path / 'events.jsonl')!r}, 'a').write({line!r})"
    code, said = kept_going(tmp_path, 1, f"{append}; sys.exit(2)")
    assert code == 2
    assert "the run ended (exit code 2); going on from version 1, restart 1 of 1" in said
    assert "the run ended (exit code 2) after 1 restart (--restarts)" in said


def test_a_run_is_not_resumed_more_often_than_asked_for(tmp_path: Path) -> None:
    code, told, said = after(tmp_path, "1 1 -9 0", 2)
    assert code == 128 + 9
    assert len(told) == 3
    assert "after 2 restarts (--restarts); go on from version 3 with: headway train --resume" in said


def test_a_run_without_a_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    code, said = kept_going(tmp_path, 3, "sys.exit(1)")
    assert code == 1
    assert "before its first checkpoint (trainer.save_freq), and is not restarted; start it over" in said


@mostly_slow(
    ("end", "version", "again"),
    [("sys.exit(1)", 0, False), ("sys.exit(1)", 3, True), ("os.kill(os.getpid(), 9)", 0, True)],
    quick=[("sys.exit(1)", 0, False)],
)
def test_before_its_first_checkpoint_a_run_is_resumed_unless_it_fails_within_version_0(
    tmp_path: Path, end: str, version: int, again: bool
) -> None:
    (tmp_path / "checkpoints/version_0").mkdir(parents=True)
    reached = {"kind": "version.reached", "time": 0.0, "groups": {}, "episodes": {}}
    lines = [json.dumps({**reached, "version": number}) for number in range(version + 1)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    code, said = kept_going(tmp_path, 1, f"import os; {end}")
    assert code != 0
    assert ("going on from version 0, restart 1 of 1" in said) == again
    assert ("ended (exit code 1) within version 0, and is not restarted; go on from version 0 with" in said) != again


def test_workers_that_a_killed_driver_left_are_ended_before_it_is_resumed(tmp_path: Path) -> None:
    leaves = (
        "import os, pathlib, signal, subprocess, time\n"
        "run = pathlib.Path(sys.argv[-1]); left = run / 'left'\n"
        "if left.exists():\n"
        "    pathlib.Path(run / 'alive').write_text(str(os.path.exists('/proc/' + left.read_text())))\n"
        "    sys.exit(0)\n"
        "worker = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "left.write_text(str(worker.pid))\n"
        "(run / 'checkpoints' / 'version_1').mkdir(parents=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert kept_going(tmp_path, 1, leaves)[0] == 0
    assert (tmp_path / "alive").read_text() == "False"


@pytest.mark.parametrize("killed", [False, True])
def test_a_restart_is_by_the_process_that_waited_or_by_a_new_one_where_that_was_killed(
    tmp_path: Path, killed: bool
) -> None:
    ends = (
        "import os, pathlib, signal, time\n"
        "run = pathlib.Path(sys.argv[-1]); told = run / 'told'\n"
        "told.open('a').write(f'{os.getpid()}\\n')\n"
        "(run / 'checkpoints' / 'version_1').mkdir(parents=True, exist_ok=True)\n"
        "while not (run / 'go').exists(): time.sleep(0.02)\n"
        "sys.exit(0) if len(told.read_text().split()) == 3 else os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    attending, told = attend(tmp_path, 3, ends), tmp_path / "told"
    process, until = psutil.Process(attending.pid), time.monotonic() + 240
    try:
        while not told.exists() or len(process.children()) < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
        (waits,) = {child.pid for child in process.children()} - {int(told.read_text())}
        if killed:
            os.kill(waits, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert attending.wait(240) == 0
    finally:
        attending.kill()
        attending.communicate()
    ran = [int(pid) for pid in told.read_text().split()]
    assert len(set(ran)) == 3
    assert (waits == ran[1]) != killed


@pytest.mark.parametrize("name", restarts.IMPORTED)
def test_what_the_process_that_waits_imports_is_there(name: str) -> None:
    assert find_spec(name) is not None


def test_a_signal_is_passed_on_and_the_run_that_it_ends_is_not_resumed(tmp_path: Path) -> None:
    """Whatever the run's process says at its end."""
    asks = (
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(600)\n"
    )
    attending = attend(tmp_path, 3, asks)
    try:
        until = time.monotonic() + 240
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        attending.send_signal(signal.SIGTERM)
        assert attending.wait(240) == 1
    finally:
        attending.kill()
        attending.communicate()


def test_the_command_names_the_runs_directory_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[list[str], Path, int]] = []
    monkeypatch.setattr(restarts, "keep_going", lambda *call, debug: given.append(call) or 0)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, ["train", "demo", "--restarts", "2", "run.seed=3"]).exit_code == 0
    ((arguments, run, most),) = given
    assert arguments == ["train", "demo", "run.seed=3", f"run.dir={run}"]
    assert run.parent == Path("runs")
    assert most == 2
    assert not list(tmp_path.iterdir())


def test_the_option_for_tracebacks_and_a_directory_of_any_name_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(restarts._Attended, "finish", lambda self, arguments, again: given.append(arguments) or 0)
    monkeypatch.setattr(restarts, "adopt_orphans", lambda: None)
    asked = ["train", "demo", "--restarts", "1", "--debug", f"run.dir='{tmp_path}/a: b'"]
    assert CliRunner().invoke(cli, asked).exit_code == 0
    assert given == [["train", "demo", asked[-1], asked[-1], "--debug"]]


def test_restarts_of_a_run_that_saves_at_its_end_alone_are_refused() -> None:
    refused = CliRunner().invoke(cli, ["train", "demo", "--restarts", "2", "trainer.save_freq=-1"])
    assert refused.exit_code == 2
    assert "--restarts=2 has no effect with trainer.save_freq=-1" in refused.output


@pytest.mark.slow
def test_a_run_that_is_killed_as_it_is_told_to_stop_says_how_to_go_on(tmp_path: Path) -> None:
    """What it left behind is ended, too."""
    asks = (
        "import os, pathlib, signal, subprocess, time\n"
        f"run = pathlib.Path({str(tmp_path)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))\n"
        "(run / 'checkpoints' / 'version_3').mkdir(parents=True)\n"
        "(run / 'left').write_text(str(subprocess.Popen(['sleep', '600'], start_new_session=True).pid))\n"
        "(run / 'ready').touch()\n"
        "time.sleep(600)\n"
    )
    attending = attend(tmp_path, 3, asks)
    until = time.monotonic() + 240
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    attending.send_signal(signal.SIGTERM)
    said = attending.communicate(timeout=240)[1]
    assert attending.returncode == 128 + 9
    assert "(SIGKILL) as it was told to stop; go on from version 3 with: headway train --resume" in said
    assert not Path("/proc", (tmp_path / "left").read_text()).exists()


def test_a_wrong_number_of_restarts_is_refused() -> None:
    refused = CliRunner().invoke(cli, ["train", "demo", "--restarts", "-1"])
    assert refused.exit_code == 2
    assert "--restarts" in refused.output
