from __future__ import annotations

import re
from pathlib import Path

import pytest
import ray._private.worker as printing

from headway.cluster.on_ray.ray_worker import messages_in

DEATH = {"lines": ["A worker died or was killed"], "pid": "raylet", "is_err": False}
"""As a thread of Ray's hands a raylet's message on to what prints it."""


def test_what_ray_reports_goes_to_the_log_and_not_to_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log, before = tmp_path / "logs" / "ray.log", printing.print_to_stdstream
    with messages_in(log):
        assert not log.exists()
        printing.print_to_stdstream(DEATH, ignore_prefix=False)
        printing.print_to_stdstream(DEATH, ignore_prefix=False)
        assert capfd.readouterr() == ("", "")
    assert re.fullmatch(r"(\d\d:\d\d:\d\d  A worker died or was killed\n){2}", log.read_text())
    assert printing.print_to_stdstream is before


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("in the way")
    with messages_in(tmp_path / "logs" / "ray.log"):
        printing.print_to_stdstream(DEATH, ignore_prefix=False)
    assert capfd.readouterr() == ("", "")


def test_where_ray_prints_in_another_way_nothing_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(printing, "print_to_stdstream")
    with messages_in(tmp_path / "ray.log"):
        assert not hasattr(printing, "print_to_stdstream")
    assert list(tmp_path.iterdir()) == []
