"""A run over several sources: what is read from where, who is held out, and which row numbers prompts have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config.schema import Config
from headway.data.rows import read_rows
from headway.data.sources import build_sources
from headway.errors import DataError
from tests.data.conftest import CHAT_TEMPLATE

WriteRows = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> WriteRows:
    """A JSONL file of ``count`` rows whose answers are ``<name><i>``."""

    def write(name: str, count: int, prompt: str = "{}?", **columns: Any) -> str:
        rows = [{"prompt": prompt.format(i), "answer": f"{name}{i}", **columns} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / f"{name}.jsonl")

    return write


def config_of(**data: Any) -> Config:
    return Config.model_validate({"data": data, "run": {"seed": 3}})


def test_a_list_of_files_is_read_one_after_the_other(write: WriteRows, tokenizer) -> None:
    config = config_of(train=[write("a", 2), write("b", 3)], val_size=0, shuffle=False, epochs=1)
    prompts = list(iter(build_sources(config, tokenizer).train.next, None))
    assert [(p.row, p.source, p.answer) for p in prompts] == [
        (0, "a", "a0"),
        (1, "a", "a1"),
        (2, "b", "b0"),
        (3, "b", "b1"),
        (4, "b", "b2"),
    ]


def test_sources_may_name_their_columns_each(write: WriteRows, tmp_path: Path, tokenizer) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"q": "2?", "solution": {"value": 4}}) + "\n")
    sources = [write("a", 1), {"path": str(other), "prompt_key": "q", "answer_key": "solution.value", "name": "mine"}]
    prompts = read_rows(config_of(train=sources, val_size=0)).train
    assert [(p.prompt, p.answer, p.source) for p in prompts] == [("0?", "a0", "a"), ("2?", 4, "mine")]


def test_an_epoch_has_its_sources_by_weight(write: WriteRows, tokenizer) -> None:
    sources = [{"path": write("a", 90), "weight": 0.25}, {"path": write("b", 10), "weight": 0.75}]
    bundle = build_sources(config_of(train=sources, val_size=0, epochs=2), tokenizer)
    prompts = list(iter(bundle.train.next, None))
    assert bundle.train.rows == 100
    for epoch in range(2):
        drawn = Counter(p.answer for p in prompts if p.epoch == epoch)
        assert sum(n for answer, n in drawn.items() if answer.startswith("a")) == 25
        assert {n for answer, n in drawn.items() if answer.startswith("b")} <= {7, 8}
    assert len({p.answer for p in prompts if p.answer.startswith("a")}) == 50  # no row again before all others


def test_no_prompt_of_a_weighted_run_has_the_row_number_of_a_held_out_one(write: WriteRows, tokenizer) -> None:
    sources = [{"path": write("a", 9), "weight": 1}, {"path": write("b", 2), "weight": 4}]
    for held_out in ({"val": write("v", 15)}, {"val_size": 3}):
        config = config_of(train=sources, epochs=3, **held_out)
        bundle = build_sources(config, tokenizer)
        prompts = list(iter(bundle.train.next, None))
        assert len({(p.epoch, p.row) for p in prompts}) == len(prompts)
        assert {p.row for p in prompts}.isdisjoint(p.row for p in bundle.val)
        assert {p.answer for p in prompts}.isdisjoint(p.answer for p in bundle.val)


def test_rows_held_out_by_seed_come_from_all_sources_and_are_none_of_trainings(write: WriteRows, tokenizer) -> None:
    rows = read_rows(config_of(train=[write("a", 30), write("b", 70)], val_size=20))
    answers = [f"a{i}" for i in range(30)] + [f"b{i}" for i in range(70)]
    assert [record.answer for record in rows.val] == [answers[row] for row in rows.val_rows]
    assert [record.answer for record in rows.train] == [answers[row] for row in rows.train_rows]
    assert sorted([*rows.train_rows, *rows.val_rows]) == list(range(100))
    assert {record.source for record in rows.val} == {"a", "b"}
    assert [part.rows for part in rows.parts] == [
        sum(record.source == source for record in rows.train) for source in ("a", "b")
    ]


def test_one_source_as_a_list_is_the_same_as_its_path(write: WriteRows, tokenizer) -> None:
    path = write("a", 20)
    runs = [build_sources(config_of(train=given, val_size=5, epochs=2), tokenizer) for given in (path, [path])]
    drawn = [[(p.epoch, p.row, p.answer) for p in iter(run.train.next, None)] for run in runs]
    assert drawn[0] == drawn[1]
    assert [p.row for p in runs[0].val] == [p.row for p in runs[1].val]


def test_held_out_files_may_be_several_and_are_asked_in_order(write: WriteRows, tokenizer) -> None:
    config = config_of(train=write("a", 4), val=[write("v", 2), {"path": write("w", 1), "name": "aime"}])
    val = build_sources(config, tokenizer).val
    assert [(p.answer, p.source, p.row) for p in val] == [("v0", "v", 4), ("v1", "v", 5), ("w0", "aime", 6)]


def test_held_out_rows_are_capped_by_seed_over_all_sources(write: WriteRows, tokenizer) -> None:
    def answers(seed: int, most: int | None) -> list[str]:
        config = config_of(train=write("a", 4), val=[write("v", 30), write("w", 30)], val_max_samples=most)
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
        rows = read_rows(config)
        assert sum(part.rows for part in rows.val_parts) == len(rows.val) == len(set(rows.val_rows))
        return [prompt.answer for prompt in build_sources(config, tokenizer, rows).val]

    every = answers(3, None)
    few = answers(3, 10)
    assert few == answers(3, 10) == [answer for answer in every if answer in few] != answers(4, 10)
    assert (len(every), len(few), len({answer[0] for answer in few})) == (60, 10, 2)
    assert answers(3, 100) == every


def test_what_is_left_out_is_counted_by_source(write: WriteRows, tokenizer) -> None:
    long = "x" * 10 + "{}"
    sources = [write("a", 3), write("b", 2, long), write("c", 1)]
    mixed = [{"path": sources[0]}, {"path": sources[1], "name": "a"}, {"path": sources[2]}]
    config = config_of(train=[sources[0], sources[2]], val=mixed, max_prompt_length=5, epochs=1)
    bundle = build_sources(config, tokenizer)
    assert (bundle.train.left_out.counts, bundle.val_left_out.counts) == ({}, {"a": {"too_long": 2}})


def test_a_source_of_nothing_but_too_long_prompts_ends_the_run_before_it_starts(write: WriteRows, tokenizer) -> None:
    config = config_of(train=[write("a", 3), write("b", 2, "x" * 20)], val_size=0, max_prompt_length=10)
    with pytest.raises(DataError, match=r"all 2 prompts of .*b\.jsonl .*data\.max_prompt_length=10 tokens"):
        build_sources(config, tokenizer)


def test_holding_out_all_of_one_small_source_is_refused_by_name(write: WriteRows) -> None:
    config = config_of(train=[write("a", 1), write("b", 1)], val_size=1)
    with pytest.raises(DataError, match=r"(a|b)\.jsonl: .*held out \(data\.val_size\)"):
        build_sources(config, tokenizer=None)


def test_the_columns_that_a_reward_may_ask_for_are_those_of_all_rows(write: WriteRows, tmp_path: Path) -> None:
    sources = [write("a", 2, ability="math", hint="?", level=1), write("b", 2, level=2, ability="code", tests=[])]
    rows = read_rows(config_of(train=sources, val_size=0))
    assert rows.columns == ("ability", "level")
    assert rows.lacked == {"hint": f"{tmp_path}/b.jsonl, line 1", "tests": f"{tmp_path}/a.jsonl, line 1"}
    assert read_rows(config_of(task={"name": "sort"})).columns == ("length",)


def test_held_out_rows_and_single_rows_have_a_say_in_the_columns(write: WriteRows, tmp_path: Path) -> None:
    train, val = write("a", 2, level=1, hint="?"), write("v", 2, hint="?")
    with Path(train).open("a") as file:
        file.write('{"prompt": "", "answer": "", "level": 2}\n')
    rows = read_rows(config_of(train=train, val=val))
    assert rows.columns == ()
    assert rows.lacked == {"hint": f"{tmp_path}/a.jsonl, line 3", "level": f"{tmp_path}/v.jsonl, line 1"}
    rows = read_rows(config_of(task={"name": "sort"}, val=val))
    assert rows.lacked == {"length": f"{tmp_path}/v.jsonl, line 1", "hint": "a problem of sort"}


def test_a_row_that_the_template_cannot_render_is_named(write: WriteRows, tmp_path: Path, make_tokenizer) -> None:
    path = tmp_path / "chat.jsonl"
    chats = [[{"role": "user", "content": "fine"}], [{"role": "tool", "content": "not fine"}]]
    path.write_text("".join(json.dumps({"prompt": chat, "answer": 1}) + "\n" for chat in chats))
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}x"
    )
    with pytest.raises(DataError, match=r"prompt of chat \(.*chat\.jsonl, line 2\): .*no tools"):
        build_sources(config_of(train=str(path), val_size=0), make_tokenizer(template))


def test_messages_without_a_template_name_the_row(write: WriteRows, tmp_path: Path, tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"prompt": chat, "answer": 1}) + "\n")
    with pytest.raises(DataError, match=r"prompts of chat \(.*line 1\) need a chat template"):
        build_sources(config_of(train=str(path), val_size=0), tokenizer)


def test_a_prompt_says_its_messages_only_where_the_row_had_them(write: WriteRows, make_tokenizer) -> None:
    config = config_of(train=write("a", 1), val_size=0, chat_template="always")
    prompt = build_sources(config, make_tokenizer(CHAT_TEMPLATE)).train.next()
    assert prompt.messages is None
    assert prompt.question in prompt.text != prompt.question
