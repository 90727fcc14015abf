"""What is wrong with names, files, the user's code or the model's folder is found before a run leaves any trace."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.api.checks import preflight
from headway.api.checks.preflight import check_inputs, check_model
from headway.api.checks.trials import check_dry
from headway.api.sft import sft_run
from headway.config.doctor import FIRST_RELEASES
from headway.config.schema import Config
from headway.config.sections.model_section import MakeModelConfig
from headway.errors import ConfigError, DataError, ModelError, UserCodeError, UserError
from headway.models.made_model import make_model
from headway.reports.run_directory import RunDirectory
from tests.engines.train.families import make_family

ROOT = Path(__file__).parents[2]
REWARDS = """
def score(response, answer): return 1.0
def levelled(response, level): return 1.0
def optional(response, level=3, **more): return 1.0
def unusable(text): return 1.0
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """A configuration over files that can be used as it is. Its reward is tried without a process."""
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
        "reward": {"function": "exact_match"},
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


def test_a_reward_may_ask_for_what_held_out_rows_have_too(job: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "answer": "1", "level": 2}\n' * 3)
    (tmp_path / "val.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 3)
    job = job | {"data": job["data"] | {"val": str(tmp_path / "val.jsonl"), "val_size": 0}}
    check_inputs(changed(job, "reward", function=f"{tmp_path}/reward.py:optional"))
    with pytest.raises(UserCodeError) as refused:
        check_inputs(changed(job, "reward", function=f"{tmp_path}/reward.py:levelled"))
    assert str(refused.value) == (
        "reward.function: levelled needs 'level', but the rows have nothing beside prompt and answer "
        f"({tmp_path}/val.jsonl, line 1 lacks it); give the parameter a default, or the rows that column"
    )


@pytest.mark.parametrize("part", ["train", "val"])
def test_each_source_has_answers_for_a_reward_that_compares_with_them(
    job: dict[str, Any], tmp_path: Path, part: str
) -> None:
    for name, answer in (("with", "1"), ("without", None)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "1=", "answer": answer}) + "\n")
    both = [str(tmp_path / "with.jsonl"), str(tmp_path / "without.jsonl")]
    data = {"train": both[0], "val": both[0], "val_size": 0}
    job = job | {"reward": {"function": "exact_match"}, "data": data}
    check_inputs(Config.model_validate(job))
    with pytest.raises(DataError) as refused:
        check_inputs(changed(job, "data", **{part: both}))
    named = both[1] if part == "train" else f"data.val ({both[1]})"
    assert str(refused.value).startswith(f"{named}: the answer of all 1 rows is null")


def check(config: Config) -> None:
    check_model(config, check_inputs(config))


def test_a_job_without_mistakes_passes_and_its_prompts_come_back(job: dict[str, Any]) -> None:
    config = Config.model_validate(job)
    rows = check_inputs(config)
    found = check_model(config, rows)
    assert found is not None
    assert found.train.rows == 7
    assert [prompt.text for prompt in found.val] == [record.prompt for record in rows.val]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "bloom"}, "it has biases of its attention"),
        ({"model_type": "falcon", "alibi": True}, "it has biases of its attention"),
        ({"model_type": "rwkv"}, "it has a recurrent state"),
        ({"model_type": "mamba"}, "some of its layers have linear_attention"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 16}, "it has latent attention"),
        ({"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["local"], 2]], "window_size": 3}, "windows"),
        ({"model_type": "gemma4_text"}, "does not state one size of attention heads"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_model_that_the_native_engine_cannot_run_is_refused_with_a_way_out(
    job: dict[str, Any], values: dict[str, Any], reason: str
) -> None:
    path = Path(job["model"]["path"])
    (path / "config.json").write_text(json.dumps(values))
    config = Config.model_validate(job)
    with pytest.raises(ModelError) as refused:
        check(config)
    said = str(refused.value)
    assert said.startswith(f"model.path={path}: the native rollout engine cannot run this model") and reason in said
    assert f"(model_type {values['model_type']})" in said and "set rollout.name=vllm" in said


def test_vllm_that_is_not_installed_is_refused_by_the_doctor_too(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.config.doctor.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        check_inputs(changed(job, "rollout", name="vllm"))
    elsewhere = {**job, "cluster": {"address": "head:6379"}}
    check_inputs(changed(elsewhere, "rollout", name="vllm"))


def test_torch_and_transformers_that_are_too_old_are_refused_before_anything_else(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "transformers":
            return "5.17.0"
        raise PackageNotFoundError(name)

    config, conversations = Config.model_validate(job), Config.model_validate(job | {"sft": {}})
    monkeypatch.setattr("headway.config.doctor.version", version)
    for check in (lambda: check_inputs(config), lambda: check_dry(config), lambda: sft_run.check(conversations)):
        with pytest.raises(ConfigError) as refused:
            check()
        said = str(refused.value)
        assert said.startswith("no torch and transformers 5.17.0 here (on ") and sys.executable in said
        assert said.endswith("pip install 'torch>=2.11' 'transformers>=5.19'")
    monkeypatch.setattr("headway.config.doctor.version", {"torch": "2.11.0a0+cu130", "transformers": "5.19"}.get)
    check_inputs(config)


def test_all_places_tell_the_first_releases_of_pyproject_toml() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first = {name: ".".join(map(str, release)) for name, release in FIRST_RELEASES.items()}
    assert {f"{name}>={release}" for name, release in first.items()} <= {*project["dependencies"]}
    for page in ("README.md", "docs/quickstart.md", "docs/rollout-engines.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert f"torch ≥ {first['torch']} and transformers ≥ {first['transformers']}" in text, page
    said = (ROOT / "benchmarks" / "wheelhouse.py").read_text(encoding="utf-8")
    assert f"torch {first['torch']} or later" in said


def test_all_packages_that_are_not_installed_are_named_at_once(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "mcp", None)
    asked: dict[str, Any] = {"rollout": {"name": "vllm"}, "reports": {"trackers": ["wandb", "mlflow"]}}
    asked["agent"] = {"mcp": {"search": {"command": ["search"]}}}
    with pytest.raises(ConfigError) as refused:
        check_dry(Config.model_validate(job | asked))
    trackers, vllm, mcp = str(refused.value).splitlines()
    assert "headway[wandb,mlflow]" in trackers and "vLLM is not installed" in vllm and "headway[mcp]" in mcp


def test_a_model_that_is_yet_to_be_made_has_no_prompts(job: dict[str, Any]) -> None:
    config = Config.model_validate(job | {"model": {"make": {}}})
    assert check_model(config, check_inputs(config)) is None


@pytest.mark.parametrize(("answers", "refused"), [([None] * 3, True), ([None, None, "1"], False)])
@pytest.mark.parametrize("reward", ["exact_match", "math_verify", "regex"])
@pytest.mark.parametrize("trains_on", ["a file", "a task"])
def test_held_out_rows_whose_answers_are_all_null_are_refused(
    job: dict[str, Any], tmp_path: Path, trains_on: str, reward: str, answers: list[str | None], refused: bool
) -> None:
    val = tmp_path / "val.jsonl"
    val.write_text("".join(json.dumps({"prompt": "1=", "answer": answer}) + "\n" for answer in answers))
    data = {"train": job["data"]["train"]} if trains_on == "a file" else {"task": {"name": "sort"}}
    params = {"pattern": "1"} if reward == "regex" else {}
    config = Config.model_validate(
        job | {"data": data | {"val": str(val), "val_size": 0}, "reward": {"function": reward, "params": params}}
    )
    if not refused:
        check_inputs(config)
        return
    with pytest.raises(DataError) as error:
        check_inputs(config)
    assert str(error.value).startswith(
        f"data.val ({val}): the answer of all 3 rows is null, and reward.function={reward}"
    )


def test_held_out_rows_without_answers_are_taken_where_the_reward_needs_none(
    job: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "val.jsonl").write_text('{"prompt": "1=", "answer": null}\n' * 3)
    job = job | {"reward": {"function": f"{tmp_path}/reward.py:score"}}
    check_inputs(changed(job, "data", val=str(tmp_path / "val.jsonl"), val_size=0))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("exact", ConfigError, "unknown reward 'exact'"),
        pytest.param("nowhere.py:score", UserCodeError, "there is no file", marks=pytest.mark.slow),
        pytest.param("FOLDER/reward.py:scores", UserCodeError, "has no 'scores'", marks=pytest.mark.slow),
        ("FOLDER/reward.py:unusable", UserCodeError, r"takes \(text\)"),
        ("FOLDER/reward.py:levelled", UserCodeError, "levelled needs 'level', but the rows"),
    ],
)
def test_a_reward_that_could_not_score_any_row_is_refused(
    job: dict[str, Any], tmp_path: Path, function: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_inputs(changed(job, "reward", function=function.replace("FOLDER", str(tmp_path))))


@pytest.mark.slow
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


def test_an_algorithm_that_there_is_not_is_refused(job: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        check(changed(job, "algorithm", adv_estimator="grop"))


def test_lengths_beyond_the_models_positions_are_refused(job: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"416 tokens.* 256 positions"):
        check(changed(job, "data", max_response_length=400))


def test_prompts_that_are_all_too_long_are_refused(job: dict[str, Any]) -> None:
    """Takes longer where it is the first in its process that opens a tokenizer, which imports transformers."""
    with pytest.raises(DataError, match=r"data\.max_prompt_length=1 tokens"):
        check(changed(job, "data", max_prompt_length=1))


def test_a_prompt_that_the_models_tokenizer_cannot_read_is_a_data_error(job: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "ÄÖÜ", "answer": ""}\n' * 3)
    with pytest.raises(DataError, match=r"tokenizer cannot .* train\b"):
        check(Config.model_validate(job))


def test_a_folder_without_a_tokenizer_is_refused(job: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        check(Config.model_validate(job))


OWN = """
def loss(inputs, params): return 1
def loss_of_all(*anything): return 1
def estimate(inputs): return 1
def estimate_with(inputs, gamma, *, k=3): return 1
def takes_what_comes(inputs, **params): return 1
def wants_more(inputs, gamma, horizon): return 1
def alone(inputs): return 1
"""


@pytest.mark.parametrize(
    ("key", "function", "problem"),
    [
        ("loss_mode", "loss", None),
        ("loss_mode", "loss_of_all", None),
        ("loss_mode", "alone", "takes (inputs), but is called with (inputs, params)"),
        ("adv_estimator", "estimate", None),
        ("adv_estimator", "estimate_with", None),
        ("adv_estimator", "takes_what_comes", None),
        ("adv_estimator", "wants_more", "missing a required argument: 'horizon'"),
        ("correction", "loss", None),
        ("correction", "alone", "takes (inputs), but is called with (inputs, params)"),
    ],
)
def test_an_own_function_must_take_what_it_is_called_with(
    job: dict[str, Any], tmp_path: Path, key: str, function: str, problem: str | None
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    spec = f"{tmp_path}/own.py:{function}"
    algorithm: dict[str, Any] = {
        "loss_mode": {"policy_loss": {"loss_mode": spec}},
        "adv_estimator": {"adv_estimator": spec},
        "correction": {"rollout_correction": {"name": spec}},
    }[key]
    config = changed(job, "algorithm", **algorithm)
    if problem is None:
        check(config)
        return
    with pytest.raises(UserCodeError) as refused:
        check(config)
    assert str(refused.value).startswith(f"{spec}: ")
    assert problem in str(refused.value)


@pytest.mark.parametrize(("tokens", "fits"), [(31, False), (32, True)])
def test_a_kv_cache_without_room_for_one_context_is_refused(job: dict[str, Any], tokens: int, fits: bool) -> None:
    of_token = 1 * 2 * 2 * 8 * 4  # layers · (keys, values) · heads · head_dim · bytes of a float32
    config = changed(job | {"cluster": {"device": "cpu"}}, "rollout", kv_cache_gib=tokens * of_token / 2**30)
    if fits:
        check(config)
        return
    with pytest.raises(ConfigError, match=r"rollout\.kv_cache_gib=.* 32 tokens"):
        check(config)


def test_a_token_that_the_model_does_not_have_cannot_be_biased(job: dict[str, Any], tmp_path: Path) -> None:
    highest = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] - 1
    check(changed(job, "rollout", logit_bias={highest: 1.0, 0: 1.0}))
    with pytest.raises(ConfigError, match=f"no token {highest + 1}; .* 0 to {highest}"):
        check(changed(job, "rollout", logit_bias={highest + 1: 1.0}))
    with pytest.raises(ConfigError, match="no token -1"):
        check(changed(job, "rollout", logit_bias={-1: 1.0}))


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        ({}, None),
        ({"moe_intermediate_size": 8}, r"experts\.0\.down_proj\.weight is \[32, 16\].* \[32, 8\]"),
        ({"num_local_experts": 8}, r"mlp\.gate\.weight is \[4, 32\].* \[8, 32\]"),
        (
            {"num_hidden_layers": 1},
            r"file has model\.layers\.1\.",
        ),
        ({"num_hidden_layers": 3}, r"file lacks model\.layers\.2\."),
    ],
    ids=str,
)
def test_files_of_experts_that_transformers_fuses_are_compared_as_they_are(
    job: dict[str, Any], tmp_path: Path, says: dict[str, int], problem: str | None
) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "answer": ""}\n' * 3)  # its tokenizer has digits
    path = make_family("qwen3-moe", tmp_path / "experts")
    file = tmp_path / "experts" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | says))
    config = changed(job, "model", path=path)
    if problem is None:
        check(config)
        return
    with pytest.raises(ModelError, match=rf"config\.json: .*{problem}"):
        check(config)


def test_weights_of_other_shapes_than_the_configs_are_refused_in_shards_too(
    job: dict[str, Any], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    wrong = weights | {"model.norm.weight": torch.zeros(7)}
    places = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(sorted(weights))}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for tensors, problem in ((weights, False), (wrong, True)):
        for file in ("a.safetensors", "b.safetensors"):
            save_file({name: tensors[name] for name in tensors if places[name] == file}, model / file)
        if problem:
            with pytest.raises(ModelError, match=r"model\.norm\.weight is \[7\].* \[16\]"):
                check(Config.model_validate(job))
        else:
            check(Config.model_validate(job))


def edit_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"hidden_act": "frob"}, "cannot build the model that config.json describes: KeyError: 'frob'"),
        ({"rope_parameters": {"rope_type": "zz", "rope_theta": 1e4}}, "config.json describes: KeyError: 'zz'"),
        ({"num_attention_heads": 0}, "cannot build the model that config.json describes: ZeroDivisionError"),
        ({"num_hidden_layers": 0, "layer_types": []}, "config.json has no layers (num_hidden_layers)"),
        ({"num_hidden_layers": "x"}, "cannot read the model's configuration, config.json: "),
    ],
)
def test_a_config_that_describes_no_model_is_refused(
    job: dict[str, Any], tmp_path: Path, values: dict[str, Any], problem: str
) -> None:
    edit_config(tmp_path / "model", **values)
    with pytest.raises(ModelError) as refused:
        check(Config.model_validate(job))
    assert str(refused.value).startswith(f"{tmp_path}/model: ")
    assert problem in str(refused.value)


EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def without_prefix(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("change", "values", "problem"),
    [
        (lambda w: w | {HEAD: w[EMBEDDING].clone()}, {}, None),
        (lambda w: {name.replace(EMBEDDING, HEAD): tensor for name, tensor in w.items()}, {}, None),
        (lambda w: w | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, {}, None),
        (without_prefix, {}, None),
        (lambda w: w | {HEAD: w[EMBEDDING] + 1}, {"tie_word_embeddings": False}, None),
        (
            lambda w: w | {HEAD: w[EMBEDDING] + 1},
            {},
            f"{EMBEDDING} and {HEAD} differ in the file, and are one by config.json (tie_word_embeddings).",
        ),
        (lambda w: w, {"tie_word_embeddings": False}, f"the file lacks {HEAD}, "),
        (lambda w: {name: w[name] for name in w if name != NORM}, {}, f"the file lacks {NORM}, "),
        (
            lambda w: w,
            {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
            "the file lacks model.layers.1.input_layernorm.weight, which the model of config.json needs, and 10 more.",
        ),
        (
            lambda w: w | {name.replace("layers.0", "layers.1"): w[name] + 1 for name in w if "layers.0" in name},
            {},
            "the file has model.layers.1.input_layernorm.weight, which the model of config.json does not have, and 10 ",
        ),
        (lambda w: w | {NORM: w[NORM].int()}, {}, f"{NORM} is of integers (I32) in the file."),
    ],
)
def test_weights_with_other_names_than_the_models_are_refused_but_for_copies_and_constants(
    job: dict[str, Any], tmp_path: Path, change: Any, values: dict[str, Any], problem: str | None
) -> None:
    file = tmp_path / "model" / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    edit_config(tmp_path / "model", **values)
    if problem is None:
        check(Config.model_validate(job))
        return
    with pytest.raises(ModelError) as refused:
        check(Config.model_validate(job))
    assert f"the weights are not those of config.json: {problem}" in str(refused.value)


def test_a_reward_that_does_not_come_back_from_its_import_is_told_after_a_while(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "LOAD_TIMEOUT_S", 0.25)
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\ndef score(response, answer): return 1.0\n")
    with pytest.raises(UserCodeError, match=r"hangs\.py:score .*0\.5 s; .*reward\.timeout_s"):
        check_inputs(changed(job, "reward", function=f"{tmp_path}/hangs.py:score", timeout_s=0.5))


@pytest.mark.parametrize("file", ["config.yaml", "events.jsonl", "metrics.jsonl", "summary.json"])
def test_a_directory_with_any_file_of_a_run_is_occupied(tmp_path: Path, file: str) -> None:
    RunDirectory(tmp_path).check_free()
    RunDirectory(tmp_path / "new").check_free()
    (tmp_path / file).touch()
    with pytest.raises(UserError, match="already holds a run"):
        RunDirectory(tmp_path).check_free()
    with pytest.raises(UserError, match="is a file"):
        RunDirectory(tmp_path / file).check_free()
