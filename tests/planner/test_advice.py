"""The recommendation, and the one sentence, on rows made by hand."""

import math

from headway.planner.plan_rows import advise, recommend
from tests.planner.planning import row


def test_the_quickest_row_is_recommended():
    rows = [row("colocate_sync", 10), row("async_partial", 5, lag_mean=0.5, lag_max=2)]
    assert recommend(rows) is rows[1]


def test_among_rows_as_quick_the_one_with_the_least_lag_is_recommended():
    rows = [row("async_partial", 5.0, lag_mean=1.0, lag_max=2), row("async_stale", 5.05, lag_mean=0.5, lag_max=1)]
    assert recommend(rows) is rows[1]
    slower = row("async_stale", 5.2, lag_mean=0.5, lag_max=1)
    assert recommend([rows[0], slower]) is rows[0]


def test_among_rows_as_quick_and_as_stale_the_simplest_is_recommended():
    rows = [row("stream_off_policy", 5.0), row("on_policy", 5.05), row("colocate_sync", 5.05)]
    assert recommend(rows) is rows[2]


def test_a_row_that_was_cut_short_is_recommended_only_when_it_is_the_quickest_at_its_worst():
    synchronous = row("colocate_sync", 10)
    for error, best in ((0.5, True), (1.5, False), (math.inf, False)):
        cut = row("async_partial", 5, error=error)
        assert (recommend([synchronous, cut]) is cut) is best
        assert recommend([cut]) is cut


def test_a_row_that_was_simulated_to_the_end_is_recommended_however_uncertain():
    rows = [row("colocate_sync", 10), row("async_partial", 5, error=0.15, versions=30)]
    assert recommend(rows) is rows[1]


def test_asynchrony_helps_when_it_is_faster_and_the_sentence_says_what_synchronous_training_loses():
    rows = [
        row("colocate_sync", 20.0, trainer_idle_ratio=0.7, trainer_waited_s=13.0, tail=0.6),
        row("on_policy", 25.0, tail=0.6),
        row("async_partial", 10.0, train=3, rollout=5, lag_mean=0.5, lag_max=2),
    ]
    advice = advise(rows)
    assert advice.helps is True
    assert advice.recommended is rows[2]
    assert advice.sentence == (
        "Asynchrony helps here: async_partial on 3:5, η = 0.5 trains a version in 10 s, 2.00× as fast as the best "
        "synchronous setting (colocate_sync on 8 shared: 20 s), which trains 30% of the time and waits for generation "
        "65%, while 60% of the slots are empty behind the longest answers."
    )


def test_a_gain_that_is_not_worth_the_trouble_is_no_help():
    advice = advise([row("colocate_sync", 10.0, tail=0.05), row("async_partial", 9.7)])
    assert advice.helps is False
    assert "does not help here" in advice.sentence
    assert "only 3% faster than the best synchronous one" in advice.sentence


def test_where_asynchrony_does_not_help_the_sentence_says_what_both_sides_do():
    ahead = row("async_partial", 11.0, trainer_idle_ratio=0.6, rollouter_idle_ratio=0.05, update_stall_s=2.2)
    advice = advise([row("colocate_sync", 10.0, trainer_idle_ratio=0.08, tail=0.9), ahead])
    assert advice.helps is False
    assert "10% slower" in advice.sentence
    assert advice.sentence.endswith(
        "which trains 92% of the time and waits for generation 50%, while 90% of the slots are empty behind the "
        "longest answers. Of its own time the trainer idles 60%, 20% for updates, and replicas 5%."
    )


def test_when_overlap_without_stale_data_wins_the_sentence_says_so():
    rows = [
        row("colocate_sync", 10.0),
        row("stream_off_policy", 7.0),
        row("async_partial", 6.9, lag_mean=0.5, lag_max=1),
    ]
    advice = advise(rows)
    assert advice.helps is False
    assert advice.sentence.startswith(
        "Stale data does not help here, overlap alone does: with η = 0 stream_off_policy on 4:4 trains a version in "
        "7 s, 1.43× as fast"
    )
    assert advice.recommended is rows[1]


def test_a_gain_within_the_error_is_not_called_a_gain():
    advice = advise([row("colocate_sync", 10.0), row("async_partial", 8.0, error=0.4)])
    assert advice.helps is None
    assert "looks 25% faster" in advice.sentence
    assert "known within 40% only: give the plan more time" in advice.sentence
    unknown = advise([row("colocate_sync", 10.0), row("async_partial", 8.0, error=math.inf)])
    assert "too few versions for any error" in unknown.sentence


def test_without_both_sides_nothing_is_claimed():
    assert advise([]).recommended is None
    assert "--budget" in advise([]).sentence
    assert advise([row("async_partial", 5.0)]).helps is None
    assert advise([row("colocate_sync", 5.0), row("stream_off_policy", 5.0)]).helps is None
