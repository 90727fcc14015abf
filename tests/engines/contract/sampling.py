"""Part of the contract: what is sampled follows the exact distribution, and log-probs are its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.data.types import FinishReason
from tests.engines.contract.harness import (
    STOP,
    Answer,
    Feature,
    OfEngine,
    Replica,
    collect,
    make_calls,
    of_row,
    scenario,
)
from tests.engines.contract.reference import ORDER, all_logits, answers_of_two, distribution, ends_with, fit
from tests.tiers import mostly_slow

SIGNIFICANT = 1e-4
"""A right engine fails a test once in so many seeds; the seeds are fixed."""

Options = dict[str, Any]
Wrong = tuple[Options, tuple[str, ...]]


def without(*steps: str) -> Wrong:
    return {}, tuple(step for step in ORDER if step not in steps)


def early(step: str, before: str) -> Wrong:
    """``step`` right before ``before``, which should come first."""
    rest = [s for s in ORDER if s != step]
    rest.insert(rest.index(before), step)
    return {}, tuple(rest)


def instead(**options: Any) -> Wrong:
    return options, ORDER


FEW_ENDS: Options = {"stop_token_ids": (STOP, 7, 9), "logit_bias": ((STOP, 4.0), (7, 3.0), (9, 3.0))}

CASES: dict[str, tuple[Options, list[Wrong]]] = {
    "nothing": ({}, [instead(temperature=1.15), instead(top_p=0.95), instead(top_k=30), instead(min_p=0.01)]),
    "temperature": ({"temperature": 0.6}, [without("temperature"), instead(temperature=0.66)]),
    "high temperature": ({"temperature": 1.7}, [without("temperature"), instead(temperature=1.4)]),
    "top-p": ({"top_p": 0.7}, [without("top_p"), instead(top_p=0.65), instead(top_p=0.75)]),
    "top-k": ({"top_k": 5}, [without("top_k"), instead(top_k=4), instead(top_k=6)]),
    "min-p": ({"min_p": 0.1}, [without("min_p"), instead(min_p=0.15), instead(top_p=0.9, min_p=0.0)]),
    "top-k, top-p": ({"top_k": 12, "top_p": 0.8}, [without("top_k"), without("top_p"), early("top_p", "top_k")]),
    "temperature and filters": (
        {"temperature": 1.6, "top_k": 12, "top_p": 0.85},
        [without("temperature"), without("top_k"), without("top_p"), early("top_p", "temperature")],
    ),
    "temperature, min-p": ({"temperature": 2.0, "min_p": 0.2}, [early("min_p", "temperature"), without("min_p")]),
    "min-p, top-p": ({"min_p": 0.2, "top_p": 0.8}, [without("min_p"), without("top_p"), early("top_p", "min_p")]),
    "penalty": (
        {"repetition_penalty": 1.8},
        [without("penalty"), instead(repetition_penalty=1 / 1.8), instead(repetition_penalty=1.25)],
    ),
    "penalty below one": ({"repetition_penalty": 0.6}, [without("penalty"), instead(repetition_penalty=1.0)]),
    "bias": (
        {"logit_bias": ((5, 3.0), (7, -1e4), (5, 1.0), (11, 2.5))},
        [
            without("bias"),
            instead(logit_bias=((5, 1.0), (7, -1e4), (11, 2.5))),
            instead(logit_bias=((5, 4.0), (11, 2.5))),
        ],
    ),
    "bias, penalty, temperature": (
        {"logit_bias": tuple((i, 3.0) for i in range(2, 20)), "repetition_penalty": 1.7, "temperature": 1.5},
        [early("penalty", "bias"), early("temperature", "bias"), without("penalty")],
    ),
    "stop tokens": (FEW_ENDS, [instead(stop_token_ids=()), instead(stop_token_ids=(STOP, 7))]),
    "minimum": ({**FEW_ENDS, "min_tokens": 1}, [without("minimum"), instead(min_tokens=2)]),
    "stop strings": (
        {"stop": ("f", "gh"), "logit_bias": ((7, 3.0), (8, 2.0))},
        [instead(stop=()), instead(stop=("f", "g"))],
    ),
    "seed": ({"seed": 99}, [instead(temperature=1.15), instead(top_p=0.95)]),
}

QUICK = (
    "temperature and filters",
    "min-p, top-p",
    "bias, penalty, temperature",
    "minimum",
)
"""Each step of the distribution is in one of them."""


class Sampling(OfEngine):
    @mostly_slow("case", CASES, quick=QUICK)
    @scenario(Feature.TOKENS)
    async def test_answers_come_as_often_as_the_distribution_says(self, case: str) -> None:
        """Of whole answers of two tokens: a dependence between positions would show, too."""
        options, wrong = CASES[case]
        options = {"stop_token_ids": (), "max_tokens": 2, **options}
        calls = make_calls(3, n=self.harness.samples, **options)
        prompt = calls[0].input_ids.tolist()
        async with self.harness.serve(slots=self.harness.crowd) as replica:
            answers = await collect(replica, calls)
            model = replica.model(replica.version)
            counts = Counter(tuple(answer.ids) for answer in answers)
            right = fit(counts, answers_of_two(model, prompt, calls[0].sampling))
            assert right.p > SIGNIFICANT, right
            for changes, order in wrong:
                (call,) = make_calls(3, n=1, **{**options, **changes})
                # The test can tell: it would refuse an engine that does this instead.
                assert fit(counts, answers_of_two(model, prompt, call.sampling, order)).p < SIGNIFICANT, (
                    changes,
                    order,
                )
            self.assert_reported(replica, answers[:64])

    @mostly_slow("case", CASES, quick=QUICK)
    @scenario(Feature.TOKENS)
    async def test_a_log_prob_is_that_of_the_distribution_that_was_sampled_from(self, case: str) -> None:
        options, _ = CASES[case]
        async with self.harness.serve() as replica:
            parts = [make_calls(row, n=4, **{"max_tokens": 14, **options}) for row in (2, 4)]
            self.assert_reported(replica, await collect(replica, *parts))

    @scenario(Feature.TOKENS)
    async def test_greedy_takes_the_most_likely_token_and_reports_its_unfiltered_log_prob(self) -> None:
        plain = {"temperature": 0.0, "max_tokens": 14, "n": 2}
        biased = {"logit_bias": ((5, 2.0), (STOP, 30.0)), "repetition_penalty": 1.6, "stop_token_ids": (STOP,)}
        parts = [
            make_calls(0, **plain),
            make_calls(1, **plain, top_k=1, top_p=0.1, min_p=0.9),
            make_calls(2, **plain, **biased, min_tokens=6),
        ]
        async with self.harness.serve() as replica:
            answers = await collect(replica, *parts)
            self.assert_reported(replica, answers)
            for row in range(3):
                first, second = of_row(answers, row)
                assert first.ids == second.ids
                (steps,) = self.steps(replica, [first])
                for probabilities, token in steps:
                    assert token == max(range(len(probabilities)), key=probabilities.__getitem__)
            assert [answer.length for answer in of_row(answers, 2)] == [7, 7]

    @scenario(Feature.TOKENS)
    async def test_rows_of_one_batch_are_sampled_each_in_its_own_way(self) -> None:
        ways = [options for options, _ in CASES.values()]
        parts = [make_calls(i, n=1, **{"max_tokens": 10, **ways[i % len(ways)]}) for i in range(3 * len(ways))]
        async with self.harness.serve() as replica:
            self.assert_reported(replica, await collect(replica, *parts))

    @scenario(Feature.TOKENS)
    async def test_an_answer_ends_where_its_options_say_and_says_why(self) -> None:
        options: list[Options] = [
            {"stop_token_ids": (STOP, 7, 9)},
            {"stop": ("e", "xy", "ab")},
            {"stop": ("e", "xy"), "stop_token_ids": (9, 11), "min_tokens": 5},
        ]
        parts = [make_calls(i, n=6, max_tokens=24, **options[i % 3]) for i in range(9)]
        async with self.harness.serve() as replica:
            reasons: Counter[tuple[int, FinishReason]] = Counter()
            for answer in await collect(replica, *parts):
                ids, reason = answer.ids, answer.done.finish_reason
                ends = [ends_with(ids[:end], answer.call.sampling) for end in range(1, len(ids) + 1)]
                assert not any(ends[:-1])
                assert reason is (FinishReason.STOP if ends[-1] else FinishReason.LENGTH)
                assert ends[-1] or len(ids) == 24
                reasons[answer.row % 3, reason] += 1
            assert all(reasons[i, FinishReason.STOP] > 2 for i in range(3))
            assert sum(reasons[i, FinishReason.LENGTH] for i in range(3)) > 0

    @scenario(Feature.TOKENS)
    async def test_a_stop_string_may_come_before_the_minimum_and_again_right_behind_it(self) -> None:
        """What came too early to end the answer does not hide what comes later."""
        often: Options = {"max_tokens": 40, "logit_bias": ((6, 8.0), (7, 8.0)), "stop": ("e", "ff"), "min_tokens": 6}
        async with self.harness.serve() as replica:
            answers = await collect(replica, make_calls(5, n=32, **often))
        for answer in answers:
            ids = answer.ids
            ends = [end for end in range(1, len(ids) + 1) if ends_with(ids[:end], answer.call.sampling)]
            assert ends == [len(ids)]

    # ------------------------------------------------------------------------------------- references

    def assert_reported(self, replica: Replica, answers: Sequence[Answer]) -> None:
        """Each token's log-prob is that of the exact distribution behind all tokens before it."""
        for answer, steps in zip(answers, self.steps(replica, answers), strict=True):
            tolerance = self.harness.tolerance / min(1.0, answer.call.sampling.temperature or 1.0)
            for (probabilities, token), reported in zip(steps, answer.tokens.logprobs, strict=True):
                assert probabilities[token] > 0
                assert abs(np.log(probabilities[token]) - reported) < tolerance

    def steps(self, replica: Replica, answers: Sequence[Answer]) -> list[list[tuple[list[float], int]]]:
        """For each token of each answer the probabilities that it was sampled from."""
        return [
            [
                (distribution(of[at].tolist(), answer.call.sampling, answer.prompt.tolist(), answer.ids[:at]), token)
                for at, token in enumerate(answer.ids)
            ]
            for answer, of in zip(answers, all_logits(replica.model(replica.version), answers), strict=True)
        ]
