"""Files with the tokens of finished groups."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.cluster.machine import token_files
from headway.cluster.machine.token_files import (
    SMALL,
    TokenFile,
    TokenFiles,
    TokenPlace,
    read_copy,
    read_rows,
    token_bytes,
    token_directory,
)
from headway.cluster.roles.episode_worker_role import EpisodeWorkerRole
from headway.cluster.worker_engines import RemoteEpisodeWorker
from headway.config.schema import Config
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Priority
from headway.data.journal import CompletionJournal, JournalWriter
from headway.data.types import GroupTokens, RowTokens, TurnSpan
from headway.errors import RunError
from tests.cluster.fakes import group_tokens
from tests.cluster.one_version import request


def same(read: Mapping[int, RowTokens] | None, written: GroupTokens) -> bool:
    return read is not None and np.array_equal(read[0].logprobs, written[0].logprobs)


def test_what_is_written_is_read_until_it_is_removed(tmp_path: Path) -> None:
    files = TokenFiles("episode-worker-0", TokenPlace("10.0.0.1", tmp_path), "10.0.0.1")
    written = [group_tokens(n, float(n)) for n in (3, 5)]
    handles = [files.write(tokens) for tokens in written]
    assert [handle.data for handle in handles] == [None, None], "on the driver's machine all are files"
    travelled = pickle.loads(pickle.dumps(handles))
    assert all(same(read_rows(handle), tokens) for handle, tokens in zip(travelled, written, strict=True))
    files.remove(travelled[:1])
    assert read_rows(handles[0]) is None
    assert same(read_rows(handles[1]), written[1])


def test_a_part_has_the_rows_that_it_names_as_they_were_written_and_nothing_else_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)

    def row(prompt: NDArray[np.int32], length: int) -> RowTokens:
        mask = rng.random(length) < 0.7
        logprobs, versions = rng.standard_normal(length).astype(np.float32), rng.integers(0, 9, length)
        ids = rng.integers(0, 10**5, length).astype(np.int32)
        return RowTokens(
            prompt, ids, logprobs, versions.astype(np.int32), mask, (TurnSpan(0, 0, 2), TurnSpan(1, 3, 5, -7))
        )

    shared, other = (rng.integers(0, 9, n).astype(np.int32) for n in (700, 300))
    rows = [row(prompt, n) for prompt, n in ((shared, 1000), (other, 50), (shared, 2001), (shared, 0), (shared, 7))]
    file = TokenFiles("episode-worker-0", TokenPlace("here", tmp_path), "here").write(tuple(rows))
    reads: list[int] = []
    monkeypatch.setattr(token_files, "_bytes_of", counting(token_files._bytes_of, reads))
    part = read_rows(file, (2, 4, 3))
    assert part is not None and list(part) == [2, 4, 3]
    for index, read in part.items():
        for name in ("prompt_ids", "ids", "logprobs", "versions", "loss_mask"):
            written, got = getattr(rows[index], name), getattr(read, name)
            assert got.dtype == written.dtype and np.array_equal(got, written)
        assert read.turns == rows[index].turns
        assert read.prompt_ids is part[2].prompt_ids, "a prompt is read once"
        read.logprobs[:] = 0  # torch warns of arrays that cannot be written to
    size, index_size = 13 * (2001 + 7) + 4 * 700, sum(reads[:2])
    assert sum(reads[2:]) == size and index_size < 1000
    assert Path(file.path).stat().st_size == index_size + 13 * 3058 + 4 * (700 + 300)
    whole = read_rows(file)
    assert whole is not None and all(np.array_equal(a.ids, b.ids) for a, b in zip(whole.values(), rows, strict=True))
    assert read_rows(replace(file, path=f"{tmp_path}/gone"), (0,)) is None


def test_a_file_that_is_cut_short_is_told(tmp_path: Path) -> None:
    file = TokenFiles("episode-worker-0", TokenPlace("here", tmp_path), "here").write(group_tokens(100, 1.0))
    path = Path(file.path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"episode-worker-0-0' ends 1 bytes"):
        read_rows(file)


def counting(function: Callable[..., bytearray], sizes: list[int]) -> Callable[..., bytearray]:
    def call(*args: Any) -> bytearray:
        read = function(*args)
        sizes.append(len(read))
        return read

    return call


def test_on_another_machine_than_the_drivers_few_tokens_travel_with_their_handle(tmp_path: Path) -> None:
    elsewhere = TokenPlace("10.0.0.1", tmp_path / "headway-run-1")
    files = TokenFiles("episode-worker-1", elsewhere, "10.0.0.2")
    few, many = group_tokens(3, 1.0), group_tokens(SMALL, 2.0)
    small, large = files.write(few), files.write(many)
    assert len(list(tmp_path.glob("*/*"))) == 1
    assert same(read_rows(large), many)
    files.remove([small, large])
    assert list(tmp_path.glob("*/*")) == []
    assert same(read_rows(small), few), "whatever becomes of the machine"


def test_on_another_machine_the_files_of_an_episode_worker_that_was_killed_stay_for_the_run_alone(
    tmp_path: Path,
) -> None:
    place, later = (TokenPlace("10.0.0.1", tmp_path / f"headway-run-{run}") for run in (1, 2))
    code = (
        "import sys, numpy, os; from pathlib import Path\n"
        "from headway.cluster.machine.token_files import TokenFiles, TokenPlace\n"
        "from tests.cluster.fakes import group_tokens\n"
        "files = TokenFiles('episode-worker-1', TokenPlace('10.0.0.1', Path(sys.argv[1])), '10.0.0.2')\n"
        "print(files.write(group_tokens(50_000, 2.0)).path, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, place.directory], capture_output=True, text=True, check=False)
    left = TokenFile("10.0.0.2", killed.stdout.strip())
    assert killed.returncode == -signal.SIGKILL and Path(left.path).is_file()
    replacement = TokenFiles("episode-worker-1+1", place, "10.0.0.2")
    assert replacement.write(group_tokens(50_000, 3.0)).path != left.path
    TokenFiles("episode-worker-0", later, "10.0.0.2")
    assert same(read_rows(left), group_tokens(50_000, 2.0)), "as long as somebody holds the directory"


def test_a_file_system_without_room_is_one_message(tmp_path: Path) -> None:
    files = TokenFiles("episode-worker-0", TokenPlace("10.0.0.1", tmp_path), "10.0.0.1")
    tmp_path.rmdir()
    with pytest.raises(RunError, match=r"cannot be written .* bytes\): No such file"):
        files.write(group_tokens(3, 1.0))


def test_without_room_for_a_file_the_tokens_are_in_the_journal_alone(tmp_path: Path) -> None:
    files = TokenFiles("episode-worker-0", TokenPlace("10.0.0.1", tmp_path / "gone"), "10.0.0.1")
    journal = CompletionJournal(JournalWriter(tmp_path, "episode-worker-0", groups_per_block=4, sync_s=None))
    written = [group_tokens(n, float(n)) for n in (3, 4)]
    handles = [files.write(tokens, partial(journal.keep, n)) for n, tokens in enumerate(written)]
    assert [read_rows(handle) for handle in handles] == [None, None]
    assert all(same(read_copy(handle, [0]), tokens) for handle, tokens in zip(handles, written, strict=True))


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
    def of(eta: int, **trainer: int) -> Config:
        return Config.model_validate({"async_training": {"staleness_threshold": eta}, "trainer": trainer})

    one, two = of(0, max_restarts=0), of(1, max_restarts=0)
    group = (one.rollout.n + 1) * (one.data.max_prompt_length + one.data.max_response_length) * 13
    assert token_bytes(one) == (one.groups_per_version + one.groups_per_batch) * group
    assert token_bytes(two) == (2 * two.groups_per_version + two.groups_per_batch) * group
    kept = token_bytes(of(1, save_freq=5)) - token_bytes(two)
    assert kept == 10 * one.groups_per_version * group, "what is trained on again waits for two checkpoints at the most"
    assert token_bytes(of(1, save_freq=-1)) == token_bytes(two)


async def test_files_of_groups_that_the_driver_has_forgotten_are_removed_here_or_by_their_episode_worker(
    tmp_path: Path,
) -> None:
    here = tmp_path / "1"
    here.touch()
    heard: list[list[TokenFile]] = []

    class Peer:
        async def call(self, method: str, *args: Any) -> None: ...

        async def each(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
            heard.append(list(args[-1]))
            yield len(heard), (), TokenFile("there", f"{tmp_path}/{len(heard)}")

    class Worker:
        name, heartbeat, lost = "episode-worker-0", None, None
        peer = Peer

    worker = RemoteEpisodeWorker(Worker())  # type: ignore[arg-type]
    kept = [group for number in (1, 2) async for group in worker.generate([request(number)])]
    assert heard == [[], []] and here.exists()
    del kept[0]
    assert not here.exists()
    assert [group.number async for group in worker.generate([request(3)])] == [3]
    assert [group.number async for group in worker.generate([request(4)])] == [4]
    assert heard[2:] == [[], [TokenFile("there", f"{tmp_path}/3")]]
    assert kept[0].tokens == TokenFile("there", f"{tmp_path}/2")


async def test_only_groups_that_are_trained_leave_files(tmp_path: Path) -> None:
    class FakeWorker:
        async def generate(self, requests: Any, on: Any) -> AsyncGenerator[Group, None]:
            for one in requests:
                yield replace(one, tokens=group_tokens(3, 1.0))

    role = object.__new__(EpisodeWorkerRole)
    role._completed = None
    role._files = TokenFiles("episode-worker-0", TokenPlace("10.0.0.1", tmp_path), "10.0.0.1")
    role.worker = FakeWorker()  # type: ignore[assignment]
    requests = [replace(request(number), priority=priority) for number, priority in enumerate(Priority)]
    groups = [group async for group in role.generate(requests, None, [])]
    trained = [number for number, _, tokens in groups if tokens is not None]
    assert trained == [number for number, priority in enumerate(Priority) if priority is Priority.TRAINING]
    assert next(role._files._numbers) == 1, "nothing else was written"
