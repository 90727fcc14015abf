"""What ``headway eval`` refuses: one message, before anything is answered or overwritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from headway.api.checks import preflight
from headway.errors import UserError
from tests.cli.evaluations import SHORT, lines_of, said, write
from tests.cli.test_commands import run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL"], "expected DATA"),
        (["/nonexist"], "MODEL: got /nonexist, which does not exist; expected a Hugging Face folder"),
        (["MODEL", "data.max_response_length=4"], "expected DATA"),
        (["MODEL", "test.txt"], "DATA: got test.txt: no such file; expected a .jsonl, .csv or .parquet file"),
        (["MODEL", "nowhere.jsonl"], "DATA: got nowhere.jsonl: no such file"),
        (["nowhere", "sort"], "nowhere: no such folder"),
        pytest.param(["MODEL", "reasoning_gym/leg_countin"], "did you mean 'leg_counting'", marks=pytest.mark.slow),
        (["MODEL", "sort", "--n", "4"], "greedy answers (--temperature 0) are all equal"),
        (["MODEL", "sort", "--n", "2", "--temperature", "1", "--k", "1,4"], "--k 1,4: expected numbers from 1 to --n"),
        (["MODEL", "sort", "--k", "one"], "--k one: expected numbers"),
        (["MODEL", "sort", "rollout.m=1"], "rollout.m: unknown key"),
        (["MODEL", "sort", "actor.optim.lr=1"], "actor.optim.lr: no effect on an evaluation"),
        (["MODEL", "sort", "data.epochs=1"], "data.epochs: no effect on an evaluation"),
        (["MODEL", "sort", "rollout.n=4"], "rollout.n: --n says that here"),
        (["MODEL", "sort", "data.train=a.jsonl"], "data.train: DATA says what is read"),
        pytest.param(["MODEL", "sort", "reward.function=nowhere.py:score"], "there is no file", marks=pytest.mark.slow),
        (["MODEL", "sort", "data.max_prompt_length=4096"], "more than the 1024 positions"),
        (["MODEL", "sort", "-o", "/nowhere/answers.jsonl"], "--output /nowhere/answers.jsonl cannot be written"),
        (["MODEL", "sort", "-o", "/proc/answers.jsonl"], "--output /proc/answers.jsonl cannot be written"),
        (["RUN", "--config", "recipe.yaml"], "a config.yaml of its own"),
        (["MODEL", "sort", "--threshold", "nan"], "--threshold nan: expected a finite number"),
        (["MODEL", "sort", "--threshold", "-inf"], "--threshold -inf: expected a finite number"),
        (["MODEL", "sort", "-o", "-"], "--output -: expected a file"),
    ],
)
def test_what_the_user_got_wrong_is_one_message_with_code_2(
    tiny: Path, run_dir: Path, arguments: list[str], message: str
) -> None:
    places = {"MODEL": str(tiny), "RUN": str(run_dir)}
    done = run("eval", *(places.get(word, word) for word in arguments))
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def refused_over_an_input(output: Path, *arguments: str) -> None:
    """``arguments`` with ``output`` end with one message that names it, before ``output`` is changed."""
    before = output.read_bytes()
    done = run("eval", *arguments, *SHORT, "-o", str(output))
    assert output.read_bytes() == before
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"error: --output {output} would overwrite "), done.stderr
    assert done.stderr.endswith(", which belongs to what this command reads; give another file\n")


def test_answers_do_not_take_the_place_of_their_questions(tiny: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "test.jsonl", [{"prompt": "1=", "answer": "1"}])
    refused_over_an_input(tmp_path / ".." / tmp_path.name / "test.jsonl", str(tiny), data)
    (tmp_path / "link").symlink_to(data)
    refused_over_an_input(tmp_path / "link", str(tiny), data)


def test_answers_take_the_place_of_nothing_in_the_models_folder(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "before.jsonl").write_text("kept")
    for name in ("config.json", "model.safetensors", "before.jsonl"):
        refused_over_an_input(model / name, str(model), "sort")
    (tmp_path / "elsewhere.json").write_bytes((model / "config.json").read_bytes())
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(tmp_path / "elsewhere.json")
    refused_over_an_input(model / "config.json", str(model), "sort")
    refused_over_an_input(tmp_path / "elsewhere.json", str(model), "sort")


def test_answers_take_the_place_of_no_file_that_settings_name(tiny: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "test.jsonl", [{"prompt": "1=", "answer": "1"}])
    (tmp_path / "mine.py").write_text("def score(response): return 1.0\n")
    (tmp_path / "recipe.yaml").write_text(f"data: {{train: {data}}}\n")
    typed = [str(tiny), data, "--config", str(tmp_path / "recipe.yaml"), f"reward.function={tmp_path}/mine.py:score"]
    for name in ("test.jsonl", "mine.py", "recipe.yaml"):
        refused_over_an_input(tmp_path / name, *typed)


def test_answers_take_the_place_of_no_file_of_a_run_but_of_those_of_another_time(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "version_4").mkdir(parents=True)
    own = ("events.jsonl", "metrics.jsonl", "checkpoints/version_4/state.json")
    for name in own:
        (run_dir / name).write_text("kept")
    for name in (*own, "config.yaml", "model/config.json"):
        refused_over_an_input(run_dir / name, str(run_dir))
    for _ in range(2):
        said(run("eval", str(run_dir), *SHORT, "-o", str(run_dir / "answers.jsonl")))
    assert len(lines_of(run_dir / "answers.jsonl")) == 10


def test_a_model_that_does_not_load_leaves_the_answers_of_another_time(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise UserError("no weights")

    monkeypatch.setattr("headway.api.eval.scored_answers._start_engine", refuse)
    output = tmp_path / "answers.jsonl"
    output.write_text("kept")
    done = run("eval", str(tiny), "sort", *SHORT, "-o", str(output))
    assert done.stderr.endswith("error: no weights\n")
    assert output.read_text() == "kept"


def test_answers_take_the_place_of_no_task_s_code(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("def problems(): return []\n")
    refused_over_an_input(tmp_path / "task.py", str(tiny), f"{tmp_path}/task.py:problems")


def test_a_run_without_its_model_says_so(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "model")
    done = run("eval", str(run_dir))
    assert done.exit_code == 2
    assert "has no model/, which is written at its end" in done.stderr
    assert f"headway sft --resume {run_dir})" in done.stderr
    named = run_dir.rename(run_dir.with_name("my run"))
    (named / "events.jsonl").touch()
    assert f"headway train --resume '{named}')" in run("eval", str(named)).stderr


def test_a_run_is_named_where_its_model_stands_for_it_and_no_other_folder_is(run_dir: Path) -> None:
    assert "a run's directory or --config" in run("eval", str(run_dir / "model")).stderr, "it has no record"
    (run_dir / "events.jsonl").touch()
    assert f"a run's directory, here {run_dir}, or --config" in run("eval", str(run_dir / "model")).stderr
    shutil.copytree(run_dir / "model", run_dir / "other")
    assert "a run's directory or --config" in run("eval", str(run_dir / "other")).stderr


def test_a_data_file_that_is_not_there_is_named(tiny: Path) -> None:
    done = run("eval", str(tiny), "nowhere.parquet")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: DATA: got nowhere.parquet: no such file; expected a .jsonl")


def test_default_lengths_that_do_not_fit_are_told_where_others_come_from(tiny: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "test.jsonl", [{"prompt": "1=", "answer": "1"}])
    (tmp_path / "recipe.yaml").write_text("model: {path: nowhere}\nrollout: {total_rollout_steps: 64}\n")
    short = Path(shutil.copytree(tiny, tmp_path / "short"))
    settings = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 64}
    (short / "config.json").write_text(json.dumps(settings))
    for config, named in (((), True), (("--config", str(tmp_path / "recipe.yaml")), False)):
        done = run("eval", str(short), data, *config)
        assert done.exit_code == 2
        assert "positions of the model" in done.stderr
        assert ("--config RECIPE" in done.stderr) == named


def test_a_model_s_folder_is_looked_at_as_before_a_run(tiny: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "test.jsonl", [{"prompt": "1=", "answer": "1"}])
    broken = Path(shutil.copytree(tiny, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    done = run("eval", str(broken), data, *SHORT)
    assert done.exit_code == 2
    assert "and its header tells of" in done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param("import os; os._exit(3)\n", "a reward worker ended while it loaded", marks=pytest.mark.slow),
        ("while True: pass\n", "was not imported within 0.5 s; see to it that the file imports quickly"),
        ("def score(response, level): return 1.0\n", "score needs 'level', but the rows have nothing beside prompt"),
    ],
)
def test_a_reward_is_tried_as_before_a_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    if "while" in code:
        monkeypatch.setattr(preflight, "LOAD_TIMEOUT_S", 0.25)
    (tmp_path / "reward.py").write_text(code)
    data = write(tmp_path / "test.jsonl", [{"prompt": "1=", "answer": "1"}])
    timeout = ["reward.timeout_s=0.5"] if "while" in code else []
    done = run("eval", str(tiny), data, *SHORT, f"reward.function={tmp_path}/reward.py:score", *timeout)
    assert done.exit_code == 2, done.output
    assert message in done.stderr


def test_questions_without_any_answer_are_refused_where_the_reward_compares_with_it(tiny: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "test.jsonl", [{"prompt": "1=", "answer": None}] * 2)
    done = run("eval", str(tiny), data, *SHORT)
    assert done.exit_code == 2, done.output
    assert "the answer of all 2 rows is null, and reward.function=exact_match compares with it" in done.stderr


@pytest.mark.parametrize(
    ("setting", "option"), [("rollout.val_n=2", ("--n", "2")), ("rollout.val_temperature=1", ("--temperature", "1"))]
)
def test_an_option_and_the_setting_that_it_stands_for_are_one_too_many(
    tiny: Path, tmp_path: Path, setting: str, option: tuple[str, str]
) -> None:
    data = write(tmp_path / "test.jsonl", [{"prompt": "1=", "answer": "1"}])
    done = run("eval", str(tiny), data, setting, *option)
    assert done.exit_code == 2
    assert (
        f"{setting.partition('=')[0]}: {option[0]} {float(option[1]) if 'temp' in setting else option[1]}"
        in done.stderr
    )
