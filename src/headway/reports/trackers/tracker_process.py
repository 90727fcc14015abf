"""A tracker's process, as the thread that feeds it sees it: one question at a time, each with an answer.

    {"call": "on_row", "value": {…}}  ─▶   {} once it is done, or {"problem": "ConnectionError: …"}

The process is a session of its own, which Ctrl-C on the terminal does not reach. It ends with this process, however
that ends, and so does what it has started.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from headway.errors import RunError, said_by
from headway.reports.record.events_file import to_json_line
from headway.runtime.child_python import guarded, python_command

REAP_S = 5.0
"""Seconds for a process that closed its output to be gone."""
ORPHAN_S = 15.0
"""Seconds that it may outlive this process, to close the tracker as that of a failed run."""
BOOT = f"{guarded(grace_s=ORPHAN_S)}from headway.reports.trackers.tracker_main import main; main(sys.argv[1])"


class TrackerLost(RunError):
    """Error for a tracker whose process ended while it was asked."""


class TrackerLink(Protocol):
    """A tracker somewhere else. `ask` blocks; `kill` may be called from any thread, and ends it."""

    def ask(self, call: str, value: Any) -> dict[str, Any]:
        """Have the tracker do something. Raises `TrackerLost`."""

    def kill(self) -> None: ...


class TrackerProcess:
    """Process with the tracker ``name``, which prints to the file ``log``. Raises `OSError` where it cannot start."""

    def __init__(self, name: str, log: Path) -> None:
        log.parent.mkdir(exist_ok=True)  # a run that was copied may have none
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                python_command(BOOT, name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        self._ending = threading.Lock()

    def ask(self, call: str, value: Any) -> dict[str, Any]:
        if self._popen.stdin is None or self._popen.stdout is None:
            raise AssertionError("unreachable: both are pipes")
        try:
            with suppress(BrokenPipeError):  # whoever is gone answers nothing
                self._popen.stdin.write(to_json_line({"call": call, "value": value}) + "\n")
                self._popen.stdin.flush()
            if line := self._popen.stdout.readline():
                answer: dict[str, Any] = json.loads(line)
                return answer
        except (OSError, ValueError, TypeError) as cause:
            raise TrackerLost(f"its process cannot be talked to ({said_by(cause)})") from cause
        raise TrackerLost(f"its process ended ({self._end()})")

    def kill(self) -> None:
        with self._ending:  # a number that was waited for may be another process's
            if self._popen.poll() is None:
                self._popen.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._popen.wait(REAP_S)

    def _end(self) -> str:
        with suppress(subprocess.TimeoutExpired), self._ending:
            code = self._popen.wait(REAP_S)
            return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return "its output is closed"
