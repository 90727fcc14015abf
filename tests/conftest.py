"""What all tests share: one thread each, deterministic hypothesis, at most one Ray at a time, a limit of time."""

import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.budget import Budget
from tests.shared import end_shared, shared

# Read when torch, tokenizers and Ray are first imported, and by the processes that tests start.
for variable, value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MKL_CBWR": "AUTO,STRICT",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(variable, value)

# A shell's background jobs ignore Ctrl-C, what nohup starts ignores SIGHUP, and so would every process that tests send
# them to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# That data take long to draw says that the machine is busy.
slow_is_well = [HealthCheck.too_slow]
settings.register_profile(
    "headway", deadline=None, derandomize=True, print_blob=True, suppress_health_check=slow_is_well
)
settings.load_profile("headway")

# `typer.testing` builds all of Headway's commands anew for each command line, which takes longer than most of them.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]

TESTS = Path(__file__).parent
ONE_AT_A_TIME = frozenset({"cluster", "integration"})
"""Areas whose tests start several processes each: side by side they would only wait for each other."""
GROUPS = {"cluster": "processes", "integration": "processes", "engines/train": "ranks"}
"""Folders whose tests share a worker, and with it what lives as long as a worker: one Ray, three ranks."""
THEIR_TIMEOUT_S = 600
"""Longer than `cluster.start_timeout_s`, which tells who is late."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget(fails=bool(os.environ.get("CI"))), "budget")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have garbage collected seldom, and not among modules and tests: a tenth of the processor's time went there."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def _finds_ray(item: pytest.Item) -> bool:
    return "ray_here" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that find Ray running come after all that do not; those that start processes get more time."""
    items.sort(key=_finds_ray)
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in ONE_AT_A_TIME:
            item.add_marker(pytest.mark.timeout(THEIR_TIMEOUT_S))


def group_of(nodeid: str) -> str:
    """The tests of a file share a process, and so do those of a folder in `GROUPS`."""
    place = PurePosixPath(nodeid.partition("::")[0]).relative_to(TESTS.name)
    return next((group for folder, group in GROUPS.items() if place.is_relative_to(folder)), str(place))


class _Groups(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Make ``--dist loadgroup`` go by folders: pytest 9.2 does not show xdist the groups that marks name."""
    return _Groups(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
        end_shared()


@pytest.fixture(scope="module", autouse=True)
def one_thread_each() -> Iterator[None]:
    """No test leaves torch with more threads than it found: new threads would share the cores worse than in turn.

    A job of a test sets ``trainer.threads`` and ``rollout.threads``; their default is all cores of the machine. What a
    thread sets holds for those that start later, and not for those that are there, this one among them.
    """
    yield
    if (torch := sys.modules.get("torch")) is None:
        return
    there = int(os.environ["OMP_NUM_THREADS"])
    with ThreadPoolExecutor(1) as new:
        left = new.submit(torch.get_num_threads).result()
    if left != there:
        torch.set_num_threads(there)
        pytest.fail(
            f"a test leaves torch with {left} threads: give its job trainer.threads and rollout.threads={there}"
        )


@pytest.fixture(scope="module")
def ray_here(request: pytest.FixtureRequest) -> None:
    """Whoever wants Ray in this process finds it running, and leaves it running: to start takes longer than a tiny job.

    Its workers find the package and the tests' own roles where this process does. Tests with it come after all others.
    """
    shared("Ray", lambda: _ray(request.config.rootpath))


@contextmanager
def _ray(root: Path) -> Iterator[None]:
    import ray

    from headway.cluster.on_ray.ray_node import (
        ChildProcesses,
        sessions_of_their_own,
        sigterm_kept,
        without_services,
    )

    with sigterm_kept(), sessions_of_their_own(), without_services(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(root / "src"), str(root)]))
        patch.setenv("RAY_worker_niceness", "0")  # as Headway's own Ray has it
        context = ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=128 * 2**20,
        )
    family = ChildProcesses(Path(context.address_info["session_dir"]).name)
    assert len(family) > 1
    yield
    assert ray.is_initialized(), "who found Ray running left it running"
    ray.shutdown()
    assert family.end(orderly_s=10) == []
