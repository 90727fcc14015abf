"""``mode=on_policy`` is a plain synchronous loop: the same weights, bit for bit, inline and over Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headway.cluster.process import math_environment
from headway.config.schema import MakeModelConfig
from headway.models.make import make_model

PLAIN_LOOP = Path(__file__).with_name("plain_loop.py")
STEPS, MINI_BATCH = 4, 4

REWARD = '''
def score(response, answer):
    """Denser than exactness, so that an untrained model has something to learn."""
    return sum(c in answer for c in response) / (1 + len(response)) - 0.01 * abs(len(response) - len(answer))
'''

RECIPE = f"""
mode: on_policy
model: {{path: MODEL}}
data:
  task: {{name: sort, size: 256, val_size: 8, params: {{mean_length: 6, max_length: 12}}}}
  max_prompt_length: 24
  max_response_length: 16
reward: {{function: "REWARD:score"}}
rollout: {{n: 4, total_rollout_steps: {STEPS * MINI_BATCH}, max_concurrent: 8, threads: 1}}
actor:
  ppo_mini_batch_size: {MINI_BATCH}
  ppo_max_token_len_per_gpu: 256
  optim: {{lr: 1.0e-3}}
trainer: {{threads: 1}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("on_policy")
    model = MakeModelConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16, intermediate_size=64)
    make_model(model, 0, folder / "model")
    (folder / "reward.py").write_text(REWARD)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", str(folder / "model")).replace("REWARD", str(folder / "reward.py")))
    return path


@pytest.fixture(scope="module")
def plain_weights(recipe: Path) -> dict[str, bytes]:
    out = recipe.parent / "plain"
    run_python(str(PLAIN_LOOP), str(recipe), str(out))
    return weights(out)


@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_on_policy_equals_a_plain_synchronous_loop_bit_for_bit(
    recipe: Path, plain_weights: dict[str, bytes], backend: str
) -> None:
    run_dir = recipe.parent / backend
    run_python("-m", "headway", "train", str(recipe), f"cluster.backend={backend}", f"run.dir={run_dir}")
    trained = weights(run_dir / "model")
    assert trained.keys() == plain_weights.keys()
    assert [name for name in trained if trained[name] != plain_weights[name]] == []
    assert trained != weights(recipe.parent / "model")


def run_python(*arguments: str) -> None:
    environment = {**os.environ, **math_environment(1)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def weights(folder: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}
