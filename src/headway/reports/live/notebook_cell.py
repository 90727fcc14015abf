"""The output of one cell of a notebook: what a terminal would show, as HTML that is replaced as a whole.

console.print(line) ─▶ lines that stay ─┐
LiveView ─▶ show(what changes) ─────────┴▶ a page ─▶ whoever was given, whenever it is another one
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType

from headway.reports import human

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
