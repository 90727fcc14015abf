"""``python -m benchmarks.long_run``: what the driver holds, and what a row costs, after two million groups.

    the real pipeline, on the virtual clock ──events──▶ the real reports: events.jsonl, metrics.jsonl, the plain view
    simulated engines and trainer               │
                                                └─▶ after each tenth of the run: memory, seconds of a row

One process, one pipeline, one run. It exits 1 when memory grows by more than `MOST_KIB` for 1,000 groups, when rows
cost more than `SLOWER` times as much at the end as after the first tenth, or when the ledger does not balance. Each
million groups write 300 MB of events, in the temporary directory.
"""

from __future__ import annotations

import gc
import io
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from rich.console import Console

from benchmarks.runner import memory_of_process, parser, say, timed
from benchmarks.table import report
from headway.events import Event, GroupSettled, UpdateFinished
from headway.planner.profiles.job_profile import Profile
from headway.planner.simulation.simulated_run import Simulation, config_for
from headway.reports.report_manager import Reports, open_reports

MOST_KIB = 16.0
"""Most KiB for 1,000 groups by which memory may grow, by the line through the looks after the first: two million groups
are 32 MiB. What is kept of each version makes about as much."""
LOOKS = 10
SLOWER = 1.5
"""Times as much a row may cost at the end: the machine has neighbours."""
LAST = 200
"""Rows and versions before a look that its medians are of."""
ACTIVITY_S = 10.0
"""Virtual seconds between two reports of a replica: a version takes about as long."""
PROFILE = {
    "name": "long run",
    "devices": 4,
    "batch": {"groups_per_version": 64, "ppo_mini_batch_size": 16, "n": 2},
    "prompt": {"kind": "constant", "tokens": 64},
    "response": {"kind": "lognormal", "mean": 200, "sigma": 0.7, "max": 1000},
    "rollout": {"slots": 64, "decode": [[1, 0.01], [64, 0.02]], "prefill_token_s": 1e-5},
    "train": {"points": [{"devices": 2, "step_s": 0.05, "token_s": 4e-4}]},
    "update": {
        "nbytes": 10**9,
        "gather": {"latency_s": 0.1},
        "send": {"bytes_per_s": 1e10},
        "load": {"latency_s": 0.1},
    },
    "reward": {"seconds": 0.2, "workers": 8, "filtered": 0.1},
    "validation": {"problems": 4, "n": 1, "test_freq": 10},
}
"""Small where that changes nothing that grows: two answers a group, 64 groups a version, a tenth of groups filtered."""


class Meter:
    """An observer in front of the reports: what a row costs them, and how much memory this process has."""

    def __init__(self, reports: Reports, view: io.StringIO, every: int) -> None:
        """``view``: file of the plain view; ``every``: number of trained groups between two looks."""
        self.looks: list[dict[str, Any]] = []
        self._reports, self._view, self._every = reports, view, every
        self._groups = self._events = 0
        self._rows: deque[float] = deque(maxlen=LAST)
        """Seconds of the calls in which a row was made."""
        self._updates: deque[float] = deque(maxlen=LAST)
        """When updates finished, on the wall clock."""
        self._started = time.perf_counter()

    def on_event(self, event: Event) -> None:
        seconds = timed(lambda: self._reports.on_event(event))
        self._events += 1
        if "  reward " in self._view.getvalue():
            self._rows.append(seconds)
        self._view.seek(0)
        self._view.truncate()
        match event:
            case UpdateFinished():
                self._updates.append(time.perf_counter())
            case GroupSettled(fate="trained"):
                self._groups += 1
                if self._groups % self._every == 0:
                    self.look(event.time)

    def close(self) -> None: ...

    def look(self, now: float) -> None:
        """``now``: virtual seconds."""
        gc.collect()
        seconds = time.perf_counter() - self._started
        self.looks.append(
            {
                "groups": self._groups,
                "virtual days": now / 86_400,
                "wall s": seconds,
                "µs per group": 1e6 * seconds / self._groups,
                "events": self._events,
                "MiB": memory_of_process()["VmRSS"] / 2**20,
                "ms per row": 1e3 * median(self._rows),
                "ms per version": 1e3 * median(after - before for before, after in pairwise(self._updates)),
            }
        )
        say(" ".join(f"{name} {value:,.4g}" for name, value in self.looks[-1].items()))


def measured(groups: int, directory: Path) -> tuple[list[dict[str, Any]], bool]:
    """Run once in ``directory``: what was seen after each tenth, and whether the ledger balances."""
    profile, view = Profile.model_validate(PROFILE), io.StringIO()
    versions = max(1, groups // profile.batch.groups_per_version)
    config = config_for(
        profile, "async_partial", train_devices=2, replicas=2, versions=versions, activity_interval_s=ACTIVITY_S
    )
    reports = open_reports(config, directory, Console(file=view, width=200))
    meter = Meter(reports, view, versions * profile.batch.groups_per_version // LOOKS)
    simulation = Simulation(profile, config, observers=[meter])
    simulation.run()
    reports.close()
    return meter.looks, bool(reports.summary()["balanced"])


def kib_per_thousand(looks: Sequence[dict[str, Any]]) -> float:
    """Return the slope of the line through the memory of all looks but the first, in KiB for 1,000 groups."""
    groups, mib = ([look[name] for look in looks[1:]] for name in ("groups", "MiB"))
    return linear_regression(groups, mib).slope * 1024 * 1000


def main(arguments: Sequence[str] | None = None) -> int:
    directory = {"type": Path, "help": "where the run's files go, and stay (default: nowhere)"}
    options = parser("long_run", __doc__, groups=2_000_000, directory=directory).parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="headway-long-run-") as temporary:
        directory = options.directory or Path(temporary) / "run"
        looks, balanced = measured(options.groups, directory)
        nbytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    slope, slower = kib_per_thousand(looks), looks[-1]["ms per row"] / looks[0]["ms per row"]
    notes = [
        f"memory grows by {slope:.2f} KiB for 1,000 groups (at most {MOST_KIB:g}); a row costs {slower:.2f} times as "
        f"much (at most {SLOWER:g}); the ledger {'balances' if balanced else 'does not balance'}",
        f"files: {nbytes / looks[-1]['groups']:.0f} bytes a group",
    ]
    report("long_run", {"one pipeline, its reports, the virtual clock": looks}, notes)
    return 0 if slope <= MOST_KIB and slower <= SLOWER and balanced else 1


if __name__ == "__main__":
    sys.exit(main())
