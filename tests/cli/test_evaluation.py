"""``headway eval``: what it asks, what it counts, what it refuses, how it ends."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

from headway import preflight
from headway.cli.answers_file import AnswersFile
from headway.cli.evaluation import Tenths, _by_source
from headway.cluster.process import math_environment
from headway.cluster.processes import descendants
from headway.config.loading import dump, load
from headway.config.model import MakeModelConfig
from headway.errors import UserError
from headway.evaluation.figures import Answer, Estimate, Solved, figures, pass_at_k, usual_ks
from headway.evaluation.settings import settle
from headway.models.make import make_model
from tests.cli.test_commands import python, run
from tests.full_disk import files_of_at_most
from tests.integration.support import alive

LENGTH = 6
CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}assistant:"
SHORT = (f"data.max_response_length={LENGTH}", "rollout.threads=1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over characters, which answers with something for every prompt."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_model(
        MakeModelConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=16,
            intermediate_size=64,
            max_position_embeddings=1024,
            vocabulary="0123456789abcdefghijklmnopqrstuvwxyz:=,|+-*() .?",
        ),
        0,
        folder,
    )
    return folder


@pytest.fixture(scope="module")
def greedy(tiny: Path) -> dict[str, str]:
    """Prompt → the model's greedy answer, by transformers, without a cache."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    found = {}
    for prompt in (f"{a}+{b}=" for a in range(4) for b in range(3)):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        length = ids.shape[1]
        for _ in range(LENGTH):
            with torch.inference_mode():
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
            if ids[0, -1] == tokenizer.eos_token_id:
                break
        found[prompt] = tokenizer.decode(ids[0, length:], skip_special_tokens=True)
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(result: Result) -> dict[str, str]:
    """The figures that were printed, by name."""
    assert result.exit_code == 0, result.output
    words = [line.split(maxsplit=1) for line in result.stdout.partition("\n\n")[0].splitlines()]
    return {name: rest.strip() for name, rest in words}


# ------------------------------------------------------------------------------------------- figures


def test_pass_at_k_is_the_share_of_subsets_of_k_answers_with_a_correct_one() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            correct = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(correct, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(10_000, 3, 1000), (10_000, 9, 1), (5000, 2500, 100), (2000, 1, 1999)])
def test_pass_at_k_is_exact_where_binomials_overflow(n: int, c: int, k: int) -> None:
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-10)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_refuses_counts_that_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= c <= n"):
        pass_at_k(n, c, k)


def test_the_usual_ks_are_powers_of_two_and_n() -> None:
    assert [usual_ks(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_an_estimate_has_the_standard_error_of_a_mean() -> None:
    values = [0.0, 1.0, 0.5, 0.25, 1.0]
    mean = sum(values) / 5
    variance = sum((value - mean) ** 2 for value in values) / 4
    estimate = Estimate.of(values)
    assert estimate.value == pytest.approx(mean)
    assert estimate.error == pytest.approx((variance / 5) ** 0.5)
    assert Estimate.of([0.5]) == Estimate(0.5, None)


def solved(rewards: list[float], failure: str | None = None) -> Solved:
    answers = tuple(
        Answer(k, "x", tokens=k + 1, cut_off=k == 0, finish_reason="stop", reward=reward, parts={})
        for k, reward in enumerate(rewards)
    )
    return Solved(0, "s", "p", "a", answers, failure)


def test_rewards_from_the_threshold_on_are_correct_also_when_they_are_single_precision() -> None:
    nine_tenths = float(torch.tensor(0.9))
    assert nine_tenths < 0.9
    assert solved([nine_tenths, 0.8, 1.0]).correct(0.9) == 2
    assert solved([1.0, 1.0], failure="timeout after 10 s").correct(0.0) == 0


def test_figures_are_means_over_problems() -> None:
    found = figures([solved([1.0, 0.0]), solved([0.5, 0.5]), solved([0.0, 0.0], failure="no")], (1, 2), threshold=0.5)
    assert (found.problems, found.answers, found.failed) == (3, 6, 1)
    assert found.accuracy.value == pytest.approx(1 / 3)
    assert found.pass_at[1].value == pytest.approx((0.5 + 1 + 0) / 3)
    assert found.pass_at[2].value == pytest.approx(2 / 3)
    assert (found.mean_tokens, found.max_tokens, found.cut_off) == (1.5, 2, 0.5)


def test_failed_episodes_are_left_out_of_their_problem_s_figures() -> None:
    one, three = solved([1.0, 0.0, 0.0, 0.0]), solved([1.0, 1.0, 0.0, 0.0])
    one = replace(one, answers=tuple(replace(a, failure="no" if a.k else None) for a in one.answers))
    three = replace(three, answers=tuple(replace(a, failure="no" if a.k == 3 else None) for a in three.answers))
    found = figures([one, three, solved([0.0] * 4, failure="episode failed: no")], (1, 2, 4), threshold=1.0)
    assert (found.problems, found.answers, found.failed, found.failed_episodes) == (3, 12, 1, 4)
    assert found.accuracy.value == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert found.pass_at[1].value == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert found.pass_at[2].value == pytest.approx((1 + 0) / 2)  # the first one has no two answers that count
    assert found.pass_at[4] == Estimate(0.0, None)
    assert found.too_few == {1: 0, 2: 1, 4: 2}
    assert 2 not in figures([one], (1, 2), threshold=1.0).pass_at


def test_the_table_of_sources_marks_a_share_that_is_not_of_all_problems() -> None:
    whole = solved([1.0, 0.0])
    part = replace(whole, answers=(whole.answers[0], replace(whole.answers[1], failure="no")))
    found = {"a": figures([whole, part], (1, 2), threshold=1.0), "b": figures([whole], (1, 2), threshold=1.0)}
    output = io.StringIO()
    Console(file=output, width=100).print(_by_source(found, (1, 2)))
    a, b, *below = output.getvalue().splitlines()[3:]
    assert a.split()[:7] == ["a", "2", "0.750", "±", "0.250", "0.750", "1.000*"]
    assert b.split()[:5] == ["b", "1", "0.500", "0.500", "1.000"]
    assert "* without problems of which too few answers count" in "".join(below)


# ------------------------------------------------------------------------------------------- evaluations


def test_greedy_answers_are_those_of_transformers_and_are_counted(
    tiny: Path, greedy: dict[str, str], tmp_path: Path
) -> None:
    prompts = list(greedy)
    rows = [{"prompt": p, "answer": greedy[p] if i % 3 else "wrong"} for i, p in enumerate(prompts)]
    output = tmp_path / "answers.jsonl"
    done = run("eval", str(tiny), write(tmp_path / "test.jsonl", rows), *SHORT, "-o", str(output))
    right = sum(greedy[p].strip() == row["answer"].strip() for p, row in zip(prompts, rows, strict=True))
    assert right == 8
    error = (8 / 12 * 4 / 12 / 11) ** 0.5  # of a mean of zeros and ones
    figures = said(done)
    assert figures["accuracy"].startswith(f"{8 / 12:.3f} ± {error:.3f} ")
    assert figures["pass@1"].startswith(f"{8 / 12:.3f} ± {error:.3f} ")
    answers = lines_of(output)
    assert [answer["row"] for answer in answers] == list(range(12))
    assert [answer["response"] for answer in answers] == [greedy[p] for p in prompts]
    assert figures["length"].startswith(f"mean {sum(a['tokens'] for a in answers) / 12:.1f}, ")
    assert "12 of 12 problems" in done.stderr


def test_several_answers_are_counted_by_pass_at_k_and_come_again_with_the_seed(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(response): return float(response[:1] < 'h')\n")
    data = write(tmp_path / "test.jsonl", [{"prompt": f"{i}+{i}=", "answer": ""} for i in range(5)])
    outputs = [tmp_path / f"{i}.jsonl" for i in range(3)]
    for output, seed in zip(outputs, (0, 0, 1), strict=True):
        arguments = [data, "--n", "6", "--temperature", "1", "--k", "4,2", "-o", str(output), *SHORT]
        settings = [f"reward.function={tmp_path}/reward.py:score", f"run.seed={seed}"]
        figures = said(run("eval", str(tiny), *arguments, *settings))
        answers = lines_of(output)
        assert [(a["row"], a["k"]) for a in answers] == [(row, k) for row in range(5) for k in range(6)]
        for k in (2, 4):
            shares = []
            for row in range(5):
                rewards = [a["reward"] for a in answers if a["row"] == row]
                subsets = list(combinations(rewards, k))
                shares.append(sum(max(subset) for subset in subsets) / len(subsets))
            assert figures[f"pass@{k}"].startswith(f"{sum(shares) / 5:.3f} ")
            assert 0 < sum(shares) < 5
        assert "pass@1" not in figures
    first, again, other = ([a["response"] for a in lines_of(output)] for output in outputs)
    assert first == again
    assert first != other


def test_more_answers_than_the_engine_decodes_at_once_are_all_there(tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    arguments = ["sort", "--n", "9", "--temperature", "1", "--limit", "3", "-o", str(output)]
    run("eval", str(tiny), *arguments, *SHORT, "rollout.max_concurrent=2")
    assert len(lines_of(output)) == 27


def test_the_sources_of_a_file_are_told_apart(tiny: Path, greedy: dict[str, str], tmp_path: Path) -> None:
    rows = [
        {"prompt": p, "answer": greedy[p] if source == "easy" else "wrong", "data_source": source}
        for p, source in zip(greedy, ("easy", "hard", "hard", "easy"), strict=False)
    ]
    done = run("eval", str(tiny), write(tmp_path / "test.jsonl", rows), *SHORT, "--samples", "0")
    table = [line.split() for line in done.stdout.partition("source")[2].splitlines()]
    shown = {words[0]: words[1:3] for words in table if words and words[0] in ("easy", "hard")}
    assert shown == {"easy": ["2", "1.000"], "hard": ["2", "0.000"]}


def test_prompts_that_are_too_long_and_answers_that_cannot_be_scored_are_told(tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * n, "answer": "1" if n != 2 else None} for n in (1, 2, 30)]
    data = write(tmp_path / "test.jsonl", rows)
    output = tmp_path / "answers.jsonl"
    settings = ["data.max_prompt_length=8", "reward.retries=0"]
    figures = said(run("eval", str(tiny), data, *SHORT, *settings, "-o", str(output)))
    assert figures["left"] == "out  1 prompts of more than 8 tokens"
    assert figures["failed"].startswith("1 problems, which count as 0: the row has no answer")
    assert [(a["row"], a["reward"], "failure" in a) for a in lines_of(output)] == [(0, 0.0, False), (1, None, True)]


def chatting_model(directory: Path, **more: Any) -> None:
    """Make a tiny model with a chat template, in the folder ``model``."""
    model = MakeModelConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=64,
        chat_template=CHAT,
        **more,
    )
    make_model(model, 0, directory / "model")


PROGRAM = """
async def talk(row, chat):
    await chat.turn(row["prompt"])
    if row["fails"] == "all" or row["fails"] == "some" and chat.seed % 2:
        raise RuntimeError("the sandbox has burnt down")
    return 1.0
"""


def test_a_problem_is_counted_by_its_episodes_that_did_not_fail(tmp_path: Path) -> None:
    """Starts a process for the program, once to look at it and once to make the episodes."""
    chatting_model(tmp_path)
    (tmp_path / "talk.py").write_text(PROGRAM)
    rows = [{"prompt": f"{i}+1=", "answer": "1", "fails": fails} for i, fails in enumerate(["none", "some", "all"])]
    data, output = write(tmp_path / "test.jsonl", rows), tmp_path / "answers.jsonl"
    settings = [
        "data.max_prompt_length=32",
        f"rollout.program={tmp_path / 'talk.py'}:talk",
        "--n",
        "4",
        "--temperature",
        "1",
        "-o",
        str(output),
    ]
    figures = said(run("eval", str(tmp_path / "model"), data, *SHORT, *settings))
    answers = lines_of(output)
    failed = [sum("failure" in answer for answer in answers if answer["row"] == row) for row in range(3)]
    assert failed[0] == 0 < failed[1] < failed[2] == 4
    assert {answer["reward"] for answer in answers if "failure" not in answer} == {1.0}
    assert figures["accuracy"].startswith("0.667 ")  # 1, 1, and no score
    assert "without" not in figures["pass@1"]
    assert figures["pass@4"].endswith("without 1 of 3 problems: too few answers count")
    assert figures["failed"].startswith("1 problems, which count as 0: episode failed: program")
    assert figures["episodes"].startswith(f"failed  {sum(failed)} of 12, which do not count where others")
    why = "program talk.py:talk raised RuntimeError: the sandbox has burnt down"
    assert {answer["failure"] for answer in answers if answer["row"] == 2} == {why}


TWO_TURNS = """
async def talk(row, chat):
    messages = [*row["prompt"], {"role": "user", "content": "please"}]
    answer = await chat.turn(messages)
    await chat.turn([*messages, answer.message, {"role": "user", "content": "go on"}])

def score(prompts, completions):
    assert [message["content"] for message in prompts[0]] == ["1+1=", "please"]
    assert completions[0][1] == {"role": "user", "content": "go on"}
    return [len(completion) for completion in completions]
"""


def test_a_reward_for_trl_reads_the_conversation_of_a_program(tmp_path: Path) -> None:
    """Starts processes for the program and the reward, each once to look at it and once to work."""
    chatting_model(tmp_path, vocabulary="0123456789abcdefghijklmnopqrstuvwxyz:+= ")
    (tmp_path / "talk.py").write_text(TWO_TURNS)
    data = write(tmp_path / "test.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    user = [f"rollout.program={tmp_path / 'talk.py'}:talk", f"reward.function={tmp_path / 'talk.py'}:score"]
    settings = ["data.max_prompt_length=48", "data.max_response_length=48", "rollout.max_turn_tokens=4"]
    figures = said(run("eval", str(tmp_path / "model"), data, *user, *settings, "rollout.threads=1"))
    assert figures["accuracy"].startswith("3.00"), figures


def test_a_disk_that_fills_on_the_way_costs_the_rest_of_the_answers_and_no_figure(tiny: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "test.jsonl", [{"prompt": f"{i}=", "answer": "1"} for i in range(9)])
    output, all_of_them = tmp_path / "answers.jsonl", tmp_path / "all.jsonl"
    arguments = ["eval", str(tiny), data, *SHORT, "-o"]
    figures, ending = run(*arguments, str(all_of_them)).stdout.split("answers: ")
    assert ending == f"{all_of_them}\n"
    kept = all_of_them.read_text().splitlines(keepends=True)[:4]
    with files_of_at_most(len("".join(kept).encode()) + 20):
        done = run(*arguments, str(output))
    assert done.exit_code == 1
    assert output.read_text() == "".join(kept), "whole lines"
    assert done.stdout == figures
    assert done.stderr.splitlines() == [
        "answering 9 problems",
        f"warning: --output {output} cannot be written any more (File too large); it has the answers to the first 4 "
        "problems, and the evaluation goes on without it",
        "9 of 9 problems",
    ]


def test_an_answer_that_utf8_cannot_hold_is_written_as_json_spells_it(tmp_path: Path) -> None:
    odd = replace(solved([1.0]), truth="\ud800 ü")
    with AnswersFile(tmp_path / "answers.jsonl", tell=print) as file:
        file.write(odd)
    assert lines_of(tmp_path / "answers.jsonl")[0]["answer"] == odd.truth


def test_samples_are_from_all_over_the_data(tiny: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "test.jsonl", [{"prompt": f"{i}=", "answer": f"t{i}"} for i in range(10)])
    shown = run("eval", str(tiny), data, *SHORT, "--samples", "2").stdout
    assert [i for i in range(10) if f"t{i}" in shown] == [0, 5]
    assert "prompt" in shown
    assert "prompt" not in run("eval", str(tiny), data, *SHORT, "--samples", "0").stdout


# ------------------------------------------------------------------------------------------- settings

RUN = """\
mode: async_partial
run: {seed: 7}
model: {make: {}}
data: {task: {name: sort, val_size: 5, params: {max_length: 9, mean_length: 4}}, max_response_length: 4}
reward: {function: task}
actor: {ppo_mini_batch_size: 16, optim: {lr: 1.0e-4}}
rollout: {total_rollout_steps: 64, top_p: 0.5, val_n: 2, val_temperature: 0.7}
async_training: {use_rollout_log_probs: false}
algorithm: {rollout_correction: {name: truncate}}
"""


@pytest.fixture
def run_dir(tiny: Path, tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RUN)
    directory = tmp_path / "run"
    shutil.copytree(tiny, directory / "model")
    (directory / "config.yaml").write_text(dump(load(tmp_path / "recipe.yaml").config))
    return directory


def test_a_run_is_asked_what_it_held_out_as_its_validation_asks(run_dir: Path) -> None:
    job = settle(str(run_dir), None, [])
    config = job.config
    assert (config.model.path, config.run.seed) == (str(run_dir / "model"), 7)
    assert job.held_out
    assert config.data.task is not None
    assert config.data.task.val_size == 5
    assert (config.rollout.val_n, config.rollout.val_temperature, config.rollout.top_p) == (2, 0.7, 1.0)
    assert (
        said(run("eval", str(run_dir)))["data"]
        == "held-out problems of sort: 5 problems, 2 answers each, temperature 0.7"
    )


def test_the_version_of_the_model_is_told_and_that_a_newer_checkpoint_is_complete(run_dir: Path) -> None:
    (run_dir / "model" / "headway.json").write_text('{"version": 9}')
    for folder in ("version_8", "version_9", ".version_12.partial"):
        (run_dir / "checkpoints" / folder).mkdir(parents=True)
    job = settle(str(run_dir), None, [])
    assert (job.version, job.newer) == (9, None)
    (run_dir / "checkpoints" / "version_11").mkdir()
    done = run("eval", str(run_dir))
    assert said(done)["version"] == "9"
    assert "warning: the checkpoint of version 11 is newer than the model, which is version 9" in done.stderr
    job = settle(str(run_dir / "model"), "sort", [])
    assert (job.version, job.newer) == (9, None)


def test_filters_that_are_given_count(run_dir: Path) -> None:
    config = settle(str(run_dir), None, ["rollout.top_p=0.9", "rollout.logit_bias={3: 1.0}"]).config
    assert (config.rollout.top_p, config.rollout.logit_bias) == (0.9, {3: 1.0})


def test_a_file_takes_the_place_of_the_runs_task(run_dir: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "odd: name, [1].jsonl", [{"prompt": "1+1=", "answer": "2"}])
    job = settle(str(run_dir), data, [])
    assert (job.held_out, job.config.data.task, job.config.data.train) == (False, None, data)
    assert job.config.reward.function == "exact_match"
    assert "exact_match" in job.notes[0]
    assert said(run("eval", str(run_dir), data))["data"].startswith(f"{data}"[:40])


def test_a_task_is_scored_by_its_own_verifier_unless_the_reward_is_given(tiny: Path, run_dir: Path) -> None:
    def reward(model: Path, data: str, *overrides: str) -> str:
        return settle(str(model), data, overrides).config.reward.function

    assert reward(tiny, "sort") == "task"
    assert reward(tiny, "reasoning_gym/leg_counting") == "task"
    assert reward(tiny, "reverse", "reward.function=exact_match") == "exact_match"
    other = run_dir.with_name("other")
    shutil.copytree(run_dir, other)
    (other / "config.yaml").write_text(RUN.replace("function: task", "function: exact_match"))
    assert reward(other, "sort") == "exact_match"
    assert reward(other, "reverse") == "task"


def test_a_recipe_gives_data_and_reward_to_any_model(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RUN)
    job = settle(str(tiny), None, [], config_file=tmp_path / "recipe.yaml", n=1, temperature=0.0)
    assert (job.config.model.path, job.config.reward.function, job.held_out) == (str(tiny), "task", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL"], "expected DATA"),
        (["MODEL", "data.max_response_length=4"], "expected DATA"),
        (["MODEL", "test.csv"], "DATA: got test.csv, expected a .jsonl or .parquet file, or a task"),
        (["MODEL", "nowhere.jsonl"], "DATA: got nowhere.jsonl, which does not exist"),
        (["nowhere", "sort"], "nowhere: no such folder"),
        (["MODEL", "reasoning_gym/leg_countin"], "did you mean 'leg_counting'"),
        (["MODEL", "sort", "--n", "4"], "greedy answers (--temperature 0) are all equal"),
        (["MODEL", "sort", "--n", "2", "--temperature", "1", "--k", "1,4"], "--k 1,4: expected numbers from 1 to --n"),
        (["MODEL", "sort", "--k", "one"], "--k one: expected numbers"),
        (["MODEL", "sort", "rollout.m=1"], "rollout.m: unknown key"),
        (["MODEL", "sort", "actor.optim.lr=1"], "actor.optim.lr: no effect on an evaluation"),
        (["MODEL", "sort", "data.epochs=1"], "data.epochs: no effect on an evaluation"),
        (["MODEL", "sort", "rollout.n=4"], "rollout.n: --n says that here"),
        (["MODEL", "sort", "data.train=a.jsonl"], "data.train: DATA says what is read"),
        (["MODEL", "sort", "reward.function=nowhere.py:score"], "there is no file"),
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
    of_recipe = write(tmp_path / "chat.jsonl", [{"prompt": "2=", "answer": "2"}])
    (tmp_path / "mine.py").write_text("def score(response, words): return 1.0\n")
    (tmp_path / "other.py").write_text("def score(response): return 1.0\n")
    (tmp_path / "words.txt").write_text("a b")
    (tmp_path / "beneath.yaml").write_text(f"data: {{train: {of_recipe}}}\n")
    (tmp_path / "recipe.yaml").write_text(
        f"defaults: [beneath.yaml]\nreward: {{function: '{tmp_path}/other.py:score'}}\n"
    )
    settings = [f"reward.function={tmp_path}/mine.py:score", f"reward.params.words={tmp_path}/words.txt"]
    typed = [str(tiny), data, "--config", str(tmp_path / "recipe.yaml"), *settings]
    for name in ("chat.jsonl", "mine.py", "other.py", "words.txt", "beneath.yaml", "recipe.yaml"):
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

    monkeypatch.setattr("headway.evaluation.answers._start_engine", refuse)
    output = tmp_path / "answers.jsonl"
    output.write_text("kept")
    done = run("eval", str(tiny), "sort", *SHORT, "-o", str(output))
    assert done.stderr.endswith("error: no weights\n")
    assert output.read_text() == "kept"


def test_a_run_without_its_model_says_so(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "model")
    done = run("eval", str(run_dir))
    assert done.exit_code == 2
    assert "has no model/, which is written at its end" in done.stderr


def test_help_loads_neither_torch_nor_ray() -> None:
    code = """
import sys
from headway.cli import cli
try:
    cli(["eval", "--help"])
except SystemExit as end:
    assert end.code == 0, end.code
heavy = {"torch", "transformers", "ray", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("total", "told"),
    [(3, [3]), (20, [10, 20]), (100, list(range(10, 101, 10))), (1234, [*range(124, 1234, 124), 1234])],
)
def test_without_a_terminal_a_line_tells_of_each_tenth_and_never_of_a_few(total: int, told: list[int]) -> None:
    shown = io.StringIO()
    progress = Tenths(Console(file=shown), total)
    progress.start()
    for _ in range(total):
        progress.advance()
    lines = [f"answering {total} problems", *(f"{done} of {total} problems" for done in told)]
    assert shown.getvalue().splitlines() == lines


def test_a_data_file_that_is_not_there_is_called_by_its_argument(tiny: Path) -> None:
    done = run("eval", str(tiny), "nowhere.parquet")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: DATA: got nowhere.parquet, which does not exist; expected a .jsonl")


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
        ("import os; os._exit(3)\n", "a reward worker ended while it loaded"),
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


@pytest.mark.slow
def test_ctrl_c_ends_it_with_what_was_answered_on_disk(tiny: Path, tmp_path: Path) -> None:
    """In a process of its own, whose imports take seconds: the terminal's signal goes to all its processes."""
    (tmp_path / "reward.py").write_text(
        "import time\ndef score(response, answer):\n    time.sleep(0 if answer == '0' else 60)\n    return 1.0\n"
    )
    data = write(tmp_path / "test.jsonl", [{"prompt": f"{i}=", "answer": str(i // 10)} for i in range(20)])
    output = tmp_path / "answers.jsonl"
    settings = [f"reward.function={tmp_path}/reward.py:score", "reward.timeout_s=90", "rollout.max_concurrent=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "eval", str(tiny), data, *SHORT, *settings, "-o", str(output)],
        env={**os.environ, **math_environment(1)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        while "10 of 20 problems" not in (line := process.stderr.readline()):
            assert line, "it ended before it had answered anything"
        workers = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of its processes
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err + out
    assert [answer["row"] for answer in lines_of(output)] == list(range(10))
    assert workers
    deadline = time.monotonic() + 60
    while alive(workers):
        assert time.monotonic() < deadline, f"{alive(workers)} of {workers} are left"
        time.sleep(0.05)
