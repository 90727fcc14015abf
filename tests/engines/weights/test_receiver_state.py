"""The state machine of a receiver: which version arrives, which one is served, and what is refused meanwhile."""

from __future__ import annotations

import pytest

from headway.engines.weights.receiver_state import Held, ReceiverState
from headway.errors import RunError, UpdateFailed


def complete(state: ReceiverState, version: int) -> None:
    state.begin(version)
    state.complete()


def test_beside_the_served_version_another_one_arrives_and_may_fail_without_harm() -> None:
    state = ReceiverState("replica")
    state.begin(1)
    state.fail()
    assert (state.held, state.served, state.problem) == (Held.ABSENT, 0, None)
    complete(state, 2)
    state.check("decode")
    state.begin_load(2, state.staged)
    state.loaded()
    assert (state.held, state.served, state.staged) == (Held.LOADED, 2, None)


def test_over_the_served_version_nothing_is_served_until_the_new_one_is_loaded() -> None:
    state = ReceiverState("replica", in_place=True)
    state.begin(1)
    with pytest.raises(RunError, match="cannot sleep: version 1 is being written"):
        state.check_unwritten("sleep")
    state.complete()
    with pytest.raises(RunError, match=r"cannot decode: .*version 1's, .*not active"):
        state.check("decode")
    state.begin_load(1, state.staged)
    state.loaded()
    state.check("decode")


@pytest.mark.parametrize(("torn", "held", "served"), [(False, Held.LOADED, 0), (True, Held.ABSENT, None)])
def test_a_version_that_fails_over_the_served_one_harms_it_only_where_a_part_was_written(
    torn: bool, held: Held, served: int | None
) -> None:
    state = ReceiverState("replica", in_place=True)
    state.begin(1)
    state.fail(torn=torn)
    assert (state.held, state.served) == (held, served)
    if torn:
        with pytest.raises(UpdateFailed, match=r"cannot activate version 1: .*torn"):
            state.begin_load(1, state.staged)
    complete(state, 2)
    state.begin_load(2, state.staged)
    state.loaded()
    assert state.served == 2


@pytest.mark.parametrize("doing", ["receiving", "loading"])
def test_while_a_version_arrives_or_is_loaded_every_other_call_is_refused(doing: str) -> None:
    state = ReceiverState("replica")
    state.begin(1)
    if doing == "loading":
        state.complete()
        state.begin_load(1, state.staged)
    with pytest.raises(UpdateFailed, match=f"still {doing} version 1; receiving version 2"):
        state.begin(2)
    with pytest.raises(UpdateFailed, match=f"still {doing} version 1; loading version 1"):
        state.begin_load(1, 1)


def test_a_load_that_fails_may_be_tried_again_and_serves_nothing_meanwhile() -> None:
    state = ReceiverState("replica")
    complete(state, 1)
    state.begin_load(1, state.staged)
    state.tear()
    state.fail_load()
    assert (state.staged, state.served) == (1, None)
    state.begin_load(1, state.staged)
    state.loaded()
    state.check("decode")


@pytest.mark.parametrize(("in_place", "staged"), [(False, 1), (True, None)])
def test_sleep_gives_up_what_is_served_and_a_version_that_arrived_over_it(in_place: bool, staged: int | None) -> None:
    state = ReceiverState("replica", in_place=in_place)
    complete(state, 1)
    state.lose_served()
    assert state.staged == staged
    with pytest.raises(RunError, match=r"cannot resume: .*given up"):
        state.check("resume")


def test_only_what_is_staged_can_be_loaded() -> None:
    state = ReceiverState("replica")
    with pytest.raises(UpdateFailed, match=r"activate version 1: nothing is staged"):
        state.begin_load(1, state.staged)
    complete(state, 2)
    with pytest.raises(UpdateFailed, match=r"activate version 1: version 2 is staged"):
        state.begin_load(1, state.staged)
    assert state.held is Held.COMPLETE
