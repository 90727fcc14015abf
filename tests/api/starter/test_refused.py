"""What ``headway init`` cannot make a recipe of ends in one message, and leaves no file."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.api.starter.examples import make_model, quiz, sums
from tests.cli.test_commands import run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that does not chat, and data, good and bad."""
    folder = tmp_path_factory.mktemp("place")
    make_model("llama", folder / "model", chats=False)
    sums(folder)
    quiz(folder)
    files = {
        "empty.jsonl": "",
        "broken.jsonl": "{",
        "images.jsonl": json.dumps({"image": 3, "answer": 4}),
        "unanswered.jsonl": json.dumps({"prompt": "1+1?", "note": "none"}),
        "essays.jsonl": json.dumps({"prompt": "Write.", "answer": "word " * 50}),
        "strange.jsonl": json.dumps({"prompt": "Größe?", "answer": 4}),
        "data.zip": "",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "nothing").mkdir()
    (folder / "coded").mkdir()
    (folder / "run" / "model").mkdir(parents=True)
    (folder / "run" / "model" / "config.json").touch()
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Config"}}
    (folder / "coded" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "coded" / "configuration_mine.py").write_text("raise SystemExit('executed')", encoding="utf-8")
    (folder / "there.yaml").write_text("mine")
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "sums.jsonl"], "nowhere: no such folder; give a Hugging Face model folder or a model's name"),
        (["nothing", "sums.jsonl"], "nothing: the folder has no config.json; give a Hugging Face model folder"),
        (["run", "sums.jsonl"], "run: the folder has no config.json; give a Hugging Face model folder, as run/model"),
        (["sums.jsonl", "sums.jsonl"], "sums.jsonl is a file; give a Hugging Face model folder"),
        (["coded", "sums.jsonl"], "which runs only with model.trust_remote_code=true; set that if you trust the code"),
        (["model", "missing.jsonl"], "missing.jsonl: no such file"),
        (["model", "empty.jsonl"], "empty.jsonl: there are no rows; expected one for each prompt"),
        (["model", "broken.jsonl"], "broken.jsonl, line 1: not JSON"),
        (["model", "images.jsonl"], "images.jsonl: no column has the name of a prompt"),
        (["model", "unanswered.jsonl"], "unanswered.jsonl: there is no ground truth to compare answers with"),
        (["model", "essays.jsonl"], "essays.jsonl: no built-in reward fits its answers"),
        (["model", "strange.jsonl"], "the model's tokenizer cannot read a prompt"),
        (["model", "quiz.jsonl"], "need a chat template"),
        (["model", "data.zip"], "data files end in"),
        pytest.param(
            ["model", "reasoning_gym/chain_sums"],
            "reasoning-gym has no dataset 'chain_sums'; did you mean",
            marks=pytest.mark.slow,
        ),
        (["model", "sums.jsonl", "-o", "there.yaml"], "there.yaml is there already; give --force to replace it"),
        (["model", "sums.jsonl", "-o", "nowhere/a.yaml"], "--output nowhere/a.yaml cannot be written"),
        (["model", "sums.jsonl", "-o", "model/config.json", "--force"], "would overwrite a file of model"),
        (["model", "sums.jsonl", "--gpus", "12"], "--gpus 12: above 8 they are counted in machines of 8"),
        pytest.param(["model", "sums.jsonl", "--reward", "mine.py:score"], "there is no file", marks=pytest.mark.slow),
        (["model", "sums.jsonl", "--reward", "maths"], "maths"),
        (["model", "sums.jsonl", "--reward", "regex", "reward.function=regex"], "are both given; drop one of them"),
        (["model", "sums.jsonl", "data.train=quiz.jsonl"], "data.train: DATA says what is read; drop it"),
        (["model", "sums.jsonl", "model.path=model"], "model.path: MODEL says which model is trained; drop it"),
        (["model", "sums.jsonl", "rollout.m=3"], "rollout.m: unknown key"),
        (["model", "sums.jsonl", "mode=fast"], "mode: there is no mode 'fast'"),
        (["model", "sums.jsonl", "reports.trackers=[wandb]"], "wandb"),
        (
            [
                "model",
                "sums.jsonl",
                "data.max_prompt_length=${data.max_response_length}",
                "data.max_response_length=250",
            ],
            "data.max_prompt_length=250 + data.max_response_length=250 is 500 tokens",
        ),
        (["model", "sums.jsonl", "data.max_response_length=9000"], "more than the 256 positions of the model"),
    ],
)
def test_one_message_says_what_to_give(
    arguments: Sequence[str], said: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    output = [] if "-o" in arguments else ["-o", "new.yaml"]
    result = run("init", *arguments, *output)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert len(result.output.splitlines()) == 1
    assert sorted(place.rglob("*")) == before
    assert (place / "there.yaml").read_text() == "mine"


def test_a_recipe_that_is_there_is_replaced_when_asked_for(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "model", "model \N{SNAKE}")
    shutil.copy(place / "sums.jsonl", ".")
    words = ["init", "model \N{SNAKE}", "sums.jsonl", "reward.function=exact_match", "trainer.generate_ahead_steps=2"]
    words.append("--output=there.yaml")
    shutil.copy(place / "there.yaml", ".")
    result = run(*words, "--force")
    assert result.exit_code == 0, result.output
    text = Path("there.yaml").read_text(encoding="utf-8")
    assert "mine" not in text
    assert yaml.safe_load(text)["trainer"]["generate_ahead_steps"] == 2
    assert shlex.join(["headway", *words]) in text


def test_code_that_a_known_model_brings_is_not_switched_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "coded").mkdir()
    config = json.loads((place / "model" / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": "configuration_mine.Config"}
    (tmp_path / "coded" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in place.glob("model/tokenizer*"):
        shutil.copy(file, "coded")
    result = run("init", "coded", str(place / "sums.jsonl"))
    assert result.exit_code == 0, result.output
    assert "trust_remote_code" not in Path("coded-sums.yaml").read_text(encoding="utf-8")


def test_a_model_without_weights_gets_a_recipe_and_is_told_of_them(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    shutil.copy(place / "model" / "config.json", "bare")
    result = run("init", "bare", str(place / "sums.jsonl"), "--gpus", "8")
    assert result.exit_code == 0, result.output
    assert "bare has no weights and no tokenizer yet" in result.output
    assert "guessed by characters" in Path("bare-sums.yaml").read_text(encoding="utf-8")
