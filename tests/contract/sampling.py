"""Part of the contract: what is sampled follows the exact distribution, and log-probs are its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from headway.data.types import FinishReason
from headway.interfaces import GenerateRequest
from tests.contract.harness import STOP, Feature, OfEngine, Replica, collect, make_request, responses, scenario
from tests.contract.reference import ORDER, all_logits, answers_of_two, distribution, ends_with, fit
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
    "stop strings",
    "seed",
)
"""Each step of the distribution is in one of them."""


class Sampling(OfEngine):
    @mostly_slow("case", CASES, quick=QUICK)
    @scenario(Feature.TOKENS)
    async def test_answers_come_as_often_as_the_distribution_says(self, case: str) -> None:
        """Of whole answers of two tokens: a dependence between positions would show, too."""
        options, wrong = CASES[case]
        options = {"stop_token_ids": (), "max_tokens": 2, **options}
        request = make_request(3, n=self.harness.samples, **options)
        prompt = request.prompt.token_ids.tolist()
        async with self.harness.serve(slots=self.harness.crowd) as replica:
            groups = await collect(replica, [request])
            model = replica.model(replica.version)
            counts = Counter(tuple(response.ids.tolist()) for response in responses(groups))
            right = fit(counts, answers_of_two(model, prompt, request.sampling))
            assert right.p > SIGNIFICANT, right
            for changes, order in wrong:
                params = make_request(3, **{**options, **changes}).sampling
                # The test can tell: it would refuse an engine that does this instead.
                assert fit(counts, answers_of_two(model, prompt, params, order)).p < SIGNIFICANT, (changes, order)
            self.assert_reported(replica, request, groups[0].tokens.responses[:64])

    @pytest.mark.parametrize("case", CASES)
    @scenario(Feature.TOKENS)
    async def test_a_log_prob_is_that_of_the_distribution_that_was_sampled_from(self, case: str) -> None:
        options, _ = CASES[case]
        requests = [make_request(number, n=4, **{"max_tokens": 14, **options}) for number in (2, 4)]
        async with self.harness.serve() as replica:
            groups = {group.number: group for group in await collect(replica, requests)}
            for request in requests:
                self.assert_reported(replica, request, groups[request.number].tokens.responses)

    @scenario(Feature.TOKENS)
    async def test_greedy_takes_the_most_likely_token_and_reports_its_unfiltered_log_prob(self) -> None:
        plain = {"temperature": 0.0, "max_tokens": 14, "n": 2}
        biased = {"logit_bias": ((5, 2.0), (STOP, 30.0)), "repetition_penalty": 1.6, "stop_token_ids": (STOP,)}
        requests = [
            make_request(0, **plain),
            make_request(1, **plain, top_k=1, top_p=0.1, min_p=0.9),
            make_request(2, **plain, **biased, min_tokens=6),
        ]
        async with self.harness.serve() as replica:
            groups = {group.number: group for group in await collect(replica, requests)}
            for request in requests:
                group = groups[request.number]
                first, second = group.tokens.responses
                assert first.ids.tolist() == second.ids.tolist()
                self.assert_reported(replica, request, group.tokens.responses)
                for probabilities, token in self.steps(replica, request, first.ids):
                    assert token == max(range(len(probabilities)), key=probabilities.__getitem__)
            assert [len(r.ids) for r in groups[2].tokens.responses] == [7, 7]

    @scenario(Feature.TOKENS)
    async def test_rows_of_one_batch_are_sampled_each_in_its_own_way(self) -> None:
        ways = [options for options, _ in CASES.values()]
        requests = [make_request(i, n=1, **{"max_tokens": 10, **ways[i % len(ways)]}) for i in range(3 * len(ways))]
        async with self.harness.serve() as replica:
            groups = {group.number: group for group in await collect(replica, requests)}
            for request in requests:
                self.assert_reported(replica, request, groups[request.number].tokens.responses)

    @scenario(Feature.TOKENS)
    async def test_an_answer_ends_where_its_options_say_and_says_why(self) -> None:
        options: list[Options] = [
            {"stop_token_ids": (STOP, 7, 9)},
            {"stop": ("e", "xy", "ab")},
            {"stop": ("e", "xy"), "stop_token_ids": (9, 11), "min_tokens": 5},
        ]
        requests = [make_request(i, n=6, max_tokens=24, **options[i % 3]) for i in range(9)]
        async with self.harness.serve() as replica:
            reasons: Counter[tuple[int, FinishReason]] = Counter()
            groups = {group.number: group for group in await collect(replica, requests)}
            for request in requests:
                for t, response in zip(
                    groups[request.number].trajectories, groups[request.number].tokens.responses, strict=True
                ):
                    ids = response.ids.tolist()
                    ends = [ends_with(ids[:end], request.sampling) for end in range(1, len(ids) + 1)]
                    assert not any(ends[:-1])
                    assert t.finish_reason is (FinishReason.STOP if ends[-1] else FinishReason.LENGTH)
                    assert ends[-1] or len(ids) == 24
                    reasons[request.number % 3, t.finish_reason] += 1
            assert all(reasons[i, FinishReason.STOP] > 2 for i in range(3))
            assert sum(reasons[i, FinishReason.LENGTH] for i in range(3)) > 0

    @scenario(Feature.TOKENS)
    async def test_a_stop_string_may_come_before_the_minimum_and_again_right_behind_it(self) -> None:
        """What came too early to end the answer does not hide what comes later."""
        often: Options = {"max_tokens": 40, "logit_bias": ((6, 8.0), (7, 8.0)), "stop": ("e", "ff"), "min_tokens": 6}
        request = make_request(5, n=32, **often)
        async with self.harness.serve() as replica:
            (group,) = await collect(replica, [request])
        for response in group.tokens.responses:
            ids = response.ids.tolist()
            ends = [end for end in range(1, len(ids) + 1) if ends_with(ids[:end], request.sampling)]
            assert ends == [len(ids)]

    # ------------------------------------------------------------------------------------- references

    def assert_reported(self, replica: Replica, request: GenerateRequest, sampled: Any) -> None:
        """Each token's log-prob is that of the exact distribution behind all tokens before it."""
        tolerance = self.harness.tolerance / min(1.0, request.sampling.temperature or 1.0)
        for response in sampled:
            for (probabilities, token), reported in zip(
                self.steps(replica, request, response.ids), response.logprobs, strict=True
            ):
                assert probabilities[token] > 0
                assert abs(np.log(probabilities[token]) - reported) < tolerance

    def steps(self, replica: Replica, request: GenerateRequest, ids: Any) -> list[tuple[list[float], int]]:
        """For each of ``ids`` the probabilities that it was sampled from."""
        prompt, answer = request.prompt.token_ids, ids.tolist()
        logits = all_logits(replica.model(replica.version), prompt, ids).tolist()
        return [
            (distribution(logits[at], request.sampling, prompt.tolist(), answer[:at]), token)
            for at, token in enumerate(answer)
        ]
