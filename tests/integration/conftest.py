"""A Ray that runs join, as it takes longer to start than a tiny job; an end of all that was started."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from headway.cluster.processes import Family
from headway.cluster.ray_signals import sigterm_kept
from tests.integration.support import end_started


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    end_started()


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Runs in this process find Ray running, and leave it running. Tests that ask for it come after all others."""
    with sigterm_kept():
        context = ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=128 * 2**20,
        )
    family = Family(Path(context.address_info["session_dir"]).name)
    yield
    assert ray.is_initialized(), "who found Ray running left it running"
    ray.shutdown()
    assert family.end(orderly_s=10) == []
