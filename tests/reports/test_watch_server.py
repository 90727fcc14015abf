"""The server of ``headway watch``: who may see a run, and what bad input reads like."""

from __future__ import annotations

import http.client
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from headway.errors import ConfigError, UserError
from headway.events import Note
from headway.reports.run_directory import RunDirectory
from headway.reports.watch import watch_server
from headway.reports.watch.follower import Follower
from headway.reports.watch.watch_server import WatchServer
from tests.reports.stories import sample, story, validated, written
from tests.reports.test_watch import append, events_until


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return written(tmp_path / "run", story(versions=6), [sample(3, 0), sample(20, 4), validated(2, 7)])


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
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


@contextmanager
def streamed(server: WatchServer) -> Iterator[Iterator[dict[str, Any]]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
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
        connections = [idle.enter_context(socket.create_connection(address, timeout=60)) for _ in range(4)]
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
        last = next(message for message in messages if message["status"]["status"] == "completed")
        assert len([line for line in last["groups"] if line[3] == "trained"]) == 24


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
        with pytest.raises(UserError, match=rf"--port {port}: cannot listen .*in use"):
            watch_server.serve(run, port, lambda url: pytest.fail("it is served"), open_page=False)


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, notes = iter(["nothing", "folder", "run"]), list[str]()

    def sleep(seconds: float) -> None:
        if (then := next(looks)) != "nothing":
            (tmp_path / "run" / "logs").mkdir(parents=True, exist_ok=True)
        if then == "run":
            (tmp_path / "run" / "config.yaml").touch()

    # The module's alone: other threads of this process sleep, too.
    monkeypatch.setattr(watch_server, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
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
