"""What DATA means is one table, wherever it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.api.eval.evaluation_settings import _meaning
from headway.api.init.data_summary import source_of
from headway.api.python_settings import settings_given
from headway.data.rows import settings_named
from headway.errors import DataError


@pytest.mark.parametrize(
    ("data", "meant"),
    [
        ("sort", {"data.task.name": "sort"}),
        ("mine.py:task", {"data.task.name": "mine.py:task"}),
        ("sums.JSONL", {"data.train": "sums.JSONL"}),
        ("some/sums.txt", {"data.train": "some/sums.txt"}),
        ("./sums", {"data.train": "./sums"}),
        ("openai/gsm8k", {"data.train": {"dataset": "openai/gsm8k", "split": "train"}}),
        ("allenai/tulu-v0.1", {"data.train": {"dataset": "allenai/tulu-v0.1", "split": "train"}}),
    ],
)
def test_data_is_a_task_a_file_or_a_dataset(data: str, meant: dict[str, Any]) -> None:
    assert settings_named(data, "train") == meant


def test_of_a_saved_folder_the_split_that_is_wanted_is_taken_else_the_only_one(tmp_path: Path) -> None:
    for there, split in ((["test", "train"], "test"), (["other"], "other"), (["a", "b"], None)):
        (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": there}), encoding="utf-8")
        source = settings_named(str(tmp_path), "test", "validation")["data.train"]
        assert source.get("split") == split
    (tmp_path / "dataset_dict.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        settings_named(str(tmp_path), "train")


def test_a_dataset_on_the_hub_is_one_for_a_recipe_an_evaluation_and_python() -> None:
    assert source_of("openai/gsm8k") == {"data.train.dataset": "openai/gsm8k"}
    assert 'data.train={"dataset": "openai/gsm8k", "split": "test"}' in _meaning("openai/gsm8k")
    given = settings_given(None, None, {"data": "openai/gsm8k"})
    assert given["data.train.dataset"] == "openai/gsm8k"
