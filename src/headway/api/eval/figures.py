"""Figures of an evaluation: accuracy, pass@k, lengths, each over problems, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

import numpy as np

from headway.data.interfaces.episode_groups import means_of_parts
from headway.reports import human


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """One answer to a problem, scored."""

    k: int
    text: str
    tokens: int
    """Number of tokens, end-of-sequence included."""
    cut_off: bool
    """True if the answer reached the length limit."""
    finish_reason: str
    reward: float
    """Reward of the answer; 0 if it could not be scored."""
    parts: dict[str, float | None]
    """Name of a reward component, or of another number that a reward returned → its value, before weighting."""
    failure: str | None = None
    """Reason why the answer's episode failed; None if it did not."""


@dataclass(frozen=True, slots=True)
class Solved:
    """A problem with its answers, in order of k."""

    row: int
    source: str
    prompt: str
    """The prompt as the model read it, chat template included."""
    truth: object
    answers: tuple[ScoredAnswer, ...]
    question: str = ""
    """The prompt without the chat template, like `headway.data.types.Prompt.question`."""
    failure: str | None = None
    """Reason why the problem has no score; None if it has one, from the episodes that did not fail."""

    @property
    def counted(self) -> tuple[ScoredAnswer, ...]:
        """The answers that figures are computed from: those of episodes that did not fail. All answers for a problem
        without a score, which counts as 0."""
        if self.failure is not None:
            return self.answers
        return tuple(answer for answer in self.answers if answer.failure is None)

    def correct(self, threshold: float) -> int:
        """Number of counted answers with a reward of at least ``threshold``; 0 for a problem without a score."""
        if self.failure is not None:
            return 0
        # Rewards are float32: a reward of 0.9 must not be below a threshold of 0.9.
        return sum(bool(np.float32(answer.reward) >= np.float32(threshold)) for answer in self.counted)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems and its standard error, which is None for a single problem."""

    value: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Mean and standard error s/√N (s of N − 1) of problems' ``values``: answers to one problem are dependent."""
        return cls(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {human.score(self.error)}"
        return human.score(self.value) + error


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the problems of one source, or of all sources."""

    problems: int
    answers: int
    failed: int
    """Number of problems without a score. They count as 0, and as wrong."""
    failed_episodes: int
    """Number of answers that are missing because their episodes failed, also of problems with a score."""
    accuracy: Estimate
    """Mean reward over problems; of each problem, over its episodes that did not fail. As in validation."""
    of_right_and_wrong: bool
    """True where each reward is 1 or 0, so that their mean may be called an accuracy."""
    pass_at: dict[int, Estimate]
    """k → pass@k over the problems with at least k counted answers. A k that no problem reaches is left out."""
    too_few: dict[int, int]
    """k → number of problems with fewer than k answers, which pass@k leaves out: no estimate would be unbiased."""
    mean_tokens: float
    max_tokens: int
    cut_off: float
    """Share of the answers that reached the length limit."""
    parts: dict[str, float] = field(default_factory=dict)
    """Means of the reward's components and of other numbers that they returned. Empty for a single component."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate, from ``n`` answers of which ``c`` are correct, that one of ``k`` answers is correct.

    1 − C(n−c, k)/C(n, k): Chen et al. 2021, arXiv:2107.03374, equation 1. Raises `ValueError` unless 0 ≤ c ≤ n and
    1 ≤ k ≤ n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"expected 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)  # integers: nothing overflows


def usual_ks(n: int) -> tuple[int, ...]:
    """Usual values of k for pass@k: 1, 2, 4, … up to ``n``, and ``n``."""
    return tuple(sorted({2**i for i in range(n.bit_length())} | {n}))


def figures(solved: Sequence[Solved], ks: Iterable[int], threshold: float) -> Figures:
    """Compute the figures of at least one problem."""
    answers = [answer for problem in solved for answer in problem.answers]
    correct = [(len(problem.counted), problem.correct(threshold)) for problem in solved]
    passed = {k: [pass_at_k(n, c, k) for n, c in correct if n >= k] for k in ks}
    return Figures(
        problems=len(solved),
        answers=len(answers),
        failed=sum(problem.failure is not None for problem in solved),
        failed_episodes=sum(answer.failure is not None for answer in answers),
        accuracy=Estimate.of([fmean(answer.reward for answer in problem.counted) for problem in solved]),
        of_right_and_wrong=all(answer.reward in (0, 1) for problem in solved for answer in problem.counted),
        pass_at={k: Estimate.of(values) for k, values in passed.items() if values},
        too_few={k: len(solved) - len(values) for k, values in passed.items()},
        mean_tokens=fmean(answer.tokens for answer in answers),
        max_tokens=max(answer.tokens for answer in answers),
        cut_off=fmean(answer.cut_off for answer in answers),
        parts=means_of_parts({name: [value] for name, value in answer.parts.items()} for answer in answers),
    )


def by_source(solved: Sequence[Solved]) -> dict[str, list[Solved]]:
    """Group problems by source, in the order in which sources first occur."""
    found: dict[str, list[Solved]] = {}
    for problem in solved:
        found.setdefault(problem.source, []).append(problem)
    return found
