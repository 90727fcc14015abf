"""A checkpoint of which a file was damaged is told from one of another model, in one message."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from headway.engines.train.fsdp import checkpoint
from headway.engines.train.state_file import STATE_FILE, read_state
from headway.errors import ModelError, RunError
from tests.engines.train.test_engine import ModelPath, engine
from tests.tiers import mostly_slow

Damage = Callable[[Path], object]


def shard(path: Path) -> Path:
    return next(path.glob("*.distcp"))


def other_bytes(file: Path) -> None:
    file.write_bytes(bytes(byte ^ 0x5A for byte in file.read_bytes()))


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(
            lambda path: (path / STATE_FILE).write_text(""), "state.json cannot be read: ", marks=pytest.mark.slow
        ),
        (lambda path: other_bytes(shard(path)), "rank 0: UnpicklingError: Weights only load failed. Remove it"),
        (lambda path: other_bytes(path / ".metadata"), ".metadata cannot be read: "),
    ],
)
def test_a_damaged_file_is_one_message_that_says_what_to_do(
    damage: Damage, said: str, model_path: ModelPath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "version_3"
    engine(model_path()).learner.save(path, {})
    damage(path)
    with pytest.raises(ModelError) as raised:
        engine(model_path()).learner.load(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: the checkpoint is damaged: {said}")
    assert message.endswith(". Remove it, to resume from the one before")
    assert "\n" not in message
    shown = [record for record in caplog.records if record.name.startswith("torch") and record.levelno > logging.INFO]
    assert shown == []


@pytest.mark.usefixtures("one_rank")
@mostly_slow("name", [".metadata", "__0_0.distcp"], quick=["__0_0.distcp"])
def test_a_file_that_is_missing_or_cut_off_is_known_without_reading_it(
    name: str, model_path: ModelPath, tmp_path: Path
) -> None:
    path = tmp_path / "version_3"
    engine(model_path()).learner.save(path, {})
    assert read_state(path)["extra"] == {}
    size = (path / name).stat().st_size
    cut_in_half(path / name)
    cut_off = rf"{re.escape(name)} has {size // 2} bytes, .*\b{size}\b"
    with pytest.raises(ModelError, match=f"version_3: .*damaged: {cut_off}"):
        read_state(path)
    (path / name).unlink()
    with pytest.raises(ModelError, match=f"version_3: .*damaged: {re.escape(name)} is missing"):
        read_state(path)


def test_a_checkpoint_that_was_written_without_the_sizes_of_its_files_is_read(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text('{"optimizer_steps": 3, "extra": {}}')
    assert read_state(tmp_path)["optimizer_steps"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read: "),
        ('{"optimizer_steps": 3, "ex', "cannot be read: "),
        ("\0" * 40, "cannot be read: "),
        ("[]", "holds no object"),
        ('{"extra": {}}', "lacks optimizer_steps"),
    ],
)
def test_a_state_that_is_damaged_is_known_without_the_shards(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(ModelError, match=f"damaged: state.json {said}"):
        read_state(tmp_path)


def test_a_state_that_is_not_utf_8_is_damaged(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_bytes(b'{"optimizer_steps": 3, "extra": {"a": "\xff"}}')
    with pytest.raises(ModelError, match=r"state.json cannot be read: .*codec"):
        read_state(tmp_path)


@pytest.mark.usefixtures("one_rank")
def test_a_full_disk_is_named_where_torch_only_says_that_a_position_is_unexpected(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes_half(*_: object, checkpoint_id: Path, **__: object) -> None:
        (checkpoint_id / "__0_0.distcp").write_bytes(bytes(598))
        cause = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
        raise CheckpointException("write", {0: (cause, StackSummary())})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, trained = tmp_path / "version_3", engine(model_path())
    monkeypatch.setattr(checkpoint, "save", writes_half)
    with pytest.raises(RunError, match=r"version_3: rank 0: RuntimeError: \[enforce fail"):
        trained.learner.save(path, {})
    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(RunError, match=r"version_3: No space left on device") as raised:
        trained.learner.save(path, {})
    assert "enforce" not in str(raised.value)
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_of_which_a_named_file_is_not_there_takes_no_other_ones_place(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "version_3"
    engine(model_path()).learner.save(path, {"of": "the first"})
    write = checkpoint.save

    def written_elsewhere(*args: Any, checkpoint_id: Path, **kwargs: Any) -> None:
        write(*args, checkpoint_id=checkpoint_id, **kwargs)
        shard(checkpoint_id).unlink()  # as another machine's, whose disk this is not

    monkeypatch.setattr(checkpoint, "save", written_elsewhere)
    with pytest.raises(RunError, match=r"could not write .*: __0_0\.distcp is missing"):
        engine(model_path()).learner.save(path, {"of": "the second"})
    assert [entry.name for entry in tmp_path.iterdir()] == ["version_3"]
    assert read_state(path)["extra"] == {"of": "the first"}


@pytest.mark.usefixtures("one_rank")
def test_a_state_that_names_no_files_does_not_hide_what_the_metadata_lack(
    model_path: ModelPath, tmp_path: Path
) -> None:
    path = tmp_path / "version_3"
    engine(model_path()).learner.save(path, {})
    state = json.loads((path / STATE_FILE).read_text())
    (path / STATE_FILE).write_text(json.dumps(state | {"files": {}}))
    cut_in_half(shard(path))
    with pytest.raises(ModelError, match=r"damaged: __0_0.distcp has \d+ bytes, and .metadata names \d+. Remove it"):
        engine(model_path()).learner.load(path)
    shard(path).unlink()
    with pytest.raises(ModelError, match=r"damaged: __0_0\.distcp is missing"):
        engine(model_path()).learner.load(path)


@pytest.mark.usefixtures("one_rank")
def test_a_rank_that_was_given_up_in_the_middle_of_a_checkpoint_spoils_nothing_of_its_successors(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is in the middle of its files when the second one saves the same version, and goes on then."""
    path, write = tmp_path / "version_3", checkpoint.save

    def save_meanwhile(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(checkpoint, "save", write)
        engine(model_path()).learner.save(path, {"whose": "the successor's"})
        return write(*given, **named)

    monkeypatch.setattr(checkpoint, "save", save_meanwhile)
    with pytest.raises(RunError, match="could not write the checkpoint"):
        engine(model_path()).learner.save(path, {"whose": "that of the one that was given up"})
    assert engine(model_path()).learner.load(path)["whose"] == "the successor's"
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
