"""``headway watch``: who may see a run, what a page is told, and what happens when the run does something else."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headway.errors import ConfigError, DataError, RunError, UserError
from headway.events import Event, Note, RunResumed, RunStarted, VersionReached
from headway.reports.record.file_access import Tail
from headway.reports.run_directory import SILENT_S, RunDirectory, RunLock, is_trained, signs_of_life
from headway.reports.timeline.html_timeline import live_parts
from headway.reports.timeline.timeline import TimelineBuilder, build_timeline
from headway.reports.watch import watch_server
from headway.reports.watch.follower import Follower
from headway.reports.watch.watch_server import WatchServer
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
        follower.page_opened()
        return up_to_date(follower)

    return make


# ------------------------------------------------------------------------------------------------ what is told


def test_a_page_that_opens_is_told_everything(watched: Callable[..., Follower]) -> None:
    follower = watched()
    message = follower.message(0, -1)
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
    seen = follower.message(0, -1)
    assert not follower.wait(seen["serial"], seen["epoch"], timeout_s=0)
    again = follower.message(seen["serial"], seen["epoch"])
    assert (again["groups"], again["validations"], again["sampled"], again["curves"]) == ([], [], [], None)


def test_a_page_is_told_of_what_comes_and_of_nothing_else(tmp_path: Path) -> None:
    whole = story(versions=6)
    begun = events_until(3, whole)
    run, clock = written(tmp_path / "run", begun), Clock()
    follower = Follower(RunDirectory(run), clock)
    follower.page_opened()
    seen = up_to_date(follower).message(0, -1)
    assert seen["ledger"]["groups"]["trained"] == 12
    append(run, whole[len(begun) :])
    (run / "samples.jsonl").write_text(lines([sample(2, 0), validated(5, 1)]))
    clock.now += 1000
    up_to_date(follower)
    assert follower.wait(seen["serial"], seen["epoch"], timeout_s=0)
    news = follower.message(seen["serial"], seen["epoch"])
    before = {line[0] for line in seen["groups"]}
    assert {line[0] for line in news["groups"]} - before == set(
        range(max(before) + 1, news["ledger"]["groups"]["admitted"])
    )
    assert {line[0] for line in news["groups"]} & before == {2}, "only the group whose text came, too"
    assert set(news["sampled"]) == {"group=2", "validation=5&problem=1"}
    assert news["ledger"]["groups"]["trained"] == 24
    assert news["curves"] is not None
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
    follower.page_opened()
    seen = up_to_date(follower).message(0, -1)
    assert seen["ledger"]["groups"]["trained"] == 20
    at = boundary(2, whole)
    restarted = [event for event in whole if isinstance(event, RunStarted)]
    append(run, [RunResumed(time=at.time, version=2, times=1), *restarted, *whole[whole.index(at) + 1 :]])
    up_to_date(follower)
    news = follower.message(seen["serial"], seen["epoch"])
    assert news["epoch"] != seen["epoch"]
    assert news["ledger"]["groups"]["trained"] == 24
    assert news["ledger"]["balanced"]
    assert len(news["groups"]) == len({line[0] for line in news["groups"]}) == news["ledger"]["groups"]["admitted"]


def test_samples_that_are_rewritten_are_read_anew(run: Path, watched: Callable[..., Follower]) -> None:
    follower = watched()
    seen = follower.message(0, -1)
    other = run / "other"
    other.write_text(lines([sample(4, 0)]))
    other.replace(run / "samples.jsonl")
    news = up_to_date(follower).message(seen["serial"], seen["epoch"])
    assert news["epoch"] != seen["epoch"]
    assert news["sampled"] == ["group=4"]


def test_a_page_is_told_of_damaged_samples_though_nothing_else_comes(
    run: Path, watched: Callable[..., Follower]
) -> None:
    follower = watched()
    seen = follower.message(0, -1)
    assert seen["damaged"] == 0
    with (run / "samples.jsonl").open("a") as file:
        file.write("{nonsense}\n")
    assert up_to_date(follower).wait(seen["serial"], seen["epoch"], timeout_s=0)
    assert follower.message(seen["serial"], seen["epoch"])["damaged"] == 1


@pytest.mark.usefixtures("trained")
def test_a_timeline_is_built_as_rarely_as_it_is_dear_and_never_for_nobody(tmp_path: Path) -> None:
    whole = story(versions=6)
    run, clock = written(tmp_path / "run", whole[:-40]), Clock()
    follower = Follower(RunDirectory(run), clock)
    assert up_to_date(follower).message(0, -1)["timeline"] == 0, "nobody looks"
    follower.page_opened()
    assert up_to_date(follower).message(0, -1)["timeline"] == 1
    append(run, whole[-40:-20])
    assert up_to_date(follower).message(0, -1)["timeline"] == 1, "it was built a moment ago"
    clock.now += 60
    assert up_to_date(follower).message(0, -1)["timeline"] == 2


@pytest.mark.usefixtures("trained")
def test_the_cards_of_a_run_that_goes_on_are_as_new_as_what_is_said_beside_them(tmp_path: Path) -> None:
    whole = story(versions=6)
    begun = events_until(3, whole)
    run, clock = written(tmp_path / "run", begun), Clock()
    follower = Follower(RunDirectory(run), clock)
    follower.page_opened()
    up_to_date(follower)
    append(run, events_until(5, whole)[len(begun) :])
    told = up_to_date(follower).message(0, -1)
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
    follower.page_opened()
    first = up_to_date(follower).message(0, -1)
    append(run, whole[len(begun) :] if end == "finished" else events_until(5, whole)[len(begun) :])
    trained.release()
    last = up_to_date(follower).message(first["serial"], first["epoch"])
    assert (first["timeline"], last["timeline"]) == (1, 2)
    assert last["curves"] is not None
    up_to_date(follower)
    assert follower.message(0, -1)["timeline"] == 2, "it is made once"


def test_a_record_that_is_damaged_ends_with_the_line_that_is(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write("{nonsense}\n")
    follower = Follower(RunDirectory(run))
    follower.start()
    with pytest.raises(DataError, match=r"events\.jsonl:\d+ is damaged"):
        follower.join()
    assert follower.message(0, -1)["status"]["status"] == "damaged"
    follower.close()


def test_a_page_gets_its_message_while_files_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk under the run keeps no page waiting."""
    follower, answered = Follower(RunDirectory(run), Clock()), []
    read = Tail.read

    def slow(tail: Tail) -> Iterator[tuple[int, bytes]]:
        asking = threading.Thread(target=lambda: answered.append(follower.message(0, -1)), daemon=True)
        asking.start()
        asking.join(5)
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
    with pytest.raises(RunError, match=r"cannot be followed any more: .*lane"):
        follower.join()
    assert "lane" in follower.message(0, -1)["status"]["reason"]
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
            assert follower.message(0, -1)["status"]["status"] == "unreadable"
    assert up_to_date(follower).message(0, -1)["status"]["status"] == "completed"


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
    status = follower.message(0, -1)["status"]
    assert status["status"] == "running"
    assert "version 3, 12 of 24 groups trained" in status["words"]
    lock.release()
    assert up_to_date(follower).message(0, -1)["status"]["status"] == "killed"


def test_a_directory_that_is_removed_meanwhile_is_said_to_be_gone(run: Path, watched: Callable[..., Follower]) -> None:
    follower = watched()
    shutil.rmtree(run)
    assert up_to_date(follower).message(0, -1)["status"] == {
        "status": "unreadable",
        "reason": "the run's directory is gone",
    }


def test_a_run_that_only_starts_is_said_to(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [])
    lock = RunLock(run / "run.lock")
    lock.take()
    follower = up_to_date(Follower(RunDirectory(run), Clock()))
    assert follower.message(0, -1)["status"]["words"] == "starting"
    lock.release()
    assert up_to_date(follower).message(0, -1)["status"]["status"] == "not begun"


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
        return str(up_to_date(follower).message(0, -1)["status"]["words"])

    assert words() == "starting again"
    at = boundary(2, whole)
    append(run, [RunResumed(time=at.time, version=2, times=1)])
    assert words() == "starting again from version 2"
    append(run, [event for event in whole if isinstance(event, RunStarted)])
    assert words() == "running: version 2, 8 of 24 groups trained"
    append(run, whole[whole.index(at) + 1 :])
    assert words() == "completed; it still writes its model and reports"
    lock.release()
    assert up_to_date(follower).message(0, -1)["status"] == {"status": "completed", "reason": None}


def test_while_a_run_is_read_anew_the_page_does_not_say_how_the_undone_one_stood(tmp_path: Path) -> None:
    whole = story(versions=6)
    run = written(tmp_path / "run", events_until(5, whole))
    follower = up_to_date(Follower(RunDirectory(run), Clock()))
    assert follower.message(0, -1)["status"]["status"] == "killed"
    append(run, [RunResumed(time=boundary(2, whole).time, version=2, times=1)])
    assert follower.look()
    assert follower.look()
    assert follower.message(0, -1)["status"]["status"] == "reading"


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


# ------------------------------------------------------------------------------------------------ who may see it


@contextmanager
def served(run: Path) -> Iterator[WatchServer]:
    follower = Follower(RunDirectory(run))
    server = WatchServer(follower, "a run", 0)
    follower.start()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        follower.close()
        thread.join()


def ask(
    server: WatchServer, path: str, host: str | None = None, method: str = "GET"
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


@contextmanager
def streamed(server: WatchServer) -> Iterator[Iterator[dict[str, Any]]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", f"/{server.token}/stream")
    response = connection.getresponse()
    assert response.headers["Content-Type"] == "text/event-stream"
    try:
        yield (json.loads(line[6:]) for line in response if line.startswith(b"data: "))
    finally:
        connection.close()


def test_only_the_token_opens_the_page(run: Path) -> None:
    with served(run) as server:
        assert urlsplit(server.url).hostname == "127.0.0.1"
        response, body = ask(server, urlsplit(server.url).path)
        assert response.status == 200
        assert b"a run" in body
        assert response.headers["Cache-Control"] == "no-store"
        wrong = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")
        for path in (
            "/",
            "/stream",
            f"/{wrong}/",
            f"/{server.token}",
            "//",
            f"/{server.token}x/",
            "/%00/",
        ):
            response, body = ask(server, path)
            assert (response.status, body) == (404, b""), path
            assert "Python" not in response.headers["Server"]


def test_a_page_that_calls_this_machine_by_a_name_of_its_own_sees_nothing(run: Path) -> None:
    with served(run) as server:
        path = urlsplit(server.url).path
        for host in (
            "evil.example",
            f"evil.example:{server.port}",
            "127.0.0.1.evil.example",
            "",
            "localhost:80@evil",
        ):
            assert ask(server, path, host or " ")[0].status == 404, host
        for host in ("localhost:9000", "127.0.0.1", "LOCALHOST:1"):
            assert ask(server, path, host)[0].status == 200, host


def test_nothing_but_its_parts_is_served(run: Path) -> None:
    with served(run) as server:
        for where in (
            "../config.yaml",
            "config.yaml",
            "events.jsonl",
            "%2e%2e/config.yaml",
            "page",
            "sample",
            "sample?group=x",
        ):
            assert ask(server, f"/{server.token}/{where}")[0].status == 404, where


@pytest.mark.parametrize("method", ["POST", "PUT", "HEAD", "OPTIONS", "NONSENSE"])
def test_every_other_method_gets_the_same_empty_404(run: Path, method: str) -> None:
    with served(run) as server:
        for path in ("/", f"/{server.token}/"):
            response, body = ask(server, path, method=method)
            assert (response.status, body) == (404, b"")
            assert response.headers["Connection"] == "close"


def test_idle_connections_of_others_are_hung_up_on_and_keep_nobody_out(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_server, "MOST_STRANGERS", 2)
    with served(run) as server, streamed(server) as messages, ExitStack() as idle:
        next(messages)
        address = ("127.0.0.1", server.port)
        connections = [idle.enter_context(socket.create_connection(address, timeout=10)) for _ in range(4)]
        for connection in connections[:2]:
            assert connection.recv(1) == b""  # the oldest
        for _ in range(3):
            assert ask(server, urlsplit(server.url).path)[0].status == 200
        assert connections[2].recv(1) == b""
        append(run, [Note(time=0.0, level="info", text="said later")])
        next(messages)  # a page that is open stays so, whatever others do


def test_one_page_too_many_is_told_so_in_a_stream_after_which_a_browser_asks_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_server, "MOST_STREAMS", 1)
    with served(run) as server, streamed(server) as messages:
        next(messages)
        response, body = ask(server, f"/{server.token}/stream")
        assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
        assert body.startswith(b"retry: ") and b"\nevent: full\n" in body


def test_the_page_allows_itself_its_own_script_and_its_own_server_alone(run: Path) -> None:
    with served(run) as server:
        response, body = ask(server, f"/{server.token}/")
        page = body.decode()
        assert "default-src 'none'" in page
        assert "connect-src 'self'" in page
        assert "script-src 'sha256-" in page
        assert "'unsafe-eval'" not in page
        assert server.token not in page
        assert response.headers["Content-Security-Policy"] == "frame-ancestors 'none'"


def test_a_stream_tells_all_and_then_what_comes(tmp_path: Path) -> None:
    whole = story(versions=6)
    begun = events_until(3, whole)
    run = written(tmp_path / "run", begun)
    with served(run) as server, streamed(server) as messages:
        first = next(message for message in messages if message["groups"])
        assert first["ledger"]["groups"]["admitted"] == len(first["groups"])
        append(run, whole[len(begun) :])
        trained = {line[0] for line in first["groups"] if line[3] == "trained"}
        for message in messages:
            trained |= {line[0] for line in message["groups"] if line[3] == "trained"}
            if message["status"]["status"] == "completed":
                break
        assert len(trained) == 24


def test_a_sample_is_served_as_it_lies_in_the_file(run: Path) -> None:
    with served(run) as server:
        with streamed(server) as messages:
            next(message for message in messages if message["sampled"])
        response, body = ask(server, f"/{server.token}/sample?group=20")
        assert (response.status, json.loads(body)["version"]) == (200, 4)
        assert json.loads(ask(server, f"/{server.token}/sample?validation=2&problem=7")[1])["answer"] == "42"
        assert ask(server, f"/{server.token}/sample?group=5")[0].status == 404


# ------------------------------------------------------------------------------------------------ bad input


def test_a_port_in_use_is_one_message(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port {port}: cannot listen there .*in use.*; give another port"):
            watch_server.serve(run, port, lambda url: pytest.fail("it is served"), open_page=False)


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, notes = iter(["nothing", "folder", "run"]), list[str]()

    def sleep(seconds: float) -> None:
        if (then := next(looks)) != "nothing":
            (tmp_path / "run" / "logs").mkdir(parents=True, exist_ok=True)
        if then == "run":
            (tmp_path / "run" / "config.yaml").touch()

    monkeypatch.setattr(watch_server.time, "sleep", sleep)
    assert watch_server._directory(tmp_path / "run", notes.append).config.is_file()
    assert notes == [f"{tmp_path / 'run'}: no run has begun there yet; waiting 60 s for one"]
    assert next(looks, None) is None


def test_what_is_no_run_is_one_message_and_a_run_that_starts_is_one(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_server, "WAIT_S", 0.0)
    for path, problem in (
        (tmp_path / "none", "does not exist"),
        (run / "config.yaml", "is a file"),
        (tmp_path, "has no config"),
    ):
        with pytest.raises(ConfigError, match=problem):
            watch_server.serve(path, 0, lambda url: pytest.fail("it is served"), open_page=False)


def test_the_address_is_in_no_argument_of_the_browser(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may list processes sees their arguments. The file that leads to the address is its owner's alone."""
    monkeypatch.setattr(watch_server.tempfile, "tempdir", str(tmp_path))
    opened: list[str] = []
    monkeypatch.setattr(watch_server.webbrowser, "open", opened.append)
    hint = watch_server._opened("http://127.0.0.1:1/token/")
    assert opened == [hint.as_uri()]
    assert "token" not in opened[0]
    assert "http://127.0.0.1:1/token/" in hint.read_text()
    assert stat.S_IMODE(hint.stat().st_mode) == 0o600
