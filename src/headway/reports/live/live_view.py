"""The live view: on a terminal or in a notebook's cell, drawn by a separate thread at most twice a second.

    event loop ──events, phases, rows──▶ counters, lines to print     (under the lock, never waits for the terminal)
    drawing thread ──every half second──▶ takes panel and lines (under the lock), then prints them (without it)

The drawing thread alone touches the terminal, so no thread ever holds both locks, ours and the console's.

console.print(line) ─▶ lines that stay ─┐
LiveView ─▶ show(what changes) ─────────┴▶ `Cell`: a page of HTML ─▶ the function that it was given, at each change
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

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
SIZE, MARGIN = (640, 140), (48, 18)
"""Width and height of the curve in pixels, and what is left free of them at either side."""

_PAGE = (
    '<pre style="line-height:1.2;white-space:pre;overflow-x:auto;'
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace;font-size:12px\">{code}</pre>"
)


class Cell(Console):
    """Console, and `Canvas` of a view, of which ``send`` is given the whole page each time that it changed."""

    def __init__(self, send: Callable[[str], None]) -> None:
        super().__init__(file=io.StringIO(), record=True, width=WIDTH, color_system="truecolor", highlight=False)
        self._send = send
        self._kept = self._changing = self._curve = ""
        self._sent = ""
        self._sending = threading.Lock()

    def show(self, view: RenderableType, rewards: Sequence[float] = ()) -> None:
        """Show ``view`` below the lines that were printed, in the place of what was shown there before, and the curve
        of ``rewards``, the means of versions from 0 on, below all.
        """
        self._changing, self._curve = _code(view), curve(rewards)
        self._send_if_new()

    def close(self) -> None:
        """Keep what is shown, and what was printed. What is printed from now on is below it: close again to show it."""
        self._kept += _recorded(self) + self._changing
        self._changing = ""
        self._send_if_new()

    def _send_if_new(self) -> None:
        with self._sending:
            page = _PAGE.format(code=self._kept + _recorded(self, clear=False) + self._changing) + self._curve
            if page != self._sent:
                self._sent = page
                self._send(page)


def curve(rewards: Sequence[float]) -> str:
    """Return a drawing of the ``rewards``, at least two, as SVG in the colours of the page; else nothing."""
    if len(rewards) < 2:
        return ""
    (width, height), (left, top), low, high = SIZE, MARGIN, min(rewards), max(rewards)
    across, up = (width - 2 * left) / (len(rewards) - 1), (height - 2 * top) / ((high - low) or 1.0)
    points = " ".join(
        f"{left + at * across:.1f},{height - top - (one - low) * up:.1f}" for at, one in enumerate(rewards)
    )
    labels = {(0, top + 4): human.score(high), (0, height - top + 4): human.score(low)}
    labels |= {(left, height - 2): "reward by version, mean of trained answers"}
    texts = "".join(f'<text x="{x}" y="{y}">{text}</text>' for (x, y), text in labels.items())
    return (
        f'<svg width="{width}" height="{height}" style="display:block" font-size="11" font-family="sans-serif" '
        f'fill="currentColor"><polyline points="{points}" fill="none" stroke="#0a8a8a" stroke-width="2"/>{texts}</svg>'
    )


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


class Canvas(Protocol):
    """A place for what changes, below the lines that were printed and stay."""

    def show(self, view: RenderableType, rewards: Sequence[float] = ()) -> None:
        """Show ``view`` in the place of what was shown before, and the curve of ``rewards`` where that can be drawn."""

    def close(self) -> None:
        """Leave what is shown, and show nothing further."""


class Terminal:
    """Canvas at the end of a terminal's output."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def show(self, view: RenderableType, rewards: Sequence[float] = ()) -> None:
        self._live.update(view, refresh=True)

    def close(self) -> None:
        self._live.stop()


class LiveView:
    """A `ConsoleView` for terminals and other kinds of `Canvas`.

    All methods but `close` are called with ``lock`` held, `close` without it.
    """

    def __init__(
        self,
        console: Console,
        progress: RunProgress,
        lock: AbstractContextManager[Any],
        clock: Callable[[], float] = time.monotonic,
        canvas: Canvas | None = None,
    ) -> None:
        """Begin to draw on ``console``, on its terminal unless it has another ``canvas``."""
        self._console = console
        self._progress = progress
        self._lock = lock
        self._clock = clock
        self._phase: tuple[str, str, float] | None = None
        self._lines: list[Text | Padding] = []
        """Lines to print above the view: a `Text` is one line, however long; a `Padding` wraps between its margins."""
        self._spinner = Spinner("dots", style=ACCENT)
        self._canvas = canvas or Terminal(console)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._draw_until_closed, name="live-view", daemon=True)
        self._thread.start()

    def phase(self, text: str, detail: str = "") -> None:
        """Show the phase ``text``. The phase before it is printed above the view with the time that it took."""
        if self._phase is not None and self._phase[0] == text:
            self._phase = (text, detail, self._phase[2])
            return
        self._end_phase()
        self._phase = (text, detail, self._clock())

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
        self._thread.join(JOIN_TIMEOUT_S)
        with self._lock:
            self._end_phase()
        self._draw()
        self._canvas.close()

    def _end_phase(self) -> None:
        if self._phase is None:
            return
        text, detail, since = self._phase
        self._phase = None
        took = human.duration(self._clock() - since)
        self._lines.append(
            Text.assemble(("  ✓ ", GOOD), text, (f"  {detail}" if detail else "", QUIET), (f"  {took}", QUIET))
        )

    def _draw_until_closed(self) -> None:
        while not self._closing.wait(REFRESH_EVERY_S):
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            phase, rewards = self._phase, self._progress.rewards
            lines, self._lines = self._lines, []
            parts = [panel(self._progress, self._console.width)] if self._progress.metrics.started else []
        for line in lines:
            self._console.print(line, soft_wrap=isinstance(line, Text))
        if phase is not None:
            text, detail, since = phase
            took = human.duration(self._clock() - since)
            words = Text.assemble(text, (f"  {detail}" if detail else "", QUIET), (f"  {took}", QUIET))
            self._spinner.update(text=words)
            parts.append(Padding(self._spinner, (0, 0, 0, 2)))
        self._canvas.show(Group(*parts), rewards)
