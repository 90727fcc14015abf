"""A checkpoint of which a file was damaged is told from one of another model, in one message."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.engines.train.state_file import STATE_FILE, read_state
from headway.errors import ModelError
from tests.engines.train.test_engine import ModelPath, engine

Damage = Callable[[Path], object]


def shard(path: Path) -> Path:
    return next(path.glob("*.distcp"))


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / STATE_FILE).write_text(""), "state.json cannot be read: "),
        (lambda path: cut_in_half(shard(path)), "rank 0: "),
        (lambda path: shard(path).unlink(), "rank 0: FileNotFoundError: "),
        (lambda path: (path / ".metadata").write_bytes(b"\x80nothing"), ".metadata cannot be read: "),
        (lambda path: cut_in_half(path / ".metadata"), ".metadata cannot be read: "),
        (lambda path: (path / ".metadata").unlink(), ".metadata cannot be read: FileNotFoundError: "),
    ],
)
def test_a_damaged_file_is_one_message_that_says_what_to_do(
    damage: Damage, said: str, model_path: ModelPath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "version_3"
    engine(model_path()).save(path, {})
    damage(path)
    with pytest.raises(ModelError) as raised:
        engine(model_path()).load(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: the checkpoint is damaged: {said}")
    assert message.endswith(". Remove it, to resume from the one before")
    assert "\n" not in message
    shown = [record for record in caplog.records if record.name.startswith("torch") and record.levelno > logging.INFO]
    assert shown == []


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
    with pytest.raises(ModelError, match=f"the checkpoint is damaged: state.json {said}"):
        read_state(tmp_path)


def test_a_state_that_is_not_utf_8_is_damaged(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_bytes(b'{"optimizer_steps": 3, "extra": {"a": "\xff"}}')
    with pytest.raises(ModelError, match=r"state.json cannot be read: .*codec"):
        read_state(tmp_path)
