"""``python -m benchmarks.answer_cpu``: CPU seconds that each process of the demo's run on Ray spends on an answer.

From the first version to the last one, without validation, so that all that is generated is trained on. The driver's
time has everything that is in its process; `runners` are those of the reward. Linux alone: the figures are /proc's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.main_job import COMMON
from benchmarks.runner import DEMO, cpu_seconds, parser
from benchmarks.table import report
from headway.config.loading import load
from headway.runtime.process_tree import descendants


def main(arguments: Sequence[str] | None = None) -> None:
    groups = parser("answer_cpu", "What an answer costs.", groups=1024).parse_args(arguments).groups
    settings = ["cluster.backend=ray", *COMMON, f"rollout.total_rollout_steps={groups}"]
    config = load(DEMO, settings).config
    versions = groups // config.groups_per_version
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "headway", "train", str(DEMO), *settings, f"run.dir={run}"]
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        first, last = _seconds_at(driver, run, 1), _seconds_at(driver, run, versions)
        driver.wait()
    answers = (versions - 1) * config.groups_per_version * config.rollout.n
    spent = {role: (last[role] - first[role]) / answers * 1e6 for role in sorted(last)}
    beside = sum(spent.get(role, 0.0) for role in ("driver", "episode-worker-0", "runners"))
    notes = [f"Driver, episode worker and runners together: {beside:.0f} µs."]
    rows = [{"process": role, "µs an answer": microseconds} for role, microseconds in spent.items()]
    report("answer_cpu", {f"CPU of an answer on the demo: {answers} answers": rows}, notes)


def _seconds_at(driver: subprocess.Popen[bytes], run: Path, version: int) -> Counter[str]:
    """Wait until ``version`` is trained, and return the CPU seconds of the run's processes so far, by role."""
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < version:
        if driver.poll() is not None:
            sys.exit("the run has ended too early")
        time.sleep(0.02)
    spent: Counter[str] = Counter()
    for pid in (driver.pid, *descendants(driver.pid)):
        spent["driver" if pid == driver.pid else _role(pid)] += cpu_seconds(pid)  # type: ignore[assignment]
    return spent


def _role(pid: int) -> str:
    """Return a worker's name, by the log that it writes; ``runners`` or ``ray`` for others."""
    try:
        output = str(Path(f"/proc/{pid}/fd/1").readlink())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "ended"
    if b"headway.runtime.workers" in command:
        return "runners"
    of_worker = output.endswith(".log") and "/run/logs/" in output and "/ray/" not in output
    return Path(output).stem if of_worker else "ray"


if __name__ == "__main__":
    main()
