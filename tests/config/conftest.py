from collections.abc import Callable
from pathlib import Path

import pytest

from headway.config.loading import LoadedConfig, load

MINIMAL = """\
model: {make: {}}
data: {task: {name: sort}, max_prompt_length: 64, max_response_length: 64}
reward: {function: task}
actor: {ppo_mini_batch_size: 16}
rollout: {total_rollout_steps: 640}
"""
"""The smallest configuration that the doctor passes. B is 64, and 16 in modes with one batch a version."""

Write = Callable[..., Path]
Load = Callable[..., LoadedConfig]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a YAML file and returns its path."""

    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def minimal(write: Write) -> Load:
    """Loads the minimal configuration with overrides."""
    path = write(MINIMAL, "minimal.yaml")
    return lambda *overrides: load(path, overrides)
