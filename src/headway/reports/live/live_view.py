"""The live view: on a terminal or in a notebook's cell, drawn by a separate thread at most twice a second.

    event loop ──events, phases, rows──▶ counters, lines to print     (under the lock, never waits for the terminal)
    drawing thread ──every half second──▶ takes panel and lines (under the lock), then prints them (without it)

Only the drawing thread touches the terminal, so that no thread ever holds both this lock and the console's.

console.print(line) ─▶ lines that stay ─┐
LiveView ─▶ show(what changes) ─────────┴▶ `Cell`: a page of HTML ─▶ the function that it was given, at each change
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.text import Text

from headway.events import Event, RunFinished, RunStarted, ValidationFinished
from headway.reports import human
from headway.reports.live.panel import ACCENT, GOOD, LOOK_HERE, QUIET, RunProgress, panel
from headway.reports.live.plain_log import words

WIDTH = 100
"""Characters of a line."""

_PAGE = (
    '<pre style="line-height:1.2;white-space:pre;overflow-x:auto;'
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace;font-size:12px\">{code}</pre>"
)


class Cell(Console):
    """Console in a notebook's cell. ``send`` gets the whole page, lines and view, at each change."""

    def __init__(self, send: Callable[[str], None]) -> None:
        super().__init__(file=io.StringIO(), record=True, width=WIDTH, color_system="truecolor", highlight=False)
        self._send = send
        self._kept = self._changing = ""
        self._sent = ""
        self._sending = threading.Lock()

    def show(self, view: RenderableType) -> None:
        """Show ``view`` below the printed lines. It replaces the previous view."""
        self._changing = _code(view)
        self._send_if_new()

    def close(self) -> None:
        """Keep the view and the printed lines. Later lines are printed below them, and shown by another `close`."""
        self._kept += _recorded(self) + self._changing
        self._changing = ""
        self._send_if_new()

    def _send_if_new(self) -> None:
        with self._sending:
            # clear=False: each page has all lines, so they stay in the recording.
            page = _PAGE.format(code=self._kept + _recorded(self, clear=False) + self._changing)
            if page != self._sent:
                self._sent = page
                self._send(page)


def html(view: RenderableType) -> str:
    """Return ``view`` as HTML for a notebook's cell."""
    return _PAGE.format(code=_code(view))


def _code(view: RenderableType) -> str:
    console = Console(file=io.StringIO(), record=True, width=WIDTH, color_system="truecolor", highlight=False)
    console.print(view)
    return _recorded(console)


def _recorded(console: Console, *, clear: bool = True) -> str:
    return console.export_html(clear=clear, inline_styles=True, code_format="{code}")


IN_PANEL = (ValidationFinished, RunFinished)
"""Events that the panel shows."""
REFRESH_EVERY_S = 0.5
JOIN_TIMEOUT_S = 5.0


class LiveView:
    """A `ConsoleView` for terminals and cells of notebooks.

    All methods but `close` are called with ``lock`` held, `close` without it.
    """

    def __init__(self, console: Console, progress: RunProgress, lock: AbstractContextManager[Any]) -> None:
        """Begin to draw on ``console``: a terminal or a `Cell`."""
        self._console = console
        self._progress = progress
        self._lock = lock
        self._phase: tuple[str, str, float] | None = None
        self._lines: list[Text | Padding] = []
        """Lines to print above the view: a `Text` is never wrapped; a `Padding` wraps between its margins."""
        self._spinner = Spinner("dots", style=ACCENT)
        self._show: Callable[[RenderableType], None]
        if isinstance(console, Cell):
            self._show, self._end = console.show, console.close
        else:
            live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
            live.start()
            self._show, self._end = partial(live.update, refresh=True), live.stop
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._draw_until_closed, name="live-view", daemon=True)
        self._thread.start()

    def phase(self, text: str, detail: str = "") -> None:
        """Show the phase ``text``. The previous phase is printed above the view, with its duration."""
        if self._phase is not None and self._phase[0] == text:
            self._phase = (text, detail, self._phase[2])
            return
        self._end_phase()
        self._phase = (text, detail, time.monotonic())

    def warn(self, text: str) -> None:
        self._lines.append(Padding(Text(f"! {text}", style=LOOK_HERE), (0, 0, 0, 2), expand=False))

    def note(self, text: str) -> None:
        self._lines.append(Text(f"    {text}"))

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._end_phase()
        elif not isinstance(event, IN_PANEL) and (told := words(event)) is not None:
            if told[0] == "warning":
                self.warn(told[1])
            elif told[0] == "info":
                self.note(told[1])

    def on_row(self, row: dict[str, Any]) -> None:
        self._progress.on_row(row)

    def close(self) -> None:
        """End the drawing; the last state stays on the screen."""
        self._closing.set()
        # Without the lock, which the thread needs to draw.
        self._thread.join(JOIN_TIMEOUT_S)
        with self._lock:
            self._end_phase()
        self._draw()  # once more, with what came since the thread drew last
        self._end()

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._lines.append(_phase_line(self._phase, ("  ✓ ", GOOD)))
            self._phase = None

    def _draw_until_closed(self) -> None:
        while not self._closing.wait(REFRESH_EVERY_S):
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            phase, lines, self._lines = self._phase, self._lines, []
            parts = [panel(self._progress, self._console.width)] if self._progress.metrics.started else []
        # Without the lock: a stopped terminal (Ctrl-S) must not stop the run.
        for line in lines:
            self._console.print(line, soft_wrap=isinstance(line, Text))
        if phase is not None:
            self._spinner.update(text=_phase_line(phase))
            parts.append(Padding(self._spinner, (0, 0, 0, 2)))
        self._show(Group(*parts))


def _phase_line(phase: tuple[str, str, float], *mark: tuple[str, str]) -> Text:
    """Return ``mark`` and the line of a phase, (text, detail, start), with its duration."""
    text, detail, since = phase
    took = human.duration(time.monotonic() - since)
    return Text.assemble(*mark, text, (f"  {detail}" if detail else "", QUIET), (f"  {took}", QUIET))
