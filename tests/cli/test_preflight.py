"""What is wrong with names, files, the user's code or the model's folder is found before a run leaves any trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.config.model import MakeModelConfig
from headway.config.schema import Config
from headway.errors import ConfigError, DataError, ModelError, UserCodeError
from headway.models.make import make_model
from headway.preflight import check_inputs, check_model

REWARDS = """
def score(response, answer): return 1.0
def levelled(response, level): return 1.0
def optional(response, level=3, **more): return 1.0
def unusable(text): return 1.0
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """A configuration over files that can be used as it is."""
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}=", "answer": i}) + "\n" for i in range(9))
    )
    (tmp_path / "reward.py").write_text(REWARDS)
    model = MakeModelConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8, intermediate_size=16
    )
    make_model(model, 0, tmp_path / "model")
    return {
        "model": {"path": str(tmp_path / "model")},
        "data": {
            "train": str(tmp_path / "train.jsonl"),
            "val_size": 2,
            "max_prompt_length": 16,
            "max_response_length": 16,
        },
        "reward": {"function": f"{tmp_path}/reward.py:score"},
    }


def changed(job: dict[str, Any], section: str, **values: Any) -> Config:
    return Config.model_validate(job | {section: job.get(section, {}) | values})


def test_a_reward_may_ask_for_what_all_sources_have_and_for_nothing_else(job: dict[str, Any], tmp_path: Path) -> None:
    sources = []
    for name, columns in (("a", {"level": 1, "hint": ""}), ("b", {"level": 2})):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{i}=", "answer": i, **columns}) + "\n" for i in range(4)))
        sources.append(str(path))
    (tmp_path / "asks.py").write_text("def level(response, level): return 1.0\ndef hint(response, hint): return 1.0\n")
    job = job | {"data": job["data"] | {"train": sources, "val_size": 0}}
    check_inputs(changed(job, "reward", function=f"{tmp_path}/asks.py:level"))
    with pytest.raises(UserCodeError, match="hint"):
        check_inputs(changed(job, "reward", function=f"{tmp_path}/asks.py:hint"))


def check(config: Config) -> None:
    check_model(config, check_inputs(config))


def test_a_job_without_mistakes_passes(job: dict[str, Any]) -> None:
    check(Config.model_validate(job))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("exact", ConfigError, "unknown reward 'exact'"),
        ("nowhere.py:score", UserCodeError, "there is no file"),
        ("FOLDER/reward.py:scores", UserCodeError, "has no function 'scores'"),
        ("FOLDER/reward.py:unusable", UserCodeError, r"takes \(text\)"),
        ("FOLDER/reward.py:levelled", UserCodeError, "levelled needs 'level', but the rows have nothing beside"),
    ],
)
def test_a_reward_that_could_not_score_any_row_is_refused(
    job: dict[str, Any], tmp_path: Path, function: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_inputs(changed(job, "reward", function=function.replace("FOLDER", str(tmp_path))))


def test_a_reward_may_need_a_column_that_the_rows_have_or_give_it_a_default(
    job: dict[str, Any], tmp_path: Path
) -> None:
    check_inputs(changed(job, "reward", function=f"{tmp_path}/reward.py:optional"))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "answer": "1", "level": 2}\n' * 3)
    check_inputs(changed(job, "reward", function=f"{tmp_path}/reward.py:levelled"))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "srt"}, "did you mean 'sort'"),
        ({"name": "sort", "params": {"lenght": 3}}, "no parameter 'lenght'"),
        ({"name": "sort", "val_size": 99, "params": {"max_length": 3, "mean_length": 3, "alphabet": "ab"}}, "only 8"),
    ],
)
@pytest.mark.parametrize("reward", ["task", "exact_match"])
def test_a_task_that_cannot_be_made_is_refused(task: dict[str, Any], message: str, reward: str) -> None:
    config = Config.model_validate({"data": {"task": task}, "reward": {"function": reward}})
    with pytest.raises(ConfigError, match=message):
        check_inputs(config)


@pytest.mark.parametrize(
    ("section", "values"),
    [("algorithm", {"adv_estimator": "grop"}), ("algorithm", {"policy_loss": {"loss_mode": "ppo_clop"}})],
)
def test_an_algorithm_that_there_is_not_is_refused(job: dict[str, Any], section: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        check(changed(job, section, **values))


def test_lengths_beyond_the_models_positions_are_refused(job: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is 416 tokens, more than the 256 positions of the model"):
        check(changed(job, "data", max_response_length=400))


def test_prompts_that_are_all_too_long_are_refused(job: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"more than data\.max_prompt_length=1 tokens; raise it"):
        check(changed(job, "data", max_prompt_length=1))


def test_a_prompt_that_the_models_tokenizer_cannot_read_is_a_data_error(job: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "ÄÖÜ", "answer": ""}\n' * 3)
    with pytest.raises(DataError, match="tokenizer cannot read a prompt of train"):
        check(Config.model_validate(job))


def test_a_folder_without_a_tokenizer_is_refused(job: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        check(Config.model_validate(job))
