"""``headway watch``: what a page is told, and what happens when the run does something else."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.errors import DataError, RunError
from headway.events import Event, RunResumed, RunStarted, VersionReached
from headway.reports.record.events_file import to_json_line
from headway.reports.record.file_access import Tail
from headway.reports.run_directory import SILENT_S, RunDirectory, RunLock, is_trained, signs_of_life
from headway.reports.timeline.html_timeline import live_parts
from headway.reports.timeline.timeline import TimelineBuilder, build_timeline
from headway.reports.watch.follower import Follower
from tests.reports.stories import lines, sample, story, validated, written
from tests.reports.timelines import simulated_events


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def events_until(version: int, run: list[Event]) -> list[Event]:
    """The beginning of a run, up to the boundary of ``version``."""
    return run[: run.index(boundary(version, run)) + 1]


def boundary(version: int, run: list[Event]) -> VersionReached:
    return next(event for event in run if isinstance(event, VersionReached) and event.version == version)


def append(run: Path, events: list[Event]) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(lines(event.to_json() for event in events))


def up_to_date(follower: Follower) -> Follower:
    while follower.look():
        pass
    return follower


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path / "run", story(versions=6), [sample(3, 0), sample(20, 4), validated(2, 7)])


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[RunLock]:
    """The lock of ``run`` in the test's folder, held: somebody trains it."""
    (tmp_path / "run").mkdir()
    lock = RunLock(RunDirectory(tmp_path / "run").lock)
    lock.take()
    yield lock
    lock.release()


@pytest.fixture
def watched(run: Path) -> Callable[..., Follower]:
    """Followers that a page looks at, on a clock that a test moves, each without its thread."""

    def make(clock: Clock | None = None) -> Follower:
        follower = Follower(RunDirectory(run), clock or Clock())
        follower.watched = 1
        return up_to_date(follower)

    return make


# ------------------------------------------------------------------------------------------------ what is told


def test_a_page_that_opens_is_told_everything(watched: Callable[..., Follower]) -> None:
    follower = watched()
    message = follower.message()
    told = {line[0]: line for line in message["groups"]}
    assert set(told) == set(range(max(told) + 1))
    assert told[3][2:4] == ["word problems", "filtered"] or told[3][3] in ("trained", "filtered")
    assert message["ledger"]["balanced"]
    assert message["ledger"]["groups"]["trained"] == 24
    assert message["status"] == {"status": "completed", "reason": None}
    assert set(message["sampled"]) == {"group=3", "group=20", "validation=2&problem=7"}
    assert message["validations"] == [[2, 7, "addition", 1.0, 12.0]]
    assert {chart["name"] for chart in message["curves"]["charts"]} >= {"reward", "validation", "entropy", "turns"}
    assert message["timeline"] == 1
    assert json.loads(follower.timeline())["data"]["lanes"]


def test_a_page_that_is_up_to_date_is_told_nothing_again(watched: Callable[..., Follower]) -> None:
    follower = watched()
    number, message = follower.news(0, timeout_s=0) or (0, b"")
    assert json.loads(message) == json.loads(to_json_line(follower.message()))
    up_to_date(follower)
    assert follower.news(number, timeout_s=0) is None


def test_a_page_is_told_of_what_comes(tmp_path: Path) -> None:
    whole = story(versions=6)
    begun = events_until(3, whole)
    run, clock = written(tmp_path / "run", begun), Clock()
    follower = Follower(RunDirectory(run), clock)
    follower.watched = 1
    seen = up_to_date(follower).message()
    assert seen["ledger"]["groups"]["trained"] == 12
    append(run, whole[len(begun) :])
    (run / "samples.jsonl").write_text(lines([sample(2, 0), validated(5, 1)]))
    clock.now += 1000
    up_to_date(follower)
    news = json.loads((follower.news(1, timeout_s=0) or (0, b""))[1])
    assert [line[0] for line in news["groups"]] == [*range(news["ledger"]["groups"]["admitted"])]
    assert set(news["sampled"]) == {"group=2", "validation=5&problem=1"}
    assert news["ledger"]["groups"]["trained"] == 24
    assert news["curves"] != json.loads(to_json_line(seen["curves"]))
    assert news["timeline"] == seen["timeline"] + 1


def test_what_is_told_of_a_growing_run_is_what_its_whole_record_says() -> None:
    """A timeline that was built on the way changes nothing of the one that is built at the end."""
    whole = simulated_events("async_partial")
    builder = TimelineBuilder()
    for place, event in enumerate(whole):
        builder.on_event(event)
        if place % (len(whole) // 20) == 0:
            builder.build(ended=False)
    assert live_parts(builder.build(ended=False), 10_000) == live_parts(build_timeline(whole), 10_000)


def test_a_run_that_is_resumed_is_read_anew_without_what_it_undid(tmp_path: Path) -> None:
    whole = story(versions=6)
    run = written(tmp_path / "run", events_until(5, whole))
    follower = Follower(RunDirectory(run), Clock())
    follower.watched = 1
    seen = up_to_date(follower).message()
    assert seen["ledger"]["groups"]["trained"] == 20
    at = boundary(2, whole)
    restarted = [event for event in whole if isinstance(event, RunStarted)]
    append(run, [RunResumed(time=at.time, version=2, times=1), *restarted, *whole[whole.index(at) + 1 :]])
    up_to_date(follower)
    news = follower.message()
    assert news["epoch"] != seen["epoch"]
    assert news["ledger"]["groups"]["trained"] == 24
    assert news["ledger"]["balanced"]
    assert len(news["groups"]) == len({line[0] for line in news["groups"]}) == news["ledger"]["groups"]["admitted"]


def test_samples_that_are_rewritten_are_read_anew(run: Path, watched: Callable[..., Follower]) -> None:
    follower = watched()
    seen = follower.message()
    other = run / "other"
    other.write_text(lines([sample(4, 0)]))
    other.replace(run / "samples.jsonl")
    news = up_to_date(follower).message()
    assert news["epoch"] != seen["epoch"]
    assert news["sampled"] == ["group=4"]


def test_a_page_is_told_of_damaged_samples_though_nothing_else_comes(
    run: Path, watched: Callable[..., Follower]
) -> None:
    clock = Clock()
    follower = watched(clock)
    assert follower.message()["damaged"] == 0
    with (run / "samples.jsonl").open("a") as file:
        file.write("{nonsense}\n")
    clock.now += 60
    assert json.loads((up_to_date(follower).news(1, timeout_s=0) or (0, b""))[1])["damaged"] == 1


@pytest.mark.usefixtures("trained")
def test_a_timeline_is_built_as_rarely_as_it_is_dear_and_never_for_nobody(tmp_path: Path) -> None:
    whole = story(versions=6)
    run, clock = written(tmp_path / "run", whole[:-40]), Clock()
    follower = Follower(RunDirectory(run), clock)
    assert up_to_date(follower).message()["timeline"] == 0, "nobody looks"
    follower.watched = 1
    assert up_to_date(follower).message()["timeline"] == 1
    append(run, whole[-40:-20])
    assert up_to_date(follower).message()["timeline"] == 1, "it was built a moment ago"
    clock.now += 60
    assert up_to_date(follower).message()["timeline"] == 2


@pytest.mark.usefixtures("trained")
def test_the_cards_of_a_run_that_goes_on_are_as_new_as_what_is_said_beside_them(tmp_path: Path) -> None:
    whole = story(versions=6)
    begun = events_until(3, whole)
    run, clock = written(tmp_path / "run", begun), Clock()
    follower = Follower(RunDirectory(run), clock)
    follower.watched = 1
    up_to_date(follower)
    append(run, events_until(5, whole)[len(begun) :])
    told = up_to_date(follower).message()
    assert told["timeline"] == 1, "it was built a moment ago"
    cards = {name: value for name, value, _ in told["figures"]}
    assert (cards["versions"], cards["groups trained"]) == ("5", str(told["ledger"]["groups"]["trained"]))


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_the_last_timeline_and_curves_are_made_at_once_when_a_run_ends(
    end: str, tmp_path: Path, trained: RunLock
) -> None:
    whole = story(versions=6)
    begun = events_until(3, whole)
    run = written(tmp_path / "run", begun)
    follower = Follower(RunDirectory(run), Clock())
    follower.watched = 1
    first = up_to_date(follower).message()
    append(run, whole[len(begun) :] if end == "finished" else events_until(5, whole)[len(begun) :])
    trained.release()
    last = up_to_date(follower).message()
    assert (first["timeline"], last["timeline"]) == (1, 2)
    up_to_date(follower)
    assert follower.message()["timeline"] == 2, "it is made once"


def test_a_record_that_is_damaged_ends_with_the_line_that_is(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write("{nonsense}\n")
    follower = Follower(RunDirectory(run))
    follower.start()
    with pytest.raises(DataError, match=r"events\.jsonl:\d+ is damaged"):
        follower.join()
    assert follower.message()["status"]["status"] == "damaged"
    follower.close()


def test_a_page_gets_its_message_while_files_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk under the run keeps no page waiting."""
    follower, answered = Follower(RunDirectory(run), Clock()), []
    read = Tail.read

    def slow(tail: Tail) -> Iterator[tuple[int, bytes]]:
        asking = threading.Thread(target=lambda: answered.append(follower.news(0, timeout_s=0)), daemon=True)
        asking.start()
        asking.join(60)
        assert not asking.is_alive(), f"a page waits for {tail.path.name}"
        return read(tail)

    monkeypatch.setattr(Tail, "read", slow)
    up_to_date(follower)
    assert answered


def test_a_failure_that_nobody_thought_of_ends_the_command_with_a_message(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("lane")

    monkeypatch.setattr(TimelineBuilder, "on_event", fail)
    follower = Follower(RunDirectory(run))
    follower.start()
    with pytest.raises(RunError, match=r"cannot be followed .*: .*lane"):
        follower.join()
    assert "lane" in follower.message()["status"]["reason"]
    follower.close()


def test_what_cannot_be_read_for_a_moment_is_read_later(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose rights change, or a network's disk that is away: neither the record nor the lock is damaged."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    follower = Follower(RunDirectory(run), Clock())
    for name in ("pathlib.Path.open", "headway.reports.run_directory.is_trained"):
        with monkeypatch.context() as refused:
            refused.setattr(name, refuse)
            up_to_date(follower)
            assert follower.message()["status"]["status"] == "unreadable"
    assert up_to_date(follower).message()["status"]["status"] == "completed"


def test_nothing_is_known_of_a_lock_whose_folder_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    assert is_trained(tmp_path / "run.lock") is None


# ------------------------------------------------------------------------------------------------ how it stands


def test_a_run_goes_on_while_its_lock_is_held_and_was_killed_when_nobody_holds_it(tmp_path: Path) -> None:
    run = written(tmp_path / "run", events_until(3, story(versions=6)))
    lock = RunLock(run / "run.lock")
    lock.take()
    (run / "events.jsonl").touch()
    follower = up_to_date(Follower(RunDirectory(run), Clock()))
    status = follower.message()["status"]
    assert status["status"] == "running"
    assert "version 3, 12 of 24 groups trained" in status["words"]
    lock.release()
    assert up_to_date(follower).message()["status"]["status"] == "killed"


def test_a_directory_that_is_removed_meanwhile_is_said_to_be_gone(run: Path, watched: Callable[..., Follower]) -> None:
    follower = watched()
    shutil.rmtree(run)
    assert up_to_date(follower).message()["status"] == {
        "status": "unreadable",
        "reason": "the run's directory is gone",
    }


def test_a_run_that_only_starts_is_said_to(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [])
    lock = RunLock(run / "run.lock")
    lock.take()
    follower = up_to_date(Follower(RunDirectory(run), Clock()))
    assert follower.message()["status"]["words"] == "starting"
    lock.release()
    assert up_to_date(follower).message()["status"]["status"] == "not begun"


def test_a_killed_run_that_is_resumed_starts_until_it_trains_and_never_passes_for_its_abandoned_history(
    tmp_path: Path,
) -> None:
    whole = story(versions=6)
    run = written(tmp_path / "run", events_until(5, whole))
    os.utime(run / "events.jsonl", (1, 1))  # long ago
    lock = RunLock(run / "run.lock")
    lock.take()
    follower = up_to_date(Follower(RunDirectory(run), Clock()))

    def words() -> str:
        return str(up_to_date(follower).message()["status"]["words"])

    assert words() == "starting again"
    at = boundary(2, whole)
    append(run, [RunResumed(time=at.time, version=2, times=1)])
    assert words() == "starting again from version 2"
    append(run, [event for event in whole if isinstance(event, RunStarted)])
    assert words() == "running: version 2, 8 of 24 groups trained"
    append(run, whole[whole.index(at) + 1 :])
    assert words() == "completed; it still writes its model and reports"
    lock.release()
    assert up_to_date(follower).message()["status"] == {"status": "completed", "reason": None}


def test_while_a_run_is_read_anew_the_page_does_not_say_how_the_undone_one_stood(tmp_path: Path) -> None:
    whole = story(versions=6)
    run = written(tmp_path / "run", events_until(5, whole))
    follower = up_to_date(Follower(RunDirectory(run), Clock()))
    assert follower.message()["status"]["status"] == "killed"
    append(run, [RunResumed(time=boundary(2, whole).time, version=2, times=1)])
    assert follower.look()
    assert follower.look()
    assert follower.message()["status"]["status"] == "reading"


def test_the_lock_tells_whether_a_run_is_trained(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run.lock")
    lock.take()
    assert is_trained(tmp_path / "run.lock") is True
    lock.release()
    assert is_trained(tmp_path / "run.lock") is False


def test_nothing_is_known_of_a_lock_that_another_machine_holds(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("process 1 on some-other-machine\n")
    assert is_trained(tmp_path / "run.lock") is None


def test_a_process_on_another_machine_that_shows_no_sign_of_life_trains_no_more(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    lock.write_text("process 1 on some-other-machine\n")
    taken = lock.stat().st_mtime
    assert is_trained(lock, now=lambda: taken + SILENT_S - 1) is None
    assert is_trained(lock, now=lambda: taken + SILENT_S) is False
    signs_of_life(lock).touch()
    os.utime(signs_of_life(lock), (taken + 5000, taken + 5000))
    assert is_trained(lock, now=lambda: taken + 5000 + SILENT_S - 1) is None
    assert is_trained(lock, now=lambda: taken + 5000 + SILENT_S) is False
