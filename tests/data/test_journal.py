"""The journal's files: whatever a process that died has left of them, what is read was written."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import strategies as st

from headway.cluster.roles.episode_worker_role import EpisodeWorkerRole
from headway.config.schema import Config
from headway.data.interfaces.rollout import Completion, GenerateRequest, Priority, SamplingParams
from headway.data.journal import (
    OPEN_BLOCKS,
    CompletionJournal,
    JournalWriter,
    Record,
    block_of,
    give_up,
    records,
    segments,
    written,
)
from headway.data.types import FinishReason, SampledTokens, TrajectoryId
from tests.tiers import a_share_and_all, searched

values = st.dictionaries(st.text(max_size=5), st.integers(-5, 5) | st.text(max_size=8), max_size=3)
several = st.lists(st.builds(Record, values, st.binary(max_size=40)), min_size=1, max_size=6)


def read(path: Path) -> list[tuple[dict[str, object], bytes]]:
    return [(dict(record.values), record.data) for record in records(path)]


def writer(directory: Path, name: str = "episode-worker-0") -> JournalWriter:
    return JournalWriter(directory, name, groups_per_block=4, sync_s=None)


@searched(100, several, st.data())
def test_a_file_torn_at_any_byte_holds_what_was_written_before(given_records: list[Record], data: st.DataObject):
    with TemporaryDirectory() as folder:
        one = writer(Path(folder))
        for record in given_records:
            one.append(0, record)
        one.close()
        (path,) = segments(Path(folder))
        whole = path.read_bytes()
        given_records = [Record({"run": None}), *given_records]
        ends = np.cumsum([len(record.packed()) for record in given_records]).tolist()
        assert ends[-1] == len(whole)
        torn = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:torn])
        expected = [(dict(record.values), record.data) for record in given_records]
        assert read(path) == expected[: sum(end <= torn for end in ends)]
        alone = [(dict(record.values), record.data) for record in records(path, values_alone=True)]
        assert alone == [(of, b"") for of, _ in expected[: sum(end <= torn for end in ends)]]


@searched(100, several, st.data())
def test_a_byte_that_changed_hides_its_record_and_those_behind_it(given_records: list[Record], data: st.DataObject):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "driver.0.0"
        whole = bytearray(b"".join(record.packed() for record in given_records))
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
        ends = np.cumsum([len(record.packed()) for record in given_records]).tolist()
        assert len(read(path)) == sum(end <= place for end in ends)


def test_each_life_of_a_writer_has_a_file_of_its_own_and_what_is_torn_hides_nothing_of_the_next(tmp_path: Path):
    first = writer(tmp_path)
    first.append(5, Record({"n": 1}))
    first.append(5, Record({"n": 2}))
    first.close()
    (path,) = segments(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    second = writer(tmp_path)
    second.append(5, Record({"n": 2}))
    second.close()
    found = segments(tmp_path, block=1)
    assert [record.values for _, record in written(tmp_path, block=1)] == [{"n": 1}, {"n": 2}]
    assert {block_of(path) for path in found} == {1}


def test_a_disk_that_takes_half_a_record_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    one, write = writer(tmp_path), os.write
    one.append(0, Record({"n": 0}))
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
        one.append(0, Record({"n": 1}))
        one.append(0, Record({"n": 2}))
    one.append(0, Record({"n": 3}))
    one.close()
    assert [record.values["n"] for _, record in written(tmp_path)] == [0, 3]
    (warning,) = caplog.messages
    assert "cannot be written" in warning


def test_a_directory_that_is_gone_is_warned_of_once(tmp_path: Path, caplog):
    one = writer(tmp_path / "gone")
    for number in range(0, 40, 4):
        one.append(number, Record({}))
    assert len(caplog.messages) == 1


def test_what_was_written_is_synced_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: Queue[str] = Queue()
    monkeypatch.setattr(os, "fsync", lambda file: synced.put(Path(f"/proc/self/fd/{file}").readlink().name))

    async def run() -> set[str]:
        one = JournalWriter(tmp_path, "driver", groups_per_block=4, sync_s=0.001)
        one.append(0, Record({}))
        one.append(9, Record({}))
        names = {await asyncio.to_thread(synced.get, timeout=60) for _ in range(2)}
        one.close()
        return names

    assert asyncio.run(run()) == {"driver.0.0", "driver.2.0"}


def test_syncing_goes_on_after_a_moment_without_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: Queue[int] = Queue()
    scarce = iter([True])
    dup = os.dup

    def duplicate(file: int) -> int:
        asked.put(file)
        if next(scarce, False):
            raise OSError(errno.EMFILE, "Too many open files")
        return dup(file)

    async def run() -> None:
        one = JournalWriter(tmp_path, "driver", groups_per_block=4, sync_s=0.001)
        for _ in range(2):
            one.append(0, Record({}))
            await asyncio.to_thread(asked.get, timeout=60)
        one.close()

    monkeypatch.setattr(os, "dup", duplicate)
    asyncio.run(run())


# ------------------------------------------------------------------------------------- completions

SAMPLING = SamplingParams(max_tokens=8, temperature=0.7)


def request(k: int = 0, key: int = 0, ids: tuple[int, ...] = (1, 2, 3)) -> GenerateRequest:
    return GenerateRequest(7, TrajectoryId(0, 5, 0, k), np.array(ids, np.int32), SAMPLING, key)


def completion(*ids: int, reason: FinishReason = FinishReason.STOP) -> Completion:
    tokens = SampledTokens(
        np.array(ids, np.int32),
        -np.arange(len(ids), dtype=np.float32) / 7,
        np.array([3 + 2 * (place > 1) for place in range(len(ids))], np.int32),
    )
    return Completion(7, len(ids), [[0, 3], [2, 5]][: 1 + (len(ids) > 2)], reason, 1.0, 2.0, tokens)


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[tuple[CompletionJournal, CompletionJournal]]:
    """Those of an episode worker, and of the one that makes its groups again."""
    both = CompletionJournal(writer(tmp_path)), CompletionJournal(writer(tmp_path, "episode-worker-0+1"))
    yield both
    for one in both:
        one.close()


def recalled(journal: CompletionJournal, asked: GenerateRequest, number: int = 6) -> tuple[str, Completion] | None:
    async def recall() -> tuple[str, Completion] | None:
        return journal.recall(number, asked)

    return asyncio.run(recall())


def test_a_finished_call_is_found_with_its_tokens_log_probs_and_versions(journals):
    first, second = journals
    first.append(6, request(), "rollout-1", completion(4, 9, 2))
    replica, found = recalled(second, request())
    expected = completion(4, 9, 2)
    assert (replica, found.length, found.version_spans) == ("rollout-1", 3, [[0, 3], [2, 5]])
    assert found.finish_reason is FinishReason.STOP
    for name in ("ids", "logprobs", "versions"):
        have, want = getattr(found.tokens, name), getattr(expected.tokens, name)
        assert have.dtype == want.dtype
        assert have.tobytes() == want.tobytes()


@a_share_and_all
def test_calls_behind_one_with_a_damaged_byte_are_found_and_none_is_answered_by_other_tokens(
    journals, tmp_path: Path, share: float, caplog
):
    """Which calls are in a file is read without their tokens, and without copies of those of whole groups."""
    first, second = journals
    for k in range(3):
        first.append(6, request(k=k), "rollout-1", completion(4 + k, 9))
        first.keep(6, bytes(100))
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    starts = [record.at for record in records(path)]
    assert len(starts) == 7, "the first one names the run"
    for place in range(starts[3], starts[4], int(1 / share)):  # the second call
        for change in (1, 128):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
            second.reread(6)
            found = [recalled(second, request(k=k)) for k in range(3)]
            answers = {k: one[1].tokens.ids.tolist() for k, one in enumerate(found) if one is not None}
            if place >= starts[4] - 3 * 4 * 2:  # in its tokens; in what it is of it may hide another call
                assert answers == {0: [4, 9], 2: [6, 9]}
            assert answers.items() <= {0: [4, 9], 2: [6, 9]}.items()
    assert f"{path}: the record at byte {starts[3]} is damaged, and its call is made again" in caplog.text


def test_a_call_that_is_asked_for_in_another_way_is_not(journals):
    first, second = journals
    first.append(6, request(), "rollout-1", completion(4, 9))
    assert recalled(second, request(k=1)) is None
    assert recalled(second, request(key=3)) is None
    assert recalled(second, request(ids=(1, 2, 4))) is None
    assert recalled(second, replace(request(), sampling=replace(SAMPLING, temperature=0.8))) is None
    assert recalled(second, replace(request(), priority=Priority.VALIDATION)) is None
    assert recalled(second, request(), number=2) is None, "of another block"
    assert recalled(second, request()) is not None


def test_calls_that_were_aborted_validated_or_simulated_are_left_out(journals, tmp_path: Path):
    first, _ = journals
    first.append(6, request(), "rollout-1", completion(4, reason=FinishReason.ABORTED))
    first.append(6, replace(request(), priority=Priority.VALIDATION), "rollout-1", completion(4))
    first.append(6, request(), "rollout-1", replace(completion(4), tokens=None))
    assert segments(tmp_path) == []


def test_what_another_episode_worker_writes_later_is_found_after_it_was_lost(journals):
    first, second = journals
    assert recalled(second, request()) is None
    first.append(6, request(), "rollout-1", completion(4, 9))
    assert recalled(second, request()) is None, "files are read once"
    second.reread(6)
    assert recalled(second, request()) is not None


@pytest.mark.parametrize("lost", ["episode-worker-0", "episode-worker-1"])
def test_what_an_episode_worker_writes_that_was_given_up_and_came_back_counts_behind_what_others_wrote(
    tmp_path: Path, lost: str
):
    """Both have written the same call: the one that was given up, and the one that made its group again."""
    for name in ("episode-worker-0", "episode-worker-1"):
        one = CompletionJournal(writer(tmp_path, name))
        one.append(6, request(), name, completion(*([1] if name == lost else [4, 9])))
        one.close()
    give_up(tmp_path, lost)
    resumed = CompletionJournal(writer(tmp_path, "episode-worker-0+1"))
    replica, found = recalled(resumed, request())
    assert (replica != lost, found.tokens.ids.tolist()) == (True, [4, 9])


def test_files_of_others_in_the_directory_are_no_part_of_the_journal(tmp_path: Path):
    """An editor leaves one beside the file that it shows."""
    writer(tmp_path, "driver").append(0, Record({"life": 0}))
    for name in (".driver.0.0.swp", "driver.0.0.bak", "driver.0.0~", "notes"):
        (tmp_path / name).touch()
    writer(tmp_path, "driver").append(0, Record({"life": 1}))
    assert [path.name for path in segments(tmp_path)] == ["driver.0.0", "driver.0.1"]
    assert [record.values for _, record in written(tmp_path)] == [{"life": 0}, {"life": 1}]


def test_of_two_lives_the_later_one_has_the_higher_number_in_whatever_block(tmp_path: Path):
    """A batch is written in the block of its oldest group, which may be another one in another life."""
    for block, life in ((1, "first"), (1, "second"), (2, "third"), (0, "fourth")):
        one = writer(tmp_path, "driver")
        one.append(4 * block, Record({"life": life}))
        one.close()
    found = [record.values["life"] for _, record in written(tmp_path, "driver")]
    assert found == ["first", "second", "third", "fourth"]


def test_a_block_that_is_written_again_after_many_others_goes_on_in_its_file(tmp_path: Path):
    one = writer(tmp_path)
    for block in [*range(OPEN_BLOCKS + 4), 0, 1]:
        one.append(4 * block, Record({"block": block}))
    one.close()
    assert len(segments(tmp_path)) == OPEN_BLOCKS + 4
    assert [record.values["block"] for _, record in written(tmp_path, block=0)] == [0, 0]


def test_a_call_is_found_whoever_asked_for_it_with_another_context_later(journals):
    first, second = journals
    first.append(6, request(), "rollout-1", completion(4, 9))
    second.append(6, request(ids=(7, 8)), "rollout-0", completion(5))
    _, found = recalled(second, request())
    assert found.tokens.ids.tolist() == [4, 9]


def test_a_validation_reads_no_files(journals, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.data.journal.segments", lambda *_, **__: pytest.fail("files were looked for"))
    assert recalled(journals[1], replace(request(), priority=Priority.VALIDATION)) is None


@pytest.mark.parametrize(("sync_s", "save_freq", "wanted"), [(1.0, 10, True), (None, 10, False), (1.0, -1, False)])
def test_an_episode_worker_leaves_a_journal_alone_that_the_run_does_not_want(
    tmp_path: Path, sync_s: float | None, save_freq: int, wanted: bool
):
    """It is there from an earlier process, with other settings."""
    values = {"mode": "async_stale", "run": {"journal_sync_s": sync_s}, "trainer": {"save_freq": save_freq}}
    (tmp_path / "journal").mkdir()
    role = SimpleNamespace(_config=Config.model_validate(values), _run_dir=tmp_path, name="episode-worker-0")
    assert (EpisodeWorkerRole._completions(role) is not None) == wanted


@pytest.mark.parametrize("zeros", [8, 100])
def test_zeros_behind_the_records_as_a_machine_that_died_leaves_them_are_none(tmp_path: Path, zeros: int):
    path = tmp_path / "driver.0.0"
    path.write_bytes(Record({"n": 1}).packed() + bytes(zeros))
    assert read(path) == [({"n": 1}, b"")]


def test_an_answer_that_is_found_holds_no_more_than_itself(journals):
    first, second = journals
    first.append(6, request(), "rollout-1", completion(4, 9))
    _, found = recalled(second, request())
    assert found.tokens.ids.flags.writeable
    assert found.tokens.ids.base.nbytes == 3 * 2 * 4


def test_a_file_that_is_not_whole_is_told_with_how_much_of_it_is_left_out(tmp_path: Path, caplog):
    one = writer(tmp_path)
    for n in range(3):
        one.append(0, Record({"n": n}))
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert [record.values["n"] for _, record in written(tmp_path)] == [0, 1]
    length = len(Record({"n": 2}).packed())
    assert caplog.messages == [f"{path} is not whole: its last {length - 3} bytes of {len(whole) - 3} are left out"]


def test_files_of_another_run_are_left_out_and_told(tmp_path: Path, caplog):
    for run in ("this", "other"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "settings.json").write_text(json.dumps({"run": run}))
        for name in ("driver", "episode-worker-0"):
            one = writer(tmp_path / run, name)
            one.append(0, Record({"of": run, "by": name}))
            one.close()
    shutil.copy(tmp_path / "other" / "driver.0.0", tmp_path / "this" / "driver.0.0")
    assert [record.values["by"] for _, record in written(tmp_path / "this")] == ["episode-worker-0"]
    assert caplog.messages == [f"{tmp_path / 'this' / 'driver.0.0'} is of another run, and is left out"]


def test_a_file_that_may_not_be_read_is_left_out_and_told(journals, monkeypatch: pytest.MonkeyPatch, caplog):
    first, second = journals
    first.append(6, request(), "rollout-1", completion(4, 9))

    def refused(path: Path, mode: str):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    assert recalled(second, request()) is None
    (told,) = caplog.messages
    assert "cannot be read, and is left out: [Errno 13] Permission denied" in told


def test_a_reader_of_many_completions_holds_their_places_and_no_tokens(journals):
    first, second = journals
    for k in range(50):
        first.append(6, request(k=k), "rollout-1", completion(*range(20_000)))
    tracemalloc.start()
    assert recalled(second, request(k=3)) is not None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 12 * 20_000, "of twelve million bytes"
