"""The socket through which a run is asked for something: a real one, its two ends in one process."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from headway.api import control_socket
from headway.api.control_socket import Message, ask, listening
from headway.errors import HeadwayError, RunError, StallError, UserError
from headway.reports.run_directory import RunDirectory, RunLock


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


async def echo(message: Message) -> AsyncGenerator[str, None]:
    yield f"asked for {message['command']}"
    yield "done"


async def asked(run: RunDirectory, message: Message | None = None) -> list[str]:
    return await asyncio.to_thread(lambda: list(ask(run, message or {"command": "profile"})))


async def failure(run: RunDirectory) -> HeadwayError:
    with pytest.raises(HeadwayError) as raised:
        await asked(run)
    return raised.value


async def test_whoever_asks_gets_the_answers_lines_and_the_socket_goes_with_the_run(run: RunDirectory):
    async with listening(run.control, echo):
        assert stat.S_IMODE(run.control.stat().st_mode) == 0o600
        assert await asked(run) == ["asked for profile", "done"]
        assert await asked(run, {"command": "again"}) == ["asked for again", "done"]
    assert not run.control.exists()


@pytest.mark.parametrize("kind", [UserError, RunError])
async def test_an_error_of_the_answer_is_whoever_asks_own(run: RunDirectory, kind: type[HeadwayError]):
    async def refuse(message: Message) -> AsyncGenerator[str, None]:
        yield "first"
        raise kind("no such thing")

    async with listening(run.control, refuse):
        error = await failure(run)
    assert type(error) is kind and str(error) == "no such thing"


async def test_a_path_that_is_too_long_for_an_address_is_reached_through_its_folder(tmp_path: Path):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    run = RunDirectory(folder)
    assert len(os.fsencode(run.control)) > control_socket.ADDRESS_BYTES
    async with listening(run.control, echo):
        assert await asked(run) == ["asked for profile", "done"]
    assert not run.control.exists()


async def test_the_socket_of_a_killed_run_is_replaced(run: RunDirectory):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(run.control))
    assert "no process trains this run" in str(await failure(run))
    async with listening(run.control, echo):
        assert await asked(run) == ["asked for profile", "done"]


async def test_a_file_of_that_name_is_left_alone(run: RunDirectory):
    run.control.write_text("mine")
    with pytest.raises(OSError, match="in use"):
        async with listening(run.control, echo):
            pass
    assert run.control.read_text() == "mine"


async def test_a_file_system_without_sockets_is_an_error_to_go_on_after(run: RunDirectory, tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        async with listening(tmp_path / "nowhere" / "control.sock", echo):
            pass


async def test_whoever_hangs_up_ends_nothing_but_the_reading(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_socket, "ALIVE_EVERY_S", 0.02)
    left = asyncio.Event()

    async def slow(message: Message) -> AsyncGenerator[str, None]:
        try:
            yield "begun"
            await asyncio.sleep(60)
        finally:
            left.set()

    def hang_up() -> None:
        lines = ask(run, {"command": "profile"})
        assert next(lines) == "begun"
        lines.close()  # type: ignore[attr-defined]

    async with listening(run.control, slow):
        await asyncio.to_thread(hang_up)
        async with asyncio.timeout(10):
            await left.wait()
    async with listening(run.control, echo):
        assert await asked(run) == ["asked for profile", "done"]


async def test_a_run_with_nothing_to_tell_says_that_it_is_there(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_socket, "ALIVE_EVERY_S", 0.05)
    monkeypatch.setattr(control_socket, "SILENT_S", 0.5)

    async def slow(message: Message) -> AsyncGenerator[str, None]:
        await asyncio.sleep(1.0)
        yield "at last"

    async with listening(run.control, slow):
        assert await asked(run) == ["at last"]


async def test_a_run_that_stands_still_is_told_by_name(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_socket, "SILENT_S", 0.1)
    lock = RunLock(run.lock)
    lock.take()

    async def silent(message: Message) -> AsyncGenerator[str, None]:
        await asyncio.sleep(60)
        yield "never"

    monkeypatch.setattr(control_socket, "LAST_WORDS_S", 0.0)
    async with listening(run.control, silent):
        error = await failure(run)
    lock.release()
    assert isinstance(error, StallError)
    assert f"waited 0.1 s for process {os.getpid()} on {socket.gethostname()}" in str(error)


async def test_a_run_that_ends_before_it_has_answered_says_so(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_socket, "LAST_WORDS_S", 0.0)
    begun = asyncio.Event()

    async def silent(message: Message) -> AsyncGenerator[str, None]:
        begun.set()
        await asyncio.sleep(60)
        yield "never"

    async with listening(run.control, silent):
        asking = asyncio.create_task(failure(run))
        await begun.wait()
    assert "ended before it had answered" in str(await asking)


@pytest.mark.parametrize("sent", [b"nonsense\n", b"[1]\n", b"x" * 100_000 + b"\n", b""])
async def test_nonsense_is_answered_with_an_error(run: RunDirectory, sent: bytes):
    async with listening(run.control, echo):
        reader, writer = await asyncio.open_unix_connection(str(run.control))
        writer.write(sent)
        writer.write_eof()
        assert b"nothing that it understands" in await reader.read()
        writer.close()


async def test_whoever_says_nothing_is_hung_up_on(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_socket, "ASKING_S", 0.05)
    async with listening(run.control, echo):
        reader, writer = await asyncio.open_unix_connection(str(run.control))
        async with asyncio.timeout(10):
            assert b"nothing that it understands" in await reader.read()
        writer.close()


@pytest.fixture
def held(run: RunDirectory) -> Iterator[RunLock]:
    lock = RunLock(run.lock)
    lock.take()
    yield lock
    lock.release()


async def test_nobody_who_trains_is_told_with_the_way_to_go_on(run: RunDirectory):
    error = await failure(run)
    assert isinstance(error, UserError)
    assert f"no process trains this run. To go on with it: headway train --resume {run.path}" in str(error)


@pytest.mark.usefixtures("held")
async def test_a_run_that_cannot_be_asked_yet_is_told_with_its_process(run: RunDirectory):
    assert f"process {os.getpid()} on {socket.gethostname()} trains this run, and cannot be asked" in str(
        await failure(run)
    )


@pytest.mark.usefixtures("held")
async def test_a_run_on_another_machine_is_told_with_its_name(run: RunDirectory):
    run.lock.write_text("process 7 on elsewhere\n")
    message = str(await failure(run))
    assert "process 7 on elsewhere trains this run, or did, and this machine is" in message
    assert message.endswith("give the command there")
