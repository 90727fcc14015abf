"""Samples, found again in their file, and chosen for a page; lines that are read while they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.events import GroupAdmitted, GroupRewarded, GroupSettled, TrajectoryFinished
from headway.reports.record.file_access import Rewritten, Tail
from headway.reports.samples.samples_file import ON_PAGE, SampleIndex, for_page, read_all, spread
from headway.reports.timeline.run_history import GroupLog
from tests.reports.stories import lines, sample, validated


def write(path: Path, text: str, mode: str = "a") -> None:
    with path.open(mode) as file:
        file.write(text)


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path, tail = tmp_path / "file", Tail(tmp_path / "file")
    assert list(tail.read()) == []
    write(path, "one\ntw")
    assert list(tail.read()) == [(0, b"one\n")]
    write(path, "o\nthree\n")
    assert list(tail.read()) == [(4, b"two\n"), (8, b"three\n")]
    assert list(tail.read()) == []


def test_a_line_that_is_longer_than_what_is_read_at_once_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.reports.record.file_access.CHUNK", 4)
    path = tmp_path / "file"
    write(path, f"{'x' * 50}\nend\n")
    tail = Tail(path)
    assert [line for _ in range(3) for _, line in tail.read()] == [b"x" * 50 + b"\n", b"end\n"]


def test_a_tail_ends_a_line_where_every_other_reader_does(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"damaged\rby\r\nbytes \x0b\x0c\x85\nand whole\n")
    assert [line for _, line in Tail(path).read()] == path.open("rb").readlines()


@pytest.mark.parametrize("change", ["replaced", "shortened", "removed"])
def test_a_tail_notices_a_file_that_is_another_one(tmp_path: Path, change: str) -> None:
    path = tmp_path / "file"
    write(path, "one\ntwo\n")
    tail = Tail(path)
    assert len(list(tail.read())) == 2
    if change == "replaced":
        write(tmp_path / "other", "one\ntwo\nthree\n")
        (tmp_path / "other").replace(path)
    elif change == "shortened":
        write(path, "one\n", "w")
    else:
        path.unlink()
    with pytest.raises(Rewritten):
        list(tail.read())


def test_samples_are_found_by_group_and_by_validation_and_the_last_of_a_group_counts(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, lines([sample(3, 1), validated(2, 7), sample(3, 2), sample(4, 2)]))
    index = SampleIndex(path)
    assert index.read_on() == 4
    assert [*index.lines.values()] == [[2, 7, "addition", 1.0, 12.0]]
    assert json.loads(index.line((3,)) or b"")["version"] == 2
    assert json.loads(index.line((2, 7)) or b"")["prompt"] == "What is 40 + 2?"
    assert index.line((5,)) is None
    write(path, "{broken\n" + lines([sample(5, 3)]))
    assert index.read_on() == 2
    assert sorted(index.groups) == [3, 4, 5]
    assert index.damaged == 1


def test_lone_surrogates_and_damaged_lines_end_no_page(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    one = {**sample(3, 1), "answer": "half \ud83d"}
    broken = ['{"group": 4, "version": 1, "half\n', "{}\n"]
    write(path, json.dumps(one) + "\n" + "".join(broken) + json.dumps({**validated(2, 7), "source": "\udc00"}) + "\n")
    index = read_all(path)
    group, problem = for_page(index)
    json.dumps([group, problem, *index.lines.values()], ensure_ascii=False).encode()
    assert (group["answer"], problem["source"], index.damaged) == ("half \\ud83d", "\\udc00", 2)


def test_a_run_without_samples_has_none(tmp_path: Path) -> None:
    assert for_page(read_all(tmp_path / "samples.jsonl")) == []


def test_spreading_begins_with_both_ends_and_leaves_nothing_out() -> None:
    assert list(spread(9))[:5] == [8, 0, 4, 6, 2]
    assert sorted(spread(37)) == list(range(37))
    assert list(spread(0)) == []


def test_a_page_gets_samples_of_all_parts_of_the_run_within_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, lines(row for v in range(60) for row in (sample(2 * v, v), sample(2 * v + 1, v), validated(v, 1))))
    chosen = for_page(read_all(path), budget=100_000)
    assert 50_000 < len(json.dumps(chosen)) < 102_000
    groups = [row["group"] for row in chosen if "group" in row]
    assert {0, 119} <= set(groups)
    assert all(any(low <= group < low + 30 for group in groups) for low in (0, 30, 60, 90))
    assert {0, 59} <= {row["validation"] for row in chosen if "validation" in row}
    assert "ids" not in chosen[0]["episodes"][0]["rows"][0]


def test_a_group_that_is_too_large_keeps_the_tokens_of_its_first_episodes_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, lines([sample(1, 1, tokens=2048, episodes=12)]))
    (shown,) = for_page(read_all(path))
    kept = [bool(episode["rows"]) for episode in shown["episodes"]]
    assert kept == sorted(kept, reverse=True)
    assert 0 < sum(kept) < 12
    assert shown["left_out"] == 12 - sum(kept)
    assert len(json.dumps(shown)) < ON_PAGE


# ------------------------------------------------------------------------------------------ groups


def admitted(number: int) -> GroupAdmitted:
    return GroupAdmitted(
        time=0, number=number, epoch=0, row=0, attempt=0, version=0, admitted=1, discarded=0, limit=9, source="maths"
    )


def finished(number: int, tokens: int, failure: str | None = None) -> TrajectoryFinished:
    return TrajectoryFinished(
        time=0,
        number=number,
        k=0,
        replica="r",
        prompt_tokens=1,
        tokens=tokens,
        finish_reason="stop",
        version_spans=[],
        started=0,
        finished=0,
        failure=failure,
    )


def test_a_groups_line_tells_its_fate_mean_reward_and_length() -> None:
    log = GroupLog()
    for number in (0, 1):
        log.on_event(admitted(number))
    for event in (finished(0, 10), finished(0, 30), finished(0, 99, "TimeOut")):
        log.on_event(event)
    log.on_event(GroupRewarded(time=0, number=0, rewards=[0.0, 1.0]))
    log.on_event(GroupSettled(time=0, number=1, fate="failed", reason="it raised"))
    assert log.lines() == [
        [0, 0, "maths", "in_flight", None, 0.5, 20.0, None],
        [1, 0, "maths", "failed", "it raised", None, None, None],
    ]


def test_the_oldest_groups_are_forgotten_and_sampled_ones_later() -> None:
    log = GroupLog(sampled={1, 5}, most=4)
    for number in range(9):
        log.on_event(admitted(number))
        log.on_event(GroupSettled(time=0, number=number, fate="failed", reason="it raised"))
    log.on_event(admitted(9))
    assert [line[0] for line in log.lines()] == [1, 5, 6, 7, 8, 9]
