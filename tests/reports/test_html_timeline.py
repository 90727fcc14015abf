"""The page: whole in one file, safe against what runs put into labels, true to the timeline, small for big runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from headway.events import Note, RunFinished
from headway.reports.samples.token_view import Color, scale_of
from headway.reports.timeline.html_timeline import live_page, merge_short, merged, page, write_html
from headway.reports.timeline.lanes import Lane, LaneSpan, SpanKind, idle
from headway.reports.timeline.timeline import Timeline, build_timeline
from tests.reports.scripted_run import ScriptedRun
from tests.reports.stories import story
from tests.reports.timelines import cut_short, failed, simulated, started
from tests.tiers import searched

VOID = {"meta", "br", "img", "hr", "input", "link"}


class Page(HTMLParser):
    """Elements with their attributes, the text of scripts and of everything else; complains of elements left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif not self._open or self._open[-1] != "style":
            self.text += data

    @property
    def given(self) -> dict[str, Any]:
        given: dict[str, Any] = json.loads(self.scripts[0])
        return given

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = self.given["timeline"]["data"]
        return data

    @property
    def told(self) -> str:
        """All that the page's script has to tell."""
        return json.dumps(self.given, ensure_ascii=False)


def unpacked(data: dict[str, Any], wanted: Lane) -> list[tuple[int, int, str, str]]:
    """Start, end, kind and words of a lane's spans, read as the page's script reads them."""
    packed = next(
        lane["spans"] for lane in data["lanes"] if (lane["group"], lane["name"]) == (wanted.group, wanted.name)
    )
    found, at = [], 0
    for gap, seconds, kind, words in zip(*(packed[i::4] for i in range(4)), strict=True):
        found.append((at + gap, at + gap + seconds, data["kinds"][kind]["name"], data["strings"][words]))
        at += gap + seconds
    return found


def test_the_page_asks_nothing_of_any_network_and_forbids_itself_to() -> None:
    text = page(simulated("async_partial"))
    assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|url\(", text)
    for tag, attributes in Page(text).elements:
        assert tag not in ("link", "iframe", "img", "object")
        assert not attributes.keys() & {"src", "href"}
    assert "default-src 'none'" in text


@pytest.mark.parametrize("mode", ["async_partial", "colocate_async"])
def test_the_page_holds_every_span_to_the_microsecond(mode: str) -> None:
    timeline = simulated(mode)
    data = Page(page(timeline)).data
    origin = timeline.window[0]
    for lane in timeline.lanes:
        shown = unpacked(data, lane)
        assert len(shown) == len(lane.spans)
        for (start, end, kind, words), span in zip(shown, lane.spans, strict=True):
            assert start == pytest.approx(1e6 * (span.start - origin), abs=1)
            assert end == pytest.approx(1e6 * (span.end - origin), abs=1)
            assert kind == span.kind
            assert span.label in words


def test_the_header_has_the_runs_figures_and_the_sentence() -> None:
    timeline = build_timeline(ScriptedRun().build())
    parsed = Page(page(timeline))
    text = parsed.text + parsed.told
    for expected in ("async_partial", "completed", "trainer idle", "lag, mean", "bound 2", "of 40 admitted", "0.786"):
        assert expected in text
    assert timeline.summary["bottleneck"] in text


def test_a_simulated_run_says_so_and_shows_nothing_that_was_not_simulated() -> None:
    parsed = Page(page(build_timeline(ScriptedRun().build(), simulated=True)))
    text = parsed.text + parsed.scripts[0]
    assert "simulated from a profile" in text
    assert "validates v0: " in text and "of 40 admitted" in text
    for meaningless in ("completed", "validation reward", "0.786", "mean reward"):
        assert meaningless not in text


def test_idle_reasons_are_listed_and_readers_without_scripts_are_told() -> None:
    parsed = Page(page(simulated("async_partial")))
    assert "waits for groups from the message queue" in parsed.told
    assert "noscript" in {tag for tag, _ in parsed.elements}
    assert "details" in {tag for tag, _ in parsed.elements}


def test_labels_cannot_leave_the_place_that_they_stand_in() -> None:
    nasty = 'a </script><script>alert("1")</script> & <b>ünï ✗ \u2028 "quoted"'
    events = [
        started(mode=nasty),
        Note(time=1.0, level="warning", text=nasty),
        RunFinished(time=2.0, status="failed", reason=nasty, version=0, groups={}),
    ]
    parsed = Page(page(build_timeline(events)))
    assert [tag for tag, _ in parsed.elements].count("script") == 2
    assert "b" not in {tag for tag, _ in parsed.elements}
    assert nasty in parsed.data["strings"]
    assert nasty in parsed.text
    assert parsed.given["status"]["reason"] == nasty


def test_a_lane_without_spans_a_run_of_one_event_and_failed_runs_have_pages() -> None:
    for events in (cut_short(), failed(), [started()], []):
        parsed = Page(page(build_timeline(events)))
        assert "Headway timeline" in parsed.text
        assert "NaN" not in parsed.told
    whole = simulated("async_partial")
    empty = Lane("Run", "empty")
    bare = Timeline(whole.window, (empty,), (), (), whole.summary, whole.measured)
    assert unpacked(Page(page(bare)).data, empty) == []


def test_the_page_is_written_in_utf_8(tmp_path: Path) -> None:
    write_html(build_timeline(failed()), tmp_path / "page.html", name="ünï ✗")
    assert "ünï ✗" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "color"), [("gap", Color.GAP), ("log-prob", Color.LOGPROB), ("entropy", Color.ENTROPY)]
)
def test_pages_colour_tokens_by_the_steps_that_the_terminal_has(name: str, color: Color) -> None:
    """Steps with bounds of their own: a gap of 0.0001 is nothing, whatever else is in its row."""
    scale = scale_of(color, ())
    for text in (page(build_timeline(story(versions=1))), live_page("run")):
        given = Page(text).given["scales"][name]
        assert given["bounds"] == list(scale.bounds)
        assert given["labels"] == [step.label for step in scale.steps]
        assert [bool(strength) for strength in given["strengths"]] == [bool(step.style) for step in scale.steps]
        assert max(abs(strength) for strength in given["strengths"]) == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_pages_script_parses(tmp_path: Path) -> None:
    script = tmp_path / "page.js"
    script.write_text(Page(page(build_timeline([]))).scripts[1], encoding="utf-8")
    subprocess.run(["node", "--check", str(script)], check=True, timeout=30)


# ------------------------------------------------------------------------------------------ runs with many spans

pieces = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 6), st.sampled_from([SpanKind.DECODE, SpanKind.IDLE, SpanKind.HALTED])),
    max_size=60,
)


def lane_of(parts: list[tuple[int, int, SpanKind]]) -> tuple[LaneSpan, ...]:
    spans, at = [], 0
    for gap, seconds, kind in parts:
        span = (at + gap, at + gap + seconds)
        spans.append(
            LaneSpan(*span, kind, "decodes") if kind is SpanKind.DECODE else idle(span, f"is {kind}", kind=kind)
        )
        at = span[1]
    return tuple(spans)


@searched(100, pieces, st.integers(1, 30))
def test_merging_short_spans_keeps_the_seconds_of_each_kind_and_moves_none_further_than_the_resolution(
    parts: list[tuple[int, int, SpanKind]], resolution: int
) -> None:
    spans = lane_of(parts)
    shown = tuple(merge_short(spans, resolution))
    assert len(shown) <= len(spans)
    assert all(before.end <= after.start for before, after in pairwise(shown))
    for kind in (SpanKind.DECODE, SpanKind.IDLE, SpanKind.HALTED):
        for until in range(0, 800, 7):
            before, after = (
                sum(max(0, min(s.end, until) - s.start) for s in of if s.kind is kind) for of in (spans, shown)
            )
            assert abs(before - after) <= resolution
        assert sum(s.seconds for s in shown if s.kind is kind) == sum(s.seconds for s in spans if s.kind is kind)
    assert [span for span in spans if span.seconds >= resolution] == [
        s for s in shown if s in spans and s.seconds >= resolution
    ]


def test_a_run_with_too_many_spans_is_merged_to_the_limit_and_the_page_says_so() -> None:
    spans = tuple(
        span
        for i in range(6_000)
        for span in (LaneSpan(i, i + 0.75, SpanKind.DECODE, f"decodes {i}"), idle((i + 0.75, i + 1), "no requests"))
    )
    lane = Lane("Replicas", "rollout-0", spans)
    shown, resolution = merged([lane], (0.0, 6_000.0), most=2_000)
    assert len(shown[0].spans) <= 2_000
    assert resolution > 0
    assert sum(shown[0].idle_by_reason((0.0, 6_000.0)).values()) == pytest.approx(1_500)
    whole = simulated("async_partial")
    big = Timeline((0.0, 6_000.0), (lane,), (), (), whole.summary, (0.0, 6_000.0))
    text = page(big, max_spans=2_000)
    assert "are merged" in text
    assert len(text) < 200_000
    assert Page(text).data["lanes"][0]["busy"] == pytest.approx(0.75)
    assert "are merged" not in page(whole)
