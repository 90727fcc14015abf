"""Replicas over vLLM on another machine than the trainer. Both machines run in the environment of ``make vllm-env``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.nodes.machines import REPOSITORY, Machines, machines
from tests.cluster.nodes.runs import check, hosts, prepare, train, with_room

PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(not PYTHON.exists(), reason="make vllm-env builds the environment with vLLM"),
]


@pytest.fixture(scope="module")
def two(possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Two machines; each has room for one worker."""
    scratch = tmp_path_factory.mktemp("vllm-machines")
    prepare(scratch / "shared")
    python = PYTHON.parent.parent.resolve() / "bin" / "python"
    with machines(scratch, dict.fromkeys(("A", "B"), 1), python) as made:
        yield from with_room(made, 0.01)


def test_a_replica_over_vllm_on_another_machine_gets_every_version(two: Machines) -> None:
    """Takes long: a whole run, with a start of vLLM."""
    run = train(two, "vllm", "mode=async_partial", "rollout.name=vllm", "rollout.kv_cache_gib=0.1")
    check(run)
    assert hosts(run)["actor-0"] != hosts(run)["rollout-0"]
