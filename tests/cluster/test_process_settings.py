"""Settings of a process of this run's own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cluster.machine.worker_setup import ALLOCATOR, collecting_seldom

SET_UP = """
import os, sys
from pathlib import Path
from headway.cluster.machine.worker_setup import ALLOCATOR, set_up_process
set_up_process("actor-0", 1, Path(sys.argv[1]), only_trains=sys.argv[2] == "True")
print({name: os.environ[name] for name in ALLOCATOR if name in os.environ}, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("only_trains", "given", "found"),
    [
        (True, {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (False, {}, {}),
        *((True, {name: "max_split_size_mb:64"}, {name: "max_split_size_mb:64"}) for name in ALLOCATOR),
    ],
)
def test_segments_of_memory_grow_in_processes_that_only_train_unless_the_user_says_otherwise(
    tmp_path: Path, only_trains: bool, given: dict[str, str], found: dict[str, str]
) -> None:
    log = tmp_path / "run" / "logs" / "actor-0.log"
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR} | given
    subprocess.run([sys.executable, "-c", SET_UP, str(log), str(only_trains)], env=environment, check=True)
    assert log.read_text().splitlines()[-1] == f"{found} False"


def test_garbage_is_collected_seldom_and_afterwards_as_before() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        with collecting_seldom():
            assert gc.get_threshold() == (20_000, 10, 10)
            assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() == (700, 10, 10)
        assert gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*before)
