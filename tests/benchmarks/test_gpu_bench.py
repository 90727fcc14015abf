"""How `python -m benchmarks.gpu` runs its checks, whatever becomes of one, and what it says in the end."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, table
from benchmarks.gpu_checks import __main__ as one_check
from benchmarks.gpu_checks import engine
from benchmarks.gpu_checks.process import CHECKS, ROOT, answer_of, command
from benchmarks.gpu_checks.setting import CheckFailed, Passed, Setting, Skipped

GOOD = {"outcome": "passed", "lines": ["all is well"], "figures": {"a": 1}, "seconds": 0.1}


@pytest.fixture(autouse=True)
def into_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "OUT", tmp_path / "bench")


def answered(tmp_path: Path, code: str, limit_s: float = 20.0) -> dict[str, Any]:
    """What becomes of a check whose process runs ``code``, with its answer's path in ``answer``."""
    answer = tmp_path / "answer.json"
    start = f"import os, pathlib, signal, subprocess, sys, time\nanswer = pathlib.Path({str(answer)!r})\n"
    return answer_of([sys.executable, "-c", start + code], answer, tmp_path / "log", limit_s)


# ---------------------------------------------------------------------------------------- one check's process


def test_what_a_check_answers_is_its_answer(tmp_path: Path) -> None:
    """Starts a process for a check, which imports torch."""
    assert answered(tmp_path, f"answer.write_text({json.dumps(GOOD)!r})") == GOOD


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "print('reading'); sys.stdout.flush(); os.kill(os.getpid(), signal.SIGSEGV)",
            "was ended by SIGSEGV; .* reading",
        ),
        ("sys.exit(3)", "ended with exit code 3; the last that it printed: nothing"),
        ("pass", "ended without an answer"),
        (f"answer.write_text({json.dumps(GOOD)!r}); os.abort()", "was ended by SIGABRT"),
    ],
    ids=["segmentation fault", "exit code", "no answer", "dies after it answered"],
)
def test_a_check_whose_process_ends_otherwise_has_failed_and_it_is_said_how(
    tmp_path: Path, code: str, said: str
) -> None:
    found = answered(tmp_path, code)
    assert found["outcome"] == "failed"
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found["lines"][0])


def test_a_check_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = f"""
print("waiting"); sys.stdout.flush()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(child)!r}).write_text(str(child.pid))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""
    started = time.monotonic()
    found = answered(tmp_path, code, limit_s=4.0)
    assert time.monotonic() - started < 60
    assert (found["outcome"], found["seconds"] > 1) == ("failed", True)
    assert found["lines"] == ["it was not over after 4 s; the last that it printed: waiting"]
    with suppress(ProcessLookupError):  # gone already, or about to be
        ends = select.poll()
        ends.register(pidfd := os.pidfd_open(int(child.read_text())))
        assert ends.poll(60_000), "what the check had started still runs"
        os.close(pidfd)


@pytest.mark.parametrize(
    ("raised", "outcome", "line"),
    [
        (None, "passed", "fine"),
        (CheckFailed("off by 2"), "failed", "off by 2"),
        (Skipped("one GPU"), "skipped", "one GPU"),
        (TypeError("an argument\nis missing"), "failed", "TypeError: an argument is missing"),
    ],
    ids=["passes", "fails", "is skipped", "raises"],
)
def test_whatever_a_check_raises_there_is_an_answer(
    raised: Exception | None, outcome: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(setting: Setting) -> Passed:
        assert setting == Setting("cpu", tmp_path, small=True)
        if raised is not None:
            raise raised
        return Passed(["fine"])

    monkeypatch.setattr(engine, "decoding", check)
    answer = tmp_path / "answer.json"
    _, _, _, name, setting, path = command("decoding", Setting("cpu", tmp_path, small=True), answer)
    one_check.main(name, setting, path)
    said = json.loads(answer.read_text())
    assert (said["outcome"], said["lines"]) == (outcome, [line])


# ---------------------------------------------------------------------------------------- all of them


def made(monkeypatch: pytest.MonkeyPatch, outcomes: Sequence[str], took_s: float = 0.0) -> list[float]:
    """Let checks end as ``outcomes`` say, each after ``took_s``; the limits that they were given are returned."""
    now, limits, left = [0.0], list[float](), iter(outcomes)

    def answer(command: object, answer: object, log: object, limit_s: float) -> dict[str, Any]:
        limits.append(limit_s)
        now[0] += took_s
        return {"outcome": next(left), "lines": ["said"], "figures": {}, "seconds": took_s}

    monkeypatch.setattr(gpu, "answer_of", answer)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    return limits


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [(["passed", "passed"], 0), (["failed", "passed"], 1), (["skipped", "passed"], 0)],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_a_failure_stops_nothing_and_is_the_exit_code(
    outcomes: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made(monkeypatch, outcomes)
    assert gpu.main(["--device", "cpu", "--only", "sleep,decoding"]) == code
    shown = capsys.readouterr().out
    written = json.loads((table.OUT / "gpu-cpu-form.json").read_text())
    assert [one["outcome"] for one in written["checks"]] == outcomes
    assert [one["name"] for one in written["checks"]] == ["decoding", "sleep"], "in the order of the table"
    assert all(CHECKS[one["name"]].title in shown for one in written["checks"])
    assert all(outcome in shown for outcome in outcomes)


def test_all_checks_share_the_time_and_what_is_left_out_for_want_of_it_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = made(monkeypatch, ["passed"] * len(CHECKS), took_s=50.0)
    answers = gpu.run(list(CHECKS), Setting("cpu", tmp_path), 102.0)
    assert limits == [90, 52], "its own, or what is left"
    assert [one["outcome"] for one in answers] == ["passed"] * 2 + ["not run"] * (len(CHECKS) - 2)
    assert "102 s" in answers[-1]["lines"][0]
    assert gpu.report(answers, Setting("cpu", tmp_path)) == 1


def test_checks_that_measure_nothing_are_made_at_once_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    together = [name for name in CHECKS if not CHECKS[name].alone][: gpu.TOGETHER]
    all_there = threading.Barrier(len(together), timeout=20)

    def answer(*_: object) -> dict[str, Any]:
        all_there.wait()
        return GOOD

    monkeypatch.setattr(gpu, "answer_of", answer)
    answers = gpu.run(together, Setting("cuda", tmp_path), 60.0)
    assert [one["name"] for one in answers if one["outcome"] == "passed"] == together


def test_the_limits_leave_room_for_a_hang_of_any_check_but_the_last_two() -> None:
    assert all(check.limit_s <= gpu.MINUTES * 60 / 3 for check in CHECKS.values())


def test_without_a_gpu_nothing_is_run_or_written_and_the_exit_code_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    limits = made(monkeypatch, [])
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "sees no GPU here" in said.err
    assert said.err.count("\n") == 1
    assert not limits
    assert not table.OUT.exists()


def test_a_python_without_headways_packages_or_with_old_ones_is_told_of_the_wheelhouse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = gpu.version

    def version(name: str) -> str:
        if name in ("omegaconf", "pydantic"):
            raise PackageNotFoundError(name)
        return "5.17.0" if name == "transformers" else right(name)

    assert gpu.lacking() == []
    monkeypatch.setattr(gpu, "version", version)
    said = gpu.why_not("cuda") or ""
    assert re.search(r"lacks omegaconf, pydantic, transformers>=5\.\d+ \(it has 5\.17\.0\); ", said)
    assert "make wheelhouse" in said


def test_the_command_itself_imports_nothing_of_headway_before_it_knows_that_it_can_be_run() -> None:
    code = (
        "import sys; from benchmarks import gpu; print({m.split('.')[0] for m in sys.modules} & "
        "{'headway', 'torch'} or 'nothing')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "nothing"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_check_passes_in_its_cpu_form_from_the_command_line(tmp_path: Path) -> None:
    """Over 5 s: fourteen processes that import torch, one of which is a whole run of the demo."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CHECKS)} passed" in done.stdout
