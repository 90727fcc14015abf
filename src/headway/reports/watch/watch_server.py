"""Serves a run's page on loopback, only to those with the token in its address.

    GET /TOKEN/            the page, whose script asks for the rest
    GET /TOKEN/stream      all that it shows, again whenever something changed, as server-sent events
    GET /TOKEN/timeline    the newest timeline
    GET /TOKEN/sample?group=17     one sample; or ?validation=4&problem=12

Another user of the machine can connect, too, and gets an empty 404 for every path and method: the token has 256 random
bits and is compared in constant time. A page of somebody else's that has its own name resolve to loopback is refused
by the Host header. Nothing is ever written, and nothing is served that is not in the run's directory.
"""

from __future__ import annotations

import asyncio
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from html import escape
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from headway.errors import UserError
from headway.reports.report import readable
from headway.reports.run_directory import LEFTOVERS, RunDirectory
from headway.reports.samples.samples_file import Key
from headway.reports.timeline.html_timeline import live_page
from headway.reports.watch.follower import Follower

LOOPBACK = "127.0.0.1"
NAMES = frozenset({LOOPBACK, "localhost", "[::1]"})
"""Names of this machine in a Host header; the port may be another one, which ssh forwards."""
MOST_STREAMS = 16
IDLE_S = 15.0
"""Seconds without a change after which a stream sends a sign of life, and so notices a closed page."""
KEEP_S = 30.0
"""Seconds that a connection stays open without a request."""
MOST_STRANGERS = 128
"""Largest number of open connections that have not shown the token: any user of this machine can open some."""
FULL = b"retry: 5000\nevent: full\ndata: %d\n\n" % MOST_STREAMS
"""Answer to one page too many. The browser retries after 5000 ms; after an HTTP error it would never retry."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Server": "headway",
}


class _Connection(RequestHandler):
    """Connection that answers bad HTTP in the same way as a request without the token."""

    def __init__(self, answers: web.Server, strangers: dict[RequestHandler, None], **options: Any) -> None:
        """``strangers``: connections that have not shown the token, the oldest first."""
        super().__init__(answers, **options)
        self._strangers = strangers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._strangers[self] = None
        # Without a bound another user could hold all of the process's files open.
        if len(self._strangers) > MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._strangers.pop(self, None)
        super().connection_lost(exc)

    def handle_error(self, *args: Any, **named: Any) -> web.StreamResponse:
        return _refused()


class WatchServer:
    """Server of one run's page. ``serve_forever`` serves until `shutdown`, from another thread."""

    def __init__(self, follower: Follower, name: str, port: int = 0) -> None:
        """Listen on loopback. ``name`` is the page's title; ``port`` 0 takes a free one.

        Raises `UserError` if the port is not available.
        """
        self.token = secrets.token_urlsafe(32)
        self._follower = follower
        self._page = live_page(name).encode()
        self._strangers: dict[RequestHandler, None] = {}
        self._streams = 0
        """Number of streams that are open."""
        try:
            self._socket = socket.create_server((LOOPBACK, port))
        except (OSError, OverflowError) as cause:
            why = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else cause
            raise UserError(
                f"--port {port}: cannot listen there ({why}); give another port, or none, to take any that is free"
            ) from cause
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        # Each stream waits in a thread; one more, so that samples do not wait for the streams.
        self._loop.set_default_executor(ThreadPoolExecutor(MOST_STREAMS + 1, thread_name_prefix="watch"))
        self._ending = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    def serve_forever(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    def shutdown(self) -> None:
        with suppress(RuntimeError):  # it is over already
            self._loop.call_soon_threadsafe(self._ending.set)

    async def _serve(self) -> None:
        answers = web.Server(self._answer)

        def connection() -> _Connection:
            no_log: Any = None  # addresses hold the token
            options = {"loop": self._loop, "access_log": no_log, "keepalive_timeout": KEEP_S}
            return _Connection(answers, self._strangers, **options)

        listening = await self._loop.create_server(connection, sock=self._socket)
        await self._ending.wait()
        listening.close()
        await answers.shutdown(0.0)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        where = self._authorized(request) if request.method == "GET" else None
        body: bytes | None = None
        match where:
            case "":
                return _response(self._page, "text/html; charset=utf-8")
            case "stream":
                return await self._stream(request)
            case "timeline":
                body = self._follower.timeline()
            case "sample" if key := _key(parse_qs(urlsplit(request.raw_path).query)):
                with suppress(OSError):
                    body = await asyncio.to_thread(self._follower.sample, key)
        return _response(body, "application/json") if body else _refused()

    def _authorized(self, request: web.BaseRequest) -> str | None:
        """Return the path after the token; None for a request without the token or for another host."""
        host = request.headers.get("Host", "").lower()
        name, colon, port = host.rpartition(":")
        if (name if colon and port.isdigit() else host) not in NAMES:
            return None
        _, _, rest = urlsplit(request.raw_path).path.partition("/")
        token, slash, where = rest.partition("/")
        # Both as bytes: strings are compared only where they are ASCII.
        if not (hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()) and slash):
            return None
        self._strangers.pop(request.protocol, None)  # it has shown the token
        return where

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send changes until the page is closed or following ends."""
        if self._streams >= MOST_STREAMS:
            return _response(FULL, "text/event-stream")
        follower = self._follower
        response = web.StreamResponse(headers=HEADERS | {"Content-Type": "text/event-stream"})
        response.force_close()
        self._streams += 1
        follower.watched = self._streams
        try:
            await response.prepare(request)
            number = 0
            while not follower.closing:
                if news := await asyncio.to_thread(follower.news, number, IDLE_S):
                    number, message = news
                    await response.write(b"data: " + message + b"\n\n")
                else:
                    await response.write(b": nothing new\n\n")
        except ConnectionError:
            """The page was closed."""
        finally:
            self._streams -= 1
            follower.watched = self._streams
        return response


def _response(body: bytes, kind: str) -> web.Response:
    policy = {"Content-Security-Policy": "frame-ancestors 'none'"} if kind.startswith("text/html") else {}
    return web.Response(body=body, headers=HEADERS | {"Content-Type": kind} | policy)


def _refused() -> web.Response:
    """An empty 404, after which the connection is closed."""
    response = web.Response(status=HTTPStatus.NOT_FOUND, headers=HEADERS | {"Connection": "close"})
    response.force_close()
    return response


def _key(query: Mapping[str, list[str]]) -> Key | None:
    """Return the key of the requested sample; None if the query names none."""
    try:
        if "group" in query:
            return (int(query["group"][0]),)
        return int(query["validation"][0]), int(query["problem"][0])
    except (KeyError, ValueError):
        return None


log = logging.getLogger(__name__)
WAIT_S = 60.0
"""Longest wait for a run that has not begun, in seconds."""
LOOK_S = 0.2
"""Seconds between two looks for it."""
FIRST_LOOK_S = 1.0
"""Seconds to wait for the first reading of the record before the address is shown: the record may be damaged."""


def serve(
    run: Path, port: int, tell: Callable[[str], None], open_page: bool, note: Callable[[str], None] = log.info
) -> None:
    """Serve the page of the run in directory ``run`` until an interrupt. ``tell`` is called with its address.

    If the run has not begun, it waits and calls ``note`` with a message.

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
        with suppress(KeyboardInterrupt), readable(run):  # an interrupt is the way to end it
            follower.join()
    finally:
        if hint is not None:
            hint.unlink(missing_ok=True)
        server.shutdown()
        follower.close()


def _directory(run: Path, note: Callable[[str], None]) -> RunDirectory:
    """Return the directory of a run, which may still be starting: it has a configuration.

    Waits for a run if there is none yet. Raises `ConfigError`.
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
    """Open ``url`` in a browser through a file that only this user may read. Returns the file.

    Other users see the arguments of a browser's process: the address itself must not be among them.
    """
    descriptor, name = tempfile.mkstemp(prefix="headway-", suffix=".html")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">\n')
    webbrowser.open(Path(name).as_uri())
    return Path(name)
