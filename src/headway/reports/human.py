"""Formatting of numbers for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

_BLOCKS = "▁▂▃▄▅▆▇█"
UNKNOWN = "-"
LARGE = 1e6
"""Numbers from this one on are written with an exponent."""


def count(value: int) -> str:
    """Write a whole number: 1184 → ``1,184``."""
    return f"{value:,}"


def share(value: float | None) -> str:
    """Write a share in percent: 0.123 → ``12%``. A share that only rounds to 0 or 100 is marked as such."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    percent = round(100 * value)
    if percent == 0 and value > 0:
        return "<1%"
    if percent == 100 and value < 1:
        return ">99%"
    return f"{percent}%"


def number(value: float | None) -> str:
    """Write three significant digits: 0.01234 → ``0.0123``, 1e-4 → ``1e-4``, 1234.5 → ``1,234``, 3e38 → ``3e38``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    size = abs(float(f"{value:.3g}")) if abs(value) < 1000 else round(abs(value))  # as shown: 999.7 is 1,000
    if size >= LARGE or size < 1e-3:
        return _with_exponent(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def score(value: float | None) -> str:
    """Write a reward with three decimals, so that a column of them lines up; large ones as 3e38 → ``3e38``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:.3f}" if round(abs(value), 3) < LARGE else _with_exponent(value)


def _with_exponent(value: float) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def duration(seconds: float | None) -> str:
    """Write a duration in seconds: 0.42 → ``0.4s``, 42 → ``42s``, 92 → ``1m 32s``, 5400 → ``1h 30m``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 9.95:  # more would be written as 10.0s
        return f"{max(seconds, 0.0):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as ``width`` blocks at most, between minimum and maximum; nothing for fewer than two.

    If there are more values than ``width``, neighbours are averaged.
    """
    shown = [value for value in values if math.isfinite(value)]
    if len(shown) > width:
        ends = [place * len(shown) // width for place in range(width + 1)]
        shown = [fmean(shown[start:end]) for start, end in pairwise(ends)]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in shown)
