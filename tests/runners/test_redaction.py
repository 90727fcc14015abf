"""Secrets in what runners print."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.runners.redaction import RedactedLog, Redaction


@pytest.mark.parametrize("cut", range(1, 9))
async def test_a_secret_that_arrives_in_two_parts_is_hidden(tmp_path: Path, cut: int) -> None:
    with (tmp_path / "log").open("wb") as file:
        log = RedactedLog(file.fileno(), Redaction(["hunter2-hunter2"]))
        for part in (b"it is " + b"hunter2-hunter2"[:cut], b"hunter2-hunter2"[cut:] + b", really; hunt"):
            os.write(log.writer, part)
            for _ in range(3):
                await asyncio.sleep(0)
        log.close()
    assert (tmp_path / "log").read_bytes() == b"it is ***, really; hunt"


@given(st.text(), st.lists(st.text(min_size=3, max_size=5), max_size=3))
def test_nothing_that_is_hidden_is_left(text: str, secrets: list[str]) -> None:
    redacted = Redaction(secrets).of(text + "".join(secrets))
    assert not any(secret in redacted.replace("***", "\0") for secret in secrets if "*" not in secret)


def test_short_values_are_no_secrets_and_a_part_of_another_one_is_hidden_with_it() -> None:
    assert Redaction(["1", "", "ab"]).of("1 ab 0") == "1 ab 0"
    assert Redaction(["abc", "abcdef"]).of("abcdef abc") == "*** ***"
    assert Redaction(['quo"te\n']).of(r"{'a': 'quo\"te\n'}") == "{'a': '***'}"
