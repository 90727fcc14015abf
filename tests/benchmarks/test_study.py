"""What `make study-staleness` runs, what it keeps of a run, and what it makes of that."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import study_staleness
from benchmarks.runner import DEMO
from benchmarks.study_staleness import (
    FULL,
    LOSSES,
    PAGE,
    QUICK,
    RATES,
    START,
    THEME,
    Result,
    Run,
    accuracy_table,
    by_cell,
    conduct,
    draw,
    health_table,
    lag_range,
    read,
    runs,
    themed,
    time_table,
    write_into,
)
from benchmarks.table import markdown
from headway.config.doctor import diagnose
from headway.config.loading import load
from tests.tiers import mostly_slow

RUN = Run("naive PPO", eta=4, lr=2e-4, seed=0)


def result(run: Run = RUN, *, final: float = 0.9, lag: float = 3.5, seconds: float = 20.0) -> Result:
    return Result(
        run=run,
        updates=[0, 16, 48, 64],
        accuracy=[0.5, 0.7, 0.8, final],
        lag_mean=lag,
        lag_max=run.eta,
        ess_mean=0.9,
        ess_min=0.8,
        kl_mean=0.01,
        kl_max=0.02,
        clip_fraction=0.05,
        skipped_steps=0,
        seconds=seconds,
    )


def grid() -> list[Result]:
    """A result for each run of a small study; whatever is looked for in it differs from run to run."""
    made = runs((0, 4), (1e-4, 2e-4), (0, 1))
    return [result(run, final=0.6 + 0.01 * k, lag=0.9 * run.eta, seconds=10.0 + k) for k, run in enumerate(made)]


# ---------------------------------------------------------------------------------------------- the runs


@mostly_slow("run", [r for r in FULL if r.seed == 0] + list(QUICK), quick=QUICK, ids=lambda run: run.name)
def test_every_setting_of_a_run_is_permitted_and_has_an_effect(run: Run, tmp_path: Path) -> None:
    loaded = load(DEMO, [f"model.path={tmp_path}", *START, *run.settings()])
    diagnose(loaded)
    config = loaded.config
    assert config.groups_per_version == 16
    assert config.async_training.staleness_threshold == run.eta
    assert config.async_training.fill_queue == (run.eta > 0)
    assert config.actor.optim.lr == run.lr


def test_the_three_losses_differ_in_their_settings_alone() -> None:
    loaded = {loss: load(DEMO, ["model.path=m", *START, *replace(RUN, loss=loss).settings()]) for loss in LOSSES}
    naive, decoupled, truncated = (loaded[loss].config for loss in LOSSES)
    assert naive.async_training.use_rollout_log_probs
    assert not decoupled.async_training.use_rollout_log_probs
    assert (naive.algorithm.policy_loss.loss_mode, naive.algorithm.rollout_correction.name) == ("ppo_clip", None)
    assert decoupled.algorithm.policy_loss.loss_mode == "ppo_clip"
    # One bound for both, so that what differs is the trust region around π_prox and nothing else.
    assert decoupled.algorithm.rollout_correction.bound == truncated.algorithm.policy_loss.rollout_is_threshold == 2


def test_a_version_has_several_optimizer_steps_because_after_one_the_losses_would_be_the_same() -> None:
    config = load(DEMO, ["model.path=m", *START, *RUN.settings()]).config
    assert config.groups_per_version // config.actor.ppo_mini_batch_size > 1


def test_every_run_of_a_study_has_a_name_of_its_own_and_seeds_come_one_after_the_other() -> None:
    assert len({run.name for run in FULL}) == len(FULL)
    order = [(RATES.index(run.lr), run.seed) for run in FULL]
    assert order == sorted(order), "a study that was stopped has whole rates, and whole seeds"


# ---------------------------------------------------------------------------------------------- a run's result


def test_a_result_is_read_from_the_runs_summary_and_metrics(tmp_path: Path) -> None:
    summary = {
        "eval": [{"version": 0, "accuracy": 0.5}, {"version": 4, "accuracy": 0.75}],
        "lag": {"mean": 1.5, "max": 2},
        "skipped_steps": 1,
    }
    rows = [
        {"version": 0, "offpolicy/ess": 1.0, "offpolicy/kl": 0.0, "actor/clip_fraction": 0.0},
        {"version": 1, "offpolicy/ess": 0.5, "offpolicy/kl": 0.2, "actor/clip_fraction": 0.1},
        {"version": 2, "validation/accuracy": 0.75},
    ]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(RUN, tmp_path, 12.0) == Result(
        run=RUN,
        updates=[0, 16],
        accuracy=[0.5, 0.75],
        lag_mean=1.5,
        lag_max=2,
        ess_mean=0.75,
        ess_min=0.5,
        kl_mean=0.1,
        kl_max=0.2,
        clip_fraction=0.05,
        skipped_steps=1,
        seconds=12.0,
    )


def test_the_area_is_the_mean_of_the_piecewise_linear_curve() -> None:
    # Trapezoids by hand: 16 · 0.6 + 32 · 0.75 + 16 · 0.85 over 64 steps.
    assert result().area == pytest.approx((16 * 0.6 + 32 * 0.75 + 16 * 0.85) / 64)


def test_accuracy_at_half_is_the_last_one_within_the_first_half() -> None:
    assert result().half == 0.7
    assert replace(result(), updates=[0, 16, 32, 64]).half == 0.8


def test_a_study_that_goes_on_runs_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    ran: list[Run] = []

    def execute(run: Run, model: Path) -> Result:
        if len(ran) == 2 and run not in ran:
            raise KeyboardInterrupt
        ran.append(run)
        return result(run)

    monkeypatch.setattr(study_staleness, "execute", execute)
    with pytest.raises(KeyboardInterrupt):
        conduct(FULL[:4], tmp_path, tmp_path / "kept")
    monkeypatch.setattr(study_staleness, "execute", lambda run, model: ran.append(run) or result(run))
    assert conduct(FULL[:4], tmp_path, tmp_path / "kept") == [result(run) for run in FULL[:4]]
    assert ran == list(FULL[:4])


def test_a_result_of_other_settings_or_another_model_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Run] = []
    monkeypatch.setattr(study_staleness, "execute", lambda run, model: ran.append(run) or result(run))
    longer = replace(RUN, versions=RUN.versions + 1)
    assert longer.name == RUN.name
    for weights, run in ((b"one", RUN), (b"one", longer), (b"another", longer), (b"another", longer)):
        (tmp_path / "model.safetensors").write_bytes(weights)
        conduct([run], tmp_path, tmp_path)
    assert ran == [RUN, longer, longer]


# ---------------------------------------------------------------------------------------------- tables, page, figure


def test_seeds_are_put_together_by_rate_η_and_loss() -> None:
    cells = by_cell(reversed(grid()))
    assert list(cells)[:4] == [
        (1e-4, 0, "naive PPO"),
        (1e-4, 0, "decoupled PPO"),
        (1e-4, 0, "truncated IS"),
        (1e-4, 4, "naive PPO"),
    ]
    assert all([r.run.seed for r in same] == [0, 1] for same in cells.values())


def test_the_range_of_lags_is_one_number_where_the_runs_agree() -> None:
    assert lag_range([result(lag=3.001), result(lag=3.002)]) == "3.00"
    assert lag_range([result(lag=3.1), result(lag=2.5)]) == "2.50–3.10"


def test_the_accuracy_table_has_each_seed_and_their_mean() -> None:
    first, second = result(final=0.7), result(replace(RUN, seed=1), final=0.9)
    row = markdown(accuracy_table([second, first])).splitlines()[-1]
    area = (first.area + second.area) / 2
    assert row == f"| 0.0002 | 4 | naive PPO | 3.50 | 4 | 0.700 0.900 | **0.800** | 0.700 | {area:.3f} |"


def test_the_health_table_has_means_and_the_worst_of_all_seeds() -> None:
    worse = replace(result(replace(RUN, seed=1)), ess_mean=0.7, ess_min=0.1, kl_mean=0.03, kl_max=0.5, skipped_steps=2)
    row = markdown(health_table([result(), worse])).splitlines()[-1]
    assert row == "| 0.0002 | 4 | naive PPO | 0.800 | 0.100 | 0.0200 | 0.500 | 5.0% | 2 |"


def test_the_time_table_is_of_the_first_seed_and_adds_up() -> None:
    table = time_table(grid(), "a machine.")
    assert "| 0.0001 | naive PPO | 10.0 | 13.0 |" in table
    one = sum(result.seconds for result in grid() if result.run.seed == 0)
    assert f"{one / 60:.1f} minutes for one seed and {sum(range(10, 34)) / 60:.1f} for all 24" in table
    assert "the longest run took 33.0 s" in table


def test_blocks_are_replaced_between_their_marks_and_prose_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin one -->\nold\n<!-- end one -->\nafter\n")
    write_into(page, {"one": r"| \1 |"})
    write_into(page, {"one": r"| \1 |"})
    assert page.read_text() == "before\n<!-- begin one -->\n\n| \\1 |\n\n<!-- end one -->\nafter\n"


def test_a_page_without_a_blocks_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin one -->\n<!-- end one -->\n")
    with pytest.raises(ValueError, match="begin two"):
        write_into(page, {"one": "new", "two": "new"})
    assert "new" not in page.read_text()


def test_the_studys_page_has_a_place_for_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(study_staleness, "PAGE", page)
    monkeypatch.setattr(study_staleness, "FIGURE", tmp_path / "figure.svg")
    monkeypatch.setattr(study_staleness, "model", lambda: tmp_path)
    monkeypatch.setattr(study_staleness, "conduct", lambda runs, model, kept: [result(run) for run in runs])
    study_staleness.main([])
    text = page.read_text(encoding="utf-8")
    assert all(header in text for header in ("| final, by seed |", "| ESS, mean |", "minutes for one seed"))


@pytest.mark.slow
def test_the_figure_names_each_panels_measured_lag_and_every_loss(tmp_path: Path) -> None:
    draw(grid(), tmp_path / "figure.svg")
    words = [e.text or "" for e in ElementTree.parse(tmp_path / "figure.svg").iter() if e.tag.endswith("}text")]
    assert words.count("η = 0: mean lag 0.00") == words.count("η = 4: mean lag 3.60") == 2
    assert set(LOSSES) <= set(words)


@pytest.mark.slow
def test_the_same_results_give_the_same_figure(tmp_path: Path) -> None:
    of_one_rate = [one for one in grid() if one.run.lr == 1e-4]
    for name in ("one", "other"):
        draw(of_one_rate, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_the_figures_colours_follow_the_readers_scheme() -> None:
    ink, on_dark = THEME["ink"]
    svg = themed(f'<svg><defs></defs><g style="fill: {ink}"/></svg>')
    assert 'style="fill: var(--ink)"' in svg
    assert svg.count(ink) == svg.count(on_dark) == 1
    assert "prefers-color-scheme:dark" in svg
