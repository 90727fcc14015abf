"""Plans from Python: the split of the devices, and whether asynchrony helps."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from headway.api.run_handle import Run, Table, table
from headway.api.subprocess_client import carry_out_apart
from headway.errors import ConfigError
from headway.reports.live.live_view import html

if TYPE_CHECKING:
    import pandas as pd

    from headway.planner import planner
    from headway.planner.profiles.job_profile import Profile


@dataclass(frozen=True)
class Plan:
    """Settings of a job, simulated, and which of them to choose. Printed, it is what ``headway plan`` prints."""

    found: planner.PlanResult
    """Result of the simulator."""

    @property
    def settings(self) -> dict[str, Any]:
        """The recommended settings, for `headway.train`; empty if the time ran out before any was simulated.

        Devices and meshes are not among them: `table` has the numbers of training and of generating devices.
        """
        best = self.found.advice.recommended
        return {} if best is None else best.setting.settings

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every setting that was simulated, the quickest first, as ``headway plan --json`` writes it."""
        from headway.planner.plan_rows import to_json

        return [to_json(row) for row in self.found.rows]

    @property
    def table(self) -> pd.DataFrame | Table:
        """The rows: a ``DataFrame`` where pandas is installed, else a `Table`."""
        return table(self.rows)

    def __repr__(self) -> str:
        from headway.planner.plan_table import WIDEST, render

        console = Console(file=io.StringIO(), width=WIDEST, highlight=False)
        with console.capture() as printed:
            console.print(render(self.found, WIDEST))
        return printed.get()

    def _repr_html_(self) -> str:
        from headway.planner.plan_table import WIDEST, render

        return html(render(self.found, WIDEST))


def plan(
    profile: str | os.PathLike[str] | Run, *, gpus: int | None = None, budget: float = 60.0, sweep: bool = False
) -> Plan:
    """Simulate a job's settings and recommend some, as ``headway plan`` does, in a subprocess.

    Args:
        profile: a YAML file of the job's costs; or a run, or its directory, whose record is replayed.
        gpus: number of all devices; the profile's by default.
        budget: seconds of processor time to spend.
        sweep: simulate all combinations of preset, split, η and trigger, not only those that may be the fastest.

    Raises:
        ConfigError: the file is no profile, or no split of the devices fits.
    """
    from headway.planner.profile_fitting.run_profiler import profile_run
    from headway.planner.profiles.profile_files import read_profile

    if not budget > 0:
        raise ConfigError(f"budget: got {budget}, expected a number of seconds above 0")
    path = profile.path if isinstance(profile, Run) else Path(profile).expanduser()
    job = profile_run(path, replay=True) if (path / "events.jsonl").is_file() else read_profile(path)
    # In a subprocess: a plan's clock is an event loop, and a notebook already runs one.
    return Plan(carry_out_apart(partial(_plan, job, gpus, budget, sweep), None))


def _plan(job: Profile, gpus: int | None, budget: float, sweep: bool, _: Console | None) -> planner.PlanResult:
    from headway.planner import planner

    return planner.plan(job, devices=gpus, budget_s=budget, sweep=sweep)
