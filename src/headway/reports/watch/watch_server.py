"""Serves a run's page on loopback, only to those with the token in its address.

    GET /TOKEN/            the page, whose script asks for the rest
    GET /TOKEN/stream      what has changed, as server-sent events
    GET /TOKEN/timeline    the newest timeline
    GET /TOKEN/sample?group=17     one sample; or ?validation=4&problem=12

Another user of the machine can connect, too, and gets an empty 404 for every path and method: the token has 256 random
bits and is compared in constant time. A few connections may be open that have not shown it; for one more the oldest of
them is hung up on, so that idle ones keep nobody out. A page of somebody else's that has its own name resolve to
loopback is refused by the Host header. Nothing is ever written, and nothing is served that is not in the run's
directory.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from headway.errors import ConfigError, DataError, UserError
from headway.reports.record.events_file import to_json_line
from headway.reports.run_directory import LEFTOVERS, RunDirectory
from headway.reports.samples.samples_file import Key
from headway.reports.timeline.html_timeline import live_page
from headway.reports.watch.follower import Follower

LOOPBACK = "127.0.0.1"
NAMES = frozenset({LOOPBACK, "localhost", "[::1]"})
"""Names of this machine in a Host header; the port may be another one, which ssh forwards."""
MOST_STREAMS = 16
IDLE_S = 15.0
"""Seconds without a change after which a stream says that it is alive, and notices a page that was closed."""
BETWEEN_S = 0.25
"""Least seconds between two messages of a stream."""
REQUEST_TIMEOUT_S = 30.0
MOST_STRANGERS = 128
"""Connections that are open at a time without having shown the token, a thread each: anybody on this machine can make
some."""
FULL = b"retry: 5000\nevent: full\ndata: %d\n\n" % MOST_STREAMS
"""Stream of one page too many. A browser asks again after it, in so many milliseconds, and never after an error."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class WatchServer(ThreadingHTTPServer):
    """Server of one run's page. ``serve_forever`` serves until `shutdown`, from another thread."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, follower: Follower, name: str, port: int = 0) -> None:
        """Listen on loopback. ``name`` is the page's title; ``port`` 0 takes a free one.

        Raises `UserError` where the port cannot be had.
        """
        self.follower = follower
        self.token = secrets.token_urlsafe(32)
        self.page = live_page(name).encode()
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._strangers: dict[socket.socket, None] = {}
        """Connections that have not shown the token, the oldest first."""
        self._lock = threading.Lock()
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as cause:
            raise UserError(
                f"--port {port}: cannot listen there ({getattr(cause, 'strerror', None) or cause}); give another port, "
                "or none, to take any that is free"
            ) from cause

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a new thread. Closes the oldest of too many connections without the token."""
        with self._lock:
            self._strangers[request] = None
            if len(self._strangers) > MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):  # its thread reads the end, and closes it
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.known(request)
        super().shutdown_request(request)

    def known(self, request: Any) -> None:
        """Note that a connection is no stranger's, or is over."""
        with self._lock:
            self._strangers.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a request that broke off: its reader is gone."""


@dataclass(frozen=True, slots=True)
class _Reply:
    body: bytes
    kind: str = "application/json"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = REQUEST_TIMEOUT_S
    protocol_version = "HTTP/1.1"
    named: ClassVar[str] = "headway"

    def version_string(self) -> str:
        return self.named

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses hold the token."""

    def do_GET(self) -> None:
        where = self._authorized()
        if where == "stream":
            self._stream()
        elif (reply := self._reply(where)) is None:
            self._refuse()
        else:
            self._send(HTTPStatus.OK, reply)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse other requests than GET, and bad HTTP, without the page that http.server would send."""
        self._refuse()

    def _refuse(self) -> None:
        """Send an empty 404, and hang up: frees the thread at once, and leaves the body unread."""
        self.close_connection = True
        self._send(HTTPStatus.NOT_FOUND, _Reply(b"", "text/plain"))

    def _authorized(self) -> str | None:
        """Return what is asked for, behind the token; None for a request without it, or for another host."""
        host = self.headers.get("Host", "").lower()
        name, colon, port = host.rpartition(":")
        if (name if colon and port.isdigit() else host) not in NAMES:
            return None
        _, _, rest = urlsplit(self.path).path.partition("/")
        token, slash, where = rest.partition("/")
        # Both as bytes: strings are compared only where they are ASCII.
        allowed = hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        if not (allowed and slash):
            return None
        self.server.known(self.connection)
        return where

    def _reply(self, where: str | None) -> _Reply | None:
        match where:
            case "":
                return _Reply(self.server.page, "text/html; charset=utf-8")
            case "timeline":
                timeline = self.server.follower.timeline()
                return _Reply(timeline) if timeline else None
            case "sample":
                key = _key(parse_qs(urlsplit(self.path).query))
                with suppress(OSError):
                    sample = None if key is None else self.server.follower.sample(key)
                    return None if sample is None else _Reply(sample)
        return None

    def _send(self, status: HTTPStatus, reply: _Reply) -> None:
        self._begin(status, reply.kind)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    def _begin(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        if kind.startswith("text/html"):
            self.send_header("Content-Security-Policy", "frame-ancestors 'none'")

    def _stream(self) -> None:
        """Send what changes until the page is closed, or nothing is followed any more."""
        if not self.server.streams.acquire(blocking=False):
            self._send(HTTPStatus.OK, _Reply(FULL, "text/event-stream"))
            return
        follower = self.server.follower
        self.close_connection = True
        follower.page_opened()
        try:
            self._begin(HTTPStatus.OK, "text/event-stream")
            self.end_headers()
            since, epoch = 0, -1
            while not follower.closing:
                if follower.wait(since, epoch, IDLE_S):
                    message = follower.message(since, epoch)
                    since, epoch = message["serial"], message["epoch"]
                    self.wfile.write(b"data: " + to_json_line(message).encode() + b"\n\n")
                    follower.pause(BETWEEN_S)
                else:
                    self.wfile.write(b": nothing new\n\n")
                self.wfile.flush()
        finally:
            follower.page_closed()
            self.server.streams.release()


def _key(query: Mapping[str, list[str]]) -> Key | None:
    """Return the key of the sample that is asked for; None where none is."""
    try:
        if "group" in query:
            return (int(query["group"][0]),)
        return int(query["validation"][0]), int(query["problem"][0])
    except (KeyError, ValueError):
        return None


log = logging.getLogger(__name__)
WAIT_S = 60.0
"""Seconds that a run which has not begun is waited for."""
LOOK_S = 0.2
"""Seconds between two looks for it."""
FIRST_LOOK_S = 1.0
"""Seconds that the address waits for the record, which may be damaged; a large one is read behind it."""


def serve(
    run: Path, port: int, tell: Callable[[str], None], open_page: bool, note: Callable[[str], None] = log.info
) -> None:
    """Serve the page of the run in directory ``run`` until an interrupt. ``tell`` is called with its address.

    A run that has not begun is waited for, of which ``note`` is told.

    Raises `UserError` where ``run`` is no run's directory, its record is damaged, or the port cannot be had.
    """
    directory = _directory(run, note)
    follower = Follower(directory)
    server = WatchServer(follower, run.resolve().name, port)
    follower.start()
    thread = threading.Thread(target=server.serve_forever, name="watch", daemon=True)
    thread.start()
    hint: Path | None = None
    try:
        if follower.first_look(FIRST_LOOK_S):
            tell(server.url)
            if open_page:
                hint = _opened(server.url)
        with suppress(KeyboardInterrupt):  # the way to end it
            try:
                follower.join()
            except DataError as cause:
                raise ConfigError(f"RUN: got {run}, whose record cannot be read: {cause}") from cause
    finally:
        if hint is not None:
            hint.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()
        follower.close()


def _directory(run: Path, note: Callable[[str], None]) -> RunDirectory:
    """Return the directory of a run, which may still be starting: it has a configuration.

    Where nothing is there yet a run is waited for. Raises `ConfigError`.
    """
    until = time.monotonic() + WAIT_S
    if (to_come := _to_come(run)) and WAIT_S:
        note(f"{run}: no run has begun there yet; waiting {WAIT_S:g} s for one")
    while to_come and time.monotonic() < until:
        time.sleep(LOOK_S)
        to_come = _to_come(run)
    directory = RunDirectory(run)
    needed = directory.events if directory.events.is_file() else directory.config
    return RunDirectory.existing(run, needed.name)


def _to_come(run: Path) -> bool:
    """Tell whether a run may begin in this directory: it is not there, or has only what a start makes first."""
    try:
        return all(entry.name in LEFTOVERS for entry in run.iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _opened(url: str) -> Path:
    """Open ``url`` in a browser by way of a file that only this user may read; return the file.

    Other users see the arguments of a browser's process: the address itself must not be among them.
    """
    descriptor, name = tempfile.mkstemp(prefix="headway-", suffix=".html")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">\n')
    webbrowser.open(Path(name).as_uri())
    return Path(name)
