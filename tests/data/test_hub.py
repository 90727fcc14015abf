"""Hugging Face datasets: from folders, as the library writes and reads them; what is said where they cannot be had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from headway.config.schema import Config, DataConfig, SourceConfig
from headway.data.files import Columns, Record
from headway.data.rows import _read
from headway.data.sources import build_sources
from headway.errors import ConfigError, DataError

ROWS = [{"question": f"{i}+1=", "answer": [str(i + 1)], "level": i} for i in range(4)]
QUESTIONS = Columns("question", "answer")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A data repository's folder: a file for each split."""
    folder = tmp_path / "sums"
    folder.mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """What `save_to_disk` leaves of several splits."""
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    return str(tmp_path / "saved")


def read(dataset: str, columns: Columns = QUESTIONS, **options: Any) -> list[Record]:
    default_split = options.pop("default_split", "train")
    source = SourceConfig(dataset=dataset, prompt_key=columns.prompt, answer_key=columns.answer, **options)
    return _read(source, DataConfig(), default_split)


@pytest.mark.parametrize("kind", ["folder", "saved"])
def test_a_datasets_rows_come_in_order_with_their_other_columns(kind: str, request) -> None:
    dataset = request.getfixturevalue(kind)
    name = Path(dataset).name
    expected = [Record(row["question"], row["answer"], name, {"level": row["level"]}) for row in ROWS]
    assert read(dataset) == expected
    assert read(dataset, split="test") == read(dataset, default_split="test") == expected[:1]
    assert read(dataset)[3].where == f"dataset {dataset}, train, row 3"


def test_a_dataset_that_was_saved_without_splits_needs_none(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).with_format("numpy").save_to_disk(tmp_path / "one")
    records = read(str(tmp_path / "one"))
    assert [record.answer for record in records] == [row["answer"] for row in ROWS]  # lists, whatever the saved format
    assert type(records[0].extra["level"]) is int
    with pytest.raises(DataError, match=r"one split .*drop split: train"):
        read(str(tmp_path / "one"), split="train")


def test_a_dataset_of_verls_columns_needs_no_keys(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "q"}]
    row = {"prompt": prompt, "data_source": "aime", "reward_model": {"style": "rule", "ground_truth": {"n": [1]}}}
    datasets.Dataset.from_list([row]).save_to_disk(tmp_path / "verl")
    (record,) = read(str(tmp_path / "verl"), Columns())
    assert (record.prompt, record.answer, record.source) == (prompt, {"n": [1]}, "aime")


def test_training_and_held_out_prompts_come_from_the_usual_splits(folder: str, tokenizer) -> None:
    source = {"dataset": folder, "prompt_key": "question"}
    config = Config.model_validate({"data": {"train": source, "val": source, "epochs": 1, "shuffle": False}})
    bundle = build_sources(config, tokenizer)
    assert [prompt.text for prompt in iter(bundle.train.next, None)] == [row["question"] for row in ROWS]
    assert [(prompt.text, prompt.row) for prompt in bundle.val] == [("0+1=", 4)]


def test_a_saved_folder_is_read_also_as_a_path(saved: str, tokenizer) -> None:
    data = {"train": saved, "val": saved, "prompt_key": "question", "epochs": 1, "shuffle": False}
    bundle = build_sources(Config.model_validate({"data": data}), tokenizer)
    assert [prompt.text for prompt in iter(bundle.train.next, None)] == [row["question"] for row in ROWS]
    assert [(prompt.text, prompt.row) for prompt in bundle.val] == [("0+1=", 4)]
    assert [record.prompt for record in read(f"{saved}/test")] == ["0+1="]


def test_saved_rows_are_those_of_the_library_whatever_their_types(tmp_path: Path) -> None:
    rows = [{"question": f"{i}", "answer": {"n": [i, None]}, "kind": i % 2, "more": [{"a": i}, "b"]} for i in range(5)]
    table = datasets.Dataset.from_list(rows, on_mixed_types="use_json").cast_column(
        "kind", datasets.ClassLabel(names=["x", "y"])
    )
    for name, dataset in {"mixed": table, "plain": table.remove_columns("more")}.items():
        dataset.select([3, 1, 2]).save_to_disk(tmp_path / name, num_shards=2)
        records = read(str(tmp_path / name))
        assert [{"question": r.prompt, "answer": r.answer, **r.extra} for r in records] == [
            dict(row) for row in dataset.select([3, 1, 2])
        ]


def test_a_saved_folder_that_is_damaged_is_refused_in_one_line(saved: str) -> None:
    (file,) = Path(saved, "test").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DataError, match=r"saved \(split test\) cannot be loaded: Arrow"):
        read(saved, split="test")
    file.unlink()
    with pytest.raises(DataError, match=r"saved \(split test\) cannot be loaded: FileNotFoundError"):
        read(saved, split="test")


def test_without_the_library_the_message_says_how_to_install_it(folder: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'headway\[datasets\]'"):
        read(folder)


@pytest.mark.slow
def test_the_library_is_imported_only_for_a_dataset() -> None:
    program = "import sys, headway.data.sources; print('datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("error", [ConnectionError, datasets.exceptions.DatasetNotFoundError, TimeoutError])
def test_a_dataset_that_is_out_of_reach_is_one_line(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error("Couldn't reach\n\n  the Hub" + "!" * 1000)

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError) as refused:
        read("openai/gsm8k", subset="main")
    message = str(refused.value)
    assert message.startswith("dataset openai/gsm8k (subset main, split train) cannot be loaded: ")
    assert f"{error.__name__}: Couldn't reach the Hub!" in message
    assert message.endswith("offline, name a folder or a .jsonl, .csv or .parquet file")
    assert "\n" not in message
    assert len(message) < 800


def test_what_is_asked_of_the_hub_is_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*args: Any, **options: Any) -> datasets.Dataset:
        asked.append((args, options))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    (first, *_) = read("openai/gsm8k", subset="main", split="train[:4]", revision="abc")
    assert asked == [(("openai/gsm8k", "main"), {"split": "train[:4]", "revision": "abc"})]
    assert first.source == "openai/gsm8k"


def test_a_split_that_is_not_there_is_refused_with_those_that_are(folder: str, saved: str) -> None:
    with pytest.raises(DataError, match=r"no split 'validation'; .*train, test\. Set split"):
        read(saved, split="validation")
    with pytest.raises(DataError, match=r'split validation\) cannot be loaded: .*"validation".*test'):
        read(folder, split="validation")


@pytest.mark.parametrize("key", ["subset", "revision"])
def test_a_saved_folder_has_neither_subset_nor_revision(saved: str, key: str) -> None:
    with pytest.raises(DataError, match=f"saved folder has no {key}"):
        read(saved, **{key: "x"})


def test_a_dataset_without_the_columns_is_refused_with_those_it_has(saved: str) -> None:
    with pytest.raises(DataError, match=r"train: .*no column 'prompt'; .*question, answer, level"):
        read(saved, Columns())


def test_an_empty_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(ROWS).select([]))
    with pytest.raises(DataError, match=r"dataset openai/gsm8k, train: .*no rows"):
        read("openai/gsm8k")


def test_a_file_that_the_library_cannot_read_says_what_is_at_the_bottom_of_it(folder: str) -> None:
    (Path(folder) / "train.jsonl").write_text('{"question": "q", "answer": ["a"]}\n{"question": ["q"], "answer": 1}\n')
    with pytest.raises(DataError, match=r"cannot be loaded: DatasetGenerationError: .*, from \w+: "):
        read(folder)


def test_a_row_that_does_not_fit_is_named(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a"}, {"question": None, "answer": "a"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "bad")
    with pytest.raises(DataError, match=r"bad, train, row 1, 'question': .*not None"):
        read(str(tmp_path / "bad"))
