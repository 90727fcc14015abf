"""Every benchmark imports, and those that need no model run, in their smallest form."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from benchmarks import long_run, sandbox
from benchmarks.runner import Failed, call, parser, turns, words
from benchmarks.table import Ratio, Share, markdown

MODULES = sorted(path.stem for path in Path("benchmarks").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_imports(name: str) -> None:
    """Imports torch, transformers and Ray, once for all."""
    if name == "trl_job" and importlib.util.find_spec("trl") is None:
        pytest.skip("TRL has an environment of its own (make trl-env)")
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.slow
def test_a_long_run_balances_and_is_looked_at_after_each_tenth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates thirty small versions, with the real reports beside them."""
    small = {"groups_per_version": 4, "ppo_mini_batch_size": 1, "n": 2}
    monkeypatch.setitem(long_run.PROFILE, "batch", small)
    looks, balanced = long_run.measured(120, tmp_path)
    assert [look["groups"] for look in looks] == [*range(12, 121, 12)]
    assert balanced
    assert all(look["ms per row"] > 0 and look["ms per version"] > 0 for look in looks)


def test_a_call_in_the_sandbox_is_timed_beside_a_bare_interpreter() -> None:
    took = sandbox.measure(1)
    assert sandbox.BARE in took
    assert all(len(ms) == 1 and ms[0] > 0 for ms in took.values())


def test_a_table_shows_each_kind_of_figure_in_its_own_way() -> None:
    row = {"what": "a", "n": 12_345, "s": 0.01234, "many": 1234.5, "over": Ratio(1.5), "of": Share(0.5), "none": None}
    assert markdown([row]).splitlines()[1:] == [
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| a | 12,345 | 0.0123 | 1,234 | 1.50× | 50.0% | — |",
    ]
    assert json.loads(json.dumps(row))["over"] == 1.5


def test_contenders_take_turns_and_no_round_begins_without_time_for_it() -> None:
    assert [name for name, _ in turns({"a": 1, "b": 2}, 2)] == ["a", "b", "a", "b"]
    assert [name for name, _ in turns({"a": 1, "b": 2}, 2, seconds=0.0)] == ["a", "b"]


def test_a_process_that_fails_ends_the_benchmark_with_its_last_words() -> None:
    with pytest.raises(Failed, match="so it goes"):
        call(sys.executable, "-c", "import sys; sys.exit('so it goes')")


def test_an_unknown_word_of_a_list_is_told_with_those_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    options = parser("demo", None, models=words(["1m", "3m"]))
    assert options.parse_args([]).models == ["1m", "3m"]
    assert options.parse_args(["--models", "3m"]).models == ["3m"]
    with pytest.raises(SystemExit):
        options.parse_args(["--models", "3m,9m"])
    assert "unknown 9m; known: 1m, 3m" in capsys.readouterr().err
