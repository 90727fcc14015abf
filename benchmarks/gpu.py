"""``python -m benchmarks.gpu``: what works on this machine's GPUs and how fast, in eight minutes, without a network.

    CHECKS ─▶ a process each ─▶ answers ─▶ one table, build/bench/gpu.json

A check that fails, crashes or hangs never stops the next. The exit code is 0 when nothing failed, 1 when a check failed
or could not be made in time, 2 when there is no GPU: then nothing is run or written. ``--device cpu --small`` runs the
same checks without a GPU, as the tests do; their figures say nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu_checks.process import CHECKS, ROOT, answer_of, command, end_all
from benchmarks.gpu_checks.setting import Setting
from benchmarks.wheelhouse import NOT_IMPORTED

MINUTES = 8.0
LEAST_S = 5.0
"""A check is not begun with less time than that."""
TOGETHER = 4
"""Checks that are made at once on a GPU, where they measure nothing."""
NO_GPU = 2
OUTCOMES = ("passed", "failed", "skipped", "not run")

Answer = dict[str, Any]
"""``name``, ``title``, ``outcome``, ``seconds``, ``lines`` and ``figures`` of one check."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What works on this GPU.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--small", action="store_true", help="the sizes of the CPU form")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of {','.join(CHECKS)}")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for everything; default: %(default)g")
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.only or ()) - set(CHECKS)):
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    if problem := why_not(chosen.device):
        print(f"benchmarks.gpu: {problem}. Nothing was run.", file=sys.stderr)
        return NO_GPU
    with tempfile.TemporaryDirectory(prefix="headway-gpu-") as scratch:
        setting = Setting(chosen.device, Path(scratch), small=chosen.small)
        names = [name for name in CHECKS if name in (chosen.only or CHECKS)]
        answers = run(names, setting, chosen.minutes * 60)
    return report(answers, setting)


def why_not(device: str) -> str | None:
    """Why nothing can be run here, and what to do; None if it can."""
    if missing := lacking():
        return (
            f"this Python lacks {', '.join(missing)}; with a network: make setup; without: make wheelhouse "
            "PYTHON_VERSION=3.12 on a machine that has one, which says how to go on"
        )
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no GPU here (torch.cuda.is_available() is false). The same checks without "
            "one: python -m benchmarks.gpu --device cpu --small"
        )
    return None


def lacking() -> list[str]:
    """Packages of pyproject.toml that this Python does not have, or only in another release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = []
    for required in map(Requirement, project["dependencies"]):
        if canonicalize_name(required.name) not in NOT_IMPORTED:
            try:
                there = version(required.name)
            except PackageNotFoundError:
                missing.append(required.name)
            else:
                right = required.specifier.contains(there, prereleases=True)
                missing += [] if right else [f"{required} (it has {there})"]
    return missing


def run(names: Sequence[str], setting: Setting, seconds: float) -> list[Answer]:
    """Make the checks, each within its limit and all within ``seconds``; on a GPU some at once."""
    from benchmarks.table import OUT

    logs = (OUT / "gpu").absolute()
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds

    def made(number: int, name: str) -> Answer:
        check, left = CHECKS[name], deadline - time.monotonic()
        if left < LEAST_S:
            over = f"the {seconds:g} s for everything were over"
            said: Answer = {"outcome": "not run", "lines": [over], "seconds": 0.0}
        else:
            print(f"[{number} of {len(names)}, {left:.0f} s left] {check.title}", file=sys.stderr, flush=True)
            answer = setting.scratch / f"{name}.json"
            said = answer_of(command(name, setting, answer), answer, logs / f"{name}.log", min(check.limit_s, left))
        said = {"name": name, "title": check.title, "figures": {}, **said}
        (logs / f"{name}.json").write_text(json.dumps(said), encoding="utf-8")  # what is known stays, should this end
        print(f"    {name} {said['outcome']}, {said['seconds']:.0f} s", file=sys.stderr, flush=True)
        return said

    answers: list[Answer] = []
    numbered = list(enumerate(names, 1))
    for alone, checks in groupby(numbered, key=lambda one: CHECKS[one[1]].alone):
        with ThreadPoolExecutor(1 if alone or not setting.on_gpu else TOGETHER) as pool:
            try:
                answers += pool.map(lambda one: made(*one), list(checks))
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                end_all()
                raise
    return answers


def report(answers: Sequence[Answer], setting: Setting) -> int:
    """Show what was found, write the file; returns the exit code."""
    from benchmarks.table import write

    machine = described(setting)
    print(", ".join(machine.values()))
    for one in answers:
        print(f"\n{one['outcome']:<8} {one['seconds']:4.0f} s  {one['title']}")
        print(*(f"{'':17}{line}" for line in one["lines"]), sep="\n")
    counts = {outcome: sum(one["outcome"] == outcome for one in answers) for outcome in OUTCOMES}
    name = "gpu" if setting.on_gpu else "gpu-cpu-form"
    path = write(name, {"date": time.strftime("%Y-%m-%d"), "on": machine, "counts": counts, "checks": list(answers)})
    print("\n" + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]))
    print(f"written to {path}; what each check printed is in {path.parent / 'gpu'}")
    return 1 if counts["failed"] or counts["not run"] else 0


def described(setting: Setting) -> Mapping[str, str]:
    """The device and the libraries. Called when all checks are over: it takes memory on the device."""
    import torch
    import transformers

    device = "CPU form, small" if setting.small else "CPU form"
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        device = f"{torch.cuda.device_count()} × {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    libraries = {one.__name__: f"{one.__name__} {one.__version__}" for one in (torch, transformers)}
    return {"device": device, **libraries, "python": f"Python {sys.version.split()[0]}"}


if __name__ == "__main__":
    sys.exit(main())
