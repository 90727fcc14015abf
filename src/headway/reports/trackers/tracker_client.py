"""Client of a tracker in its own process: messages are queued at once, and never refused.

run's thread ──put──▶ TrackerQueue ──▶ this tracker's thread ──ask──▶ its process
                                      └─▶ RUN/trackers/NAME.json: the entry, and how many rows it has
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from headway.errors import DataError, said_by
from headway.reports.record.file_access import replace_file
from headway.reports.trackers.tracker import TrackerSetting
from headway.reports.trackers.tracker_process import TrackerLink, TrackerLost
from headway.reports.trackers.tracker_queue import Message, RunEnd, TrackerQueue

BEHIND_S = 60.0
"""Seconds without an answer after which a tracker is said to be behind."""
MOST_STARTS = 3
"""Most processes that are started for one tracker in a run without `GOOD_ROWS` taken in between."""
GOOD_ROWS = 10
"""Number of rows that a process takes before those that were started before it are forgotten."""
GOES_ON = "; the run goes on, and what waits is sent later"
MOST_REFUSALS = 3
"""Times that one row is refused before what is behind it is tried, and that settings are before the run's end."""


@dataclass(frozen=True, slots=True)
class TrackerState:
    """A tracker's state for resuming, from the file ``NAME.json`` in the run's folder of trackers."""

    entry: str = ""
    rows: int = 0
    """Number of rows that the entry has."""
    whole: bool = False
    """True if the entry has the run's end, too."""

    @classmethod
    def read(cls, path: Path) -> TrackerState:
        """Read the file; one that is missing is that of a tracker without an entry. Raises `DataError`."""
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
    """Return the path of the memory of the tracker ``name``. ``folder``: the run's folder of trackers."""
    return folder / f"{name}.json"


@dataclass(frozen=True, slots=True)
class TrackerMessages:
    """Ways to tell the user something, each callable from any thread."""

    warn: Callable[[str], None]
    note: Callable[[str], None]
    phase: Callable[[str], None]


class TrackerApart:
    """A tracker's thread, and what it has to send.

    not started ─start─▶ sending ─end─▶ sending the rest ─▶ over
                            └───────────────┴──give_up──────┘
    """

    def __init__(
        self,
        name: str,
        setting: TrackerSetting,
        outbox: TrackerQueue,
        link: Callable[[], TrackerLink],
        say: TrackerMessages,
        *,
        remedy: str = "",
        goes_on: str = GOES_ON,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is started. ``link`` starts the tracker's process, in this tracker's thread. ``remedy``: the
        command that sends what the tracker lacks in the end. ``goes_on``: what follows from a failure, behind it.
        """
        self.name = name
        self.where = ""
        """Place to look at the run; empty before the tracker has told it."""
        self._setting = setting
        self._outbox = outbox
        self._make_link = link
        self._say = say
        self._clock = clock
        self._link: TrackerLink | None = None
        self._starts = 0
        self._good_rows = 0
        self._refusals = (-1, 0)
        """Number of the row that was refused last, and how often it was."""
        self._settings_told = not setting.config
        self._settings_tries = 0
        self._settings_problem = ""
        self._opened = False
        self._opened_at = 0
        """Number of the row before which the newest process was opened."""
        self._lost_some = False
        """True once a process has not kept what it took."""
        self._complete = False
        self._given_up = False
        self._usual_remedy = remedy
        self._goes_on = goes_on
        self._own_remedy = ""
        self._problem = ""
        self._warned: set[str] = set()
        self._asked_at: float | None = None
        """Time of the question that is not answered yet; None where there is none."""
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)

    # ------------------------------------------------------------------------------------------ the run's thread

    def start(self) -> None:
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError as cause:  # the system allows no more threads
                self._warn(f"cannot be started ({cause})" + ("; the run goes on without" if self._goes_on else ""))

    def on_row(self, row: dict[str, Any] | None = None) -> None:
        """Take a row, which ``metrics.jsonl`` has, unless its disk refuses it."""
        self._outbox.put_row(row)
        asked_at = self._asked_at
        if asked_at is not None and (waited := self._clock() - asked_at) >= BEHIND_S:
            self._warn(f"has not answered for {waited:.0f} s{self._goes_on}")

    def on_sample(self, sample: dict[str, Any]) -> None:
        self._outbox.put_sample(sample)

    def end(self, ending: RunEnd) -> None:
        """Let the thread send what is left, and end."""
        self._outbox.end(ending)

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the thread's end. Returns whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Kill the tracker's process. Its thread then ends by itself."""
        self._given_up = True
        if (link := self._link) is not None:
            link.kill()

    def missing(self, silent: str) -> str:
        """Say after the end what the tracker did not get, why, and how it gets it; "" where it has all.

        ``silent``: the reason where it is none of the tracker's own.
        """
        if self._thread.ident is None:
            return ""
        lost, damaged = " and ".join(self._outbox.lost()), self._outbox.damaged()
        anew = f"; to send all of it to a new entry, take that file from a copy, remove {self._memory}, and give: "
        anew = f"{damaged}{anew}{self._usual_remedy}" if damaged and self._usual_remedy else damaged
        if self._complete:
            why = "it was too slow, or refused them"
            refused = f"{lost} ({why}); the run's directory has them" if lost else ""
            told = "; nor ".join(filter(None, (refused, anew)))
            return f"{self.name} did not get {told}" if told else ""
        left = self._outbox.left() + ([] if self._settings_told else ["the settings"])
        what = ", ".join(left) or "the end of the run"
        aside = f", and not {lost}, which the run's directory has" if lost else ""
        aside += f", and not {damaged}" if damaged else ""
        why = self._problem or self._settings_problem or silent
        remedy = self._usual_remedy if left else self._own_remedy or self._usual_remedy
        return f"{self.name} did not get {what} ({why}){aside}" + (f"; send it with: {remedy}" if remedy else "")

    # ------------------------------------------------------------------------------------------ the tracker's thread

    def _run(self) -> None:
        told, ended = 0, False
        try:
            self._open()  # at once: the user sees where the run is, and what is wrong, before the first version ends
            while not ended and not self._given_up:
                told, ended = self._outbox.wait(told)
                self._send()
            if self._opened and not self._given_up:
                all_sent = self._outbox.first() is None and self._settings_told
                problem = self._problem
                self._complete = self._ask("close", self._outbox.status) is not None and all_sent
                self._problem = self._problem or problem
                self._remember()
        except Exception as cause:  # nothing of a tracker may reach the run, or a thread's traceback the terminal
            self._fail(said_by(cause))
        finally:
            if (link := self._link) is not None:
                link.kill()

    def _send(self) -> None:
        """Send what waits, up to the first thing that the tracker would not take."""
        if not self._opened and not self._open():
            return
        while not self._given_up and (message := self._outbox.first()) is not None:
            if self._ask(message.call, message.value) is not None:
                self._on_sent(message)
            elif message.call == "on_sample" and self._opened:
                self._outbox.lose(message)
            elif message.call != "on_row" or not self._opened or not (self._passes_over() or self._tries_again()):
                return
        if self._settings_tries < MOST_REFUSALS or self._outbox.ended:
            self._tell_settings()

    def _on_sent(self, message: Message) -> None:
        self._outbox.sent(message)
        if message.call == "on_row":
            self._good_rows += 1
            if self._good_rows == GOOD_ROWS and not self._lost_some:
                self._starts = 1  # this process alone
            self._remember()

    def _passes_over(self) -> bool:
        """Give a row up that was refused `MOST_REFUSALS` times, if the tracker takes what is behind it."""
        number, count = self._refusals
        self._refusals = (self._outbox.next, count + 1 if number == self._outbox.next else 1)
        if self._refusals[1] < MOST_REFUSALS or (behind := self._outbox.behind()) is None:
            return False
        if self._ask(behind.call, behind.value) is None:
            return False
        self._outbox.pass_over(behind)
        self._remember()
        return True

    def _tries_again(self) -> bool:
        """Tell whether a row that was refused is tried again at once: no other comes with which it would be."""
        return self._outbox.ended and self._refusals[1] < MOST_REFUSALS

    def _tell_settings(self) -> None:
        """Send the settings, unless the tracker has them. It gets its rows without them, too."""
        if not self._settings_told and self._opened:
            self._settings_tries += 1
            self._settings_told = self._ask("on_settings", self._setting.config) is not None
            self._settings_problem = self._problem
            if not self._opened:  # they ended the process: the next one is for the rows
                self._settings_tries = MOST_REFUSALS

    def _open(self) -> bool:
        if self._link is None and not self._start_process():
            return False
        answer = self._ask("open", {**asdict(self._setting), "folder": str(self._setting.folder)})
        if answer is None:
            return False
        self._setting = replace(self._setting, entry=answer["entry"])
        if not self.where and answer["where"]:
            self._say.note(f"{self.name}: {answer['where']}")
        self.where, self._own_remedy, self._opened = answer["where"], answer["remedy"], True
        self._opened_at = self._outbox.next
        self._remember()
        if self._settings_tries < MOST_REFUSALS:
            self._tell_settings()
        return self._opened  # the settings may have ended the process

    def _start_process(self) -> bool:
        if self._starts == MOST_STARTS or self._given_up:
            return False
        self._starts += 1
        self._good_rows = 0
        try:
            self._setting.folder.mkdir(exist_ok=True)
            self._link = self._make_link()
        except OSError as cause:
            self._fail(f"its process cannot be started ({cause.strerror or cause})")
        return self._link is not None

    def _ask(self, call: str, value: Any) -> dict[str, Any] | None:
        """Call the tracker. Returns its answer; None where it failed, of which the user is warned once."""
        if self._link is None or self._given_up:
            return None
        self._asked_at = self._clock()
        try:
            answer = self._link.ask(call, value)
        except TrackerLost as cause:
            self._end_process()
            answer = {"problem": str(cause)}
        finally:
            self._asked_at = None
        if answer.get("kept") is False:
            self._end_process()
            self._outbox.back_to(self._opened_at)
            self._lost_some = True
        self._account(answer)
        if "problem" in answer:
            self._fail(answer["problem"])
            return None
        self._problem = ""
        return answer

    def _end_process(self) -> None:
        if (link := self._link) is not None:
            link.kill()
        self._link, self._opened = None, False
        self._outbox.lose_held()

    def _account(self, answer: dict[str, Any]) -> None:
        """Take over what an answer says of samples."""
        if "held" in answer:
            self._outbox.account(answer["held"], answer["dropped"])
            if answer["dropped"]:
                self._warn(f"did not take samples ({answer['why']}); it gets the rows without them", "samples")

    def _remember(self) -> None:
        path = self._memory
        try:
            TrackerState(self._setting.entry, self._outbox.next, self._complete).write(path)
        except OSError as cause:
            self._warn(f"cannot write {path} ({cause.strerror or cause}); a resumed run would begin another entry")

    @property
    def _memory(self) -> Path:
        return memory_file(self._setting.folder, self.name)

    def _fail(self, problem: str) -> None:
        self._problem = "" if self._given_up else problem
        if not self._given_up:
            self._warn(f"{problem}{self._goes_on}")
            if self._link is None and self._starts == MOST_STARTS:
                later = f"; send the rest with: {self._usual_remedy}" if self._usual_remedy else ""
                self._warn(f"its process ended {MOST_STARTS} times, and gets no other in this run{later}", "no process")

    def _warn(self, text: str, about: str = "trouble") -> None:
        """Warn the user, once about each thing."""
        if about not in self._warned:
            self._warned.add(about)
            self._say.warn(f"{self.name}: {text}")
