"""Files as verl's preprocessing writes them, read without a word about their columns."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from headway.config.schema import Config
from headway.data.files import Columns, Record, read_records
from headway.data.sources import build_sources
from headway.errors import DataError
from tests.data.conftest import CHAT_TEMPLATE

SCHEMA = pyarrow.schema(
    [
        ("data_source", pyarrow.string()),
        ("prompt", pyarrow.list_(pyarrow.struct({"content": pyarrow.string(), "role": pyarrow.string()}))),
        ("ability", pyarrow.string()),
        ("reward_model", pyarrow.struct({"ground_truth": pyarrow.string(), "style": pyarrow.string()})),
        (
            "extra_info",
            pyarrow.struct(
                {
                    "answer": pyarrow.string(),
                    "index": pyarrow.int64(),
                    "question": pyarrow.string(),
                    "split": pyarrow.string(),
                }
            ),
        ),
    ]
)
"""Of verl's gsm8k: structs' fields in alphabetical order, as `datasets` leaves them."""


def gsm8k_row(index: int) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"content": f"What is {index}+1?", "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": str(index + 1), "style": "rule"},
        "extra_info": {"answer": f"#### {index + 1}", "index": index, "question": f"{index}+1", "split": "train"},
    }


def parquet(path: Path, rows: list[dict[str, Any]], schema: pyarrow.Schema | None = None) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
    return str(path)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(path: str, **options: Any) -> list[Record]:
    return read_records(path, Columns(**options))


@pytest.mark.parametrize("write", [lambda path, rows: parquet(path, rows, SCHEMA), jsonl], ids=["parquet", "jsonl"])
def test_verls_gsm8k_works_as_it_is(tmp_path: Path, write, request) -> None:
    kind = "parquet" if "parquet" in request.node.callspec.id else "jsonl"
    rows = [gsm8k_row(i) for i in range(3)]
    records = read(write(tmp_path / f"train.{kind}", rows))
    others = [{name: value for name, value in row.items() if name != "prompt"} for row in rows]
    assert records == [
        Record(row["prompt"], row["reward_model"]["ground_truth"], "openai/gsm8k", extra)
        for row, extra in zip(rows, others, strict=True)
    ]


def test_what_a_verl_reward_gets_arrives_with_the_prompt(tmp_path: Path, make_tokenizer) -> None:
    path = parquet(tmp_path / "train.parquet", [gsm8k_row(i) for i in range(4)], SCHEMA)
    config = Config.model_validate({"data": {"train": path, "val_size": 1, "epochs": 1}})
    bundle = build_sources(config, make_tokenizer(CHAT_TEMPLATE))
    prompts = [*iter(bundle.train.next, None), *bundle.val]
    assert sorted(prompt.row for prompt in prompts) == [0, 1, 2, 3]
    for prompt in prompts:
        row = gsm8k_row(prompt.row)
        assert prompt.text == f"<s>[user]What is {prompt.row}+1?[assistant]"
        assert prompt.messages == [{"role": "user", "content": f"What is {prompt.row}+1?"}]
        assert (prompt.source, prompt.answer) == ("openai/gsm8k", str(prompt.row + 1))
        assert prompt.extra["extra_info"] == row["extra_info"]
        assert prompt.extra["ability"] == "math"
        assert prompt.extra["reward_model"]["style"] == "rule"


@pytest.mark.parametrize(
    "ground_truth",
    [
        ["4", "four"],
        7,
        0.5,
        True,
        None,
        {"target": 24, "numbers": [1, 5, 5, 5]},
        [[1, 2], [3]],
        {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"], "fn_name": "f"},
    ],
    ids=str,
)
def test_a_ground_truth_of_any_kind_arrives_as_plain_python(tmp_path: Path, ground_truth: Any) -> None:
    row = {**gsm8k_row(0), "reward_model": {"ground_truth": ground_truth, "style": "rule"}}
    for path in (parquet(tmp_path / "a.parquet", [row]), jsonl(tmp_path / "a.jsonl", [row])):
        (record,) = read(path)
        assert record.answer == ground_truth
        assert type(record.answer) is type(ground_truth)
        assert json.dumps(record.answer) == json.dumps(ground_truth)  # no array anywhere inside


def test_arrays_of_numpy_in_a_pandas_frame_arrive_as_lists(tmp_path: Path) -> None:
    import pandas

    frame = pandas.DataFrame(
        {
            "prompt": [np.array([{"role": "user", "content": "q"}], dtype=object)],
            "reward_model": [{"style": "rule", "ground_truth": np.array(["a", "b"], dtype=object)}],
            "extra_info": [{"ids": np.arange(3), "when": pandas.Timestamp("2024-05-06")}],
        },
        index=[17],
    )
    frame.to_parquet(tmp_path / "a.parquet")
    (record,) = read(str(tmp_path / "a.parquet"))
    assert record.prompt == [{"role": "user", "content": "q"}]
    assert record.answer == ["a", "b"]
    assert record.extra["extra_info"]["ids"] == [0, 1, 2]
    assert record.extra["extra_info"]["when"] == datetime.datetime(2024, 5, 6)


def test_fields_that_parquet_had_to_add_to_a_message_are_taken_off_again(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s", "name": "guide"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": "u"},
    ]
    (record,) = read(parquet(tmp_path / "a.parquet", [{"prompt": messages, "answer": "1"}]))
    assert record.prompt == messages


def test_fields_that_parquet_had_to_add_go_at_any_depth_and_empty_columns_stay(tmp_path: Path) -> None:
    def tool(**properties: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}

    def call(**arguments: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    rows: list[dict[str, Any]] = [
        {
            "prompt": [call(a=1)],
            "answer": {"x": [{"y": 1}, {"z": 2}]},
            "tools": [tool(a={"enum": ["0"]})],
            "n": None,
        },
        {"prompt": [call(b="2")], "answer": {"w": [1, None]}, "tools": [tool(b={"enum": ["1"]}), tool()], "n": 1},
    ]
    read_back = read(parquet(tmp_path / "a.parquet", rows))
    assert [(one.prompt, one.answer, one.extra) for one in read_back] == [
        (row["prompt"], row["answer"], {"tools": row["tools"], "n": row["n"]}) for row in rows
    ]
    explicit = {"prompt": "p", "answer": {"x": None}, "info": {"y": [{"z": None}]}}
    (kept,) = read(jsonl(tmp_path / "a.jsonl", [explicit]))
    assert (kept.answer, kept.extra) == (explicit["answer"], {"info": explicit["info"]})


def test_the_ground_truth_of_verl_goes_before_a_column_called_answer(tmp_path: Path) -> None:
    row = {**gsm8k_row(0), "answer": "the whole solution"}
    path = jsonl(tmp_path / "a.jsonl", [row])
    assert read(path)[0].answer == "1"
    assert read(path)[0].extra["answer"] == "the whole solution"
    assert read(path, answer="answer")[0].answer == "the whole solution"


def test_rows_of_both_kinds_may_stand_in_one_file(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "answer": "plain"},
        gsm8k_row(1),
        {"prompt": "p", "answer": "no truth inside", "reward_model": {"style": "model"}},
        {"prompt": "p", "answer": "nothing inside", "reward_model": None},
    ]
    records = read(jsonl(tmp_path / "a.jsonl", rows))
    assert [record.answer for record in records] == ["plain", "2", "no truth inside", "nothing inside"]


@pytest.mark.parametrize(
    ("key", "answer"), [("extra_info.answer", "#### 1"), ("extra_info.index", 0), ("meta.level", "dotted")]
)
def test_an_answer_key_may_look_inside_a_column_and_a_columns_own_dots_go_first(tmp_path, key: str, answer) -> None:
    row = {**gsm8k_row(0), "meta.level": "dotted", "meta": {"level": "inside"}}
    (record,) = read(jsonl(tmp_path / "a.jsonl", [row]), answer=key)
    assert record.answer == answer
    assert ("meta.level" in record.extra) is (key != "meta.level")
    assert record.extra["extra_info"] == row["extra_info"]


def test_a_source_that_is_named_is_called_so_and_keeps_its_data_source_column(tmp_path: Path) -> None:
    (record,) = read(parquet(tmp_path / "a.parquet", [gsm8k_row(0)]), name="mine")
    assert (record.source, record.extra["data_source"]) == ("mine", "openai/gsm8k")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p"}, "no column 'reward_model.ground_truth' or 'answer'; there are prompt. Set data.prompt_key"),
        ({"prompt": "p", "reward_model": {"style": "rule"}}, "no column 'reward_model.ground_truth' or 'answer'"),
        ({"prompt": "p", "reward_model": "rule"}, "no column 'reward_model.ground_truth' or 'answer'"),
        ({}, "no column 'prompt' or 'reward_model.ground_truth' or 'answer'; there are none"),
    ],
    ids=str,
)
def test_a_row_without_a_ground_truth_is_named_with_what_there_is(tmp_path: Path, row: dict, message: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [gsm8k_row(0), row])
    with pytest.raises(DataError, match=f"a.jsonl, line 2: there is {message}"):
        read(path)


def test_a_parquet_row_whose_struct_is_null_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [gsm8k_row(0), {**gsm8k_row(1), "reward_model": None}], SCHEMA)
    with pytest.raises(DataError, match=r"a\.parquet, row 1: .*no column 'reward_model\.ground_truth'"):
        read(path)
