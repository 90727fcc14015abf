"""``python -m benchmarks.gpu``: what works on this machine's GPUs and how fast, in eight minutes, without a network.

    CHECKS ─▶ lanes of processes ─▶ findings, each as soon as it is known ─▶ gpu.json ─▶ one table

A check that fails, crashes or hangs stops no other, and loses nothing that it had found. The exit code is 0 when
nothing failed, 1 when a check failed or was not reached, 2 when there is no GPU: then nothing is run or written.
``--device cpu --small`` runs the same checks without a GPU, as the tests do; their figures say nothing about speed.
``--table FILE`` prints the table of an earlier run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event, Lock
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu_checks.lanes import ALONE, CHECKS, ROOT, WARM_UP, Lane
from benchmarks.gpu_checks.setting import Setting
from benchmarks.runner import parser, say, words
from benchmarks.wheelhouse import NOT_IMPORTED

MINUTES = 8.0
LEAST_S = 3.0
"""A check is not begun with less time than that."""
NO_GPU = 2
OUTCOMES = ("passed", "failed", "skipped", "not run")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(
        "gpu",
        "What works on this GPU, and how fast.",
        device={"choices": ["cuda", "cpu"], "default": "cuda"},
        small={"action": "store_true", "help": "the sizes of the CPU form"},
        only=words(CHECKS),
        minutes={"type": float, "help": f"for everything; default: {MINUTES:g} on a GPU"},
        out={"type": Path, "help": "a folder for gpu.json and the logs; default: build/bench"},
        table={"type": Path, "metavar": "FILE", "help": "print the table of this gpu.json, and end"},
    )
    chosen = options.parse_args(arguments)
    if chosen.table is not None:
        try:
            print(shown(json.loads(chosen.table.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError) as cause:
            options.error(f"--table: {chosen.table} is no gpu.json of this benchmark: {type(cause).__name__}: {cause}")
        return 0
    if problem := why_not(chosen.device):
        print(f"benchmarks.gpu: {problem}. Nothing was run.", file=sys.stderr)
        return NO_GPU
    with tempfile.TemporaryDirectory(prefix="headway-gpu-") as scratch:
        setting = Setting(chosen.device, Path(scratch), small=chosen.small)
        names = [name for name in CHECKS if name in chosen.only]
        minutes = chosen.minutes or MINUTES * setting.patience
        report = run(names, setting, minutes * 60, chosen.out)
    print(shown(report.content))
    print(f"send back: this table and {report.path}; what the checks printed is in {report.logs}")
    return 1 if report.content["counts"]["failed"] or report.content["counts"]["not run"] else 0


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


class Report:
    """Content of gpu.json, written again whenever something is known."""

    def __init__(self, names: Sequence[str], name: str, folder: Path | None) -> None:
        from benchmarks import table

        self.path = (folder or table.OUT).absolute() / f"{name}.json"
        self.logs = self.path.parent / name
        self.logs.mkdir(parents=True, exist_ok=True)
        self._lock, self._started = Lock(), time.monotonic()
        self.content: dict[str, Any] = {"name": name, "date": time.strftime("%Y-%m-%d"), "on": {}, "counts": {}}
        unknown = {"outcome": "not run", "reason": "it was not reached", "seconds": 0.0}
        self.content["checks"] = {name: {**unknown, "findings": {}} for name in names}

    def hear(self, check: str, message: Mapping[str, Any]) -> None:
        """Take a message of a lane's process, or what became of its check."""
        with self._lock:
            said = self.content["checks"][check]
            if "machine" in message:
                self.content["on"] = message["machine"]
            elif "finding" in message:
                finding = message["finding"]
                known = said["findings"].setdefault(finding["name"], {"text": "", "lines": []})
                known["text"] += f"{'; ' * bool(known['text'])}{finding['text']}"
                known["lines"] += finding["lines"]
                self._say(f"{check}, {finding['name']}: {finding['text']}")
            else:
                said.update(message)
                self._say(f"{check} {said['outcome'].upper()} in {said['seconds']:.0f} s {said['reason']}")
            outcomes = [one["outcome"] for one in self.content["checks"].values()]
            self.content["counts"] = {outcome: outcomes.count(outcome) for outcome in OUTCOMES}
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.content, indent=1), encoding="utf-8")
            new.replace(self.path)  # whoever ends this process finds a whole file

    def _say(self, text: str) -> None:
        say(f"[{time.monotonic() - self._started:3.0f} s] {text}")


def run(names: Sequence[str], setting: Setting, seconds: float, folder: Path | None = None) -> Report:
    """Make the checks, each within its limit and all within ``seconds``; on a GPU lanes side by side."""
    report = Report(names, "gpu" if setting.on_gpu else "gpu-cpu-form", folder)
    deadline, warm, stopped = time.monotonic() + seconds, Event(), Event()
    lanes = {name: Lane(setting, report.logs / f"{name}.log") for name in {CHECKS[name].lane: 0 for name in names}}

    def make(lane: str) -> None:
        for name in (name for name in names if CHECKS[name].lane == lane):
            check = CHECKS[name]
            if check.compiled and WARM_UP in names:
                warm.wait(max(0.0, deadline - time.monotonic()))
            left = deadline - time.monotonic()
            if left >= LEAST_S and not stopped.is_set():
                limit_s = min(check.limit_s * setting.patience, left)
                report.hear(name, lanes[lane].make(name, limit_s, lambda said, name=name: report.hear(name, said)))
            else:
                reason = f"the {seconds:g} s for everything were over"
                report.hear(name, {"outcome": "not run", "reason": reason, "seconds": 0.0})
            if name == WARM_UP:
                warm.set()
        lanes[lane].stop()

    together = [lane for lane in lanes if lane != ALONE]
    with ThreadPoolExecutor(max(1, len(together)) if setting.on_gpu else 1) as pool:
        try:
            list(pool.map(make, together))
            list(pool.map(make, [lane for lane in lanes if lane == ALONE]))
        finally:
            stopped.set()
            for lane in lanes.values():
                lane.stop()
    return report


def shown(content: Mapping[str, Any]) -> str:
    """The table that is sent back, what failed and why, and the lines of findings."""
    from benchmarks.table import markdown

    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in content["counts"].items() if count)
    parts = [markdown(rows(content)), f"{outcomes}, {content['date']}"]
    for name, check in content["checks"].items():
        if check["reason"]:
            parts.append(f"{name} {check['outcome']}: {check['reason']}")
        for label, finding in check["findings"].items():
            if lines := finding["lines"]:
                parts.append("\n".join([f"{name}, {label}:", *(f"    {line}" for line in lines)]))
    return "\n".join(parts)


def rows(content: Mapping[str, Any]) -> list[dict[str, str]]:
    """Lines of the table, one for each finding that a check can have; its outcome where it has none."""
    device = ", ".join(content["on"].values()) or "device"
    return [
        {"check": f"`{name}`", "finding": label, device: made["findings"].get(label, {"text": made["outcome"]})["text"]}
        for name, made in content["checks"].items()
        for label in CHECKS[name].findings
    ]


if __name__ == "__main__":
    sys.exit(main())
