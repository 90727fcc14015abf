"""What trackers need is looked at before a run begins."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.config.schema import Config
from headway.errors import ConfigError
from headway.reports.trackers import tracker_set
from headway.reports.trackers.tracker import TrackerSetting
from headway.reports.trackers.tracker_set import check_trackers
from headway.reports.trackers.tracker_tools import make_tracker

DOCUMENT = (Path(__file__).parents[3] / "docs" / "errors.md").read_text(encoding="utf-8")


def with_trackers(*names: str, **reports: Any) -> Config:
    return Config.model_validate({"reports": {"trackers": list(names), **reports}})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the packages that are installed, for a test to fill."""
    names: set[str] = set()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(origin=name) if name in names else None
    )
    return names


def test_packages_that_are_missing_are_said_at_once_with_their_extras(installed: set[str]) -> None:
    installed.add("mlflow")
    with pytest.raises(ConfigError) as refused:
        check_trackers(with_trackers("tensorboard", "wandb", "mlflow", "prometheus"))
    assert str(refused.value) == (
        "reports.trackers names wandb, prometheus, and wandb, prometheus_client are not installed here; install them "
        "with pip install 'headway[wandb,prometheus]', or take them out of reports.trackers"
    )
    with pytest.raises(ConfigError) as refused:
        check_trackers(with_trackers("wandb"))
    assert f"`{refused.value}`" in DOCUMENT


def test_a_folder_with_the_name_of_a_package_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "headway_stands_for_wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tracker_set, "PACKAGES", {"wandb": "headway_stands_for_wandb"})
    with pytest.raises(ConfigError, match="headway_stands_for_wandb is not installed"):
        check_trackers(with_trackers("wandb"), ["wandb"])


def test_tensorboard_alone_needs_nothing(installed: set[str]) -> None:
    check_trackers(with_trackers("tensorboard"))
    check_trackers(with_trackers())


@pytest.mark.parametrize(("code", "begins"), [(0, True), (3, False), (1, False), (None, True)])
def test_a_run_without_a_login_is_refused_once_wandb_itself_knows_of_none(
    code: int | None, begins: bool, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that does not answer is no reason to refuse: the tracker will tell what is wrong."""
    installed.add("wandb")

    def run(command: list[str], **given: Any) -> subprocess.CompletedProcess[bytes]:
        if code is None:
            raise subprocess.TimeoutExpired(command, 1.0)
        return subprocess.CompletedProcess(command, code)

    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    if begins:
        check_trackers(with_trackers("wandb"))
        return
    with pytest.raises(ConfigError) as refused:
        check_trackers(with_trackers("wandb"))
    assert f"`{refused.value}`" in DOCUMENT


@pytest.mark.parametrize(("name", "value"), [("WANDB_MODE", "offline"), ("WANDB_API_KEY", "k")])
def test_a_variable_with_a_login_or_without_need_of_one_is_enough(
    name: str, value: str, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.add("wandb")
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "run", None)
    check_trackers(with_trackers("wandb"))


def test_a_port_in_use_is_said_before_anything_starts(installed: set[str]) -> None:
    installed.add("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            check_trackers(with_trackers("prometheus", prometheus_port=port))
        assert f"`{refused.value}`".replace(str(port), "9464") in DOCUMENT
    check_trackers(with_trackers("prometheus", prometheus_port=0))


@pytest.mark.parametrize("host", ["nosuchhost.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_not_taken_for_a_port(host: str, installed: set[str]) -> None:
    installed.add("prometheus_client")
    with pytest.raises(ConfigError, match=rf"^reports\.prometheus_host={host}: .*no address\b"):
        check_trackers(with_trackers("prometheus", prometheus_host=host, prometheus_port=0))


def test_a_tracker_that_there_is_not_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tracker 'comet'; .*tensorboard, wandb, mlflow, trackio, prometheus"):
        make_tracker("comet", TrackerSetting(project="p", name="n", folder=tmp_path))
