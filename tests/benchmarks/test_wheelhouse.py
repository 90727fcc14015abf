"""What `make wheelhouse` collects, with a package index made of a dictionary, and what it makes of too much."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import wheelhouse
from benchmarks.wheelhouse import (
    IN_THE_IMAGE,
    NOT_IMPORTED,
    WheelhouseError,
    collect,
    read_pins,
    requirements,
    summary,
    wanted,
)

ROOT = Path(wheelhouse.__file__).parents[1]


def wheel(path: Path, requires: Sequence[str] = ()) -> Path:
    metadata = "Metadata-Version: 2.4\nName: x\n" + "".join(f"Requires-Dist: {one}\n" for one in requires)
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("x-1.dist-info/METADATA", metadata)
    return path


def index(monkeypatch: pytest.MonkeyPatch, packages: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Let pip find ``packages`` (name → what it requires), and nothing else; the calls are returned."""
    calls: list[list[str]] = []

    def download(pins: Sequence[str], python_version: str, folder: Path) -> None:
        calls.append(list(pins))
        for pin in pins:
            name = pin.split("==")[0]
            wheel(folder / f"{name}-1-py3-none-any.whl", packages[name])

    monkeypatch.setattr(wheelhouse, "download", download)
    return calls


def a_project(folder: Path, dependencies: Sequence[str], pins: Sequence[str]) -> None:
    listed = ", ".join(f'"{one}"' for one in dependencies)
    (folder / "pyproject.toml").write_text(f"[project]\ndependencies = [{listed}]\n")
    (folder / "constraints.txt").write_text("# pins\n" + "\n".join(pins))


def test_what_wheels_require_is_collected_too_and_what_the_image_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_project(tmp_path, ["torch>=2", "ray>=2", "blend>=5", "a>=1"], ["a==1", "b==2", "c==3", "Blend==5.2"])
    monkeypatch.chdir(tmp_path)
    calls = index(monkeypatch, {"Blend": [], "a": ["b>=1", "numpy"], "b": ["c; python_version < '3.13'", "a"], "c": []})
    stale = tmp_path / "out" / "old-1-py3-none-any.whl"
    stale.parent.mkdir()
    stale.touch()
    found = collect("3.12", tmp_path / "out")
    assert calls == [["a==1", "Blend==5.2"], ["b==2"], ["c==3"]]
    assert [one.name.split("-")[0] for one in found] == ["Blend", "a", "b", "c"]


def test_a_package_without_a_pin_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_project(tmp_path, ["a>=1"], [])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WheelhouseError, match=r"\ba is required and constraints\.txt"):
        collect("3.12", tmp_path / "out")


def test_markers_are_those_of_the_image_not_of_this_machine() -> None:
    lines = ["x; python_version < '3.12'", "y; sys_platform == 'win32'", "z; extra == 'dev'", "Typing_Extensions>=4"]
    assert wanted(lines, "3.12") == {"typing-extensions"}
    assert wanted(lines, "3.11") == {"typing-extensions", "x"}


def test_what_a_wheel_requires_is_read_from_its_metadata(tmp_path: Path) -> None:
    assert requirements(wheel(tmp_path / "x-1-py3-none-any.whl", ["a>=1", "b; extra == 'c'"])) == [
        "a>=1",
        "b; extra == 'c'",
    ]
    assert requirements(wheel(tmp_path / "y-1-py3-none-any.whl")) == []


def test_a_wheelhouse_that_is_too_large_is_an_error_and_one_that_is_not_says_how_to_use_it(tmp_path: Path) -> None:
    large = tmp_path / "large-1-py3-none-any.whl"
    large.write_bytes(b"\0" * 2_000_000)
    said = summary([large], tmp_path, "3.12")
    assert "1 wheels for Python 3.12, 2.0 MB (at most 55)" in said
    assert f"--no-index --no-deps --target /tmp/site {tmp_path}/*.whl" in said
    with pytest.raises(WheelhouseError, match=r"56\.0 MB, more than 55 MB; the largest: larger-1"):
        summary([large, _of(tmp_path, 54_000_000)], tmp_path, "3.12")


def _of(folder: Path, nbytes: int) -> Path:
    path = folder / "larger-1-py3-none-any.whl"
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


def test_a_version_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        wheelhouse.main(["--python-version", "312"])
    assert "expected one such as 3.12" in capsys.readouterr().err


def test_each_dependency_is_in_the_image_pinned_or_left_out_for_a_reason() -> None:
    pins = read_pins(ROOT / "constraints.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    assert names <= {*pins, *IN_THE_IMAGE, *NOT_IMPORTED}
    assert wanted(project["dependencies"], "3.12") <= set(pins)


@pytest.mark.slow
def test_the_inline_path_imports_nothing_that_is_left_out() -> None:
    """Over 5 s: imports torch and all that an inline run uses, in a process where what is left out is not."""
    left_out = sorted({"ray", "pyarrow", "reasoning_gym", "grpc", "markdown", "PIL", "werkzeug", "datasets"})
    code = f"""
import sys
sys.modules.update(dict.fromkeys({left_out!r}))  # importing one of them raises ImportError
import headway.api.run, headway.cli, headway.cluster.backend, headway.cluster.inline_cluster, headway.cluster.startup
import headway.cluster.roles.training_roles, headway.cluster.roles.rollout_role, headway.engines.rollout.native.engine
import headway.engines.train.fsdp.engine, headway.agents.rewards.mathematics, headway.agents.rewards.scorers
import headway.api.sft.warmup, headway.runtime.workers.worker_main
from pathlib import Path
from tempfile import TemporaryDirectory
from headway.reports.trackers.tensorboard import TensorBoardTracker
from headway.reports.trackers.tracker import TrackerSetting
with TemporaryDirectory() as folder:
    tracker = TensorBoardTracker(TrackerSetting("p", "n", Path(folder) / "trackers"))
    tracker.on_row({{"version": 1, "loss": 2.0}})
    tracker.close("completed")
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr
