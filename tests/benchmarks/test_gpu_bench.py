"""How `python -m benchmarks.gpu` runs its checks, whatever becomes of one, and what it says in the end."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, table
from benchmarks.gpu_checks import engine, lanes
from benchmarks.gpu_checks.lanes import ALONE, CHECKS, ROOT, WARM_UP, Lane
from benchmarks.gpu_checks.setting import CheckFailed, Finding, Findings, Setting, Skipped
from benchmarks.runner import Hear

FOUND = {"finding": {"name": "interrupt", "text": "all is well", "lines": ["a"]}}
GOOD = {"outcome": "passed", "reason": "", "seconds": 0.1}


@pytest.fixture(autouse=True)
def into_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "OUT", tmp_path / "bench")


def lane_of(tmp_path: Path, code: str) -> Lane:
    """A lane whose process runs ``code`` for each check; ``say`` writes a message."""
    lane = Lane(Setting("cpu", tmp_path, small=True), tmp_path / "log")
    start = "import json, os, pathlib, signal, subprocess, sys, time\n"
    start += "say = lambda message: print(json.dumps(message), flush=True)\nsay({'answer': None})\n"
    script = f"{start}for name in sys.stdin:\n" + textwrap.indent(code, "    ")
    lane.worker._command = [sys.executable, "-c", script]
    return lane


# ---------------------------------------------------------------------------------------- one lane's process


def test_what_a_check_finds_is_heard_at_once_and_its_process_makes_the_next(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    lane = lane_of(tmp_path, f"say({FOUND}); say({{'answer': {{**{GOOD}, 'reason': str(os.getpid())}}}})")
    one, two = (lane.make(name, 20.0, heard.append) for name in ("decoding", "logprobs"))
    lane.stop()
    assert heard == [FOUND, FOUND]
    assert one["outcome"] == two["outcome"] == "passed"
    assert one["reason"] == two["reason"], "another process"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "print('reading', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
            "was ended by SIGSEGV; .* reading",
        ),
        ("sys.exit(3)", "ended with exit code 3; the last that it printed: nothing"),
        ("break", "ended with exit code 0; "),
        pytest.param("os.fork() or time.sleep(60); os._exit(4)", "ended with exit code 4; ", marks=pytest.mark.slow),
    ],
    ids=["segmentation fault", "exit code", "no answer", "what it forked lives on"],
)
def test_what_was_found_before_its_process_ended_is_kept_and_it_is_said_how(
    tmp_path: Path, code: str, said: str
) -> None:
    heard: list[dict[str, Any]] = []
    lane = lane_of(tmp_path, f"say({FOUND})\n{code}")
    found = lane.make("decoding", 20.0, heard.append)
    assert (heard, found["outcome"]) == ([FOUND], "failed")
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found["reason"])
    assert lane.make("logprobs", 20.0, heard.append)["outcome"] == "failed", "the next check has a process again"


@pytest.mark.slow
def test_a_check_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """Takes 4 s: the check's limit, within which two processes have to have started."""
    child = tmp_path / "child"
    code = f"""
print("waiting", file=sys.stderr, flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(child)!r}).write_text(str(child.pid))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say({FOUND})
time.sleep(600)
"""
    heard: list[dict[str, Any]] = []
    found = lane_of(tmp_path, code).make("decoding", 4.0, heard.append)
    assert (found["outcome"], heard) == ("failed", [FOUND])
    assert found["reason"] == "it was not over after 4 s; the last that it printed: waiting"
    with suppress(ProcessLookupError):  # gone already, or about to be
        ends = select.poll()
        ends.register(pidfd := os.pidfd_open(int(child.read_text())))
        assert ends.poll(60_000), "what the check had started still runs"
        os.close(pidfd)


@pytest.mark.parametrize(
    ("raised", "outcome", "reason"),
    [
        (None, "passed", ""),
        (CheckFailed("off by 2"), "failed", "off by 2"),
        (Skipped("one GPU"), "skipped", "one GPU"),
        (TypeError("an argument\nis missing"), "failed", "TypeError: an argument is missing"),
    ],
    ids=["passes", "fails", "is skipped", "raises"],
)
def test_whatever_a_check_raises_there_is_an_answer(
    raised: Exception | None, outcome: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(setting: Setting) -> Findings:
        for name in CHECKS["decoding"].findings:
            yield Finding(name, "fine")
        if raised is not None:
            raise raised

    monkeypatch.setattr(engine, "decoding", check)
    found: list[Finding] = []
    said = lanes.outcome("decoding", Setting("cpu", tmp_path, small=True), found.append)
    assert said == {"outcome": outcome, "reason": reason}
    assert [one.name for one in found] == list(CHECKS["decoding"].findings)


def test_a_check_that_leaves_a_finding_out_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "decoding", lambda setting: iter([Finding("greedy", "fine")]))
    said = lanes.outcome("decoding", Setting("cpu", tmp_path), lambda finding: None)
    assert said["reason"] == "it found nothing for CUDA graphs, interrupt, mixed prompts, running ahead, top-p"


def test_attention_takes_cudnns_kernels_last_in_every_lane(tmp_path: Path) -> None:
    """Compiled for each new length, they took most of the time of a loop over ``transformers.generate``."""
    lane = lane_of(tmp_path, f"say({{'answer': {{**{GOOD}, 'reason': os.environ['TORCH_CUDNN_SDPA_DEPRIORITIZED']}}}})")
    assert lane.make("decoding", 20.0, lambda message: None)["reason"] == "1"
    lane.stop()


# ---------------------------------------------------------------------------------------- all of them


def made(monkeypatch: pytest.MonkeyPatch, outcomes: Mapping[str, str], took_s: float = 0.0) -> list[float]:
    """Let checks end as ``outcomes`` say, each after ``took_s``; the limits that they were given are returned."""
    now, limits = [0.0], list[float]()

    def make(self: Lane, name: str, limit_s: float, hear: Hear) -> dict[str, Any]:
        limits.append(limit_s)
        now[0] += took_s
        hear({"machine": {"device": "a device", "torch": "torch 2.11"}})
        hear({"finding": {"name": CHECKS[name].findings[0], "text": f"{name} is fine", "lines": ["90%"]}})
        return {"outcome": outcomes.get(name, "passed"), "reason": "", "seconds": took_s}

    monkeypatch.setattr(Lane, "make", make)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    return limits


@pytest.mark.parametrize(("outcome", "code"), [("passed", 0), ("failed", 1), ("skipped", 0)], ids=str)
def test_a_failure_stops_nothing_and_is_the_exit_code(
    outcome: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made(monkeypatch, {"decoding": outcome})
    assert gpu.main(["--device", "cpu", "--only", "sleep,decoding"]) == code
    shown = capsys.readouterr().out
    written = json.loads((table.OUT / "gpu-cpu-form.json").read_text())
    assert [(name, one["outcome"]) for name, one in written["checks"].items()] == [
        ("decoding", outcome),
        ("sleep", "passed"),
    ]
    assert "| check | finding | a device, torch 2.11 |" in shown
    assert "decoding, CUDA graphs:\n    90%" in shown
    assert "| `sleep` | weights kept | sleep is fine |" in shown
    assert "| `sleep` | weights given up | passed |" in shown
    assert f"| `decoding` | greedy | {outcome} |" in shown
    assert gpu.main(["--table", str(table.OUT / "gpu-cpu-form.json")]) == 0
    assert capsys.readouterr().out.strip() in shown


def test_a_file_that_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    for name in ("none.json", "other.json"):
        with pytest.raises(SystemExit):
            gpu.main(["--table", str(tmp_path / name)])
        assert f"{name} is no gpu.json" in capsys.readouterr().err


def test_all_checks_share_the_time_and_what_is_left_out_for_want_of_it_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = made(monkeypatch, {}, took_s=200.0)
    report = gpu.run(["decoding", "sleep", "steps"], Setting("cpu", tmp_path), 402.0)
    factor = Setting("cpu", tmp_path).patience
    assert limits == [402, min(CHECKS["sleep"].limit_s * factor, 202)], "its own, or what is left"
    assert [one["outcome"] for one in report.content["checks"].values()] == ["passed", "passed", "not run"]
    assert "402 s" in report.content["checks"]["steps"]["reason"]
    assert report.content["counts"] == {"passed": 2, "failed": 0, "skipped": 0, "not run": 1}


def test_lanes_are_made_side_by_side_on_a_gpu_and_those_that_measure_when_they_have_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = {check.lane: name for name, check in reversed(CHECKS.items()) if check.lane != ALONE}
    names, all_there, order = [*first.values(), "sleep", "steps"], threading.Barrier(len(first), timeout=60), []

    def make(self: Lane, name: str, *_: object) -> dict[str, Any]:
        if name in first.values():
            all_there.wait()
        order.append(name)
        return GOOD

    monkeypatch.setattr(Lane, "make", make)
    report = gpu.run(names, Setting("cuda", tmp_path), 60.0)
    assert order[-2:] == ["sleep", "steps"]
    assert all(one["outcome"] == "passed" for one in report.content["checks"].values())


def test_what_needs_compiled_kernels_begins_when_they_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order, free_ones = list[str](), threading.Event()

    def make(self: Lane, name: str, *_: object) -> dict[str, Any]:
        if name == WARM_UP:  # until all have been made that can be made meanwhile
            free_ones.wait(60)
        order.append(name)
        if name == "update":
            free_ones.set()
        return GOOD

    monkeypatch.setattr(Lane, "make", make)
    gpu.run(["kernels", "broadcast", "update", "compiled"], Setting("cuda", tmp_path), 60.0)
    assert order == ["broadcast", "update", "kernels", "compiled"]


def ends_at_worst() -> dict[str, float]:
    """Seconds after which each check has ended if all take as long as they may."""
    ends: dict[str, float] = {}
    of_lane: dict[str, float] = {}
    for name, check in CHECKS.items():
        start = of_lane.get(check.lane, max(of_lane.values(), default=0.0) if check.lane == ALONE else 0.0)
        start = max(start, ends[WARM_UP]) if check.compiled else start
        ends[name] = of_lane[check.lane] = start + check.limit_s
    return ends


def test_all_limits_together_are_less_than_the_whole_time() -> None:
    assert max(ends_at_worst().values()) <= gpu.MINUTES * 60 - 10


def test_there_is_an_answer_in_every_minute_even_if_all_checks_hang() -> None:
    ends = [0.0, *sorted(ends_at_worst().values())]
    assert max(after - before for before, after in pairwise(ends)) <= 60


def test_the_table_of_the_documentation_has_the_rows_of_the_checks() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    there = re.findall(r"^\| (`\w+`) \| ([^|]+) \|", page.partition("## On a GPU")[2], re.MULTILINE)
    assert there == [(f"`{name}`", label) for name, check in CHECKS.items() for label in check.findings]


def test_without_a_gpu_nothing_is_run_or_written_and_the_exit_code_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    limits = made(monkeypatch, {})
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
@pytest.mark.timeout(1200)
def test_every_check_passes_in_its_cpu_form_from_the_command_line(tmp_path: Path) -> None:
    """Minutes: all checks, among them a run of the demo and layers that are compiled."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CHECKS)} passed" in done.stdout
    written = json.loads((tmp_path / "gpu-cpu-form.json").read_text())
    assert all(text for row in gpu.rows(written) for text in row.values())
