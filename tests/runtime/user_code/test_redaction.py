"""Secrets in what workers print."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.runtime.workers.redaction import RedactedLog, Redaction, passed_on, secrets_of


@pytest.mark.parametrize("cut", range(1, 9))
async def test_a_secret_that_arrives_in_two_parts_is_hidden(tmp_path: Path, cut: int) -> None:
    log = RedactedLog(tmp_path / "log", Redaction(["hunter2-hunter2"]))
    for part in (b"it is " + b"hunter2-hunter2"[:cut], b"hunter2-hunter2"[cut:] + b", really; hunt"):
        os.write(log.writer, part)
        for _ in range(3):
            await asyncio.sleep(0)
    log.close()
    assert (tmp_path / "log").read_bytes() == b"it is ***, really; hunt"


async def test_of_a_log_the_end_is_kept_and_it_says_what_was_dropped(tmp_path: Path) -> None:
    log = RedactedLog(tmp_path / "log", Redaction(), most_bytes=400)
    for k in range(100):
        os.write(log.writer, b"line %03d\n" % k)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    log.close()
    older, newer = (tmp_path / name for name in ("log.1", "log"))
    kept = older.read_text() + newer.read_text()
    lines = [line for line in kept.splitlines() if line.startswith("line")]
    assert lines == [f"line {k:03}" for k in range(100 - len(lines), 100)]
    assert len(lines) >= 20 and len(kept) <= 600
    assert newer.read_text().startswith("headway: what was printed before is in log.1; ")
    dropped = int(newer.read_text().split("; ")[1].split(" ")[0])
    assert dropped > 9 * (100 - len(lines)) - 1


@given(st.text(), st.lists(st.text(min_size=3, max_size=5), max_size=3))
def test_nothing_that_is_hidden_is_left(text: str, secrets: list[str]) -> None:
    redacted = Redaction(secrets).of(text + "".join(secrets))
    assert not any(secret in redacted.replace("***", "\0") for secret in secrets if "*" not in secret)


def test_short_values_are_no_secrets_and_a_part_of_another_one_is_hidden_with_it() -> None:
    assert Redaction(["1", "", "ab"]).of("1 ab 0") == "1 ab 0"
    assert Redaction(["abc", "abcdef"]).of("abcdef abc") == "*** ***"
    assert Redaction(['quo"te\n']).of(r"{'a': 'quo\"te\n'}") == "{'a': '***'}"


def test_user_code_gets_no_variable_that_was_not_meant_for_it() -> None:
    given = {
        "PATH": "/bin", "HOME": "/root", "LC_ALL": "C", "https_proxy": "http://me:pa55word@proxy:1", "HF_HOME": "/hub",
        "SSL_CERT_FILE": "/ca", "TOKENIZERS_PARALLELISM": "false",
        "HF_TOKEN": "hf_123456", "WANDB_API_KEY": "w-123456", "OPENAI_APIKEY": "o-123456", "MY_SECRET_2": "m-123456",
        "AWS_SECRET_ACCESS_KEY": "a-123456", "DB_PASSWORD": "d-123456", "GAME_DIR": "/game", "KEY": "no",
    }  # fmt: skip
    assert set(passed_on(given)) == {
        *("PATH", "HOME", "LC_ALL", "https_proxy", "HF_HOME", "SSL_CERT_FILE", "TOKENIZERS_PARALLELISM"),
    }
    secrets = {*(value for value in given.values() if value.endswith("123456")), "pa55word"}
    assert set(secrets_of(given)) == secrets
