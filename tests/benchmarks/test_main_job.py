"""The main job's contenders, its table, and what makes a comparison void."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import main_job


def figures(rate: float, **changes: float) -> main_job.Figures:
    return {
        "samples/s": rate,
        "tokens/s": 8 * rate,
        "samples": main_job.SAMPLES,
        "optimizer steps": main_job.STEPS,
        **changes,
    }


def test_the_recipe_makes_the_samples_and_steps_that_are_expected_of_every_contender() -> None:
    from headway.config.loading import load

    config = load(main_job.DEMO, [*main_job.COMMON, main_job.LENGTH]).config
    assert config.rollout.n * main_job.GROUPS == main_job.SAMPLES
    assert main_job.GROUPS // config.actor.ppo_mini_batch_size == main_job.STEPS


def test_without_an_environment_trl_is_left_out_and_the_table_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = tmp_path / ".installed"
    monkeypatch.setattr(main_job, "TRL_STAMP", stamp)
    runs, notes = main_job.contenders()
    assert list(runs) == ["plain loop", "on_policy", "async_partial"]
    assert [note.split(",")[0] for note in notes] == ["TRL: skipped"]
    stamp.touch()
    runs, notes = main_job.contenders()
    assert list(runs) == ["plain loop", "TRL", "on_policy", "async_partial"]
    assert notes == []


def test_ratios_are_of_medians_against_the_plain_loop_and_trl() -> None:
    rounds = {
        "plain loop": [figures(100), figures(90), figures(300)],
        "TRL": [figures(50), figures(40), figures(60)],
        "async_partial": [figures(200, **{"tokens/s": 1200}), figures(150), figures(900)],
    }
    rows = {row["contender"]: row for row in main_job.table(rounds)}
    assert (rows["async_partial"]["÷ plain loop"], rows["async_partial"]["÷ TRL"]) == (2.0, 4.0)
    assert rows["TRL"]["÷ plain loop"] == 0.5
    assert rows["async_partial"]["tokens/sample"] == 6.0
    assert "samples" not in rows["TRL"]


def test_without_trl_its_ratio_is_left_open() -> None:
    rows = main_job.table({"plain loop": [figures(100)], "on_policy": [figures(120)]})
    assert [row["÷ TRL"] for row in rows] == [None, None]


@pytest.mark.parametrize("changes", [{"samples": 2047}, {"optimizer steps": 15}])
def test_a_contender_that_did_less_ends_the_benchmark(changes: dict[str, float]) -> None:
    main_job.check("TRL", figures(100))
    with pytest.raises(SystemExit, match="no comparison"):
        main_job.check("TRL", figures(100, **changes))
