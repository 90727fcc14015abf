"""A job, a whole run of it that tests only read, and an end of all that was started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.support import end_started, make_job, train


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    end_started()


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def undisturbed(recipe: Path) -> Path:
    """A run of the recipe as it is, in this process, with a checkpoint of each version. Only to be read, or copied."""
    run_dir = recipe.parent / "undisturbed"
    train(recipe, run_dir, "cluster.backend=inline", "trainer.save_freq=1", "reports.samples=3")
    return run_dir
