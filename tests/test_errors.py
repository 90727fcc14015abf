"""What foreign code raises, and what it holds, in one line."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import DataError, RunnerLost, UserCodeError, boundary, cut, shown


def test_foreign_code_that_leaves_the_process_is_told_as_any_other_failure_of_it_with_its_place() -> None:
    told = r"^making it: SystemExit: 0 \(test_errors\.py:\d+, in leave\)$"

    def leave() -> None:
        raise SystemExit(0)

    with pytest.raises(UserCodeError, match=told), boundary("making it", UserCodeError):
        leave()


@pytest.mark.parametrize("passed_on", [KeyboardInterrupt, asyncio.CancelledError, DataError])
def test_interrupts_cancellation_and_own_errors_pass_a_boundary(passed_on: type[BaseException]) -> None:
    with pytest.raises(passed_on, match=r"^as it is$"), boundary("making it", UserCodeError):
        raise passed_on("as it is")


@given(st.text(), st.integers(1, 20))
def test_what_is_cut_has_at_most_so_many_characters_and_is_whole_where_they_suffice(text: str, most: int) -> None:
    told = cut(text, most)
    assert len(told) <= most
    assert told == text if len(text) <= most else (told.endswith("…") and text.startswith(told[:-1]))


def test_what_is_said_of_a_lost_runner_survives_pickling() -> None:
    lost = pickle.loads(pickle.dumps(RunnerLost("its runner ended with SIGKILL", end="SIGKILL", culprit=True)))
    assert (str(lost), lost.end, lost.culprit) == ("its runner ended with SIGKILL", "SIGKILL", True)


def test_a_long_value_is_shown_by_its_beginning() -> None:
    assert shown([1, 2]) == "[1, 2]"
    assert shown("x" * 100) == f"'{'x' * 78}…"
    assert len(shown("x" * 100)) == 80
