"""``python -m benchmarks.answer_cpu``: CPU seconds that each process of the demo's run on Ray spends on an answer.

From the first version to the last one, without validation, so that all that is generated is trained on. The driver's
time has everything that is in its process; `runners` are those of the reward. Linux alone: the figures are /proc's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.main_job import COMMON, RECIPE
from benchmarks.table import report
from headway.cluster.machine.child_processes import descendants
from headway.config.loading import load

SETTINGS = ("cluster.backend=ray", *COMMON)
TICKS = os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answer_cpu", description="What an answer costs.")
    parser.add_argument("--groups", type=int, default=1024, help="groups of the run; default: %(default)s")
    groups = parser.parse_args(arguments).groups
    settings = [*SETTINGS, f"rollout.total_rollout_steps={groups}"]
    config = load(RECIPE, settings).config
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "headway", "train", str(RECIPE), *settings, f"run.dir={run}"]
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        versions = groups // config.groups_per_version
        first = _seconds_at(driver, run, 1)
        last = _seconds_at(driver, run, versions)
        driver.wait()
    answers = (versions - 1) * config.groups_per_version * config.rollout.n
    spent = {role: (last[role] - first.get(role, 0.0)) / answers * 1e6 for role in sorted(last)}
    rows = [{"process": role, "µs an answer": microseconds} for role, microseconds in spent.items()]
    beside = sum(spent.get(role, 0.0) for role in ("driver", "episode-worker-0", "runners"))
    report(
        "answer_cpu",
        f"CPU of an answer on the demo: {answers} answers",
        rows,
        [f"Driver, episode worker and runners together: {beside:.0f} µs. Load at the end: {os.getloadavg()[0]:.1f}."],
    )


def _seconds_at(driver: subprocess.Popen[bytes], run: Path, version: int) -> dict[str, float]:
    """Wait until ``version`` is trained, and return the CPU seconds of the run's processes so far, by role."""
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < version:
        if driver.poll() is not None:
            sys.exit("the run has ended too early")
        time.sleep(0.02)
    spent: dict[str, float] = defaultdict(float)
    for pid in (driver.pid, *descendants(driver.pid)):
        role = "driver" if pid == driver.pid else _role(pid)
        spent[role] += _cpu(pid)
    return dict(spent)


def _role(pid: int) -> str:
    """A worker's name, by the log that it writes; ``runners`` or ``ray`` for others."""
    try:
        output = str(Path(f"/proc/{pid}/fd/1").readlink())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "ended"
    if b"headway.runtime.workers" in command:
        return "runners"
    of_worker = output.endswith(".log") and "/run/logs/" in output and "/ray/" not in output
    return Path(output).stem if of_worker else "ray"


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    main()
