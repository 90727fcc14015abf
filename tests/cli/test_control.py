"""``headway ctl``, with runs that are none, do not go on, or only answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headway.api.control_socket import Answer, Message, RunControl, listening
from headway.cli import cli
from headway.reports.run_directory import RunDirectory


def ctl(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["ctl", *arguments])


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.config.write_text("")
    directory.events.write_text("")
    return directory


@contextmanager
def going_on(run: RunDirectory, answer: Answer) -> Iterator[None]:
    """A run that answers, on a thread of its own, in the block."""
    loop, up, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with listening(run.control, answer):
            up.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert up.wait(10)
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()


def test_what_the_run_says_is_printed_as_it_comes(run: RunDirectory):
    seen: list[Message] = []

    async def answer(message: Message) -> AsyncGenerator[str, None]:
        seen.append(message)
        yield "the window opens with version 4"
        yield "wrote profiles/version-4/actor-0.json.gz"

    with going_on(run, answer):
        done = ctl(str(run.path), "profile", "--versions", "2", "--seconds", "5")
    assert done.exit_code == 0, done.output
    assert done.stdout == "the window opens with version 4\nwrote profiles/version-4/actor-0.json.gz\n"
    assert seen == [{"command": "profile", "versions": 2, "seconds": 5.0}]


def test_a_run_that_is_still_starting_says_so(run: RunDirectory):
    with going_on(run, RunControl().answer):
        done = ctl(str(run.path), "profile")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: this run is still starting, and has nothing to profile; ask again when it trains\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "profile"], "RUN: got nowhere, which does not exist; expected a run's directory"),
        ([".", "profile"], "which has no config.yaml; expected a run's directory"),
        (["run", "profile"], "no process trains this run. To go on with it: headway train --resume run"),
        (
            ["run", "profile", "--versions", "0"],
            "Invalid value for '--versions': Input should be greater than",
        ),
        (["run", "profile", "--seconds", "soon"], "Invalid value for '--seconds'"),
        (["run", "prune"], "No such command 'prune'"),
        (["run"], "Missing command"),
    ],
)
def test_each_bad_input_ends_in_one_message(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
):
    monkeypatch.chdir(run.path.parent)
    done = ctl(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_command_that_the_run_does_not_know_names_those_that_it_does(run: RunDirectory):
    from headway.api.control_socket import ask
    from headway.errors import UserError

    with (
        going_on(run, RunControl().answer),
        pytest.raises(UserError, match="can be asked for profile, not for 'prune'"),
    ):
        list(ask(run, {"command": "prune"}))
