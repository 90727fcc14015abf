"""Files with the tokens of finished groups."""

from __future__ import annotations

import gc
import pickle
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.cluster import token_files
from headway.cluster.keepers import RemoteKeeper
from headway.cluster.token_files import SMALL, TokenFile, TokenFiles, read_here, token_bytes, token_directory
from headway.config.schema import Config
from headway.data.types import GroupTokens
from headway.errors import RunError
from headway.interfaces import FinishedGroup
from tests.cluster.fakes import group_tokens


def same(read: GroupTokens | None, written: GroupTokens) -> bool:
    return read is not None and np.array_equal(read.rows[0].logprobs, written.rows[0].logprobs)


def test_what_is_written_is_read_until_it_is_removed(tmp_path: Path) -> None:
    files = TokenFiles(tmp_path, "10.0.0.1", Config())
    written = [group_tokens(n, float(n)) for n in (3, 5)]
    handles = [files.write(tokens) for tokens in written]
    assert [handle.data for handle in handles] == [None, None], "on the driver's machine all are files"
    travelled = pickle.loads(pickle.dumps(handles))
    assert all(same(read_here(handle), tokens) for handle, tokens in zip(travelled, written, strict=True))
    files.remove(travelled[:1])
    assert read_here(handles[0]) is None
    assert same(read_here(handles[1]), written[1])


def test_on_another_machine_than_the_drivers_few_tokens_travel_with_their_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "SHARED_MEMORY", tmp_path)
    files = TokenFiles(tmp_path / "of the driver", "10.0.0.2", Config())
    few, many = group_tokens(3, 1.0), group_tokens(SMALL, 2.0)
    small, large = files.write(few), files.write(many)
    assert len(list(tmp_path.glob("*/*"))) == 1
    assert same(read_here(large), many)
    files.remove([small, large])
    files.close()
    assert list(tmp_path.iterdir()) == []
    assert same(read_here(small), few), "whatever becomes of the machine"


def test_a_file_system_without_room_is_one_message(tmp_path: Path) -> None:
    files = TokenFiles(tmp_path, "10.0.0.1", Config())
    tmp_path.rmdir()
    with pytest.raises(RunError, match=r"cannot be written to .* bytes\): No such file.*make room, or let fewer"):
        files.write(group_tokens(3, 1.0))


@pytest.mark.parametrize("free", [0, 10**15])
def test_files_are_in_memory_unless_that_has_too_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(token_files, "SHARED_MEMORY", memory)
    monkeypatch.setattr(token_files, "gettempdir", lambda: str(disk))
    monkeypatch.setattr(token_files, "_free", lambda _: free)
    with token_directory(Config()) as directory:
        assert directory.parent == (memory if free else disk)
    assert not directory.exists()


def test_the_bytes_of_what_may_wait_grow_with_staleness() -> None:
    one, two = (Config(async_training={"staleness_threshold": eta}) for eta in (0, 1))  # type: ignore[arg-type]
    group = one.rollout.n * (one.data.max_prompt_length + one.data.max_response_length) * 13
    assert token_bytes(one) == (one.groups_per_version + one.groups_per_fetch) * group
    assert token_bytes(two) == (2 * two.groups_per_version + two.groups_per_fetch) * group


async def test_a_keeper_hears_which_groups_the_driver_has_forgotten() -> None:
    heard: list[list[TokenFile]] = []

    class Peer:
        async def each(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
            heard.append(list(args[-1]))
            yield FinishedGroup(len(heard), (), TokenFile("here", f"/{len(heard)}"))

    class Worker:
        name, heartbeat, lost = "keeper-0", None, None
        peer = Peer

    keeper = RemoteKeeper(Worker())  # type: ignore[arg-type]
    kept = [group async for group in keeper.generate([])]
    kept += [group async for group in keeper.generate([])]
    assert heard == [[], []]
    del kept[0]
    gc.collect()
    assert [group.number async for group in keeper.generate([])] == [3]
    assert heard[2] == [TokenFile("here", "/1")]
    assert kept[0].tokens == TokenFile("here", "/2")
