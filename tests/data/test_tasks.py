"""Procedural tasks: right answers, the lengths' distribution, determinism, a disjoint held-out set, clear errors."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.tasks import make_task, split_task
from headway.errors import ConfigError, UserCodeError

LETTERS = {"alphabet": "cab", "min_length": 2, "mean_length": 4.0, "max_length": 9}


def test_sort_sorts_in_the_order_of_the_alphabet() -> None:
    task = make_task("sort", LETTERS, seed=1)
    for index in range(50):
        problem = task.problem(index)
        sequence = problem.prompt.removeprefix("sort:").removesuffix("=")
        assert sorted(sequence) == sorted(problem.answer)
        assert problem.answer == "c" * sequence.count("c") + "a" * sequence.count("a") + "b" * sequence.count("b")


def test_reverse_reverses() -> None:
    problem = make_task("reverse", LETTERS, seed=1).problem(3)
    assert problem.prompt == f"reverse:{problem.answer[::-1]}="


def test_a_prompt_format_of_ones_own() -> None:
    problem = make_task("reverse", {"prompt_format": "{sequence} backwards: "}, seed=1).problem(3)
    assert problem.prompt == f"{problem.answer[::-1]} backwards: "


@pytest.mark.parametrize("name", ["sort", "reverse", "reasoning_gym/countdown"])
def test_a_problem_depends_on_seed_and_index_alone(name: str) -> None:
    """Imports a package of tasks, with what it needs."""
    one, two = (make_task(name, {}, seed=5, problems=20) for _ in range(2))
    forwards = [one.problem(i) for i in range(20)]
    backwards = [two.problem(i) for i in reversed(range(20))][::-1]
    assert forwards == backwards
    assert forwards != [make_task(name, {}, seed=900, problems=20).problem(i) for i in range(20)]


def test_lengths_are_geometric() -> None:
    """P(min + k) ∝ qᵏ: compared with the exact truncated distribution."""
    minimum, mean, maximum, n = 3, 6.0, 12, 20_000
    task = make_task("sort", {"min_length": minimum, "mean_length": mean, "max_length": maximum}, seed=0)
    counts = Counter(task.problem(i).extra["length"] for i in range(n))
    q = (mean - minimum) / (1 + mean - minimum)
    weights = [q**k for k in range(maximum - minimum + 1)]
    for k, weight in enumerate(weights):
        p = weight / sum(weights)
        assert abs(counts[minimum + k] / n - p) < 5 * math.sqrt(p * (1 - p) / n)
    assert set(counts) == set(range(minimum, maximum + 1))


def test_a_mean_of_the_minimum_makes_all_lengths_equal() -> None:
    task = make_task("reverse", {"min_length": 4, "mean_length": 4, "max_length": 9}, seed=0)
    assert {len(task.problem(i).answer) for i in range(30)} == {4}


@pytest.mark.parametrize(("response", "score"), [("{}", 1.0), (" {}\n", 1.0), ("{}1", 0.0), ("", 0.0)])
def test_only_the_exact_sequence_scores(response: str, score: float) -> None:
    task = make_task("sort", {}, seed=0)
    problem = task.problem(0)
    assert task.score(response.format(problem.answer), problem.answer, problem.extra) == score


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), size=st.integers(1, 200), val_size=st.integers(0, 60))
def test_held_out_problems_are_distinct_and_never_trained_on(seed: int, size: int, val_size: int) -> None:
    params = {"alphabet": "01", "min_length": 6, "mean_length": 7.0, "max_length": 10}
    split = split_task("sort", params, seed=seed, size=size, val_size=val_size)
    held_out = {problem.prompt for problem in split.val}
    assert len(split.val) == len(held_out) == val_size
    assert len(split.train) == size
    assert held_out.isdisjoint(problem.prompt for problem in split.train)


def test_training_problems_are_made_on_demand() -> None:
    train = split_task("sort", {}, seed=0, size=10**9, val_size=2).train
    assert train[5] == train[5] and train[5] != train[6]
    with pytest.raises(IndexError):
        train[10**9]


def test_a_task_with_too_few_distinct_problems_says_so() -> None:
    tiny = {"alphabet": "01", "min_length": 2, "mean_length": 2, "max_length": 2}
    with pytest.raises(ConfigError, match="only 4 distinct problems in 20 tries"):
        split_task("sort", tiny, seed=0, size=50, val_size=5)
    with pytest.raises(ConfigError, match="too few distinct problems"):
        _ = split_task("sort", tiny, seed=0, size=50, val_size=4).train[0]


def test_reasoning_gym_problems_are_scored_by_their_own_verifier() -> None:
    split = split_task("reasoning_gym/countdown", {"min_numbers": 3, "max_numbers": 3}, seed=0, size=5, val_size=3)
    problem = split.val[0]
    assert split.task.score(problem.answer, problem.answer, problem.extra) == 1.0
    assert split.task.score(f"so <answer> {problem.answer} </answer>", problem.answer, problem.extra) == 1.0
    swapped = f"({problem.answer}) + 0 * 0"  # another right value with numbers that were not given
    assert split.task.score(swapped, problem.answer, problem.extra) < 1.0


def test_what_a_verifier_cannot_parse_is_wrong() -> None:
    task = make_task("reasoning_gym/prime_factorization", {}, seed=0)
    problem = task.problem(0)
    assert task.score(problem.answer, problem.answer, problem.extra) == 1.0
    assert task.score("two times three", problem.answer, problem.extra) == 0.0


def test_a_verifier_accepts_another_right_answer() -> None:
    """Scoring is the dataset's, not text comparison: a sum may be written in another order."""
    task = make_task("reasoning_gym/countdown", {"min_numbers": 2, "max_numbers": 2, "operators": ["+"]}, seed=0)
    problem = task.problem(0)
    left, right = problem.answer.split(" + ")
    assert task.score(f"{right} + {left}", problem.answer, problem.extra) == 1.0


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "srot",
            {},
            r"unknown task 'srot' \(did you mean 'sort'\?\); known: reverse, sort, or reasoning_gym/<dataset>",
        ),
        ("reasoning_gym/countdwn", {}, "no dataset 'countdwn'; did you mean 'countdown'"),
        ("reasoning_gym/countdown", {"numbers": 3}, "has no parameter 'numbers'; it takes .*max_numbers"),
        ("reasoning_gym/countdown", {"seed": 3}, "no parameter 'seed'.*run.seed"),
        ("reasoning_gym/countdown", {"min_numbers": -1}, "does not take .*AssertionError"),
        ("reasoning_gym/countdown", {"min_numbers": "x"}, "does not take .*TypeError"),
        ("sort", {"mean_lenght": 3}, r"no parameter 'mean_lenght' \(did you mean 'mean_length'\?\)"),
        ("sort", {"mean_length": "8"}, "mean_length: expected float, not '8'"),
        ("sort", {"min_length": True}, "min_length: expected int, not True"),
        ("sort", {"prompt_format": 3}, "prompt_format: expected str, not 3"),
        ("sort", {"alphabet": "aa"}, "two or more different characters"),
        ("sort", {"min_length": 0}, "1 ≤ min_length"),
        ("sort", {"mean_length": 100}, "mean_length ≤ max_length, not 3, 100, 32"),
        ("sort", {"prompt_format": "sort"}, "must contain {sequence}"),
    ],
)
def test_what_a_task_does_not_take_is_explained(name: str, params: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(name, params, seed=0)


def test_a_task_may_come_from_a_file(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "from headway.data.tasks import Problem\n"
        "class Count:\n"
        "    name = 'count'\n"
        "    def problem(self, index): return Problem('a' * index, str(index))\n"
        "    def score(self, response, answer, extra): return float(response == answer)\n"
        "def count(params, seed, problems): return Count()\n"
    )
    assert make_task(f"{tmp_path}/mine.py:count", {}, seed=0).problem(3).answer == "3"


def test_tasks_load_without_torch_pydantic_or_reasoning_gym() -> None:
    code = (
        "import sys, headway.data.tasks as t; t.make_task('sort', {}, seed=0).problem(0);"
        "sys.exit(str({'torch', 'pydantic', 'reasoning_gym', 'transformers'} & set(sys.modules) or '') or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_mixture_of_reasoning_gyms_datasets_is_written_as_a_config_has_it() -> None:
    mixture = {"datasets": [{"name": "leg_counting", "weight": 1}, {"name": "chain_sum", "config": {"min_terms": 2}}]}
    task = make_task("reasoning_gym/composite", mixture, seed=3, problems=12)
    names = {task.problem(i).extra["metadata"]["source_dataset"] for i in range(12)}
    assert names == {"leg_counting", "chain_sum"}
    assert all(task.score(p.answer, p.answer, p.extra) == 1 for p in map(task.problem, range(12)))


OWN = """
from dataclasses import replace
from headway.data.tasks import Problem
class Task:
    def __init__(self, **changes):
        self.changes = changes
    def problem(self, index):
        return replace(Problem("p", "a"), **self.changes)
    def score(self, response, answer, extra): return 1.0
class Raising(Task):
    def problem(self, index): return {}["p"]
class Leaving(Task):
    def problem(self, index): raise SystemExit(0)
def leave(): raise SystemExit(0)
class Text(Task):
    def problem(self, index): return "p"
class Nothing(Task):
    def problem(self, index): pass
class Unscored:
    problem = Task.problem
class Narrow(Task):
    def score(self, response): return 1.0
"""


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "returned None, which has no problem; expected an object with problem(index), which returns a "),
        ("params['size']", "cannot be made with data.task.params={}: KeyError: 'size'"),
        ("[].x", "cannot be made with data.task.params={}: AttributeError: 'list' object has no attribute 'x'"),
        ("leave()", "cannot be made with data.task.params={}: SystemExit: 0"),
        ("Unscored()", "returned Unscored <"),
        ("Narrow()", "score: takes (response), but is called with (response, answer, extra): too many"),
        ("Task", "problem: takes (self, index), but is called with (index): missing a required argument"),
    ],
)
def test_a_factory_of_one_s_own_that_makes_no_task_is_the_user_s_error(
    tmp_path: Path, returned: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(f"{OWN}\ndef make(params, seed, problems): return {returned}\n")
    with pytest.raises(UserCodeError) as error:
        make_task(f"{tmp_path}/own.py:make", {}, seed=0)
    assert str(error.value).startswith(f"{tmp_path}/own.py:make: {message}")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("Raising()", ": KeyError: 'p'"),
        ("Leaving()", ": SystemExit: 0"),
        ("Text()", " returned str 'p', expected a headway.data.tasks.Problem"),
        ("Nothing()", " returned None, expected a headway.data.tasks.Problem"),
        ("Task(prompt=['p'])", " returned a Problem whose prompt is list ['p'], expected text"),
        ("Task(answer=4)", " returned a Problem whose answer is int 4, expected text"),
        ("Task(extra=None)", " returned a Problem whose extra is None, expected a mapping"),
    ],
)
def test_a_problem_of_one_s_own_that_is_none_is_the_user_s_error(tmp_path: Path, made: str, message: str) -> None:
    (tmp_path / "own.py").write_text(f"{OWN}\ndef make(params, seed, problems): return {made}\n")
    spec = f"{tmp_path}/own.py:make"
    with pytest.raises(UserCodeError) as error:
        split_task(spec, {}, seed=0, size=5, val_size=0).train[3]
    said, _, place = str(error.value).partition(" (own.py:")
    assert said == f"{spec}: problem(3){message}"
    assert bool(place) == message.startswith(":"), "what it raised has its line"


def test_what_a_task_of_one_s_own_says_of_its_parameters_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from headway.errors import ConfigError\ndef make(params, seed, problems): raise ConfigError('give a size')\n"
    )
    with pytest.raises(ConfigError, match=r"^give a size$"):
        make_task(f"{tmp_path}/own.py:make", {}, seed=0)


def test_what_its_score_raises_is_left_to_whoever_scores(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        f"{OWN}\nclass Odd(Task):\n    def score(self, response, answer, extra): raise KeyError(response)\n"
        "def make(params, seed, problems): return Odd()\n"
    )
    with pytest.raises(KeyError, match="said"):
        make_task(f"{tmp_path}/own.py:make", {}, seed=0).score("said", "", {})


def test_a_factory_of_one_s_own_must_take_what_it_is_called_with(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def few(params): return None\n")
    with pytest.raises(UserCodeError, match=r"own\.py:few: takes \(params\), .*\(params, seed, problems\)"):
        make_task(f"{tmp_path}/own.py:few", {}, seed=0)
