"""A transcript keeps what was sampled, in order, and trains each of it once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.agents.episodes.episode_tokens import NO_VERSION, TokenRows, call_key
from headway.data.types import RowTokens, SampledTokens
from tests.tiers import searched


def sampled(ids, start=0.0, version=3):
    """Tokens whose log-probs count from ``start``, so that each can be told from every other."""
    return SampledTokens(
        np.array(ids, np.int32),
        np.arange(start, start + len(ids), dtype=np.float32),
        np.full(len(ids), version, np.int32),
    )


def trained(row: RowTokens) -> list[int]:
    return row.ids[row.loss_mask].tolist()


def path(row: RowTokens) -> list[int]:
    """All ids of a row, its prompt included."""
    return [*row.prompt_ids.tolist(), *row.ids.tolist()]


def test_turns_that_go_on_make_one_row():
    transcript = TokenRows()
    assert not transcript.add([1, 2], sampled([3, 4], version=5))
    assert transcript.add([1, 2, 3, 4, 9, 9], sampled([6], start=7, version=6))
    [row] = transcript.rows()
    assert (row.prompt_ids.tolist(), row.ids.tolist()) == ([1, 2], [3, 4, 9, 9, 6])
    assert row.loss_mask.tolist() == [True, True, False, False, True]
    assert row.logprobs.tolist() == [0, 1, 0, 0, 7]
    assert row.versions.tolist() == [5, 5, NO_VERSION, NO_VERSION, 6]
    assert [(turn.number, turn.start, turn.stop) for turn in row.turns] == [(0, 0, 2), (1, 4, 5)]
    assert (transcript.turns, transcript.forks) == (2, 0)
    assert [a.dtype for a in (row.ids, row.loss_mask, row.logprobs, row.versions)] == [
        np.int32,
        np.bool_,
        np.float32,
        np.int32,
    ]


def test_a_turn_whose_context_was_changed_forks_and_what_it_shares_is_trained_in_the_first_row():
    transcript = TokenRows()
    transcript.add([1, 2], sampled([3, 4]))
    transcript.add([1, 2, 3, 4, 9], sampled([5]))
    assert not transcript.add([1, 2, 3, 4, 8], sampled([6]))
    first, second = transcript.rows()
    assert trained(first) == [3, 4, 5]
    assert trained(second) == [6]
    assert path(second) == [1, 2, 3, 4, 8, 6]
    assert transcript.forks == 1


def test_the_same_context_twice_makes_two_rows_that_both_train_what_they_sampled():
    transcript = TokenRows()
    transcript.add([1], sampled([2, 3]))
    transcript.add([1], sampled([2, 3], start=10))
    rows = transcript.rows()
    assert [trained(row) for row in rows] == [[2, 3], [2, 3]]
    assert [row.logprobs[row.loss_mask].tolist() for row in rows] == [[0, 1], [10, 11]]
    assert transcript.add([1, 2, 3, 4], sampled([5]))
    assert [trained(row) for row in transcript.rows()] == [[2, 3, 5], [2, 3]]


def test_the_longest_of_two_rows_that_a_context_begins_with_goes_on():
    transcript = TokenRows()
    transcript.add([1], sampled([2]))
    transcript.add([1], sampled([2, 3]))
    assert transcript.add([1, 2, 3, 4], sampled([5]))
    assert [trained(row) for row in transcript.rows()] == [[2], [2, 3, 5]]


def test_conversations_in_parallel_are_rows_of_their_own_and_go_on_independently():
    transcript = TokenRows()
    transcript.add([1, 7], sampled([2]))
    transcript.add([5, 7], sampled([3]))
    assert transcript.add([5, 7, 3, 8], sampled([4]))
    assert transcript.add([1, 7, 2, 8], sampled([6]))
    first, second = transcript.rows()
    assert (path(first), path(second)) == ([1, 7, 2, 8, 6], [5, 7, 3, 8, 4])
    assert (transcript.turns, transcript.forks) == (4, 1)


def test_a_context_that_is_cut_short_forks_inside_of_what_was_sampled():
    transcript = TokenRows()
    transcript.add([1], sampled([2, 3, 4]))
    assert not transcript.add([1, 2], sampled([9]))
    assert [(path(row), trained(row)) for row in transcript.rows()] == [
        ([1, 2, 3, 4], [2, 3, 4]),
        ([1, 2, 9], [9]),
    ]


def test_a_turn_in_which_nothing_was_sampled_makes_no_row_and_can_be_made_again():
    transcript = TokenRows()
    transcript.add([1, 2], SampledTokens.nothing())
    assert transcript.rows() == []
    assert transcript.add([1, 2], sampled([3]))
    assert [trained(row) for row in transcript.rows()] == [[3]]


def keys_of(context, number):
    taken = []
    for _ in range(number):
        taken.append(call_key(context, taken))
    return taken


def test_a_context_that_is_called_again_has_the_first_of_its_keys_that_is_free():
    keys = keys_of([1, 2], 4)
    assert len({*keys, *keys_of([1, 2, 3], 4)}) == 8
    assert all(0 < key < 2**64 for key in keys)
    assert call_key(np.array([1, 2], np.int64), {keys[0], keys[2], keys[3]}) == keys[1]


def test_call_keys_are_the_same_in_every_process_and_version():
    assert keys_of([1, 2, 3], 5)[::4] == [14431766130720074920, 15374861595833865575]


# A tiny vocabulary makes shared prefixes frequent. A turn begins with some path of what there is, cut somewhere, or
# with all of it, and goes on with tokens of its own.
ids = st.lists(st.integers(0, 2), max_size=5)
plans = st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.integers(0, 10), ids, ids), min_size=1, max_size=12)


def play(plan):
    """A transcript made by ``plan``, and its turns as (context, sampled)."""
    transcript, turns, paths = TokenRows(), [], [[]]
    for which, whole, cut, tail, continuation in plan:
        path = paths[which % len(paths)]
        context = [*(path if whole else path[:cut]), *tail]
        transcript.add(context, sampled(continuation, start=100 * len(turns), version=len(turns)))
        turns.append((context, continuation))
        paths.append(context + continuation)
    return transcript, turns


@searched(100, plans)
def test_every_sampled_token_is_trained_once_unchanged_in_order_and_nothing_else_is(plan):
    transcript, turns = play(plan)
    seen = set()
    for row in transcript.rows():
        assert len(row.ids) == len(row.loss_mask) == len(row.logprobs) == len(row.versions)
        masked = np.zeros(len(row.ids), bool)
        for turn in row.turns:
            context, continuation = turns[turn.number]
            assert turn.number not in seen
            seen.add(turn.number)
            until = len(row.prompt_ids) + turn.stop
            assert path(row)[:until] == context + continuation  # what the engine saw, and what it gave
            assert row.logprobs[turn.start : turn.stop].tolist() == [
                100 * turn.number + i for i in range(len(continuation))
            ]
            assert (row.versions[turn.start : turn.stop] == turn.number).all()
            masked[turn.start : turn.stop] = True
        assert row.loss_mask.tolist() == masked.tolist()
        assert (row.versions[~masked] == NO_VERSION).all()
        assert (row.logprobs[~masked] == 0).all()
        assert len(row.ids) == row.turns[-1].stop
    assert {number for number, (_, continuation) in enumerate(turns) if continuation} <= seen
    assert transcript.turns == len(turns)


@searched(100, plans)
def test_a_turn_continues_a_row_exactly_if_its_context_begins_with_all_of_it(plan):
    transcript, turns = TokenRows(), play(plan)[1]
    rows: list[list[int]] = []
    for context, continuation in turns:
        fitting = [row for row in rows if context[: len(row)] == row]
        assert transcript.add(context, sampled(continuation)) is bool(fitting)
        if fitting:
            rows.remove(max(fitting, key=len))
        rows.append(context + continuation)
    assert transcript.forks == len(rows) - 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), ids, st.data())
def test_a_continuation_that_is_split_over_calls_gives_the_same_row(continuation, prompt, data):
    cut = data.draw(st.integers(0, len(continuation)))
    whole, parts = TokenRows(), TokenRows()
    tokens = sampled(continuation)
    whole.add(prompt, tokens)
    parts.add(prompt, SampledTokens(tokens.ids[:cut], tokens.logprobs[:cut], tokens.versions[:cut]))
    parts.add(
        [*prompt, *continuation[:cut]], SampledTokens(tokens.ids[cut:], tokens.logprobs[cut:], tokens.versions[cut:])
    )
    [one], [other] = whole.rows(), parts.rows()
    for name in ("ids", "loss_mask", "logprobs", "versions"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
