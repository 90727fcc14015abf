"""Nothing that a run holds grows with its groups, its versions or its losses: a run may take weeks."""

from __future__ import annotations

import asyncio
import io
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
from rich.console import Console

from benchmarks.long_run import PROFILE
from headway.errors import WorkerDied
from headway.events import Event, VersionReached
from headway.pipeline.admission.sample_collector import SampleOutlet
from headway.planner.profiles.job_profile import Profile
from headway.planner.simulation.simulated_run import Simulation, config_for
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.run_sums import Series
from headway.reports.report_manager import Reports, open_reports
from tests.pipeline.scenario import Run, Scenario
from tests.pipeline.test_samples import Spelled


def sizes(*roots: object) -> Counter[str]:
    """Return class and attribute → number of entries of all containers that Headway's objects have there, but for those
    with a limit of their own.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", root) for root in roots]
    while todo:
        place, one = todo.pop()
        if id(one) in seen or isinstance(one, type | Series):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            found[place] += len(one)
            todo += [(place, value) for pair in one.items() for value in pair]
        elif isinstance(one, list | tuple | set | frozenset | deque):
            if not isinstance(one, deque) or one.maxlen is None:
                found[place] += len(one)
            todo += [(place, value) for value in one]
        elif isinstance(one, MethodType):
            todo.append((place, one.__self__))
        elif type(one).__module__.startswith("headway."):
            todo += [(f"{type(one).__name__}.{name}", getattr(one, name, None)) for name in _attributes(one)]
    return found


def _attributes(one: object) -> Iterator[str]:
    yield from getattr(one, "__dict__", ())
    for cls in type(one).__mro__:
        slots = getattr(cls, "__slots__", ())
        yield from [slots] if isinstance(slots, str) else slots


def growing(looks: Sequence[Counter[str]]) -> list[str]:
    """Return the places with ever more entries, from each look to the next but one."""
    names = set().union(*looks)
    return sorted(
        name for name in names if all(one[name] < two[name] for one, two in zip(looks, looks[2:], strict=False))
    )


class Looks:
    """Observer that looks at ``roots`` every second version, once the run has gone on for eight of them, and leaks."""

    def __init__(self) -> None:
        self.roots: list[object] = []
        self.found: list[Counter[str]] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, VersionReached) and event.version >= 8 and event.version % 2 == 0:
            self.found.append(sizes(*self.roots))
            metrics = next(root for root in self.roots if isinstance(root, Reports)).metrics
            metrics.warnings.append("one more")

    def close(self) -> None: ...


@pytest.mark.slow
def test_nothing_grows_with_groups_and_versions_but_a_leak_that_is_planted(tmp_path: Path) -> None:
    """Simulates 28 versions with their reports; the leak is of one entry every second version."""
    profile = Profile.model_validate({**PROFILE, "validation": {"problems": 4, "n": 1, "test_freq": 1}})
    config = config_for(profile, "async_partial", train_devices=2, replicas=2, versions=28, activity_interval_s=10.0)
    looks = Looks()
    reports = open_reports(config, tmp_path / "run", Console(file=io.StringIO(), width=200))
    simulation = Simulation(profile, config, observers=[reports, looks])
    looks.roots += [simulation, reports]
    simulation.run()
    reports.close()
    assert len(looks.found) == 11
    assert growing(looks.found) == ["RunMetrics.warnings"]


def test_nothing_grows_with_the_losses_of_replicas_and_episode_workers(tmp_path: Path) -> None:
    """A replica or an episode worker dies every ten seconds, thirty times, and another one takes its place."""
    looks: list[Counter[str]] = []

    async def beside(run: Run) -> None:
        metrics, read = RunMetrics(), 0
        while True:
            for members in (run.rollouts, run.episode_workers):
                await asyncio.sleep(10.0)
                members[-1].die(WorkerDied(f"{members[-1].name} was killed"))
            for event in run.events[read:]:
                metrics.on_event(event)
            read = len(run.events)
            looks.append(sizes(run.pipeline, metrics))

    scenario = Scenario(
        "async_partial",
        sections={"cluster": {"max_replica_restarts": 1000}, "reports": {"samples": 2}, "trainer": {"save_freq": 2}},
        total=16 * 40,
        replicas=2,
        problems=1,
        supervised=True,
        replica_start_s=2.0,
        episode_workers=2,
        filters=True,
        samples=SampleOutlet(lambda _: None, Spelled()),
        journal=tmp_path / "journal",
        beside=beside,
    )
    scenario.run().assert_completed()
    assert len(looks) >= 12
    # Of a replica that is gone its name is kept, so that no other one takes it; the first fifty warnings are kept.
    assert set(growing(looks[4:])) <= {"ReplicaPool._gone", "RunMetrics.warnings"}
