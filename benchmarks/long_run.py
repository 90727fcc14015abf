"""``python -m benchmarks.long_run``: what the driver holds, and what a row costs, after a million groups.

    the real pipeline, on the virtual clock ──events──▶ the real reports: events.jsonl, metrics.jsonl, the plain view
    simulated engines and trainer               │
                                                └─▶ at 10% of the run, and at its end: memory, seconds of a row

One process, one pipeline, one run. It exits 1 when the memory at the end is more than `MOST_MIB` above that at 10%,
when rows cost more than `SLOWER` times as much as then, or when the ledger does not balance. A million groups write
hundreds of MB of events, in the temporary directory.
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
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.runner import memory_of_process, parser, timed
from benchmarks.table import report
from headway.events import Event, GroupSettled, UpdateFinished
from headway.planner.profiles.job_profile import Profile
from headway.planner.simulation.simulated_run import Simulation, config_for
from headway.reports.report_manager import Reports, open_reports

MOST_MIB = 50.0
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

    def __init__(self, reports: Reports, view: io.StringIO, mark: int) -> None:
        """``view``: file of the plain view; ``mark``: trained groups at the first look."""
        self.looks: list[dict[str, Any]] = []
        self._reports, self._view, self._mark = reports, view, mark
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
                if self._groups == self._mark:
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


def measured(groups: int, mark: int, directory: Path) -> tuple[list[dict[str, Any]], bool]:
    """Run once in ``directory``: what was seen at the mark and at the end, and whether the ledger balances."""
    profile, view = Profile.model_validate(PROFILE), io.StringIO()
    versions = max(1, groups // profile.batch.groups_per_version)
    config = config_for(
        profile, "async_partial", train_devices=2, replicas=2, versions=versions, activity_interval_s=ACTIVITY_S
    )
    reports = open_reports(config, directory, Console(file=view, width=200))
    meter = Meter(reports, view, mark)
    simulation = Simulation(profile, config, observers=[meter])
    simulation.run()
    meter.look(simulation.seconds)
    reports.close()
    return meter.looks, bool(reports.summary()["balanced"])


def main(arguments: Sequence[str] | None = None) -> int:
    directory = {"type": Path, "help": "where the run's files go, and stay (default: nowhere)"}
    options = parser("long_run", __doc__, groups=1_000_000, directory=directory).parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="headway-long-run-") as temporary:
        directory = options.directory or Path(temporary) / "run"
        (early, late), balanced = measured(options.groups, options.groups // 10, directory)
        nbytes = sum(file.stat().st_size for file in directory.glob("events*/*"))
        nbytes += (directory / "events.jsonl").stat().st_size
    grown, slower = late["MiB"] - early["MiB"], late["ms per row"] / early["ms per row"]
    notes = [
        f"memory grew by {grown:.1f} MiB (at most {MOST_MIB:g}); a row costs {slower:.2f} times as much (at most "
        f"{SLOWER:g}); the ledger {'balances' if balanced else 'does not balance'}",
        f"events: {nbytes / late['groups']:.0f} bytes a group",
    ]
    report("long_run", {"one pipeline, its reports, the virtual clock": [early, late]}, notes)
    return 0 if grown <= MOST_MIB and slower <= SLOWER and balanced else 1


if __name__ == "__main__":
    sys.exit(main())
