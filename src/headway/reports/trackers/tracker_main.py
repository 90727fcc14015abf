"""Main of a tracker's process: makes the tracker, and calls it on request.

Lines come in on the standard input and are answered, one by one, on what was the standard output; whatever a library
prints goes to the log. Where the input ends without a call of ``close``, the run's process is gone: the tracker is
closed as that of a failed run, and the process ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from headway.errors import said_by
from headway.reports.trackers.factory import make_tracker
from headway.reports.trackers.tracker import NotKept, Tracker, TrackerSetting

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
        if (tracker_ := self._tracker) is None:
            return {}
        match call:
            case "on_settings":
                tracker_.on_settings(value)
            case "on_row":
                tracker_.on_row(value)
            case "on_sample":
                tracker_.on_sample(value)
            case "on_summary":
                tracker_.on_summary(value)
            case "on_model":
                tracker_.on_model(Path(value))
            case "close":
                self._tracker = None
                tracker_.close(value)
        return {}
