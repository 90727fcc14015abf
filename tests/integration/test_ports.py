"""The one port that a user can give: ``cluster.address``, where something else than Ray listens.

All others are the system's choice: two runs at once are in `test_runs`.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.integration.support import make_job, run_here


@pytest.fixture
def silent() -> Iterator[int]:
    """A port at which connections are accepted and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def web_server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server.server_port
        server.shutdown()
        serving.join()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["silent", "web_server"])
def test_an_address_at_which_something_else_than_ray_listens_is_one_message_in_bounded_time(
    tmp_path: Path, request: pytest.FixtureRequest, who: str
) -> None:
    """Waits for as long as the answer may take, and starts a process that asks for it."""
    address, run_dir = f"127.0.0.1:{request.getfixturevalue(who)}", tmp_path / "run"
    settings = (f"cluster.address={address}", "cluster.start_timeout_s=4", f"run.dir={run_dir}")
    done = run_here("train", str(make_job(tmp_path)), *settings)
    assert done.exit_code == 2, done.output
    said = f"error: cluster.address={address}: no Ray cluster answered within "
    assert re.fullmatch(re.escape(said) + r"[\d.]+ s \(cluster\.start_timeout_s\)\. .*\n", done.stderr), done.stderr
    assert not run_dir.exists(), "the corrected command finds its place free"
