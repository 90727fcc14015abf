"""Where a run's directory comes from when none is named."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headway.config.schema import Config
from headway.reports.report_manager import Reports, open_reports
from headway.reports.run_directory import Occupied, in_free_directory


def begun(config: Config) -> Reports:
    return in_free_directory(config.run.dir, config.run.name, lambda path: open_reports(config, path))


def test_runs_that_begin_in_the_same_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-120000")
    config = Config.model_validate({"run": {"name": "sort"}, "reports": {"trackers": [], "live": "off"}})
    for name in ("sort-20260101-120000", "sort-20260101-120000-2", "sort-20260101-120000-3"):
        reports = begun(config)
        reports.close()
        assert reports.directory.path == Path("runs") / name
    named = Config.model_validate({**config.model_dump(), "run": {"dir": "runs/sort-20260101-120000"}})
    with pytest.raises(Occupied, match=r"already holds a run; .*run\.dir"):
        begun(named)
