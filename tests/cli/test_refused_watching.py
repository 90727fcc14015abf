"""Every row of docs/errors.md on runs that are watched, compared or asked: the command ends with its message."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli import cli
from headway.reports.watch import watch_server
from tests.cli.test_bad_input import _table
from tests.reports.stories import story, written

ROWS = _table("A run that is watched, compared or asked")
"""Input → message and exit code, as the document's section has them."""


def damage(folder: Path) -> None:
    (folder / "other" / "events.jsonl").write_text("nonsense\n")


def spoil_settings(folder: Path) -> None:
    (folder / "other" / "config.yaml").write_text("a: [")


def kill(folder: Path) -> None:
    events = folder / "run" / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-1]))


CASES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "watch of what is no run": ("watch nowhere", lambda folder: None),
    "watch of a run whose record is damaged": ("watch other", damage),
    "--port in use": ("watch run --port PORT", lambda folder: None),
    "compare of one run alone": ("compare run", lambda folder: None),
    "compare of a run with itself": ("compare run ./run", lambda folder: None),
    "compare of a damaged record": ("compare run other", damage),
    "compare of settings that cannot be read": ("compare run other", spoil_settings),
    "report of versions that there are not": ("report run --versions 7:9", lambda folder: None),
    "--html over a file of a run": ("compare run other --html other/events.jsonl", lambda folder: None),
    "ctl of what is no run": ("ctl nowhere profile", lambda folder: None),
    "ctl of a run that nobody trains": ("ctl run profile", kill),
    "ctl of a run that is complete": ("ctl run profile", lambda folder: None),
}


def test_the_document_lists_the_cases_and_nothing_else() -> None:
    assert set(ROWS) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_each_ends_in_the_message_that_the_document_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch_server, "WAIT_S", 0.0)
    for run in ("run", "other"):
        written(tmp_path / run, story(versions=2))
    command, prepare = CASES[name]
    prepare(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        typed = command.replace("PORT", str(taken.getsockname()[1])).split()
        done = CliRunner().invoke(cli, typed)
    row = ROWS[name]
    pattern = ".*".join(re.escape(part) for part in row.message.split("…"))
    assert (done.exit_code, done.stdout) == (row.exit_code, ""), done.stderr
    assert re.fullmatch(f"error: {pattern}\n", done.stderr), done.stderr
