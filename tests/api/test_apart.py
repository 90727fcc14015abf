"""Jobs in a process of their own: their results, errors and ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from headway.api import subprocess_client
from headway.api.subprocess_client import carry_out_apart
from headway.errors import ConfigError, RunError, WorkerDied
from headway.reports.live.live_view import Cell

if TYPE_CHECKING:
    from rich.console import Console

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Doing:
    """A job that does one of several things."""

    what: str
    folder: str = ""

    def __call__(self, console: Console | None) -> object:
        match self.what:
            case "shows":
                assert console is not None
                console.print("so far")
                return os.getpid()
            case "errs":
                error = ConfigError("rollout.n: no")
                error.add_note("and so on")
                raise error
            case "fails":
                return {}["nothing"]
            case "fails by itself":
                raise type("Own", (Exception,), {})("badly")
            case "says what only it knows":
                here = ModuleType("only_here")
                sys.modules["only_here"] = here
                here.Own = Own = type("Own", (), {"__module__": "only_here"})  # type: ignore[attr-defined]
                return Own()
            case "saves":
                assert isinstance(console, Cell)
                try:
                    console.show("so far")
                    while True:
                        time.sleep(0.01)
                finally:
                    time.sleep(1.0)
                    Path(self.folder, "checkpoint").touch()
            case "waits":
                os.kill(os.getppid(), signal.SIGINT)  # the caller passes it on
                signal.pause()
            case _:
                print("a last word", flush=True)
                os._exit(3)
        return None


def test_the_result_and_the_pages_come_back_and_errors_as_they_were_raised() -> None:
    """Seven processes start one after another."""
    pages: list[str] = []
    pid = carry_out_apart(Doing("shows"), pages.append)
    assert pid != os.getpid()
    assert "so far" in pages[-1]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ConfigError, match=r"^rollout\.n: no") as refused:
        carry_out_apart(Doing("errs"), None)
    assert refused.value.__notes__ == ["and so on"]
    with pytest.raises(KeyError, match="nothing") as failed:
        carry_out_apart(Doing("fails"), None)
    assert 'return {}["nothing"]' in failed.value.__notes__[0]
    with pytest.raises(RunError, match=r"^Own: badly"):
        carry_out_apart(Doing("fails by itself"), None)
    with pytest.raises(RunError, match=r"cannot be read here: ModuleNotFoundError: .*'only_here'"):
        carry_out_apart(Doing("says what only it knows"), None)
    with pytest.raises(WorkerDied, match=r"\(exit code 3\).*\na last word"):
        carry_out_apart(Doing("ends"), pages.append)


def test_an_interrupt_is_passed_on_to_the_job() -> None:
    """A process starts."""
    with pytest.raises(KeyboardInterrupt):
        carry_out_apart(Doing("waits"), None)


def test_a_job_that_is_asked_to_end_has_time_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process starts."""
    monkeypatch.setattr(subprocess_client, "GONE_S", 0.1)

    def show(page: str) -> None:
        raise ValueError("the page cannot be shown")

    with pytest.raises(ValueError, match="cannot be shown"):
        carry_out_apart(Doing("saves", str(tmp_path)), show)
    assert (tmp_path / "checkpoint").exists()


def test_an_interrupt_before_the_job_has_begun_ends_it_in_silence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process starts."""
    early = "import os; os.kill(os.getppid(), signal.SIGINT); signal.pause(); from headway"
    monkeypatch.setattr(subprocess_client, "BOOT", subprocess_client.BOOT.replace("from headway", early))
    with pytest.raises(KeyboardInterrupt):
        carry_out_apart(Doing("shows"), None)
    assert capfd.readouterr() == ("", "")
