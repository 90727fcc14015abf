"""A timeline as one HTML page that needs nothing else: no network, no library, no file beside it.

Timeline ─▶ merged to at most MAX_SPANS ─▶ integers and a table of strings ─▶ inside the page ─▶ page/*.js
         └▶ figures, idle reasons, remarks ─▶ plain HTML, which also shows without scripts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from headway.reports import human
from headway.reports.events_file import to_json_line
from headway.reports.page_data import MAX_SPANS, busy_share, merged, page_data
from headway.reports.timeline import KEPT_DISCARDS, Timeline, idle_reasons

REASONS_SHOWN = 12
SCRIPTS = ("rows.js", "drawing.js", "hands.js")
"""Scripts of the page, in the order in which it runs them."""


def write_html(timeline: Timeline, path: Path, *, bottleneck: str | None = None) -> None:
    """Write the page to ``path``, which is replaced. ``bottleneck`` is a sentence, the summary's own when not given."""
    path.write_text(page(timeline, bottleneck=bottleneck), encoding="utf-8")


def page(timeline: Timeline, *, bottleneck: str | None = None, max_spans: int = MAX_SPANS) -> str:
    """Return the HTML text of a timeline's page."""
    figures, sentence = timeline.summary, bottleneck or timeline.summary["bottleneck"]
    mode = str(figures["mode"] or "unknown mode")
    status = "simulated" if timeline.simulated else str(figures["status"])
    why = f'<p class="why">{escape(str(figures["reason"]))}</p>' if figures["reason"] else ""
    lanes, resolution = merged(timeline.lanes, timeline.window, max_spans)
    return Template(_part("timeline.html")).substitute(
        title=escape(f"{mode} · Headway timeline"),
        mode=escape(mode),
        status=f'<span class="status {escape(status)}">{escape(status)}</span>{why}',
        figures="\n".join(_figures(timeline)),
        sentence=f'<p class="sentence">{escape(sentence)}</p>',
        lanes=_lane_table(timeline),
        reasons=_reason_table(timeline),
        remarks="\n".join(f"<p>{escape(remark)}</p>" for remark in _remarks(timeline, resolution)),
        data=_inside_script(to_json_line(page_data(timeline, lanes, resolution))),
        css=_part("timeline.css"),
        js="\n".join(_part(name) for name in SCRIPTS),
    )


def _part(name: str) -> str:
    return files("headway.reports").joinpath("page", name).read_text(encoding="utf-8")


def _inside_script(json: str) -> str:
    """Escape JSON so that no character in it could end, or open, an element."""
    return json.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _figures(timeline: Timeline) -> Iterator[str]:
    """The figures that a reader wants to know first, as entries of a definition list."""
    figures, lag = timeline.summary, timeline.summary["lag"]
    evaluations = figures["eval"]
    trained = figures["groups"]["trained"]
    bound = "no bound" if lag["bound"] is None else f"bound {lag['bound']}"
    yield _figure("wall time", human.duration(figures["wall_s"] or timeline.window[1] - timeline.window[0]))
    yield _figure("versions", human.count(figures["version"]))
    yield _figure("groups trained", human.count(trained), f"of {human.count(figures['groups']['admitted'])} admitted")
    yield _figure("trainer idle", human.share(figures["trainer/idle_ratio"]))
    yield _figure("replicas idle", human.share(figures["rollouter/idle_ratio"]))
    yield _figure("slots in use", human.share(figures["rollouter/slot_utilization"]))
    yield _figure("lag, mean", human.number(lag["mean"]))
    yield _figure("lag, most", human.UNKNOWN if lag["max"] is None else human.count(lag["max"]), bound)
    yield _figure("groups per second", human.number(figures["throughput"]["samples_per_s"]))
    if evaluations and not timeline.simulated:
        first, last = evaluations[0]["accuracy"], evaluations[-1]["accuracy"]
        yield _figure(
            "validation reward", human.score(last), f"from {human.score(first)}" if len(evaluations) > 1 else ""
        )


def _figure(name: str, value: str, beside: str = "") -> str:
    small = f" <small>{escape(beside)}</small>" if beside else ""
    return f"    <div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"


def _reason_table(timeline: Timeline) -> str:
    reasons = idle_reasons(timeline)
    if not reasons:
        return "<p>Nothing was trained, so there is no wall time to share out.</p>"
    rows = [
        (found.who, found.reason, human.duration(found.seconds), human.share(found.share))
        for found in reasons[:REASONS_SHOWN]
    ]
    return _table(("who", "why it did nothing", "time", "share of the wall time"), rows, numbers=2)


def _lane_table(timeline: Timeline) -> str:
    rows = [
        (lane.group, lane.name, human.share(busy))
        for lane in timeline.lanes
        if (busy := busy_share(lane, timeline)) is not None
    ]
    return _table(("group", "lane", "busy"), rows, numbers=1)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int) -> str:
    """Make an HTML table, whose last ``numbers`` columns hold numbers."""
    left = len(head) - numbers

    def cells(name: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{name}{' class=number' if place >= left else ''}>{escape(cell)}</{name}>"
            for place, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>\n<thead><tr>{cells('th', head)}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _remarks(timeline: Timeline, resolution: float) -> Iterator[str]:
    """Remarks that a reader must know to read the page right."""
    if timeline.simulated:
        yield (
            "This run was simulated from a profile of costs: nothing was generated or trained, all times are "
            "predictions, and there are no rewards."
        )
    yield (
        "Wall time reaches from the first admission to the last optimizer step (the line under the time axis); ratios "
        "and shares refer to it, of replicas the mean. Idle is whatever is not work: saving a checkpoint and loading "
        "weights are idle time, with a reason."
    )
    yield (
        "Where spans are narrower than a pixel, a column is filled from below by the share of each colour. Update "
        "phases are placed by when they were reported and how long they took."
    )
    if resolution:
        yield (
            f"The run has {human.count(timeline.spans)} spans. Neighbours shorter than "
            f"{human.number(resolution * 1e3)} ms are merged, kind by kind: their totals are kept, their order is not. "
            "Zooming in ends where that would show."
        )
    discarded = sum(timeline.summary["groups"][fate] for fate in ("filtered", "dropped", "failed"))
    if discarded > KEPT_DISCARDS:
        yield f"Of {human.count(discarded)} discarded groups the first {human.count(KEPT_DISCARDS)} are marked."
