from __future__ import annotations

from hypothesis import strategies as st

from headway.events import BatchTaken, GroupAdmitted, GroupRewarded, GroupSettled
from headway.reports.metrics.group_tally import FATES, MOST_REASONS, OTHER_REASONS, GroupTally
from tests.tiers import searched


def admitted(number: int) -> GroupAdmitted:
    return GroupAdmitted(
        time=0.0, number=number, epoch=0, row=number, attempt=0, version=0, admitted=number + 1, discarded=0, limit=99
    )


def settled(number: int, fate: str, reason: str | None = None) -> GroupSettled:
    return GroupSettled(time=0.0, number=number, fate=fate, reason=reason)


@searched(100, st.lists(st.sampled_from([*FATES, "in_flight", None]), max_size=40), st.randoms(use_true_random=False))
def test_the_counts_balance_for_any_fates_in_any_order(fates: list[str | None], rng: object) -> None:
    tally = GroupTally()
    for number in range(len(fates)):
        tally.on_event(admitted(number))
    endings = [settled(number, fate) for number, fate in enumerate(fates) if fate is not None]
    rng.shuffle(endings)  # type: ignore[attr-defined]
    for ending in endings:
        tally.on_event(ending)
    counts = tally.counts()
    assert counts["admitted"] == sum(counts[fate] for fate in FATES) + counts["in_flight"]
    assert {fate: counts[fate] for fate in FATES} == {fate: fates.count(fate) for fate in FATES}
    assert tally.balances(None)
    assert tally.balances(counts)


def test_a_group_with_two_fates_does_not_balance() -> None:
    tally = GroupTally()
    tally.on_event(admitted(0))
    tally.on_event(settled(0, "trained"))
    tally.on_event(settled(0, "dropped"))
    assert not tally.balances(None)
    assert "settled before" in tally.problems[0]


def test_a_group_that_was_admitted_twice_does_not_balance() -> None:
    tally = GroupTally()
    tally.on_event(admitted(0))
    tally.on_event(settled(0, "trained"))
    tally.on_event(admitted(0))
    assert not tally.balances(None)


def test_an_admission_that_is_missing_does_not_balance() -> None:
    tally = GroupTally()
    tally.on_event(admitted(0))
    tally.on_event(admitted(2))
    assert not tally.balances(None)


def test_a_ledger_that_says_otherwise_does_not_balance() -> None:
    tally = GroupTally()
    tally.on_event(admitted(0))
    tally.on_event(settled(0, "failed", "timeout"))
    assert tally.balances({"admitted": 1, "failed": 1})
    assert not tally.balances({"admitted": 1, "trained": 1})
    assert tally.reasons["failed"]["timeout"] == 1


def test_a_group_moves_from_generating_to_the_queue_to_training() -> None:
    tally = GroupTally()
    for number in range(3):
        tally.on_event(admitted(number))
    assert tally.whereabouts() == {"generating": 3, "queued": 0, "training": 0}
    tally.on_event(GroupRewarded(time=1.0, number=0, rewards=[1.0]))
    tally.on_event(GroupRewarded(time=1.0, number=1, rewards=[1.0]))
    assert tally.whereabouts() == {"generating": 1, "queued": 2, "training": 0}
    tally.on_event(BatchTaken(time=2.0, fetch=0, version=0, numbers=[0], waited=(0.0, 2.0)))
    assert tally.whereabouts() == {"generating": 1, "queued": 1, "training": 1}
    tally.on_event(settled(0, "trained"))
    assert tally.whereabouts() == {"generating": 1, "queued": 1, "training": 0}


def test_reasons_that_quote_an_answer_are_counted_together_from_some_number_on() -> None:
    tally = GroupTally()
    for number in range(MOST_REASONS + 50):
        tally.on_event(admitted(number))
        tally.on_event(GroupSettled(time=0.0, number=number, fate="failed", reason=f"cannot read {number}"))
    assert len(tally.reasons["failed"]) == MOST_REASONS + 1
    assert tally.reasons["failed"][OTHER_REASONS] == 50
