"""A timeline as one HTML page that needs nothing else: no network, no library, no file beside it.

Timeline ─▶ merged to at most MAX_SPANS ─▶ integers and a table of strings ─▶ JSON inside the page ─▶ page/*.js
         └▶ figures, idle reasons, remarks, curves, ledger, groups, samples ─▶ JSON inside the page

Times are microseconds since the run's first event. The page that `headway watch` serves is the same without data: its
script asks for it, part by part.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from headway.events import Span
from headway.reports import human
from headway.reports.metrics.run_sums import thinned
from headway.reports.record.events_file import to_json_line
from headway.reports.record.file_access import replace_file
from headway.reports.samples.samples_file import validation_line
from headway.reports.samples.token_view import Color, Scale, scale_of
from headway.reports.timeline.lanes import Lane, LaneSpan, SpanKind
from headway.reports.timeline.run_history import to_json as curves_json
from headway.reports.timeline.timeline import (
    KEPT_DISCARDS,
    MarkKind,
    Timeline,
    build_timeline,
    idle_reasons,
)
from headway.reports.timeline.worker_lanes import ENVIRONMENTS, REPLICAS, STAGES, TRAINER

MAX_SPANS = 100_000
"""Largest number of spans in a page. Beyond it the shortest spans are merged first."""
MAX_POINTS = 4_000
"""Most points that a page draws of a counter."""
TIMED = (TRAINER, REPLICAS, ENVIRONMENTS, STAGES)
"""Groups of lanes without gaps: any time that is not idle is busy."""
IDLE = frozenset({SpanKind.IDLE, SpanKind.HALTED})


def merged(lanes: Sequence[Lane], window: Span, most: int) -> tuple[tuple[Lane, ...], float]:
    """Lanes with at most ``most`` spans in all, and the seconds below which neighbours were merged (0 for none).

    The limit may be exceeded if there are more lanes than ``most``, or no short spans.
    """
    resolution, wall = 0.0, window[1] - window[0]
    result = tuple(lanes)
    while sum(len(lane.spans) for lane in result) > most and resolution < wall / 100:
        resolution = max(4 * resolution, wall / 1e6)
        # From the given lanes each time: merged spans have lost the order of their parts.
        result = tuple(replace(lane, spans=tuple(merge_short(lane.spans, resolution))) for lane in lanes)
    return result, resolution


def merge_short(spans: Iterable[LaneSpan], resolution: float) -> Iterator[LaneSpan]:
    """Merge each run of neighbours shorter than ``resolution``, and within it, into one span for each kind.

    The seconds of each kind and reason stay what they were; within ``resolution`` their order is lost.
    """
    short: list[LaneSpan] = []
    for span in spans:
        if short and (span.seconds >= resolution or span.end - short[0].start > resolution):
            yield from _one_for_each_kind(short)
            short = []
        if span.seconds >= resolution:
            yield span
        else:
            short.append(span)
    yield from _one_for_each_kind(short)


def _one_for_each_kind(short: list[LaneSpan]) -> Iterator[LaneSpan]:
    if len(short) <= 2:
        yield from short
        return
    alike: dict[tuple[SpanKind, str | None], list[LaneSpan]] = {}
    for span in short:
        alike.setdefault((span.kind, span.reason), []).append(span)
    start = short[0].start
    for (kind, reason), those in alike.items():
        end = start + sum(span.seconds for span in those)
        label = those[0].label if len(those) == 1 else f"{reason or kind.words} ({len(those)} short spans)"
        yield LaneSpan(start, end, kind, label, reason)
        start = end


Clock = Callable[[float], int]
"""Conversion of times to whole microseconds since the run's first event."""


def page_data(timeline: Timeline, lanes: Sequence[Lane], resolution: float) -> dict[str, Any]:
    strings = dict[str, int]()

    def clock(time: float) -> int:
        return round((time - timeline.window[0]) * 1e6)

    used = {span.kind for lane in lanes for span in lane.spans}
    kinds = [kind for kind in SpanKind if kind in used]
    points = [(counter, thinned(counter.values, MAX_POINTS)) for counter in timeline.counters]
    return {
        "end": clock(timeline.window[1]),
        "resolution": 1e6 * resolution,
        "measured": None if timeline.measured is None else [clock(time) for time in timeline.measured],
        "kinds": [{"name": kind, "words": kind.words, "idle": kind in IDLE} for kind in kinds],
        "lanes": [_packed(lane, timeline, clock, strings, kinds) for lane in lanes],
        "marks": [
            _marks(timeline, kind, clock, strings)
            for kind in MarkKind
            if any(mark.kind is kind for mark in timeline.marks)
        ],
        "counters": [
            {
                "name": counter.name,
                "limit": counter.limit,
                "most": max(counter.values),
                "times": [clock(counter.times[place]) for place in kept],
                "values": [round(counter.values[place], 6) for place in kept],
            }
            for counter, kept in points
        ],
        "strings": list(strings),  # last: the lanes and marks above fill it
    }


def _packed(
    lane: Lane, timeline: Timeline, clock: Clock, strings: dict[str, int], kinds: list[SpanKind]
) -> dict[str, Any]:
    """Pack a lane. ``spans`` holds four integers a span: time since the last one's end, length, kind, label."""
    spans: list[int] = []
    reached = 0
    for span in lane.spans:
        # Not before the last end: rounded to microseconds, neighbours may overlap by one.
        start, end = max(clock(span.start), reached), clock(span.end)
        if end > start:
            # The reason is told where it says more than the label.
            reason = "" if span.reason is None or span.reason in span.label else f" ({span.reason})"
            spans += (
                start - reached,
                end - start,
                kinds.index(span.kind),
                strings.setdefault(span.label + reason, len(strings)),
            )
            reached = end
    busy = busy_share(lane, timeline)
    return {"group": lane.group, "name": lane.name, "annotates": lane.annotates, "busy": busy, "spans": spans}


def busy_share(lane: Lane, timeline: Timeline) -> float | None:
    """Share of the measured wall time that the lane was busy; of the whole run where nothing was trained."""
    window = timeline.measured or timeline.window
    if lane.group not in TIMED or lane.annotates or (told := lane.seconds(window)) <= 0:
        return None
    return max(1.0 - sum(lane.idle_by_reason(window).values()) / told, 0.0)


def _marks(timeline: Timeline, kind: MarkKind, clock: Clock, strings: dict[str, int]) -> dict[str, Any]:
    points = [
        [clock(mark.time), strings.setdefault(mark.label, len(strings))] for mark in timeline.marks if mark.kind is kind
    ]
    return {"kind": kind, "name": kind.words or kind, "row": bool(kind.words), "points": points}


REASONS_SHOWN = 12
SCRIPTS = ("common.js", "rows.js", "drawing.js", "hands.js", "curves.js", "groups.js", "tokens.js", "story.js")
"""Scripts of the page, in the order in which it runs them."""
STYLES = ("timeline.css", "story.css")


def write_html(
    timeline: Timeline, path: Path, *, samples: Sequence[dict[str, Any]] = (), name: str | None = None
) -> None:
    """Write the page to ``path``, which is replaced. ``name``: the run's."""
    replace_file(path, page(timeline, samples=samples, name=name))


def page(
    timeline: Timeline,
    *,
    max_spans: int = MAX_SPANS,
    samples: Sequence[dict[str, Any]] = (),
    name: str | None = None,
) -> str:
    """Return the HTML text of a timeline's page. ``samples``: those to show, as ``samples.jsonl`` has them.

    ``name``: the run's, which heads the page before its mode.
    """
    figures = timeline.summary
    mode = str(figures["mode"] or "unknown mode")
    status = "simulated" if timeline.simulated else str(figures["status"])
    data: dict[str, Any] = {
        "status": {"status": status, "reason": figures["reason"]},
        "figures": list(cards(figures, timeline.window, timeline.simulated)),
        "sentence": figures["bottleneck"],
        "timeline": live_parts(timeline, max_spans),
        "scales": token_scales(),
    }
    if not timeline.simulated:
        data |= {
            "curves": curves_json(timeline.curves),
            "ledger": timeline.ledger,
            "groups": timeline.groups.lines(),
            "samples": list(samples),
            "validations": [validation_line(sample) for sample in samples if "validation" in sample],
        }
    heading = escape(mode) if name is None else f"{escape(name)} <small>{escape(mode)}</small>"
    return filled("timeline.html", SCRIPTS, title=f"{name or mode} · Headway timeline", data=data, heading=heading)


def live_page(name: str) -> str:
    """Return the HTML text of the live page of a run, called ``name``, which asks for its parts."""
    data = {
        "status": {"status": "reading"},
        "figures": [],
        "sentence": "",
        "timeline": live_parts(build_timeline([]), MAX_SPANS),
        "scales": token_scales(),
        "live": True,
    }
    return filled("timeline.html", SCRIPTS, title=f"{name} · Headway", data=data, heading=escape(name), live=True)


def live_parts(timeline: Timeline, max_spans: int) -> dict[str, Any]:
    """Return what a page shows of a timeline: its data, and idle reasons and remarks as text."""
    lanes, resolution = merged(timeline.lanes, timeline.window, max_spans)
    return {
        "data": page_data(timeline, lanes, resolution),
        "reasons": [
            (found.who, found.reason, human.duration(found.seconds), human.share(found.share))
            for found in idle_reasons(timeline)[:REASONS_SHOWN]
        ],
        "remarks": list(_remarks(timeline, resolution)),
    }


def token_scales() -> dict[str, Any]:
    """Return the scales of tokens whose bounds are fixed, by the page's names: the ones of ``headway show``.

    Each has ``bounds``, ``labels`` of its steps, and their ``strengths``: 0 for the one without a colour, up to ±1.
    """
    colors = {"gap": Color.GAP, "log-prob": Color.LOGPROB, "entropy": Color.ENTROPY}
    return {name: _as_steps(scale_of(color, ())) for name, color in colors.items()}


def _as_steps(scale: Scale) -> dict[str, Any]:
    quiet = next(place for place, step in enumerate(scale.steps) if not step.style)
    most = max(quiet, len(scale.steps) - 1 - quiet)
    return {
        "bounds": scale.bounds,
        "labels": [step.label for step in scale.steps],
        "strengths": [round((place - quiet) / most, 3) for place in range(len(scale.steps))],
    }


def filled(body: str, scripts: Sequence[str], *, title: str, data: Any, live: bool = False, **parts: str) -> str:
    """Return the HTML text of a page.

    ``body``: the file of its elements, which ``parts`` fill in as HTML. ``data``: what its ``scripts`` read, as JSON.
    ``live``: it may ask where it came from for more.
    """
    script = "\n".join(["", '"use strict";', "(() => {", *(part(name) for name in scripts), "})();", ""])
    return Template(part("page.html")).substitute(
        title=escape(title),
        body=Template(part(body)).substitute(parts).rstrip(),
        css="\n".join(part(name) for name in STYLES),
        js=script,
        policy=policy(script, live=live),
        data=to_json_line(data).translate({ord(c): f"\\u{ord(c):04x}" for c in "&<>"}),  # none ends an element
    )


def policy(script: str, *, live: bool = False) -> str:
    """Return a page's Content-Security-Policy: this ``script`` alone; ``live``: it may ask where it came from."""
    # The hash covers every byte between the tags: with one extra newline the browser runs nothing.
    digest = b64encode(sha256(script.encode()).digest()).decode()
    connect = " connect-src 'self';" if live else ""
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';{connect} img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def part(name: str) -> str:
    return files("headway.reports").joinpath("page", name).read_text(encoding="utf-8")


def cards(figures: dict[str, Any], window: Span, simulated: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yield the most important figures, each as name, value and remark.

    ``figures``: as in ``summary.json``; ``window``: first and last event.
    """
    lag = figures["lag"]
    evaluations = figures["eval"]
    trained = figures["groups"]["trained"]
    bound = "no bound" if lag["bound"] is None else f"bound {lag['bound']}"
    yield ("wall time", human.duration(figures["wall_s"] or window[1] - window[0]), "")
    yield ("versions", human.count(figures["version"]), "")
    yield ("groups trained", human.count(trained), f"of {human.count(figures['groups']['admitted'])} admitted")
    yield ("trainer idle", human.share(figures["trainer/idle_ratio"]), "")
    yield ("replicas idle", human.share(figures["rollouter/idle_ratio"]), "")
    yield ("slots in use", human.share(figures["rollouter/slot_utilization"]), "")
    yield ("lag, mean", human.number(lag["mean"]), "")
    yield ("lag, most", human.UNKNOWN if lag["max"] is None else human.count(lag["max"]), bound)
    yield ("groups per second", human.number(figures["throughput"]["samples_per_s"]), "")
    if evaluations and not simulated:
        first, last = evaluations[0]["accuracy"], evaluations[-1]["accuracy"]
        yield ("validation reward", human.score(last), f"from {human.score(first)}" if len(evaluations) > 1 else "")


def _remarks(timeline: Timeline, resolution: float) -> Iterator[str]:
    """Yield remarks that are needed to read the page correctly."""
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
        "The table of idle time shares out every second in which nothing was computed. The sentence at the top adds up "
        "the waits that batches and updates told of, the one at the end for groups that never came among them, and "
        "leaves out what it blames on something else: its shares may differ by a few percent."
    )
    yield (
        "Where spans are narrower than a pixel, a column is filled from below by the share of each colour. Update "
        "phases are placed by when they were reported and how long they took."
    )
    if timeline.versions is not None:
        yield (
            "Timeline, reasons of idle time and the list of groups cover the versions {} to {}; shares there refer to "
            "their time; the figures above, the curves and the ledger are of the whole run. headway report RUN "
            "--versions A:B draws others.".format(*timeline.versions)
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
