"""Three machines for all tests of this folder (``make test-nodes``), and room on them for a module's workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.nodes.machines import ADDRESSES, Machines, machines, why_not
from tests.cluster.nodes.runs import prepare, with_room

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs get longer than `cluster.start_timeout_s`; the test that leaves a machine silent comes last."""
    items.sort(key=lambda item: item.path.name == "test_silent_machine.py")
    for item in items:
        if item.path.is_relative_to(HERE):
            limit = 1500 if item.path.stem == "test_chaos" else 600
            item.add_marker(pytest.mark.timeout(limit), append=False)


@pytest.fixture(scope="session")
def possible() -> None:
    """Skip where such machines cannot be made; fail there with ``HEADWAY_TEST_NODES=required``, as CI has it."""
    if (reason := why_not()) is not None:
        leave = pytest.fail if os.environ.get("HEADWAY_TEST_NODES") == "required" else pytest.skip
        leave(f"machines of namespaces: {reason}")


@pytest.fixture(scope="session")
def three(possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    scratch = tmp_path_factory.mktemp("machines")
    prepare(scratch / "shared")
    with machines(scratch, dict.fromkeys(ADDRESSES, 1)) as made:
        yield made


@pytest.fixture(scope="module")
def one_each(three: Machines) -> Iterator[Machines]:
    """Each machine has room for one worker that computes."""
    yield from with_room(three, 0.01)


@pytest.fixture(scope="module")
def two_each(three: Machines) -> Iterator[Machines]:
    yield from with_room(three, 0.02)
