"""A tracker's thread, which sends it a run's rows as ``metrics.jsonl`` has them, and the newest samples.

The run goes on if the tracker raises, is slow or hangs. Its progress is stored in ``RUN/trackers/NAME.json``, so that a
resumed run, or ``headway sync``, sends the rest.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from headway.errors import DataError, said_by
from headway.reports.record.file_access import Tail, replace_file, whole_lines
from headway.reports.run_directory import RunDirectory
from headway.reports.trackers.tracker import NotKept, Tracker, TrackerSetting, table
from headway.reports.trackers.tracker_tools import KEPT, make_tracker

MOST_SAMPLES = 64
"""Maximum number of waiting samples. Beyond it the oldest are dropped."""
MOST_REFUSALS = 3
"""Number of refusals of a row before the next row is tried, and of the settings before the run's end."""
BEHIND_S = 60.0
"""Seconds without an answer after which the user is warned that a tracker is behind."""
GOES_ON = "; the run goes on, and what waits is sent later"


@dataclass(frozen=True, slots=True)
class TrackerState:
    """A tracker's state for resuming, from the file ``NAME.json`` in the run's folder of trackers."""

    entry: str = ""
    rows: int = 0
    """Number of rows in the tracker's entry."""
    whole: bool = False
    """True if the entry also has the run's end."""

    @classmethod
    def read(cls, path: Path) -> TrackerState:
        """Read the file. A missing file stands for a tracker without an entry. Raises `DataError`."""
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
            if [type(value) for value in astuple(found)] != [str, int, bool] or found.rows < 0:
                raise ValueError("it has other values than an entry, a number of rows, and whether they are all")
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError) as cause:
            raise DataError(f"{path} cannot be read ({said_by(cause)})") from cause
        return found

    def write(self, path: Path) -> None:
        """Replace the file in one step. Raises `OSError`."""
        replace_file(path, json.dumps(asdict(self)))


def memory_file(folder: Path, name: str) -> Path:
    """Return the path of the state of the tracker ``name``. ``folder``: the run's folder of trackers."""
    return folder / f"{name}.json"


@dataclass(frozen=True, slots=True)
class TrackerMessages:
    """Functions that show messages to the user. Each can be called from any thread."""

    warn: Callable[[str], None]
    note: Callable[[str], None]
    phase: Callable[[str], None]


class TrackerThread:
    """The thread that sends a run to one tracker.

    not started ─start─▶ sending ─end─▶ sending the rest ─▶ over

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> class Prints(Tracker):
        ...     def on_row(self, row):
        ...         print("row", row["version"])
        >>> with TemporaryDirectory() as folder:
        ...     run, say = RunDirectory(Path(folder)), TrackerMessages(print, print, print)
        ...     setting = TrackerSetting("project", "name", run.trackers)
        ...     tracker = TrackerThread("prints", setting, run, say, make=lambda *_: Prints())
        ...     tracker.start()
        ...     _ = run.metrics.write_text('{"version": 0}\\n')
        ...     tracker.on_row()
        ...     tracker.end({"status": "completed"})
        ...     tracker.join(10.0), tracker.missing("")
        row 0
        (True, '')
    """

    def __init__(
        self,
        name: str,
        setting: TrackerSetting,
        run: RunDirectory,
        say: TrackerMessages,
        state: TrackerState | None = None,
        *,
        goes_on: str = GOES_ON,
        make: Callable[[str, TrackerSetting], Tracker] = make_tracker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the thread without starting it. ``state``: data that the tracker has. ``goes_on``: consequence of a
        failure.
        """
        self.name = name
        self.where = ""
        """Place to look at the run; empty before the tracker has told it."""
        self._setting, self._run, self._say = setting, run, say
        self._goes_on, self._make, self._clock = goes_on, make, clock
        self._rows = _lines(run.metrics)
        """Number of rows of the run so far."""
        state = state or TrackerState()
        # The record may have fewer rows than were sent, after a resume.
        self._entry, self._sent, self._whole = state.entry, min(state.rows, self._rows), False
        self._opened_at = self._sent
        """Number of rows that had been sent when the tracker was made."""
        self._lost = {"rows": 0, "samples": 0}
        self._left = dict.fromkeys(["the settings"] * bool(setting.config) + ["the summary"])
        """Parts beside rows that were not sent yet."""
        self._read_from_start()
        self._samples: deque[dict[str, Any]] = deque(maxlen=MOST_SAMPLES)
        self._refusals = self._settings_tries = 0
        self._ending: tuple[dict[str, Any], Path | None] | None = None
        self._tracker: Tracker | None = None
        self._remedy = self._problem = ""
        self._warned: set[str] = set()
        self._news = threading.Event()
        self._given_up = False
        self._asked_at: float | None = None
        """Start time of the open call of the tracker; None without one."""
        # A daemon, so that a library that hangs does not delay the run or the end of its process.
        self._thread = threading.Thread(target=self._serve, name=f"tracker-{name}", daemon=True)

    # ------------------------------------------------------------------------------------------ the run's thread

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as cause:  # the system allows no more threads
            self._warn(f"cannot be started ({cause}); the run goes on without")

    def on_row(self) -> None:
        """Note that ``metrics.jsonl`` has a further row."""
        self._rows += 1
        self._news.set()
        asked_at = self._asked_at  # read once: the tracker's thread clears it meanwhile
        if asked_at is not None and (waited := self._clock() - asked_at) >= BEHIND_S:
            self._warn(f"has not answered for {waited:.0f} s{self._goes_on}")

    def on_sample(self, sample: dict[str, Any]) -> None:
        """Take a sample with at least one episode."""
        self._lost["samples"] += len(self._samples) == MOST_SAMPLES  # then the oldest one drops out
        self._samples.append(sample)
        self._news.set()

    def end(self, summary: dict[str, Any], model: Path | None = None) -> None:
        """Let the thread send the rest, and end."""
        if model is not None:
            self._left["the model"] = None
        self._ending = summary, model
        self._news.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end. Returns True if it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Stop calling the tracker. A call in progress is abandoned."""
        self._given_up = True
        self._news.set()

    def missing(self, silent: str) -> str:
        """Return a text on the data that the tracker did not get, the reason and the remedy; "" if it has all.

        ``silent``: the reason where the tracker gave none.
        """
        if self._thread.ident is None:
            return ""
        lost = " and ".join(f"{count} {what}" for what, count in self._lost.items() if count)
        if self._whole:
            why = "refused, too many at once, or damaged in the run's directory"
            return f"{self.name} did not get {lost} ({why})" if lost else ""
        rows = self._rows - self._sent
        left = [f"{rows} of {self._rows} rows"] * bool(rows) + [*self._left]
        usual = f"headway sync {shlex.quote(str(self._run.path))}" if self.name in KEPT else ""
        remedy = usual if left else self._remedy or usual
        return (
            f"{self.name} did not get {', '.join(left) or 'the end of the run'} ({self._problem or silent})"
            + (f", and not {lost}" if lost else "")
            + (f"; send it with: {remedy}" if remedy else "")
        )

    # ------------------------------------------------------------------------------------------ the tracker's thread

    def _serve(self) -> None:
        try:
            self._send()  # at once: the user sees where the run is, and what is wrong, before the first version ends
            while self._ending is None and not self._given_up:
                self._news.wait()
                self._news.clear()  # before it sends: what comes meanwhile sets it again
                self._send()
            for _ in range(MOST_REFUSALS):
                if self._send():
                    break
            if self._ending is not None:
                self._end(*self._ending)
        except Exception as cause:  # a tracker's error must not reach the run, nor its traceback the terminal
            self._fail(said_by(cause))

    def _send(self) -> bool:
        """Send waiting data up to the first refused row. Returns True if nothing is left."""
        if self._given_up or (self._tracker is None and not self._open()):
            return False
        if "the settings" in self._left and (self._ending or self._settings_tries < MOST_REFUSALS):
            self._settings_tries += 1
            self._give("the settings", "on_settings", self._setting.config)
        while self._samples:
            if not self._call("on_sample", self._samples.popleft(), table):
                self._lost["samples"] += 1
        try:
            while rows := deque(self._tail.read()):
                if not self._send_rows(rows):
                    return False
        except OSError as cause:  # of a disk that may answer again
            self._fail(f"{self._run.metrics} cannot be read ({said_by(cause)})")
            return False
        return self._tracker is not None

    def _send_rows(self, rows: deque[tuple[int, bytes]]) -> bool:
        """Send rows, given as offsets and lines, up to the first refused one. Returns True if none was refused."""
        tail = self._tail  # a call that finds everything lost makes another one
        while rows:
            at, line = rows.popleft()
            if self._passed:
                self._passed -= 1
                continue
            if (row := _row_of(line)) is None:
                self._lost["rows"] += 1
            elif not self._call("on_row", row):
                self._refusals += 1
                # The next row shows whether one row is bad or the tracker takes none: a single bad row used to block
                # all others.
                behind = _row_of(rows[0][1]) if rows else None
                if self._refusals < MOST_REFUSALS or behind is None or not self._call("on_row", behind):
                    tail.offset = at
                    return False
                rows.popleft()
                self._lost["rows"] += 1
                self._take()
            self._take()
        return True

    def _end(self, summary: dict[str, Any], model: Path | None) -> None:
        """Send the run's end, and close the tracker."""
        if self._give("the summary", "on_summary", summary) and self._refusals and self._sent == self._rows - 1:
            self._lost["rows"] += 1  # what comes behind the last row was taken
            self._take()
        if model is not None:
            self._give("the model", "on_model", model)
        all_sent = self._sent >= self._rows and not self._left  # a full disk has kept no row
        if self._call("close", summary.get("status") or "failed"):
            self._whole = all_sent
            self._remember()

    def _open(self) -> bool:
        self._asked_at = self._clock()
        try:
            self._setting.folder.mkdir(exist_ok=True)
            self._tracker = tracker = self._make(self.name, replace(self._setting, entry=self._entry))
        except (Exception, SystemExit) as cause:
            self._fail(said_by(cause))
            return False
        finally:
            self._asked_at = None
        self._entry, self._remedy, self._problem = tracker.entry, tracker.remedy, ""
        if tracker.where and not self.where:
            self._say.note(f"{self.name}: {tracker.where}")
        self.where, self._opened_at = tracker.where, self._sent
        self._remember()
        return True

    def _give(self, part: str, call: str, value: Any) -> bool:
        if taken := self._call(call, value):
            self._left.pop(part, None)
        return taken

    def _call(self, call: str, value: Any, form: Callable[[Any], Any] = lambda value: value) -> bool:
        """Call the tracker with ``value`` in this form. Return whether that succeeded; if not, warn the user once."""
        if (tracker := self._tracker) is None or self._given_up:
            return False
        self._asked_at = self._clock()
        try:
            getattr(tracker, call)(form(value))
        except NotKept as cause:
            # All data since the tracker's creation is lost: rows are sent again from there.
            self._tracker, self._sent = None, self._opened_at
            self._left["the summary"] = None
            self._read_from_start()
            self._remember()
            self._fail(str(cause))
            return False
        except (Exception, SystemExit) as cause:
            self._fail(said_by(cause))
            return False
        finally:
            self._asked_at = None
        return True

    def _take(self) -> None:
        """Count a row as sent."""
        self._sent, self._refusals = self._sent + 1, 0
        if "the settings" not in self._left:
            self._problem = ""
        self._remember()

    def _read_from_start(self) -> None:
        self._tail, self._passed = Tail(self._run.metrics), self._sent

    def _remember(self) -> None:
        path = memory_file(self._setting.folder, self.name)
        try:
            TrackerState(self._entry, self._sent, self._whole).write(path)
        except OSError as cause:
            text = f"cannot write {path} ({cause.strerror or cause}); a resumed run would begin another entry"
            self._warn(text, "state")

    def _fail(self, problem: str) -> None:
        if not self._given_up:
            self._problem = problem
            self._warn(f"{problem}{self._goes_on}")

    def _warn(self, text: str, about: str = "trouble") -> None:
        """Warn the user, once for each value of ``about``."""
        if about not in self._warned:
            self._warned.add(about)
            self._say.warn(f"{self.name}: {text}")


def _row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None if it is no row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("version"), int) else None


def _lines(path: Path) -> int:
    try:
        return sum(1 for _ in whole_lines(path))
    except OSError:
        return 0
