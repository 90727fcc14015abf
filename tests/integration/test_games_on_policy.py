"""``mode=on_policy`` with turns is a plain synchronous loop: the same weights, bit for bit, inline and over Ray."""

from pathlib import Path

import pytest

from tests.integration.plain_games import run_plain_games
from tests.integration.support import train
from tests.integration.test_on_policy import weights

RECIPE = Path(__file__).parents[2] / "recipes" / "agents" / "guess.yaml"
SHORT = [
    "mode=on_policy",
    "model.warmup.max_steps=60",
    "model.warmup.batch_size=16",
    "rollout.n=4",
    "rollout.total_rollout_steps=12",
    "rollout.test_freq=-1",
    "rollout.runners=1",
    "rollout.threads=1",
    "trainer.threads=1",
    "actor.ppo_mini_batch_size=4",
    "trainer.save_freq=-1",
    "reports.tensorboard=false",
]


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in this process, and the weights that it has made in its folder ``model``."""
    run_dir = tmp_path_factory.mktemp("games") / "inline"
    train(RECIPE, run_dir, *SHORT, "cluster.backend=inline")
    return run_dir


@pytest.fixture(scope="module")
def plain_weights(inline: Path) -> dict[str, bytes]:
    out = inline.parent / "plain"
    recipe = inline.parent / "recipe.yaml"
    recipe.write_text(f"defaults: [{inline / 'config.yaml'}]\nmodel: {{path: {inline / 'initial_model'}}}\n")
    run_plain_games(recipe, RECIPE, out)
    return weights(out)


def test_games_on_policy_equal_a_plain_synchronous_loop_bit_for_bit(
    inline: Path, plain_weights: dict[str, bytes]
) -> None:
    """Warms a model up, so that some games are won, and trains it twice for three steps."""
    check_equal(inline, plain_weights)


def test_so_they_do_over_ray(ray_here: None, inline: Path, plain_weights: dict[str, bytes]) -> None:
    """Starts Ray, where no test has, workers that import torch, and a run's warm-up."""
    run_dir = inline.parent / "ray"
    train(RECIPE, run_dir, *SHORT, "cluster.backend=ray")
    check_equal(run_dir, plain_weights)


def check_equal(run_dir: Path, plain: dict[str, bytes]) -> None:
    trained = weights(run_dir / "model")
    assert trained.keys() == plain.keys()
    assert [name for name in trained if trained[name] != plain[name]] == []
    assert trained != weights(run_dir / "initial_model")
