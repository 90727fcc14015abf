"""JSONL, CSV and Parquet files: what is read, and what is said about files that cannot be used."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from headway.data.files import Columns, Record, read_records
from headway.errors import DataError

ROWS = [
    {"prompt": "1+1=", "answer": "2", "level": 1},
    {"prompt": "2+2=", "answer": "4", "level": 2},
]
CHAT = [{"role": "user", "content": "hi"}]


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def read(path: str, prompt_key: str = "prompt", answer_key: str = "answer") -> list[Record]:
    return read_records(path, Columns(prompt_key, answer_key))


@pytest.fixture(params=["sums.jsonl", "sums.parquet"])
def file(request, tmp_path: Path) -> Path:
    return tmp_path / request.param


def test_rows_come_in_order_with_their_other_columns(file: Path) -> None:
    assert read(write(file, ROWS)) == [
        Record("1+1=", "2", "sums", {"level": 1}),
        Record("2+2=", "4", "sums", {"level": 2}),
    ]


def test_values_of_a_csv_file_are_texts_as_they_stand_there(tmp_path: Path) -> None:
    long = "x" * 200_000
    rows = [["prompt", "answer", "level"], ["1+1=", "007", "1.0"], ['say "a,\nb"', "", " "], [long, "ä", "NaN"]]
    with (tmp_path / "sums.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows(rows)
    records = read(str(tmp_path / "sums.csv"))
    assert [[record.prompt, record.answer, record.extra["level"]] for record in records] == rows[1:]
    assert (records[0].source, records[2].where) == ("sums", f"{tmp_path / 'sums.csv'}, line 5")


def test_columns_go_by_the_configured_names(file: Path) -> None:
    rows = [{"question": "q", "solution": {"value": 3}, "prompt": "not this"}]
    (record,) = read(write(file, rows), "question", "solution")
    assert (record.prompt, record.answer, record.extra) == ("q", {"value": 3}, {"prompt": "not this"})


def test_a_prompt_may_be_a_chat(file: Path) -> None:
    (record,) = read(write(file, [{"prompt": CHAT, "answer": 1}]))
    assert record.prompt == CHAT


@pytest.mark.parametrize("spelled", [json.dumps, repr, lambda chat: json.dumps(chat, indent=2)])
@pytest.mark.parametrize("chat", [CHAT, [{"tool_calls": None, "content": "it's", "role": "user"}, *CHAT]])
def test_a_chat_that_was_stored_as_text_is_read(file: Path, spelled, chat) -> None:
    plain = [{name: value for name, value in message.items() if value is not None} for message in chat]
    (record,) = read(write(file, [{"prompt": spelled(chat), "answer": "1"}]))
    assert record.prompt == plain
    with (file.parent / "sums.csv").open("w", newline="") as table:
        csv.writer(table).writerows([["prompt", "answer"], [spelled(chat), "1"]])
    assert read(str(file.parent / "sums.csv"))[0].prompt == plain
    answered = spelled([*chat, {"role": "assistant", "content": "2"}])
    (record,) = read_records(write(file, [{"prompt": answered}]), Columns())
    assert (record.prompt, record.answer) == (plain, "2")


@pytest.mark.parametrize("text", ['[{"name": "Ann"}]', "[{'value': 1}, 2]", '[{"role":', "[1, 2]", '{"role": "user"}'])
def test_text_that_only_looks_like_a_chat_stays_text(file: Path, text: str) -> None:
    rows = [{"prompt": text, "answer": "1"}]
    if text == '[{"role":':
        with pytest.raises(DataError, match="neither JSON"):
            read(write(file, rows))
    else:
        assert read(write(file, rows))[0].prompt == text


def test_a_data_source_column_names_the_source(file: Path) -> None:
    (record,) = read(write(file, [{"prompt": "p", "answer": "a", "data_source": "gsm8k"}]))
    assert record.source == "gsm8k"


def test_missing_columns_are_named_with_those_present(file: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'prompt'; .*question, answer\. Set data\.prompt_key"):
        read(write(file, [{"question": "q", "answer": "a"}]))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3, "a prompt is text or a list of chat messages, not 3"),
        (None, "not None"),
        ([], r"not \[\]"),
        ([{"content": "x"}], "a chat message is"),
        (["x"], "a chat message is"),
        ([{"role": "user", "content": [{"type": "image", "url": "u"}]}], "parts of a message are .*read text only"),
        ([{"role": "user", "content": ["x"]}], "parts of a message are"),
    ],
)
def test_a_prompt_of_another_type_is_refused_with_its_place(tmp_path: Path, prompt: object, message: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "fine", "answer": 1}, {"prompt": prompt, "answer": 1}])
    with pytest.raises(DataError, match=f"a.jsonl, line 2, 'prompt': .*{message}"):
        read(path)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_first_line_of_a_csv_file_says_what_separates_its_columns(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "a.csv"
    lines = [["prompt", "answer"], ['"1,5; or 2?"', "2"]]
    path.write_text("".join(f"{separator.join(line)}\n" for line in lines))
    (record,) = read(str(path))
    assert (record.prompt, record.answer) == ("1,5; or 2?", "2")


ANSWERED = [
    [*CHAT, {"role": "assistant", "content": "2"}],
    [{"from": "human", "value": CHAT[0]["content"]}, {"from": "gpt", "value": "2"}],
]


@pytest.mark.parametrize("chat", ANSWERED)
def test_a_chat_that_ends_with_an_answer_has_its_ground_truth_there(file: Path, chat: list[dict[str, str]]) -> None:
    (record,) = read_records(write(file, [{"prompt": chat, "level": 1}]), Columns())
    assert (record.prompt, record.answer, record.extra) == (CHAT, "2", {"level": 1})


@pytest.mark.parametrize("chat", ANSWERED)
def test_a_column_of_ground_truths_goes_before_the_end_of_a_chat(file: Path, chat: list[dict[str, str]]) -> None:
    (record,) = read_records(write(file, [{"prompt": chat, "answer": "3"}]), Columns())
    assert ([message["role"] for message in record.prompt], record.answer) == (["user", "assistant"], "3")


def test_a_chat_without_an_answer_anywhere_is_refused_with_its_columns(file: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'reward_model\.ground_truth' or 'answer'; .*prompt, level"):
        read_records(write(file, [{"prompt": CHAT, "level": 1}]), Columns())


def test_parts_of_a_message_are_one_text(file: Path) -> None:
    parts = [{"type": "text", "text": "1+1", "image": None}, {"type": "text", "text": "="}]
    prompt = [{"role": "user", "content": parts}]
    (record,) = read(write(file, [{"prompt": prompt, "answer": "2"}]))
    assert record.prompt == [{"role": "user", "content": "1+1="}]


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p", "answer": "a"}\n\n{"prompt": }\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: not JSON: .* 12\b"):
        read(str(path))


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("[1, 2]\n")
    with pytest.raises(DataError, match=r"line 1: .*object.* not list"):
        read(str(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no such file"),
        ("a.txt", b"prompt,answer", "end in .jsonl, .csv or .parquet, not '.txt'"),
        ("a", b"", "end in .jsonl, .csv or .parquet, not 'nothing'"),
        ("a.csv", b"prompt,answer\n", "no rows"),
        ("a.csv", b"question,answer\n1,2\n", "line 1: there is no column 'prompt'; there are question, answer"),
        ("a.csv", b"prompt\n1\n", "no column 'answer'; .* give each row an empty one, .answer.: ..$"),
        ("a.csv", b"prompt,answer,prompt\n1,2,3\n", "line 1: two columns have one name"),
        ("a.csv", b"prompt,answer\n1,2\n3\n", "line 3: 1 fields, and the first line names 2 columns"),
        ("a.csv", b'prompt,answer\n"1,2\n', "line 2: not CSV: unexpected end of data; a text with quotes"),
        ("a.csv", b"prompt,answer\n\xff,2\n", "line 2 cannot be read: .* 0xff at position 1 is not UTF-8; save it as"),
        (
            "a.csv",
            b"prompt,answer,,\n1,2,,\n",
            "line 1: columns 3, 4 have no name",
        ),
        (
            "a.csv",
            b"""prompt,answer\n"[{'role': 'user', 'content': 'x'}\n {'role': 'user'}]",2\n""",
            "line 3, 'prompt': .*neither JSON nor",
        ),
        (
            "a.jsonl",
            b"""{"prompt": "array([{'content': 'x', 'role': 'user'}], dtype=object)", "answer": 1}""",
            "line 1, 'prompt': .*neither JSON nor",
        ),
        ("a.jsonl", b"\n\n", "no rows"),
        ("a.jsonl", b'{"prompt": "p", "answer": 1}\n\xff\xfe\x00', "line 2 cannot be read: UnicodeDecodeError"),
        ("a.jsonl", b'{"prompt": "p", "answer": ' + b"[" * 100_000, "line 1 cannot be read: RecursionError"),
        ("a.jsonl", b'{"prompt": "p", "answer": ' + b"1" * 5000 + b"}", "line 1 cannot be read: ValueError"),
        ("a.parquet", b"not parquet at all", "cannot be read as Parquet"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(str(tmp_path / name))


def test_a_parquet_file_without_rows_says_so(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"prompt": pyarrow.array([], pyarrow.string()), "answer": pyarrow.array([], pyarrow.string())}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no rows"):
        read(str(tmp_path / "a.parquet"))


def test_a_parquet_file_without_the_columns_is_refused_before_its_rows_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"question": "q", "answer": "a"}])
    with pytest.raises(DataError, match=r"a\.parquet: .*no column 'prompt'; .*question, answer"):
        read(path)


def test_a_parquet_row_that_is_no_text_is_named(tmp_path: Path) -> None:
    """Arrow does not check that text is UTF-8 when it is written."""
    answers = pyarrow.array([b"fine", b"\xff"]).view(pyarrow.string())
    table = pyarrow.table({"prompt": ["p", "q"], "answer": answers})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 1 .*: UnicodeDecodeError"):
        read(str(tmp_path / "a.parquet"))


def test_a_folder_is_refused_with_both_ways_to_read_what_is_in_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a folder, not a file; .*dataset: "):
        read(str(tmp_path))


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "p", "answer": 1}\r\n\r\n{"prompt": "q", "answer": 2}')
    records = read(str(path))
    assert [(record.prompt, record.where) for record in records] == [("p", f"{path}, line 1"), ("q", f"{path}, line 3")]


def test_every_record_knows_its_row(file: Path) -> None:
    place = "line {}" if file.suffix == ".jsonl" else "row {}"
    first = 1 if file.suffix == ".jsonl" else 0
    assert [r.where for r in read(write(file, ROWS))] == [f"{file}, {place.format(first + i)}" for i in range(2)]


@pytest.mark.parametrize(
    ("key", "there"),
    [
        ("meta.gt", "prompt, meta, meta.style, meta.deep"),
        ("meta.deep.gt", "prompt, meta, meta.deep.truth"),
        ("meta.style.gt", "prompt, meta"),
    ],
)
def test_a_value_that_is_not_inside_a_column_is_refused_with_those_that_are(
    tmp_path: Path, key: str, there: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1=", "meta": {"style": "rule", "deep": {"truth": 1}}}\n')
    with pytest.raises(DataError) as refused:
        read_records(str(path), Columns("prompt", key))
    assert f"there is no column '{key}'; there are {there}. Set" in str(refused.value)
    assert read_records(str(path), Columns("prompt", "meta.deep.truth"))[0].answer == 1
