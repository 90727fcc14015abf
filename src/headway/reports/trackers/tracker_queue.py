"""Bounded queue to one tracker, whose rows are read from metrics.jsonl.

rows       numbered as the lines of metrics.jsonl, which has each one before it is announced here; the newest are kept,
           for a disk that refuses them
samples    the newest; earlier ones are dropped, and counted
ending     the summary, and the model's folder where it was asked for
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.reports.record.events_file import to_json_line

SAMPLES = ROWS = 64
"""Most samples, and most of the newest rows, that are kept."""
LINES_NAMED = 3


@dataclass(frozen=True, slots=True)
class Message:
    """One call of a tracker: ``on_row``, ``on_sample``, ``on_summary`` or ``on_model``, and its argument."""

    call: str
    value: Any


@dataclass(frozen=True, slots=True)
class RunEnd:
    """End of a run: its summary, and the folder of its model where trackers get it."""

    summary: dict[str, Any]
    model: Path | None = None


class TrackerQueue:
    """Bounded queue between the run and the thread that sends. Methods may be called from any thread, none waits but
    `wait`, and none holds its lock while it reads the file.

    Example:
        >>> queue = TrackerQueue(Path("metrics.jsonl"))
        >>> queue.put_sample({"group": 17})
        >>> message = queue.first()  # stays until it is `sent`
        >>> message.call, queue.left()
        ('on_sample', [])
        >>> queue.sent(message)
        >>> queue.left()
        []
    """

    def __init__(self, metrics: Path, *, rows: int = 0, sent: int = 0) -> None:
        """Begin with ``rows`` lines in the file ``metrics``, of which the tracker has the first ``sent``."""
        self._metrics = metrics
        self._news = threading.Condition()
        self._place = (0, 0)
        """Number of a line of the file, and the bytes before it: the line that was read last."""
        self._newest: dict[int, dict[str, Any] | None] = {}
        """The newest rows by their numbers."""
        self._samples: deque[tuple[int, dict[str, Any]]] = deque(maxlen=SAMPLES)
        """Samples, each with the number of the row that comes behind it."""
        self._told = 0
        """Number of times that something was put here."""
        self._ending: deque[Message] = deque()
        self._end: tuple[Message, ...] = ()
        """All of the ending, sent or not."""
        self.ended = False
        self.status = "failed"
        """How the run ended, once it has; a run that does not say failed."""
        self.rows = rows
        """Number of rows of the run so far."""
        self.next = min(sent, rows)
        """Number of the next row to send: those before it are sent, or lost."""
        self.lost_rows = 0
        """Rows that the tracker refused while it took what was behind."""
        self.unread: list[int] = []
        """Numbers, from 1, of the lines of the file that were needed and hold no row."""
        self.lost_samples = 0
        self._held = 0
        """Samples that were taken off the queue and wait in the tracker's process, with which they would go."""

    def put_row(self, row: dict[str, Any] | None = None) -> None:
        """Announce the next ``row``, which the file has, or will have where a disk refuses it."""

        def put() -> None:
            self._newest[self.rows] = row
            self._newest.pop(self.rows - ROWS, None)
            self.rows += 1

        self._tell(put)

    def put_sample(self, sample: dict[str, Any]) -> None:
        def put() -> None:
            self.lost_samples += len(self._samples) == SAMPLES
            self._samples.append((self.rows, sample))

        self._tell(put)

    def end(self, ending: RunEnd) -> None:
        """Nothing comes any more but ``ending``."""

        def put() -> None:
            model = () if ending.model is None else (Message("on_model", str(ending.model)),)
            self._end = (Message("on_summary", ending.summary), *model)
            self._ending.extend(self._end)
            self.status = ending.summary.get("status") or self.status
            self.ended = True

        self._tell(put)

    def _tell(self, put: Callable[[], None]) -> None:
        with self._news:
            put()
            self._told += 1
            self._news.notify_all()

    def wait(self, told: int) -> tuple[int, bool]:
        """Wait until more than ``told`` things were put here. Returns how many were, and whether that was all."""
        with self._news:
            self._news.wait_for(lambda: self._told > told or self.ended)
            return self._told, self.ended

    def first(self) -> Message | None:
        """Return what is to be sent next, which stays here until `sent` is called; None where nothing waits."""
        with self._news:
            if self._samples and self._samples[0][0] <= self.next:
                return Message("on_sample", self._samples[0][1])
        if (row := self._row()) is not None:
            return Message("on_row", row)
        with self._news:
            return self._ending[0] if self._ending and self.next == self.rows else None

    def sent(self, message: Message) -> None:
        """Take ``message``, which `first` returned, off the queue."""
        with self._news:
            match message.call:
                case "on_sample":
                    if self._samples and self._samples[0][1] is message.value:  # else it made room for others meanwhile
                        self._samples.popleft()
                    else:
                        self.lost_samples -= 1
                case "on_row":
                    self.next += 1
                case _:
                    self._ending.popleft()

    def lose(self, sample: Message) -> None:
        """Take a sample off the queue that the tracker would not have."""
        with self._news:
            self.sent(sample)
            self.lost_samples += 1

    def behind(self) -> Message | None:
        """Return what comes behind the next row, and stays here: a row, or what ends the run behind the last one.

        None where that did not come yet, or is damaged.
        """
        with self._news:
            if self.next + 1 == self.rows:
                return self._ending[0] if self._ending else None
        row = _row_of(self._line(self.next + 1))
        return None if row is None else Message("on_row", row)

    def pass_over(self, behind: Message) -> None:
        """Take a row off the queue that the tracker refuses, and what was `behind` it, which it took."""
        with self._news:
            self.lost_rows += 1
            self.next += 1
            self.sent(behind)

    def back_to(self, row: int) -> None:
        """Put everything from the row with the number ``row`` on back, but for samples."""
        with self._news:
            self.next = min(self.next, row)
            self.unread = [line for line in self.unread if line <= row]
            self._ending = deque(self._end)

    def account(self, held: int, dropped: int) -> None:
        """Take over what the tracker says of the samples that it took: how many wait in it, how many it dropped."""
        with self._news:
            self._held = held
            self.lost_samples += dropped

    def lose_held(self) -> None:
        """Count the samples that waited in the tracker's process, which is gone."""
        with self._news:
            self.lost_samples += self._held
            self._held = 0

    def _row(self) -> dict[str, Any] | None:
        """Return the next row; None where there is none, or the file does not have it yet. What holds no row is passed
        over.
        """
        while self.next < self.rows:
            line = self._line(self.next)
            if line is None and not self.ended:
                return None
            if (row := _row_of(line)) is not None:
                return row
            with self._news:
                self.unread.append(self.next + 1)
                self.next += 1
        return None

    def _line(self, number: int) -> bytes | None:
        """Return a whole line of the file, or one of the newest rows as such; None where neither has it. Called by the
        thread that sends.
        """
        at, offset = self._place if number >= self._place[0] else (0, 0)
        with suppress(OSError), self._metrics.open("rb") as file:
            file.seek(offset)
            while (line := file.readline()).endswith(b"\n"):
                if at == number:
                    self._place = at, offset
                    return line
                at, offset = at + 1, offset + len(line)
        with self._news:
            row = self._newest.get(number)
        return None if row is None else to_json_line(row).encode()

    def left(self) -> list[str]:
        """Return in words what was put here and can still be sent: rows, the summary, the model."""
        with self._news:
            rows = self.rows - self.next
            names = {"on_summary": "the summary", "on_model": "the model"}
            return ([f"{rows} of {self.rows} rows"] if rows else []) + [names[end.call] for end in self._ending]

    def lost(self) -> list[str]:
        """Return in words what was put here and will not be sent, though it is whole: rows, samples."""
        with self._news:
            waiting = (len(self._samples) + self._held) * self.ended
            counts = {"rows": self.lost_rows, "samples": self.lost_samples + waiting}
            return [f"{count} {name}" for name, count in counts.items() if count]

    def damaged(self) -> str:
        """Return in words which rows will not be sent since the file does not have them whole; "" for none."""
        if not (count := len(self.unread)):
            return ""
        lines = ", ".join(map(str, self.unread[:LINES_NAMED])) + (", …" if count > LINES_NAMED else "")
        return f"{count} rows, which {self._metrics} does not have whole (line {lines})"


def _row_of(line: bytes | None) -> dict[str, Any] | None:
    """Return the row of a line; None where it holds none."""
    try:
        row = json.loads(line or b"")
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("version"), int) else None
