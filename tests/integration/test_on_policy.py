"""``mode=on_policy`` is a plain synchronous loop: the same weights, bit for bit, inline and over Ray."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.support import finish, make_job, start, train

PLAIN_LOOP = Path(__file__).with_name("plain_loop.py")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("on_policy"))


@pytest.fixture(scope="module")
def plain_weights(recipe: Path) -> dict[str, bytes]:
    out = recipe.parent / "plain"
    code, output = finish(start(str(PLAIN_LOOP), str(recipe), str(out)))
    assert code == 0, output
    return weights(out)


@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_on_policy_equals_a_plain_synchronous_loop_bit_for_bit(
    recipe: Path, plain_weights: dict[str, bytes], backend: str
) -> None:
    run_dir = recipe.parent / backend
    train(recipe, run_dir, f"cluster.backend={backend}")
    trained = weights(run_dir / "model")
    assert trained.keys() == plain_weights.keys()
    assert [name for name in trained if trained[name] != plain_weights[name]] == []
    assert trained != weights(recipe.parent / "model")


@pytest.mark.parametrize(
    "settings",
    [
        ("rollout.max_concurrent=3",),
        ("rollout.n_gpus_per_node=3", "rollout.max_concurrent=5", "rollout.max_batched_tokens=16"),
        ("rollout.n_gpus_per_node=2", "rollout.split_groups=true", "param_update.transport=shared_memory"),
    ],
    ids=" ".join,
)
def test_slots_and_replicas_change_no_bit_of_it(
    recipe: Path, plain_weights: dict[str, bytes], settings: tuple[str, ...]
) -> None:
    run_dir = recipe.parent / "-".join(settings).replace("=", "-")
    train(recipe, run_dir, "cluster.backend=inline", *settings)
    trained = weights(run_dir / "model")
    assert [name for name in trained if trained[name] != plain_weights[name]] == []


def weights(folder: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}
