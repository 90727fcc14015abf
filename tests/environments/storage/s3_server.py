"""A server of S3 in a process of its own, and what stands before it: connections and requests that fail on demand."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVER = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"
START_S = 120
Fault = Callable[[str, str], "int | str | None"]
"""Method and path of a request → the status that it gets, ``drop``, ``cut`` for half of its body, or None."""


class Proxy:
    """A way to the server that a test can close, open again, and have fail."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.port = free_port()
        self.fault: Fault = lambda method, path: None
        self.failed = 0
        """Number of requests that were answered by `fault`."""
        self._listening: ThreadingHTTPServer | None = None
        self.open()

    def open(self) -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_request(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = dict(self.headers.items())
                match proxy.fault(self.command, self.path):
                    case "drop":
                        proxy.failed += 1
                        self.close_connection = True
                        self.connection.shutdown(socket.SHUT_RDWR)
                        return
                    case "cut":
                        proxy.failed += 1
                        body = body[: len(body) // 2]
                        headers["Content-Length"] = str(len(body))
                    case int(status):
                        proxy.failed += 1
                        code = "AccessDenied" if status == 403 else "SlowDown"
                        text = f"<Error><Code>{code}</Code><Message>a test asked for it</Message></Error>".encode()
                        self.answer(status, {"Content-Length": str(len(text)), "Content-Type": "text/xml"}, text)
                        return
                connection = http.client.HTTPConnection("127.0.0.1", proxy._server_port, timeout=60)
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                data = response.read()
                kept = {name: value for name, value in response.getheaders() if name.lower() != "transfer-encoding"}
                length = kept.get("Content-Length") if self.command == "HEAD" else str(len(data))
                self.answer(response.status, {**kept, "Content-Length": length or "0"}, data)
                connection.close()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

            def answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                """Print nothing."""

            def handle(self) -> None:
                with suppress(OSError):
                    super().handle()

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._listening = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._listening.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Refuse connections from now on; those that are open are dropped with their next request."""
        if self._listening is not None:
            self._listening.shutdown()
            self._listening.server_close()
            self._listening = None
        self.fault = lambda method, path: "drop"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of a running server, which ends with the block."""
    port = free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], **quiet)  # type: ignore[call-overload]
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < deadline, f"the server did not listen within {START_S} s"
                time.sleep(0.2)
        yield port
    finally:
        server.kill()
        server.wait()
