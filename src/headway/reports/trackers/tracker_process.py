"""A tracker's process, seen from both sides: one question at a time, each with an answer.

    {"call": "on_row", "value": {…}}  ─▶   {} once it is done, or {"problem": "ConnectionError: …"}

The process is a session of its own, which Ctrl-C on the terminal does not reach. It ends with the run's process,
however that ends, and so does what it has started. Lines come in on its standard input and are answered, one by one, on
what was its standard output; whatever a library prints goes to the log. Where the input ends without a call of
``close``, the run's process is gone: the tracker is closed as that of a failed run, and the process ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from headway.errors import RunError, said_by
from headway.reports.record.events_file import to_json_line
from headway.reports.trackers.tracker import NotKept, Tracker, TrackerSetting
from headway.reports.trackers.tracker_tools import make_tracker
from headway.runtime.process_tree import guarded, python_command

REAP_S = 5.0
"""Seconds for a process that closed its output to be gone."""
ORPHAN_S = 15.0
"""Seconds that it may outlive this process, to close the tracker as that of a failed run."""
BOOT = f"{guarded(grace_s=ORPHAN_S)}from headway.reports.trackers.tracker_process import main; main(sys.argv[1])"


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


LOOK_EVERY_S = 60.0
STOOD_STILL_S = 600
"""Seconds after which a process in which no thread may run, since a library holds Python's lock, ends itself."""


def main(name: str) -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), name="reader", daemon=True).start()
    host = Host(name)
    while (line := lines.get()) is not None:
        message = json.loads(line)
        print(json.dumps(host.carry_out(message["call"], message["value"])), file=answers, flush=True)
    host.carry_out("close", "failed")
    sys.stderr.flush()
    os._exit(0)  # exit handlers of libraries wait for what nobody waits for any more


def _read(lines: queue.SimpleQueue[bytes | None]) -> None:
    """Hand on the lines of the standard input, then None."""
    received = bytearray()
    while True:
        faulthandler.dump_traceback_later(STOOD_STILL_S, exit=True)  # each look puts it off
        if not select.select([0], [], [], LOOK_EVERY_S)[0]:
            continue
        if not (chunk := os.read(0, 2**16)):
            break
        received += chunk
        *whole, received = received.split(b"\n")
        for line in whole:
            lines.put(bytes(line))
    lines.put(None)


class Host:
    """The one tracker of this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tracker: Tracker | None = None

    def carry_out(self, call: str, value: Any) -> dict[str, Any]:
        """Do what was asked. Returns the answer: nothing, what an opened tracker says of itself, or what went wrong.

        Each answer has the tracker's account of its samples, too.
        """
        tracker = self._tracker
        try:
            answer = self._carry_out(call, value)
        except NotKept as cause:
            answer = {"problem": str(cause), "kept": False}
        except (Exception, SystemExit) as cause:
            answer = {"problem": said_by(cause)}
        return answer if tracker is None else answer | tracker.samples.account()

    def _carry_out(self, call: str, value: Any) -> dict[str, Any]:
        if call == "open":
            self._tracker = tracker = make_tracker(
                self._name, TrackerSetting(**{**value, "folder": Path(value["folder"])})
            )
            return {"entry": tracker.entry, "where": tracker.where, "remedy": tracker.remedy}
        if (made := self._tracker) is not None:
            if call == "close":
                self._tracker = None
            getattr(made, call)(Path(value) if call == "on_model" else value)
        return {}
