"""``mode=on_policy`` is a plain synchronous loop: the same weights, bit for bit, inline and over Ray."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.plain_loop import run_plain_loop
from tests.integration.support import train
from tests.tiers import mostly_slow


@pytest.fixture(scope="module")
def plain_weights(recipe: Path) -> dict[str, bytes]:
    out = recipe.parent / "plain"
    run_plain_loop(recipe, out)
    return weights(out)


def test_on_policy_equals_a_plain_synchronous_loop_bit_for_bit(
    recipe: Path, undisturbed: Path, plain_weights: dict[str, bytes]
) -> None:
    check_equal(recipe, plain_weights, undisturbed)


@pytest.mark.slow
def test_so_it_does_over_ray(ray_here: None, recipe: Path, plain_weights: dict[str, bytes], tmp_path: Path) -> None:
    """Starts Ray, where no test has, and two workers that import torch. `make test` has such a run in `test_resume`,
    of which a training rank is killed.
    """
    train(recipe, tmp_path / "run", "cluster.backend=ray")
    check_equal(recipe, plain_weights, tmp_path / "run")


def check_equal(recipe: Path, plain_weights: dict[str, bytes], run_dir: Path) -> None:
    trained = weights(run_dir / "model")
    assert trained.keys() == plain_weights.keys()
    assert [name for name in trained if trained[name] != plain_weights[name]] == []
    assert trained != weights(recipe.parent / "model")


@mostly_slow(
    "settings",
    [
        ("rollout.max_concurrent=3",),
        ("rollout.n_gpus_per_node=3", "rollout.max_concurrent=5", "rollout.max_batched_tokens=16"),
        ("rollout.n_gpus_per_node=2", "param_update.transport=shared_memory"),
    ],
    quick=[("rollout.n_gpus_per_node=3", "rollout.max_concurrent=5", "rollout.max_batched_tokens=16")],
    ids=" ".join,
)
def test_slots_and_replicas_change_no_bit_of_it(
    recipe: Path, plain_weights: dict[str, bytes], settings: tuple[str, ...]
) -> None:
    """Takes seconds: a whole run."""
    run_dir = recipe.parent / "-".join(settings).replace("=", "-")
    train(recipe, run_dir, "cluster.backend=inline", "rollout.test_freq=-1", *settings)
    trained = weights(run_dir / "model")
    assert [name for name in trained if trained[name] != plain_weights[name]] == []


def weights(folder: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}
