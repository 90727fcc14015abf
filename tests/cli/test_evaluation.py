"""``headway eval``: answers of one turn, what is printed and written of them, how it ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.api.eval.scored_answers import progress
from headway.cli.eval_command import AnswersFile
from headway.cluster.machine.worker_setup import math_environment
from headway.runtime.process_tree import descendants
from tests.api.evaluation.test_figures import solved
from tests.cli.evaluations import LENGTH, SHORT, lines_of, said, write
from tests.cli.test_commands import python, run
from tests.full_disk import files_of_at_most
from tests.integration.support import alive


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


@pytest.mark.slow
def test_several_answers_are_counted_by_pass_at_k_and_come_again_with_the_seed(tiny: Path, tmp_path: Path) -> None:
    """Three whole evaluations, each with its engine and a reward worker."""
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
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.startswith("source")]
    assert lines == [
        "source easy 1.000 ± 0.000, pass@1 1.000, of 2 problems",
        "source hard 0.000 ± 0.000, pass@1 0.000, of 2 problems",
    ]


def test_prompts_that_are_too_long_and_answers_that_cannot_be_scored_are_told(tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * n, "answer": "1" if n != 2 else None} for n in (1, 2, 30)]
    data = write(tmp_path / "test.jsonl", rows)
    output = tmp_path / "answers.jsonl"
    settings = ["data.max_prompt_length=8", "reward.retries=0"]
    figures = said(run("eval", str(tiny), data, *SHORT, *settings, "-o", str(output)))
    assert figures["left"] == "out  1 prompts of more than 8 tokens"
    assert figures["failed"].startswith("1 problems, which count as 0: the row has no answer")
    assert [(a["row"], a["reward"], "failure" in a) for a in lines_of(output)] == [(0, 0.0, False), (1, None, True)]


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
    show = progress(Console(file=shown), total)
    for done in range(total + 1):
        show(done)
    lines = [f"answering {total} problems", *(f"{done} of {total} problems" for done in told)]
    assert shown.getvalue().splitlines() == lines


@pytest.mark.slow
def test_ctrl_c_ends_it_with_what_was_answered_on_disk(tiny: Path, tmp_path: Path) -> None:
    """In a process of its own, whose imports take seconds: the terminal's signal goes to all its processes."""
    (tmp_path / "reward.py").write_text(
        "import time\ndef score(response, answer):\n    time.sleep(0 if answer == '0' else 600)\n    return 1.0\n"
    )
    data = write(tmp_path / "test.jsonl", [{"prompt": f"{i}=", "answer": str(i // 10)} for i in range(20)])
    output = tmp_path / "answers.jsonl"
    settings = [f"reward.function={tmp_path}/reward.py:score", "reward.timeout_s=900", "rollout.max_concurrent=1"]
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
        out, err = process.communicate(timeout=240)
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
