"""The recipes for public data: what they are checked as for 1, 8 and 64 GPUs, and a run of each with a tiny model."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from headway.agents.rewards.score_request import ScoreRequest
from headway.agents.rewards.scorers import RewardSpec, Scorer
from headway.config.loading import load
from headway.config.sections.model_section import MakeModelConfig
from headway.config.sizing.placement import resolve_placement
from headway.data.files import Columns, read_records
from headway.data.tasks import make_task, split_task
from headway.models.made_model import make_model
from headway.models.tokenizer import load_tokenizer
from tests.agents.rewards.parts import part_of
from tests.cli.test_commands import run
from tests.tiers import mostly_slow


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is broken, however long the folder's name is."""
    monkeypatch.setenv("COLUMNS", "300")


ROOT = Path(__file__).parents[2]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
DATA = {"gsm8k-grpo": "gsm8k", "dapo-math": "dapo-math", "reasoning-gym": None}
"""Recipe → whose columns it reads; None where it makes its problems."""

NO_LOWER_CASE = "{function: format, weight: 0.1, params: {pattern: '[^a-z]*'}}"
"""A reward in which the answers of a random model differ."""
TINY = [
    "cluster.backend=inline",
    "cluster.device=cpu",
    "mode=one_step_off",
    "trainer.n_gpus_per_node=1",
    "trainer.threads=1",
    "rollout.n_gpus_per_node=1",
    "rollout.threads=1",
    "rollout.n=2",
    "rollout.max_concurrent=8",
    "rollout.total_rollout_steps=2",
    "data.epochs=null",
    "data.max_response_length=6",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_max_token_len_per_gpu=2048",
    "reward.workers=1",
    "reports.trackers=[]",
]
"""One version of one optimizer step, in one process."""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name example files as from here."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over characters with a chat template."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    vocabulary = "".join(map(chr, range(32, 127))) + "\n"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    make_model(
        MakeModelConfig(**sizes, intermediate_size=32, max_position_embeddings=4096, vocabulary=vocabulary), 0, folder
    )
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def make_data(path: Path, kind: str, *options: str) -> Path:
    script = ROOT / "examples" / "make_data.py"
    subprocess.run([sys.executable, script, path, "--like", kind, *options], check=True, timeout=240)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Recipe → the settings that name its files, which are made when they are first asked for."""

    @cache
    def settings(recipe: str) -> list[str]:
        if (kind := DATA[recipe]) is None:
            return []
        folder = tmp_path_factory.mktemp(recipe)
        train = make_data(folder / "train.parquet", kind, "--rows", "12")
        val = make_data(folder / "val.parquet", kind, "--rows", "3", "--seed", "1")
        return [f"data.train={train}", f"data.val={val}"]

    return settings


def for_gpus(recipe: str) -> dict[int, list[str]]:
    """What the recipe's comments say to add, by the number of GPUs."""
    _, _, table = (ROOT / "recipes" / f"{recipe}.yaml").read_text().partition("# GPUs   add\n")
    found: dict[int, list[str]] = {}
    for line in table.splitlines():
        match = re.fullmatch(r"# (.{4})   (.+)", line)
        if match is None:
            break
        if match[1].strip():
            gpus = int(match[1])
            found[gpus] = []
        found[gpus] += [word for word in match[2].split() if "=" in word]
    return found


@mostly_slow(
    ("recipe", "gpus"),
    product(DATA, [1, 8, 64]),
    quick=[("dapo-math", 64)],
)
def test_a_recipe_takes_as_many_gpus_as_its_comments_say(
    recipe: str, gpus: int, data: Callable[[str], list[str]]
) -> None:
    """A dry run of a whole recipe: its model, its data and its reward are tried."""
    overrides = [*data(recipe), *for_gpus(recipe)[gpus]]
    path = ROOT / "recipes" / f"{recipe}.yaml"
    done = run("train", str(path), *overrides, "--dry-run")
    assert done.exit_code == 0, done.output
    placement = resolve_placement(load(path, overrides).config)
    assert placement.total == gpus
    assert not placement.idle


@pytest.mark.slow
@pytest.mark.parametrize("recipe", DATA)
def test_a_recipe_trains_a_tiny_model_to_its_first_version(
    recipe: str, tiny: Path, data: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """A whole run and an evaluation, each with processes that score; the slowest imports reasoning_gym there."""
    own = load(ROOT / "recipes" / f"{recipe}.yaml").config.reward.function
    both = f"[{{function: {own}}}, {NO_LOWER_CASE}]"
    overrides = [*data(recipe), *TINY, f"model.path={tiny}", f"reward.functions={both}"]
    overrides += ["data.task.val_size=3"] if DATA[recipe] is None else []
    overrides += ["reward.overlong_buffer.len=2"] if recipe == "dapo-math" else []
    directory = tmp_path / "run"
    trained = run("train", f"recipes/{recipe}.yaml", *overrides, f"run.dir={directory}")
    assert trained.exit_code == 0, trained.output
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    assert (summary["groups"]["trained"], summary["groups"]["failed"]) == (2, 0)
    assert summary["eval"][-1]["version"] == 1
    assert summary["eval"][-1]["accuracy"] > 0
    evaluated = run("eval", str(directory), "--samples", "0")
    assert evaluated.exit_code == 0, evaluated.output
    assert "3 problems, " in evaluated.stdout
    words = " ".join(evaluated.stdout.split())
    assert f"mean reward {summary['eval'][-1]['accuracy']:.3f} ±" in words, "a function scores, too"


# ------------------------------------------------------------------------------------------- data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "columns", "reward_model", "extra_info"),
    [
        ("gsm8k", "openai/gsm8k", {"ground_truth", "style"}, {"answer", "index", "question", "split"}),
        ("dapo-math", "math_dapo", {"ground_truth", "style"}, {"index"}),
    ],
)
def test_small_files_have_the_columns_of_the_public_ones(
    kind: str, columns: str, reward_model: set[str], extra_info: set[str], tmp_path: Path
) -> None:
    path = make_data(tmp_path / "train.parquet", kind, "--rows", "3")
    rows = pyarrow.parquet.read_table(path).to_pylist()
    for row in rows:
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert row["data_source"] == columns
        assert [set(message) for message in row["prompt"]] == [{"content", "role"}]
        assert set(row["reward_model"]) == reward_model
        assert set(row["extra_info"]) == extra_info


@pytest.mark.parametrize(("kind", "say"), [("gsm8k", "#### {}"), ("dapo-math", "Answer: {}")])
def test_math_verify_reads_answers_in_the_form_that_the_prompts_ask_for(kind: str, say: str, tmp_path: Path) -> None:
    path = make_data(tmp_path / "train.jsonl", kind, "--rows", "8")
    score = Scorer(RewardSpec((part_of("math_verify"),), timeout_s=10)).serve
    for record in read_records(str(path), Columns()):
        right = int(record.answer)
        responses = [f"First 1, then 2.\n{say.format(right)}", f"It was {right}.\n{say.format(right + 1)}"]
        request = ScoreRequest("?", responses, record.answer, record.source, record.extra)
        assert list(asyncio.run(score(request)).rewards) == [1.0, 0.0]


def test_the_data_script_refuses_a_file_of_another_kind(tmp_path: Path) -> None:
    script = ROOT / "examples" / "make_data.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path / "train.csv"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2
    assert ".jsonl or .parquet" in done.stderr


# ------------------------------------------------------------------------------------------- the mixture


def mixture_params() -> dict[str, Any]:
    task = load(ROOT / "recipes" / "reasoning-gym.yaml").config.data.task
    assert task is not None
    return task.params


def test_the_mixture_has_problems_of_each_dataset_by_weight() -> None:
    params = mixture_params()
    split = split_task("examples/gym_mixture.py:mixture", params, seed=0, size=500, val_size=4)
    drawn = [problem.extra["metadata"]["source_dataset"] for problem in split.train]
    weights = {one["name"]: one.get("weight", 1) for one in params["datasets"]}
    assert set(drawn) == set(weights)
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(drawn.count(name) / 500 - share) < 4 * (share * (1 - share) / 500) ** 0.5


def test_each_problem_of_the_mixture_is_scored_by_its_own_dataset() -> None:
    params = {**mixture_params(), "instruction": "Be brief."}
    task = make_task("examples/gym_mixture.py:mixture", params, seed=3, problems=40)
    for index in range(40):
        problem = task.problem(index)
        assert problem.prompt.endswith("\n\nBe brief.")
        assert task.score(f"so <answer>{problem.answer}</answer>", problem.answer, problem.extra) == 1.0
        assert task.score("<answer>no idea</answer>", problem.answer, problem.extra) < 1.0
