"""The window in which a run's processes are profiled, on the virtual clock, with processes that note what they do."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headway.api.profile_window import ProfileWindow, ask
from headway.errors import RunError, UserError, WorkerDied
from headway.events import Event, Note, ProfileTaken, RunFinished, RunStarted, VersionReached
from headway.planner.simulation.virtual_clock import run_virtual
from headway.reports.run_directory import RunDirectory, RunLock
from tests.pipeline.scenario import Run, Scenario


@dataclass
class FakeProcess:
    """A process that begins after ``start_s``, and fails where it is told to."""

    name: str = "actor-0"
    start_s: float = 0.0
    take_s: float = 0.0
    fails: str = ""
    did: list[tuple[str, float]] = field(default_factory=list)

    async def start(self) -> None:
        await self._do("start", self.start_s)

    async def stop(self) -> None:
        await self._do("stop", 0.0)

    async def take(self, origin: float) -> bytes:
        await self._do("take", self.take_s)
        return f"{self.name} {origin:.0f}".encode()

    async def _do(self, what: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.fails == what:
            raise WorkerDied(f"worker {self.name} died during {what!r}")
        self.did.append((what, asyncio.get_running_loop().time()))


@dataclass
class Stage:
    """A window, the processes that it profiles, and what it tells."""

    folder: Path
    processes: list[FakeProcess] = field(default_factory=lambda: [FakeProcess(), FakeProcess("rollout-0")])
    events: list[Event] = field(default_factory=list)
    remark: str | None = None

    def __post_init__(self) -> None:
        self.window = ProfileWindow(
            lambda: self.processes,
            RunDirectory(self.folder),
            self.events.append,
            lambda time: time,
            remark=self.remark,
        )

    async def reach(self, *versions: int, every: float = 10.0) -> None:
        """Boundaries of ``versions``, one ``every`` so many seconds."""
        for version in versions:
            await asyncio.sleep(every)
            time = asyncio.get_running_loop().time()
            self.window.on_event(VersionReached(time=time, version=version, groups={}))

    def ask(self, versions: int, seconds: float = 60.0) -> None:
        """Ask as ``headway ctl`` does."""
        lock = RunLock(RunDirectory(self.folder).lock)
        lock.take()
        try:
            ask(RunDirectory(self.folder), versions, seconds)
        finally:
            lock.release()

    def notes(self, level: str) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note) and event.level == level]

    @property
    def warnings(self) -> list[str]:
        return self.notes("warning")

    def taken(self) -> ProfileTaken:
        (taken,) = (event for event in self.events if isinstance(event, ProfileTaken))
        return taken


def started(total: int | None, per_version: int = 4) -> RunStarted:
    return RunStarted(
        time=0, mode="", seed=0, groups_per_version=per_version, total_groups=total, lag_bound=0, order="fifo", slots={}
    )  # fmt: skip


def finished() -> RunFinished:
    return RunFinished(time=asyncio.get_running_loop().time(), status="completed", reason=None, version=9, groups={})


async def window_over(stage: Stage, versions: int, *boundaries: int, seconds: float = 60.0) -> None:
    stage.ask(versions, seconds)
    await stage.reach(*boundaries)
    if stage.window._task is not None:
        await stage.window._task


def test_a_window_opens_at_the_next_boundary_and_closes_so_many_later(tmp_path: Path):
    stage = Stage(tmp_path)
    run_virtual(window_over(stage, 2, 1, 2, 3, 4))
    for process in stage.processes:
        assert [(what, at) for what, at in process.did if what != "take"] == [("start", 10.0), ("stop", 30.0)]
    taken = stage.taken()
    assert (taken.version, taken.versions, taken.span, taken.reason) == (1, 2, (10.0, 30.0), None)
    assert taken.files == ["actor-0.json.gz", "rollout-0.json.gz"]
    for name in taken.files:
        assert (tmp_path / taken.folder / name).read_bytes().startswith(name.removesuffix(".json.gz").encode())
    assert stage.notes("info") == [
        "profiling version 1: actor-0, rollout-0",
        "profiled: 2 traces in profiles/version-1",
    ]
    assert not (tmp_path / "profile.json").exists()


def test_a_window_whose_processes_begin_slowly_counts_from_the_version_that_it_meets(tmp_path: Path):
    stage = Stage(tmp_path, [FakeProcess(start_s=25.0)])
    run_virtual(window_over(stage, 1, 1, 2, 3, 4, 5))
    assert (stage.taken().version, stage.processes[0].did[1]) == (3, ("stop", 40.0))


def test_a_window_is_closed_at_its_limit_and_says_so(tmp_path: Path):
    stage = Stage(tmp_path)
    run_virtual(window_over(stage, 3, 1, 2, 3, 4, seconds=15))
    taken = stage.taken()
    assert (taken.span, taken.versions) == ((10.0, 25.0), 1)
    assert taken.reason == "version 3 was not trained within --seconds 15"


def test_the_trace_of_what_was_is_kept_when_the_run_ends_first(tmp_path: Path):
    stage = Stage(tmp_path)

    async def main() -> None:
        async with stage.window:
            stage.ask(versions=5)
            await stage.reach(1, 2)
            stage.window.on_event(finished())

    run_virtual(main())
    taken = stage.taken()
    assert (taken.versions, taken.reason) == (1, "the run ended before version 5 was trained")
    assert (tmp_path / taken.folder / "rollout-0.json.gz").exists()


def test_a_run_that_fails_waits_a_few_seconds_for_traces_and_no_longer(tmp_path: Path):
    stage = Stage(tmp_path, [FakeProcess(take_s=1e6)])

    async def main() -> float:
        try:
            async with stage.window:
                stage.ask(versions=5)
                await stage.reach(1)
                await asyncio.sleep(5)
                raise RunError("the run failed")
        except RunError:
            pass
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 25.0
    assert stage.warnings == ["the run was over before the profile was written that it was asked for"]


@pytest.mark.parametrize("total", [4, None])
def test_a_run_that_ends_before_the_window_opens_says_so(tmp_path: Path, total: int | None):
    stage = Stage(tmp_path)
    stage.window.on_event(started(total))

    async def main() -> None:
        async with stage.window:
            stage.ask(versions=1)
            if total is not None:
                await stage.reach(1)  # its last boundary
            stage.window.on_event(finished())

    run_virtual(main())
    assert stage.warnings == ["the run was over before the profile was written that it was asked for"]
    assert not (tmp_path / "profiles").exists() and not (tmp_path / "profile.json").exists()


@pytest.mark.parametrize("what", ["start", "stop", "take"])
def test_a_process_that_fails_has_no_trace_and_others_have_theirs(tmp_path: Path, what: str):
    stage = Stage(tmp_path, [FakeProcess(fails=what), FakeProcess("rollout-0")])
    run_virtual(window_over(stage, 1, 1, 2, 3))
    assert stage.taken().files == ["rollout-0.json.gz"]
    assert stage.warnings == [f"there is no profile of actor-0: worker actor-0 died during '{what}'"]


def test_a_process_that_does_not_begin_in_time_is_left_out_and_stopped_all_the_same(tmp_path: Path):
    stage = Stage(tmp_path, [FakeProcess(start_s=1e6), FakeProcess("rollout-0")])
    run_virtual(window_over(stage, 1, *range(1, 12)))
    assert stage.taken().files == ["rollout-0.json.gz"]
    assert stage.warnings == ["there is no profile of actor-0: it did not begin within 60 s"]
    assert [what for what, _ in stage.processes[0].did] == ["stop", "take"]


def test_processes_that_all_begin_too_late_are_stopped_and_forget_what_they_recorded(tmp_path: Path):
    """A call that timed out here goes on over there: without an end it would record until memory runs out."""
    stage = Stage(tmp_path, [FakeProcess(start_s=1e6), FakeProcess("rollout-0", start_s=1e6)])
    run_virtual(window_over(stage, 1, *range(1, 12)))
    assert stage.warnings[-1] == "there is no profile: no process of the run could be profiled"
    for process in stage.processes:
        assert [what for what, _ in process.did] == ["stop", "take"]
    assert not (tmp_path / "profiles").exists()


def test_a_process_that_fails_to_end_forgets_what_it_recorded_and_is_warned_of_once(tmp_path: Path):
    stage = Stage(tmp_path, [FakeProcess(fails="stop"), FakeProcess("rollout-0")])
    run_virtual(window_over(stage, 1, 1, 2, 3))
    assert [what for what, _ in stage.processes[0].did] == ["start", "take"]
    assert len(stage.warnings) == 1


def test_without_any_trace_the_window_has_failed_and_another_may_be_asked_for(tmp_path: Path):
    stage = Stage(tmp_path, [FakeProcess(fails="start")])

    async def main() -> None:
        await window_over(stage, 1, 1, 2)
        assert stage.warnings[-1] == "there is no profile: no process of the run could be profiled"
        stage.processes[0].fails = ""
        await window_over(stage, 1, 3, 4)

    run_virtual(main())
    assert stage.taken().version == 3


def test_one_window_is_open_at_a_time(tmp_path: Path):
    stage = Stage(tmp_path, [FakeProcess(take_s=100.0)])

    async def main() -> None:
        stage.ask(versions=1)
        for boundary in (1, 2, 3):  # waits, is open, is written
            with pytest.raises(UserError, match="under way"):
                stage.ask(versions=1)
            await stage.reach(boundary)
            await asyncio.sleep(1)
        await asyncio.sleep(100)
        stage.ask(versions=1)

    run_virtual(main())


def test_a_request_that_a_killed_process_left_is_forgotten(tmp_path: Path):
    stage = Stage(tmp_path)
    stage.ask(versions=1)
    os.utime(tmp_path / "profile.json", (0, 0))  # the process that resumes has taken the lock since

    async def main() -> None:
        async with stage.window:
            await stage.reach(1, 2)

    run_virtual(main())
    assert stage.events == []


def test_a_request_that_comes_while_the_run_starts_is_kept(tmp_path: Path):
    stage = Stage(tmp_path)
    stage.ask(versions=1)

    async def main() -> None:
        async with stage.window:
            await stage.reach(1, 2)

    run_virtual(main())
    assert stage.taken().version == 1


def test_a_request_that_is_damaged_is_warned_of(tmp_path: Path):
    stage = Stage(tmp_path)

    async def main() -> None:
        async with stage.window:
            (tmp_path / "profile.json").write_text("{")
            await stage.reach(1)
            await asyncio.sleep(1)

    run_virtual(main())
    assert stage.warnings[0].startswith("there is no profile: JSONDecodeError")
    assert not (tmp_path / "profile.json").exists()


def test_a_folder_of_an_earlier_history_of_the_run_is_kept(tmp_path: Path):
    (tmp_path / "profiles" / "version-1").mkdir(parents=True)
    stage = Stage(tmp_path)
    run_virtual(window_over(stage, 1, 1, 2))
    assert stage.taken().folder == "profiles/version-1-2"


@pytest.mark.parametrize(
    ("versions", "seconds", "message"),
    [
        (0, 60.0, "--versions: got 0, expected 1 to 1000"),
        (1001, 60.0, "--versions: got 1001"),
        (1, 0.0, "--seconds: got 0, expected more than 0 and at most 120"),
        (1, 121.0, "--seconds: got 121"),
        (1, float("nan"), "--seconds: got nan"),
    ],
)
def test_numbers_that_make_no_window_are_refused(tmp_path: Path, versions: int, seconds: float, message: str):
    with pytest.raises(UserError, match=message):
        ask(RunDirectory(tmp_path), versions, seconds)


def test_what_is_not_profiled_is_said_first(tmp_path: Path):
    stage = Stage(tmp_path, remark="replicas are not profiled")
    run_virtual(window_over(stage, 1, 1, 2))
    assert stage.notes("info")[0] == "replicas are not profiled"


def test_a_whole_run_goes_the_same_way_with_a_window_as_without(tmp_path: Path):
    stage = Stage(tmp_path)

    def script(run: Run) -> None:
        run.recorder.on = stage.window.on_event
        stage.ask(versions=2)

    profiled = Scenario(mode="overlapped", replicas=2, script=script).run()
    alone = Scenario(mode="overlapped", replicas=2).run()

    def versions(run: Run) -> list[tuple[float, int]]:
        """What happens at one moment of the virtual clock has no order, and events in between depend on it."""
        return [(event.time, event.version) for event in run.of(VersionReached)]

    assert versions(profiled) == versions(alone)
    boundaries = {event.version: event.time for event in alone.of(VersionReached)}
    assert stage.taken().span == (boundaries[0], boundaries[2])
