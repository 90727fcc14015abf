"""``mode=on_policy`` with turns is a plain synchronous loop, bit for bit: inline, over replicas, and over Ray."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.data.interfaces.training import StepContext, StepReport
from headway.data.packing import CollatedRow
from headway.data.types import Outcomes
from headway.engines.train.batch_advantages import BatchAdvantages
from headway.engines.train.fsdp.engine import FsdpEngine
from tests.integration.plain_games import run_plain_games
from tests.integration.support import train
from tests.integration.test_on_policy import weights

RECIPE = Path(__file__).parents[2] / "recipes" / "agents" / "guess.yaml"
STEPS = 3
SHORT = [
    "mode=on_policy",
    "model.warmup.max_steps=60",
    "model.warmup.batch_size=16",
    "rollout.n=4",
    f"rollout.total_rollout_steps={4 * STEPS}",
    "rollout.test_freq=-1",
    "agent.workers=1",
    "rollout.threads=1",
    "trainer.threads=1",
    "actor.ppo_mini_batch_size=4",
    "trainer.save_freq=-1",
    "reports.trackers=[]",
]


class Trained:
    """What the trainers of this process are given and say, as plain values."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows: list[list[dict[str, Any]]] = []
        """By step."""
        self.rewards: list[list[float]] = []
        self.reports: list[StepReport] = []
        step, of_rows, of_outcomes = FsdpEngine.train_step, BatchAdvantages.__call__, BatchAdvantages.of_outcomes

        def train_step(engine: FsdpEngine, rows: Sequence[CollatedRow], context: StepContext) -> StepReport:
            self.rows.append([plain(row) for row in rows])
            self.reports.append(step(engine, rows, context))
            return self.reports[-1]

        def estimate(estimator: BatchAdvantages, rows: Sequence[CollatedRow], outcomes: Outcomes) -> Any:
            self.rewards.append(outcomes.rewards.tolist())
            return of_rows(estimator, rows, outcomes)

        def estimate_without_rows(estimator: BatchAdvantages, outcomes: Outcomes) -> Any:
            self.rewards.append(outcomes.rewards.tolist())
            return of_outcomes(estimator, outcomes)

        patch.setattr(FsdpEngine, "train_step", train_step)
        patch.setattr(BatchAdvantages, "__call__", estimate)
        patch.setattr(BatchAdvantages, "of_outcomes", estimate_without_rows)


def plain(row: CollatedRow) -> dict[str, Any]:
    """The row with its arrays as bytes, so that equal means: bit for bit."""
    arrays = {
        "ids": row.input_ids,
        "mask": row.loss_mask,
        "logprobs": row.logprobs,
        "versions": row.versions,
        **row.columns,
    }
    turns = [turn[:3] for turn in row.turns]  # the loop tells no states, which this estimator does not look at
    whole = {"prompt": row.prompt_length, "finished": row.finished, "episode": row.episode, "turns": turns}
    return whole | {name: np.ascontiguousarray(array).tobytes() for name, array in arrays.items()}


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """A run in this process, and what it trained on."""
    run_dir = tmp_path_factory.mktemp("games") / "inline"
    with pytest.MonkeyPatch.context() as patch:
        trained = Trained(patch)
        train(RECIPE, run_dir, *SHORT, "cluster.backend=inline")
    return run_dir, trained


@pytest.fixture(scope="module")
def by_hand(inline: tuple[Path, Trained]) -> tuple[Path, Trained]:
    """The model that the loop makes of the run's initial one, and what it trained on."""
    run_dir, _ = inline
    out, recipe = run_dir.parent / "plain", run_dir.parent / "recipe.yaml"
    recipe.write_text(f"defaults: [{run_dir / 'config.yaml'}]\nmodel: {{path: {run_dir / 'initial_model'}}}\n")
    with pytest.MonkeyPatch.context() as patch:
        trained = Trained(patch)
        run_plain_games(recipe, out)
    return out, trained


@pytest.mark.slow
def test_games_on_policy_equal_a_plain_synchronous_loop_bit_for_bit(
    inline: tuple[Path, Trained], by_hand: tuple[Path, Trained]
) -> None:
    """Warms a model up, so that some games are won, and trains it twice for three steps."""
    (run_dir, run), (out, plain) = inline, by_hand
    warmed_up = len(run.rows) - STEPS  # by the same trainer
    assert len(plain.rows) == STEPS
    for step in range(STEPS):
        assert run.rewards[step] == plain.rewards[step]
        assert run.rows[warmed_up + step] == plain.rows[step]
        assert replace(run.reports[warmed_up + step], shown=()) == plain.reports[step]  # the loop shows nothing
    assert any(len(row["turns"]) == 4 for rows in plain.rows for row in rows)
    assert 0 < np.mean(plain.rewards) < 1
    check_equal(run_dir, out)


@pytest.mark.slow
def test_so_they_do_over_three_replicas(by_hand: tuple[Path, Trained], tmp_path: Path) -> None:
    """A run's warm-up takes seconds."""
    train(RECIPE, tmp_path / "run", *SHORT, "cluster.backend=inline", "rollout.n_gpus_per_node=3")
    check_equal(tmp_path / "run", by_hand[0])


@pytest.mark.slow
def test_so_they_do_over_ray(ray_here: None, by_hand: tuple[Path, Trained], tmp_path: Path) -> None:
    """Starts Ray, where no test has, workers that import torch, and a run's warm-up."""
    train(RECIPE, tmp_path / "run", *SHORT, "cluster.backend=ray")
    check_equal(tmp_path / "run", by_hand[0])


def check_equal(run_dir: Path, by_hand: Path) -> None:
    trained, plain = weights(run_dir / "model"), weights(by_hand)
    assert trained.keys() == plain.keys()
    assert [name for name in trained if trained[name] != plain[name]] == []
    assert trained != weights(run_dir / "initial_model")
