"""What `make bench-rollout` asks for, how it measures, and what it makes of that."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import rollout
from benchmarks.rollout import MODELS, Measured, cells, interpreters, measure, stall, told
from benchmarks.rollout_engines import KINDS, Cell, Continuous, Engine, Generate, Native, Request, answer, check
from benchmarks.runner import Failed, TimedOut, Worker
from benchmarks.shapes import SIZES, Shape, long_tailed

TINY = Shape("tiny", 40, 32, 1, heads=2, kv_heads=1, intermediate=48)
CELL = Cell("1m", threads=1, concurrent=32, kind="ragged", tokens=64)
EVERY = [cell for size in MODELS for cell in cells(size, [1, 2], [32, 128], [64, 256])]


# ---------------------------------------------------------------------------------------------- the requests


def test_long_tailed_lengths_are_the_quantiles_of_a_log_normal_distribution_cut_at_both_ends() -> None:
    lengths = long_tailed(1000, 1, 256)
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (1, 256)
    # Median 32 and σ = 1: one standard deviation is a factor of e on either side.
    assert lengths[499] == pytest.approx(32, abs=1)
    assert lengths[841] == pytest.approx(32 * 2.71828, rel=0.02)
    assert lengths[158] == pytest.approx(32 / 2.71828, rel=0.05)
    assert sum(length == 256 for length in lengths) == pytest.approx(19, abs=2)  # P(Z > ln 8)


def test_a_small_batch_has_the_shape_of_a_large_one() -> None:
    assert fmean(long_tailed(32, 1, 64)) == pytest.approx(fmean(long_tailed(128, 1, 64)), rel=0.05)
    assert max(long_tailed(32, 1, 64)) == 64


@pytest.mark.parametrize("cell", EVERY, ids=lambda cell: cell.name)
def test_the_requests_of_a_cell_are_the_same_wherever_they_are_made_and_fit_what_engines_are_loaded_for(
    cell: Cell,
) -> None:
    asked = cell.requests()
    assert asked == Cell(**json.loads(json.dumps(asdict(cell)))).requests()
    assert all(len(one.prompt) + one.tokens <= cell.context for one in asked)
    assert all(0 < token < SIZES[cell.size].vocabulary for one in asked for token in one.prompt)
    assert max(one.tokens for one in asked) == cell.tokens


def test_engines_of_different_models_and_threads_get_lengths_that_are_the_same() -> None:
    lengths = [[(len(one.prompt), one.tokens) for one in replace(CELL, size=size).requests()] for size in MODELS]
    assert lengths[0] == lengths[1] == lengths[2]


def test_ragged_runs_have_twice_as_many_requests_as_slots_and_uniform_ones_are_uniform() -> None:
    assert len(CELL.requests()) == 64
    uniform = replace(CELL, kind="uniform").requests()
    assert len(uniform) == 32
    assert {(len(one.prompt), one.tokens) for one in uniform} == {(32, 64)}


def test_prefill_is_counted_in_tokens_of_prompts_and_the_rest_in_tokens_of_answers() -> None:
    asked = [Request((1, 2, 3), 5), Request((4,), 7)]
    assert replace(CELL, kind="prefill").work(asked) == 4
    assert CELL.work(asked) == 12


def test_cells_that_share_an_engine_are_neighbours_and_prefill_is_measured_once_for_each_number_of_threads() -> None:
    settings = [(cell.size, cell.threads, cell.concurrent) for cell in EVERY]
    changes = [setting for k, setting in enumerate(settings) if k == 0 or settings[k - 1] != setting]
    assert len(changes) == len(set(settings)) == 12
    assert len([cell for cell in EVERY if cell.kind == "prefill"]) == 6
    assert len(EVERY) == len(set(EVERY)) == 78


def test_models_have_about_as_many_parameters_as_their_names_say(tmp_path: Path) -> None:
    assert SIZES["1m"].make(tmp_path / "1m") == pytest.approx(1e6, rel=0.2)
    assert SIZES["3m"].make(tmp_path / "3m") == pytest.approx(3e6, rel=0.2)


# ---------------------------------------------------------------------------------------------- the engines


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    TINY.make(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.mark.parametrize("make", [Native, Generate, Continuous])
def test_each_engine_writes_exactly_what_is_wanted_of_every_request(
    make: Callable[[Path, int, int], Engine], tiny: Path
) -> None:
    engine = make(tiny, 3, 257)
    asked = [Request((5,) * length, tokens) for length, tokens in [(4, 2), (1, 6), (7, 1), (3, 3), (2, 4)]]
    try:
        assert engine.run(asked) == [2, 6, 1, 3, 4]
        assert engine.run(asked[:2]) == [2, 6]
    finally:
        engine.close()


class Short:
    """An engine whose fourth answer lacks a token."""

    def run(self, requests: Sequence[Request]) -> list[int]:
        return [request.tokens - (number == 3) for number, request in enumerate(requests)]

    def close(self) -> None:
        pass


def test_a_run_in_which_an_answer_is_too_short_is_no_measurement() -> None:
    wanted = CELL.requests()[3].tokens
    with pytest.raises(ValueError, match=f"answer 3 has {wanted - 1} tokens; {wanted} were wanted"):
        answer(Short(), CELL)


def test_a_run_in_which_an_answer_is_missing_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="1 answers"):
        check([2], [Request((1,), 2), Request((1,), 3)])


# ---------------------------------------------------------------------------------------------- the processes

SCRIPT = """
import sys, time
from benchmarks.runner import serve

def answer(question):
    if question == "sleep":
        time.sleep(1000)
    if question == "end":
        print("lost my way", file=sys.stderr)
        sys.exit(3)
    if question == "fail":
        raise RuntimeError("too | much")
    print("a library says hello")
    return question

serve(lambda say: answer)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker([sys.executable, "-c", SCRIPT], tmp_path / "log", {"PYTHONPATH": os.pathsep.join(sys.path)})
    yield worker
    worker.stop()


def test_a_worker_that_does_not_answer_is_ended_and_loaded_again_for_the_next_question(worker: Worker) -> None:
    assert worker.ask(2, 60) == 2
    with pytest.raises(TimedOut, match=r"over 0\.01 s"):
        worker.ask("sleep", 0.01)
    assert worker.ask([3], 60) == [3]


def test_what_a_worker_says_about_a_failure_is_passed_on_in_a_line_and_it_goes_on(worker: Worker) -> None:
    with pytest.raises(Failed, match="RuntimeError: too / much"):
        worker.ask("fail", 60)
    assert worker.ask(2, 60) == 2


def test_of_a_worker_that_ends_its_last_words_are_told(worker: Worker) -> None:
    with pytest.raises(Failed, match="lost my way"):
        worker.ask("end", 60)


def test_an_engine_that_cannot_be_loaded_is_not_tried_for_every_cell(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    script = f"open({str(tries)!r}, 'a').write('x'); print('{{\"error\": \"no such thing\"}}')"
    worker = Worker([sys.executable, "-c", script], tmp_path / "log")
    for _ in range(2):
        with pytest.raises(Failed, match="not loaded: no such thing"):
            worker.ask(2, 60)
    assert tries.read_text() == "x"


# ---------------------------------------------------------------------------------------------- the rounds


class Scripted:
    """A worker whose runs take no time."""

    def __init__(self, engine: str, asked: list[str], failure: Failed | None = None) -> None:
        self._engine, self._asked, self._failure = engine, asked, failure

    def ask(self, cell: object, timeout_s: float) -> dict[str, float]:
        self._asked.append(self._engine)
        if self._failure is not None:
            raise self._failure
        return {"tokens": 100, "seconds": 2}


def test_engines_take_turns_and_one_that_timed_out_is_not_asked_again() -> None:
    asked: list[str] = []
    failures = {"native": None, "generate": TimedOut("over 5 s"), "vllm": None}
    workers = {engine: Scripted(engine, asked, failure) for engine, failure in failures.items()}
    measured = measure(CELL, workers, 3)
    assert asked == ["native", "generate", "vllm", "native", "vllm", "native", "vllm"]
    assert measured.failures == {"generate": "over 5 s"}
    assert measured.rates == {"native": [50.0] * 3, "generate": [], "vllm": [50.0] * 3}


def test_a_cell_without_time_left_has_one_round() -> None:
    asked: list[str] = []
    workers = {engine: Scripted(engine, asked) for engine in ("native", "vllm")}
    assert measure(CELL, workers, 3, 0.0).rates == {"native": [50.0], "vllm": [50.0]}
    assert asked == ["native", "vllm"]


# ---------------------------------------------------------------------------------------------- the choice


def chosen(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[Cell]:
    """The cells of a command line, run by nobody."""
    found: list[Cell] = []
    monkeypatch.setattr(rollout, "run", lambda wanted, *_: found.extend(wanted))
    rollout.main(arguments)
    return found


def test_by_default_small_models_are_measured_in_full_and_the_large_one_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = chosen(monkeypatch)
    large = [cell for cell in found if cell.size == "100m"]
    assert len(found) - len(large) == 52
    assert {(cell.concurrent, cell.tokens) for cell in large} == {(32, 64), (32, 1)}
    assert {cell.threads for cell in large} == {1, 2}


def test_quick_measures_one_cell_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = chosen(monkeypatch, "--quick")
    assert sorted(cell.kind for cell in quick) == sorted(KINDS)
    assert {(cell.size, cell.threads, cell.concurrent) for cell in quick} == {("1m", 1, 32)}


def test_what_is_asked_for_replaces_what_would_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, "--models", "100m", "--kinds", "ragged", "--threads", "2")
    assert [(cell.size, cell.kind, cell.threads) for cell in found] == [("100m", "ragged", 2)]


@pytest.mark.parametrize("flags", [("--models", "9m"), ("--kinds", "odd"), ("--engines", "sglang")])
def test_an_unknown_name_is_told_with_those_that_are_known(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        rollout.main(flags)
    assert f"unknown {flags[1]}; known: " in capsys.readouterr().err


def test_without_an_environment_for_vllm_it_is_skipped_and_the_table_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "VLLM_PYTHON", tmp_path / "none")
    pythons, notes = interpreters(["native", "vllm"])
    assert pythons == {"native": Path(sys.executable)}
    assert any(note.startswith("vllm: skipped") for note in notes)
    monkeypatch.setattr(rollout, "VLLM_PYTHON", Path(sys.executable))
    assert set(interpreters(["native", "vllm"])[0]) == {"native", "vllm"}


# ---------------------------------------------------------------------------------------------- the tables


def measured(cell: Cell = CELL, failures: dict[str, str] | None = None, **rates: list[float]) -> Measured:
    return Measured(cell, rates, failures or {})


def test_the_ratio_is_that_of_medians_against_the_best_other() -> None:
    assert measured(native=[90, 300, 310], generate=[100, 110, 500], vllm=[40, 150, 160]).ratio == 2.0


def test_an_engine_that_failed_in_a_later_round_is_not_compared_with() -> None:
    found = measured(native=[300], vllm=[500], generate=[100], failures={"vllm": "over 90 s"})
    assert found.ratio == 3.0
    assert found.rate("vllm") is None


def test_without_the_native_engine_or_another_one_there_is_no_ratio() -> None:
    assert measured(native=[300]).ratio is None
    assert measured(vllm=[300]).ratio is None


def test_the_table_shows_rates_time_outs_and_aims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failures = {"generate": "over 90 s", "vllm": "RuntimeError: no"}
    slow = measured(replace(CELL, concurrent=128), native=[1000], generate=[], vllm=[200], failures=failures)
    quick = measured(native=[1200], generate=[300], vllm=[400])
    text = told([quick, slow], {"1m": 1_173_184}, ["a note"], show=False)
    lines = text.splitlines()
    assert "### 1m: 1,173,184 parameters" in lines
    assert "| ragged | 1 | 32 | 64 | 1,200 | 300 | 400 | 3.00× | 3.00× | 1 |" in lines
    assert "| ragged | 1 | 128 | 64 | 1,000 | over 90 s | failed | — | 3.00× | 1 |" in lines
    assert "| 1m | ragged | 3.00× | 3.00× | 3.00× | 1 of 1 |" in lines
    assert "- a note" in lines and f"- vllm, {slow.cell.name}: RuntimeError: no" in lines
    written = json.loads(Path("build/bench/rollout.json").read_text())
    assert written["cells"][0]["ratio"] == 3.0
    assert written["cells"][0]["rates"]["vllm"] == [400.0]
    assert Path("build/bench/rollout.md").read_text() == text


def test_the_mean_of_ratios_is_geometric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prefill = replace(CELL, kind="prefill", tokens=1)
    found = [measured(prefill, native=[50], vllm=[100]), measured(prefill, native=[200], vllm=[100])]
    lines = told(found, {}, [], show=False).splitlines()
    assert "| 1m | prefill | — | 1.00× | 0.50× | — |" in lines


def test_staging_beside_decoding_is_no_part_of_the_stall() -> None:
    update = {"stage": 0.010, "pause": 0.001, "activate": 0.002, "resume": 0.100}
    assert {name: round(ms) for name, ms in stall([update]).items()} == {
        "stage ms": 10,
        "pause ms": 1,
        "activate ms": 2,
        "resume ms": 100,
        "stall ms": 103,
    }
