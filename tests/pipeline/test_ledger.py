"""The ledger, and the bookkeeping that must tell the same story as it does."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import LedgerImbalance
from headway.events import GroupAdmitted, GroupSettled
from headway.pipeline.admission.ledger import Fate, Ledger
from headway.pipeline.admission.message_queue import MessageQueue
from headway.pipeline.admission.pipeline_state import RunState
from headway.pipeline.admission.staleness import Staleness
from headway.planner.simulation.virtual_clock import run_virtual
from tests.pipeline.fakes import Recorder, prompt


def run_state(recorder: Recorder | None = None) -> RunState:
    staleness = Staleness(Fraction(1), 4, 1, None, loaded={"rollout-0": 0})
    emit = (recorder or Recorder()).on_event
    return RunState(staleness, Ledger(), MessageQueue(staleness), emit)


# ---------------------------------------------------------------------------------------------- the ledger


def test_groups_are_numbered_in_the_order_of_admission():
    ledger = Ledger()
    assert [ledger.admit(prompt(0, row)) for row in (5, 3, 9)] == [0, 1, 2]
    assert [one.prompt.row for one in ledger.open.values()] == [5, 3, 9]
    assert list(ledger.open) == [0, 1, 2]


def test_a_group_meets_one_fate_and_no_second():
    ledger = Ledger()
    ledger.admit(prompt(0, 0))
    ledger.settle(0, Fate.TRAINED)
    with pytest.raises(LedgerImbalance, match=r"group 0 .*end as filtered"):
        ledger.settle(0, Fate.FILTERED)


def test_a_group_that_was_never_admitted_meets_no_fate():
    with pytest.raises(LedgerImbalance, match=r"group 3 .*admitted: 0"):
        Ledger().settle(3, Fate.TRAINED)


@given(st.lists(st.sampled_from([*Fate, None]), max_size=40))
def test_the_fates_always_add_up_to_the_admitted(fates: list[Fate | None]):
    ledger = Ledger()
    for row, fate in enumerate(fates):
        number = ledger.admit(prompt(0, row))
        if fate is not None:
            ledger.settle(number, fate)
    counts = ledger.counts()
    assert counts.pop("admitted") == sum(counts.values()) == len(fates)
    assert counts["in_flight"] == sum(fate in (None, Fate.IN_FLIGHT) for fate in fates)


def test_the_checkpoint_names_the_rows_that_are_open():
    ledger = Ledger()
    for row in (4, 7, 2):
        ledger.admit(prompt(1, row, attempt=3))
    ledger.settle(1, Fate.TRAINED)
    state = ledger.state()
    fates = {"fates": {"trained": 1}, "episode_fates": {"failed": 0, "trained": 1}}
    assert state == {
        "admitted": 3,
        **fates,
        "open": [[0, 1, 4, 3], [2, 1, 2, 3]],
        "open_episodes": [[0, 1, 0], [2, 1, 0]],
    }


def test_episodes_have_the_fate_of_their_group_unless_they_failed_before():
    ledger = Ledger(episodes=4)
    for row in range(4):
        ledger.admit(prompt(0, row))
    ledger.episodes_failed(0, 1)
    ledger.episodes_failed(2, 3)
    ledger.settle(0, Fate.TRAINED)
    ledger.settle(1, Fate.FILTERED)
    counts = ledger.episode_counts()
    assert counts == {"admitted": 16, "trained": 3, "filtered": 4, "failed": 4, "dropped": 0, "in_flight": 5}
    with pytest.raises(LedgerImbalance, match=r"group 2 .*2 more failed episodes"):
        ledger.episodes_failed(2, 2)
    with pytest.raises(LedgerImbalance, match="not open"):
        ledger.episodes_failed(1, 1)


def test_a_resumed_ledger_knows_which_episodes_of_open_groups_failed_and_how_many_groups_had():
    ledger = Ledger(episodes=4)
    for row in range(3):
        ledger.admit(prompt(0, row))
    ledger.settle(0, Fate.TRAINED)
    ledger.episodes_failed(2, 3)
    resumed = Ledger(episodes=2)  # rollout.n was changed
    resumed.restore(json.loads(json.dumps(ledger.state())), {1: prompt(0, 1), 2: prompt(0, 2)})
    assert resumed.episode_counts() == ledger.episode_counts()
    resumed.admit(prompt(0, 3))
    for number in (1, 2, 3):
        resumed.settle(number, Fate.DROPPED)
    counts = resumed.episode_counts()
    assert counts == {"admitted": 14, "trained": 4, "filtered": 0, "dropped": 7, "failed": 3, "in_flight": 0}


# ---------------------------------------------------------------------------------------------- the run's state


def test_every_change_is_charged_told_and_entered_at_once():
    recorder = Recorder()

    async def main() -> None:
        state = run_state(recorder)
        for row in range(3):
            state.admit(prompt(0, row))
        assert (state.unrewarded, state.staleness.room) == (3, 5)
        state.rewarded(0)
        state.discard(1, Fate.FILTERED, "flat")
        state.consume(0, Fate.TRAINED, lag=0)
        assert (state.unrewarded, state.staleness.room, state.consumed) == (1, 6, 1)
        state.check_balance()
        state.leave_open_in_flight()
        assert state.ledger.counts() == {
            "admitted": 3, "trained": 1, "filtered": 1, "dropped": 0, "failed": 0, "in_flight": 1
        }  # fmt: skip

    run_virtual(main())
    admitted = [event for event in recorder.events if isinstance(event, GroupAdmitted)]
    assert [(e.number, e.admitted, e.discarded, e.limit, e.version) for e in admitted] == [
        (0, 1, 0, 8, 0),
        (1, 2, 0, 8, 0),
        (2, 3, 0, 8, 0),
    ]
    settled = [event for event in recorder.events if isinstance(event, GroupSettled)]
    assert [(e.number, e.fate, e.reason, e.lag) for e in settled] == [
        (1, "filtered", "flat", None),
        (0, "trained", None, 0),
        (2, "in_flight", None, None),
    ]


def test_counters_that_disagree_with_the_ledger_are_noticed():
    async def main() -> None:
        state = run_state()
        state.admit(prompt(0, 0))
        state.ledger.settle(0, Fate.TRAINED)  # behind the counters' back
        state.check_balance()

    with pytest.raises(LedgerImbalance, match="1 admitted and 0 discarded, training 0 consumed"):
        run_virtual(main())


def test_the_version_is_the_number_of_full_versions_consumed():
    async def main() -> list[int]:
        state, versions = run_state(), []
        for row in range(9):
            versions.append(state.version)
            state.consume(state.admit(prompt(0, row)), Fate.TRAINED)
        return versions

    assert run_virtual(main()) == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_a_version_that_the_data_left_short_counts_all_the_same():
    async def main() -> tuple[int, int]:
        state = run_state()
        for row in range(5):
            state.consume(state.admit(prompt(0, row)), Fate.TRAINED)
        before = state.version
        state.data_ended = True
        assert not state.trains_more
        return before, state.version

    assert run_virtual(main()) == (1, 2)


@pytest.mark.parametrize(
    ("consumed", "fetching", "total"), [(0, 0, 0), (0, 2, 4), (4, 0, 4), (5, 0, 8), (4, 4, 8), (6, 2, 8), (7, 2, 12)]
)
def test_a_stop_shrinks_the_total_to_the_next_version_boundary(consumed: int, fetching: int, total: int):
    async def main() -> int | None:
        state = run_state()
        state.consumed, state.in_training = consumed, fetching
        state.request_stop()
        return state.staleness.total

    assert run_virtual(main()) == total
