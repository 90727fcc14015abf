from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headway.cluster.machine.token_files import directory_in_memory

HOLDER = """
import sys
from pathlib import Path
from headway.cluster.machine.token_files import directory_in_memory
with directory_in_memory(Path(sys.argv[1])) as path:
    (path / "weights").write_bytes(b"w")
    print(path, flush=True)
    sys.stdin.read()
"""


def holder(parent: Path) -> subprocess.Popen[str]:
    """A process that has a directory in ``parent``, and says which."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def directory_of(process: subprocess.Popen[str]) -> Path:
    """Once it has one."""
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_a_directory_ends_with_its_block(tmp_path: Path) -> None:
    with directory_in_memory(tmp_path) as path:
        (path / "weights").write_bytes(b"w")
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_process_that_was_killed_is_removed_by_the_next_one_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    killed, living = holder(tmp_path), holder(tmp_path)
    with killed, living:
        abandoned, held = directory_of(killed), directory_of(living)
        killed.kill()
        killed.wait()
        assert (abandoned / "weights").exists()
        with directory_in_memory(tmp_path) as mine:
            assert sorted(tmp_path.iterdir()) == sorted([mine, held])
            assert (held / "weights").exists()
        living.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "headway-other").mkdir()
    with directory_in_memory(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["headway-other"]
