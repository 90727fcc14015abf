"""``headway show``: tables, groups token by token, and what it says where there is nothing to show."""

from __future__ import annotations

import io
import json
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from headway.cli import cli
from headway.config.loading import dump
from headway.config.schema import Config
from headway.events import Event, GroupSettled, TrajectoryFinished
from headway.reports import sample_query
from headway.reports.record.events_file import EventsFile
from headway.reports.run_directory import RunLock
from headway.reports.sample_printer import print_group
from headway.reports.samples.token_view import Color, scale_of, values_of
from tests.reports.samples import episode, row, sample, validation
from tests.reports.scripted_run import ScriptedRun

SAMPLES = [
    validation(0, 2, "five"),
    sample(3, [episode(0, [row()]), episode(1, [row(), row(context="2+2=4 is so")])]),
    sample(7, [episode(0, []), episode(1, [])], fate="filtered", reason="all rewards are 1", lag=None, source="words"),
    sample(9, [], fate="dropped", reason="aborted", lag=None),
    validation(1, 2, "six \x1b[2J"),
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shown") / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text(dump(Config()))
    events = EventsFile(directory / "events.jsonl", print)
    for event in ScriptedRun(versions=2).build():
        events.on_event(event)
    events.close()
    (directory / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in SAMPLES))
    return directory


def show(run: Path | str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["show", str(run), *arguments], env={"COLUMNS": "160"})


def said(run: Path | str, *arguments: str) -> str:
    done = show(run, *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(run: Path | str, *arguments: str) -> str:
    done = show(run, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.removeprefix("error: ").strip()


# ---------------------------------------------------------------------------------------------- the table


def test_the_table_has_a_line_for_each_group_that_was_drawn(run_dir: Path) -> None:
    head, *lines = [line.split() for line in said(run_dir).splitlines()]
    assert head == ["group", "version", "fate", "lag", "reward", "tokens", "source", "prompt"]
    assert lines == [
        ["3", "4", "trained", "1", "0.500", "3", "sums", "2+2="],
        ["7", "4", "filtered", "-", "0.500", "3", "words", "2+2="],
        ["9", "4", "dropped", "-", "-", "-", "sums", "2+2="],
    ]


def test_the_table_shows_the_question_where_the_prompt_is_a_templates(tmp_path: Path, run_dir: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    templated = sample(3, [episode(0, [row()])], prompt="<|user|>2+2=<|model|>", question="2+2=")
    (run / "samples.jsonl").write_text(json.dumps(templated) + "\n")
    assert said(run).split()[-1] == "2+2="
    assert "<|user|>" in said(run, "3")


def test_the_table_can_be_narrowed(run_dir: Path) -> None:
    def groups(*arguments: str) -> list[int]:
        return [line["group"] for line in json.loads(said(run_dir, "--json", *arguments))]

    assert groups() == [3, 7, 9]
    assert groups("--fate", "filtered") == groups("--source", "words") == [7]
    assert groups("--last", "2") == [7, 9]
    assert "2 earlier ones are not shown; --last N shows more" in said(run_dir, "--last", "1")
    assert "no group that left a sample was failed" in said(run_dir, "--fate", "failed")
    (line,) = json.loads(said(run_dir, "--json", "--fate", "trained"))
    assert (line["reward"], line["lengths"], line["episodes"]) == (0.5, [3, 3], 2)


def test_validations_have_a_table_and_each_problem_its_answers_by_version(run_dir: Path) -> None:
    assert [line.split()[:2] for line in said(run_dir, "--validation").splitlines()[1:]] == [["0", "2"], ["1", "2"]]
    told = said(run_dir, "2", "--validation")
    assert told.index("version 0, answer 0: reward 1") < told.index("five") < told.index("version 1, answer 0")
    assert "six <0x1B>[2J" in told  # and not what a terminal would obey
    assert [one["validation"] for one in json.loads(said(run_dir, "2", "--validation", "--json"))] == [0, 1]


# ---------------------------------------------------------------------------------------------- one group


def test_a_group_is_told_from_its_prompt_to_its_tokens(run_dir: Path) -> None:
    told = said(run_dir, "3")
    assert "group 3: trained at version 4, lag 1, from sums" in told
    assert "answer: 4" in told
    times = "0.5s waited for an engine, 2.5s generated, 0.5s scored, 6.0s waited for training and trained"
    assert f"times: {times}" in told
    assert "row 2 of 2, behind 4 tokens that end with\n  2+2=4 is so" in told
    # By hand: gaps 0.01, −0.75 and 0.3; entropies 0.05, 0.7 and 2.5; the hole counts nowhere.
    assert told.count("gap -0.147 on average, -0.75 at most, entropy 1.08, advantage -1.5 to 0.5") == 3
    assert [line.split()[:4] for line in told.splitlines() if "rollout-0" in line] == [
        ["0", "0.000", "0", "-"],
        ["1", "1.000", "1", "-"],
    ]


def test_without_colours_tokens_that_stand_out_are_marked(run_dir: Path) -> None:
    told = said(run_dir, "3", "--episode", "0")
    assert "4⟨ is⟩-0.75↵\n<tool> right" in told
    assert "gap: trainer − engine, nats: <-0.5  >0.5 is marked ⟨so⟩, with its number" in told
    assert "episode 1:" not in told
    assert "4 is↵\n<tool>⟨ right⟩-1.50" in said(run_dir, "3", "--episode", "0", "--color", "advantage")
    assert "⟨version 3: 4⟩ is↵\n<tool>⟨version 4:  right⟩" in said(run_dir, "3", "--color", "version", "--episode", "0")
    assert "⟨trained: 4⟩ is⟨only read, or left out: ↵\n<tool>⟩⟨trained:  right⟩" in said(
        run_dir, "3", "--color", "mask", "--episode", "0"
    )


def coloured(color: Color, **settings: Any) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system="truecolor", width=160, **settings)
    print_group(SAMPLES[1], console, color=color, episode=0)
    return output.getvalue()


@pytest.mark.parametrize("color", list(Color))
def test_with_colours_a_legend_says_what_they_mean(color: Color, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    told = coloured(color)
    assert "⟨" not in told
    scale = scale_of(color, [row()])
    assert scale.title in told
    for value, piece in zip(values_of(color, row()), ["4", " is", "<tool>", " right"], strict=True):
        step = scale.step(value)
        if step is not None and step.style:
            background = step.style.removeprefix("black on #")
            rgb = ";".join(str(int(background[i : i + 2], 16)) for i in (0, 2, 4))
            assert f"\x1b[30;48;2;{rgb}m{piece}" in told
            assert f"\x1b[30;48;2;{rgb}m {step.label} " in told


def test_steps_of_advantages_are_thirds_of_the_largest_one() -> None:
    scale = scale_of(Color.ADVANTAGE, [row()])
    labels = ["<-1", "-1..-0.5", "-0.5..0", "0", "0..0.5", "0.5..1", ">1"]
    assert [step.label for step in scale.steps] == labels
    assert [scale.step(value) for value in (-1.5, -0.6, -0.1, 0.0, 0.1, 0.5, 1.5)] == list(scale.steps)
    nothing = row(columns={"advantages": [0.0] * 4})
    assert [step.label for step in scale_of(Color.ADVANTAGE, [nothing]).steps] == ["0"]


def test_no_color_is_obeyed() -> None:
    assert "⟨ is⟩-0.75" in coloured(Color.GAP, no_color=True)


def test_every_token_has_its_numbers_in_a_table(run_dir: Path) -> None:
    lines = [line.split() for line in said(run_dir, "3", "--tokens", "--episode", "0").splitlines()]
    at = lines.index(["#", "token", "version", "engine", "trainer", "gap", "entropy", "advantage"])
    assert lines[at + 1 : at + 5] == [
        ["0", "4", "3", "-0.1100", "-0.1000", "0.0100", "0.0500", "0.5000"],
        ["1", "is", "3", "-0.2500", "-1.0000", "-0.7500", "0.7000", "0.5000"],
        ["2", "\\n<tool>", *["-"] * 6],
        ["3", "right", "4", "-2.3000", "-2.0000", "0.3000", "2.5000", "-1.5000"],
    ]


def test_a_long_row_says_what_it_lacks() -> None:
    output = io.StringIO()
    one = sample(1, [episode(0, [row(cut=1200)])])
    print_group(one, Console(file=output, width=160))
    assert "[…1,200 tokens left out…]" in output.getvalue()
    print_group(one, Console(file=output, width=160), tokens=True)
    assert [line.split()[0] for line in output.getvalue().splitlines()[-4:]] == ["0", "1", "1202", "1203"]


def test_numbers_that_are_not_finite_are_shown_as_missing() -> None:
    output = io.StringIO()
    one = sample(1, [episode(0, [row(logprobs=[None, -1.0, None, None])])])
    for tokens in (False, True):
        print_group(one, Console(file=output, width=160), tokens=tokens)
    assert "gap -0.75 on average" in output.getvalue()


def test_a_group_that_was_not_trained_shows_what_was_said(run_dir: Path) -> None:
    told = said(run_dir, "7")
    assert "group 7: filtered (all rewards are 1) at version 4, from words" in told
    assert "4 is right" in told
    assert "no tokens are kept of it, since it was not trained" in told
    told = said(run_dir, "9")
    assert "group 9: dropped (aborted)" in told


def test_a_conversation_is_told_by_who_speaks() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    talk = {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [call, {"role": "tool", "content": "4"}]}
    output = io.StringIO()
    one = sample(1, [episode(0, [], conversation=talk, turns=2, failure="broke", reward=None)], fate="failed")
    print_group(one, Console(file=output, width=160))
    told = output.getvalue()
    assert told.index("user:\n  2+2?") < told.index("{'name': 'add'}") < told.index("tool:\n  4")
    assert "episode 0: no reward" in told
    assert "failed: broke" in told


def test_json_is_the_sample_itself(run_dir: Path) -> None:
    assert json.loads(said(run_dir, "3", "--json")) == SAMPLES[1]


# ---------------------------------------------------------------------------------------------- not drawn


def test_a_group_that_was_not_drawn_is_told_from_the_record(run_dir: Path) -> None:
    told = said(run_dir, "4")
    assert told.splitlines()[0].startswith("group 4: trained at version 0, lag 0, from ")
    for line in ("times: ", "rewards: "):
        assert line in told
    assert told.splitlines()[-1] == (
        "It was not drawn, so its text was not kept: about 2 groups of each version leave theirs. A larger "
        "reports.samples keeps more."
    )
    assert next(line.split() for line in told.splitlines() if "rollout-0" in line)[0] == "0"
    whole = json.loads(said(run_dir, "4", "--json"))
    assert (whole["group"], whole["fate"], whole["prompt"]) == (4, "trained", None)
    assert whole["why"].startswith("It was not drawn")


def test_a_group_whose_episodes_failed_before_their_first_turn_is_told_from_the_record(tmp_path: Path) -> None:
    reason = "episode failed: the program raised KeyError: 'x' (my_agent.py:4, in my_run)"
    events = EventsFile(tmp_path / "events.jsonl", print)
    for event in ScriptedRun(versions=1).build():
        if isinstance(event, TrajectoryFinished) and event.number == 3:
            failed: Event = replace(event, version_spans=[], tokens=0, turns=0, replica="", failure=reason)
        elif isinstance(event, GroupSettled) and event.number == 3:
            failed = replace(event, fate="failed", reason=reason)
        else:
            failed = event
        events.on_event(failed)
    events.close()
    told = said(tmp_path, "3")
    assert told.splitlines()[0].startswith(f"group 3: failed ({reason}) at version 0")
    assert told.splitlines()[-1].endswith("samples.jsonl is missing.")


def test_underscores_of_a_reason_stay() -> None:
    output = io.StringIO()
    one = sample(1, [], fate="in_flight", reason="KeyError: 'x' (my_reward.py:4, in my_score)")
    print_group(one, Console(file=output, width=160))
    assert "group 1: in flight (KeyError: 'x' (my_reward.py:4, in my_score))" in output.getvalue()


# ---------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_shown_is_one_message(run_dir: Path, tmp_path: Path) -> None:
    last = max(json.loads(line)["number"] for line in (run_dir / "events.jsonl").read_text().splitlines()
               if '"group.admitted"' in line)  # fmt: skip
    assert refused(run_dir, "99") == f"GROUP: got 99, but the run in {run_dir} has admitted the groups 0 to {last}"
    assert refused(run_dir, "3", "--episode", "5") == "--episode: got 5, but group 3 has the episodes 0, 1"
    assert refused(run_dir, "9", "--episode", "5").endswith("none, for it ended before any was made")
    assert refused(run_dir, "3", "--color", "gaps").startswith("--color: got gaps, expected one of gap, logprob, ")
    assert refused(run_dir, "--fate", "lost").startswith("--fate: got lost, expected one of trained, filtered, ")
    assert refused(run_dir, "--fate", "failed", "--validation").endswith("held-out problems have no fate")
    assert refused(run_dir, "--source", "x") == "--source: got x, expected one of sums, words"
    assert refused(run_dir, "--tokens") == "--tokens shows one group that was trained; give its number: GROUP"
    assert refused(run_dir, "3", "--last", "2") == "--last chooses lines of the table; leave GROUP out"
    assert refused(run_dir, "4", "--validation").endswith("the problems that are shown: 2")
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "has no events.jsonl" in refused(tmp_path)


@pytest.mark.parametrize(
    ("events", "samples", "arguments", "message"),
    [
        ("", None, [], "where nothing has happened yet: events.jsonl has no complete line"),
        ('{"kind": "note", "time": 1.0, "level": "info", "text": "x"}\n', "", [], "where no group was admitted yet"),
        (
            '{"kind": "note", "time": 1.0, "level": "info", "text": "x"}\n',
            "",
            ["3"],
            "admitted yet: nobody",
        ),
        (
            '{"kind": "group.admitted", "number": 3, "colour": 1}\n',
            "",
            ["3"],
            "'group.admitted' has other fields, or values of another kind",
        ),
        ('{"kind": "future.thing", "number": 3}\n', "", ["3"], "'future.thing' is none that it has. Read the run with"),
        ('{"kind": "group.admitted", "number": 3, \n', "", ["3"], "is damaged: it is not one whole JSON object. Take"),
        ("\xff\xfe\n", "", ["3"], "is damaged: it is not UTF-8"),
        ("", "{}\n", [], "whose samples.jsonl has damaged lines and no sample of a group that can be read"),
        ("", "{}\n", ["2", "--validation"], "has damaged lines and no sample of a validation that can be read"),
    ],
)
def test_a_run_that_is_damaged_of_another_version_or_still_starting_is_one_message(
    events: str, samples: str | None, arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(dump(Config()))
    (tmp_path / "events.jsonl").write_text(events, encoding="latin-1")
    if samples is not None:
        (tmp_path / "samples.jsonl").write_text(samples)
    assert message in refused(tmp_path, *arguments)


def test_a_run_that_was_told_to_keep_nothing_says_so(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump(Config.model_validate({"reports": {"samples": 0}})))
    (tmp_path / "events.jsonl").write_bytes((run_dir / "events.jsonl").read_bytes())
    assert "which keeps no samples: it has reports.samples=0" in refused(tmp_path)
    assert "the run has reports.samples=0; reports.samples=N keeps N groups a version" in said(tmp_path, "4")


def test_whether_a_run_that_has_nothing_yet_is_starting_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump(Config()))
    (tmp_path / "events.jsonl").write_text("")
    assert refused(tmp_path).endswith("has no complete line; nobody trains there, and nothing will")
    lock = RunLock(tmp_path / "run.lock")
    lock.take()
    assert refused(tmp_path).endswith("the run is still starting; ask again in a moment")
    lock.release()


def test_a_file_of_samples_that_is_missing_is_said_to_be(run_dir: Path, tmp_path: Path) -> None:
    (copied(run_dir, tmp_path, []) / "samples.jsonl").unlink()
    for arguments in ([], ["--validation"], ["2", "--validation"]):
        assert "whose samples.jsonl is missing: what was said is in no other file" in refused(tmp_path, *arguments)
    assert "is not known: the run's samples.jsonl is missing." in said(tmp_path, "4")


def test_one_episode_is_chosen_in_json_and_of_a_group_without_a_text_too(run_dir: Path) -> None:
    only = json.loads(said(run_dir, "3", "--json", "--episode", "1"))
    assert only == {**SAMPLES[1], "episodes": [SAMPLES[1]["episodes"][1]]}
    told = json.loads(said(run_dir, "4", "--json", "--episode", "0"))["episodes"]
    assert [(one["k"], one["replica"]) for one in told] == [(0, "rollout-0")]
    assert "--episode: got 77, but group 3 has the episodes 0, 1" in refused(run_dir, "3", "--json", "--episode", "77")
    assert "--episode: got 77, but group 4 has the episodes 0" in refused(run_dir, "4", "--episode", "77")


def copied(run_dir: Path, to: Path, samples: list[bytes]) -> Path:
    for name in ("config.yaml", "events.jsonl"):
        (to / name).write_bytes((run_dir / name).read_bytes())
    (to / "samples.jsonl").write_bytes(b"".join(line + b"\n" for line in samples))
    return to


def test_damaged_lines_are_left_out_and_counted_in_one_remark(run_dir: Path, tmp_path: Path) -> None:
    whole = [json.dumps(one).encode() for one in SAMPLES]
    bad = [b'{"group": 4, "version": 1, "half', b"\xff\xfe", b"{}", b'{"group": 5}']
    run = copied(run_dir, tmp_path, [whole[0], bad[0], whole[1], *bad[1:], *whole[2:]])
    table = show(run)
    assert (table.exit_code, table.stdout) == (0, said(run_dir))
    assert table.stderr == f"damaged lines of {run}/samples.jsonl, which are left out: 4 (line 2, 4, 5, …)\n"
    assert json.loads(said(run, "3", "--json")) == SAMPLES[1]
    assert "which are left out: 4" in show(run, "2", "--validation").stderr
    assert "it was not drawn, or its line in samples.jsonl is damaged" in said(run, "4")


# ---------------------------------------------------------------------------------------------- what is printed


def test_nothing_in_a_file_reaches_the_terminal_as_something_that_it_obeys(run_dir: Path, tmp_path: Path) -> None:
    evil = "e\x1b[2J\x9b2J\u202e\u2028\x7f"
    talk = {"prompt": [{"role": evil, "content": evil}], "completion": []}
    one = {"replica": evil, "finish": evil, "parts": {evil: 1.0, "b": 2.0}}
    rows = [row(columns={"advantages": [0.0] * 4, evil: [0.0] * 4}, context=evil)]
    group = sample(1, [episode(0, rows, **one), episode(1, [], conversation=talk, limit=evil, **one)], source=evil)
    problem = validation(0, 2, evil)
    problem["source"], problem["episodes"][0]["parts"] = evil, {evil: 1.0, "b": 1.0}
    other = sample(2, [], fate=evil, reason=evil)
    run = copied(
        run_dir, tmp_path, [json.dumps(line).encode() for line in (group, other, problem, validation(0, 3, "x"))]
    )
    for arguments in ([], ["1"], ["1", "--tokens"], ["2"], ["--validation"], ["2", "--validation"]):
        for more, spelled in (([], "e<0x1B>[2J<0x9B>"), (["--json"], "e\\u001b[2J\\u009b")):
            told = said(run, *arguments, *more)
            assert not [c for c in told if not c.isprintable() and c != "\n"], arguments
            assert spelled in told, arguments
    assert json.loads(said(run, "1", "--json")) == group
    assert "<0x1B>[2J" in refused(run, "--source", "x")


def test_json_of_characters_that_utf_8_cannot_encode_is_printed(run_dir: Path, tmp_path: Path) -> None:
    one = sample(1, [], source="half \ud83d", answer="é 😀")
    run = copied(run_dir, tmp_path, [json.dumps(one).encode()])
    assert json.loads(said(run, "1", "--json"))["source"] == "half \\ud83d"
    assert "é 😀" in said(run, "1", "--json")


def test_a_row_without_a_context_read_the_groups_prompt() -> None:
    output = io.StringIO()
    print_group(sample(1, [episode(0, [row(context=None)])]), Console(file=output, width=160))
    assert "behind 4 tokens" not in output.getvalue()
    print_group(sample(1, [episode(0, [row(context=None), row(context="x")])]), Console(file=output, width=160))
    assert "row 1 of 2, behind 4 tokens that end with\n  2+2=" in output.getvalue()


def test_the_tokens_of_a_group_that_was_too_large_are_said_to_be_missing() -> None:
    output = io.StringIO()
    print_group(sample(1, [episode(0, [])], shortened=True), Console(file=output, width=160))
    assert "no tokens are kept of it, for the sample was too large for its file" in output.getvalue()


def test_a_table_holds_no_sample_longer_than_its_line_takes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Held(dict[str, Any]):
        """A sample whose end can be noticed."""

    alive: weakref.WeakSet[Held] = weakref.WeakSet()
    Held.__hash__ = object.__hash__  # type: ignore[method-assign, assignment]
    most = 0

    def samples(path: Path, **others: Any) -> Iterator[dict[str, Any]]:
        nonlocal most
        for number in range(50):
            one = Held(sample(number, []))
            alive.add(one)
            most = max(most, len(alive))
            yield one

    monkeypatch.setattr(sample_query, "read_samples", samples)
    table = sample_query.listed(run_dir, [], last=10)
    assert ([line["group"] for line in table.lines], table.left_out) == (list(range(40, 50)), 40)
    assert most <= 3
