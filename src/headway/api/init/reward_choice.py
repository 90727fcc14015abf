"""Choose the built-in reward for a data set's answers.

unit tests ─▶ code     numbers, LaTeX ─▶ math_verify     letters, a few words ─▶ regex     short texts ─▶ exact_match
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.agents.rewards.code_tests import unit_tests_of
from headway.errors import ScoringFailed

Kind = Literal["code", "math", "choice", "text", "own"]
_NUMBER = r"[-+]?\$?(?:(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\s*%?"
NUMBER = re.compile(_NUMBER)
NUMBERS = re.compile(rf"{_NUMBER}(?:\s*[,;]\s*{_NUMBER})+")
LETTER = re.compile(r"\(?([A-Z])[).]?")
WORD = re.compile(r"[\w+-]{1,20}")
IN_LATEX = re.compile(r"\\[a-zA-Z]+|\$.+\$|[\w)}]\s*[=^]\s*[\w({]")
SIGNS = re.compile(r"[-+*/^=()\[\]{},.;:<>|!\s\d\w\\$%]*")
"""Pattern of an expression that is short enough, and plain enough, to be mathematics."""
OF_NUMBERS = re.compile(r"[-+]?\d+\s*/\s*\d+|[(\[{]\s*[-+\d][-+\d,./\s]*[)\]}]")
"""Pattern of fractions, tuples, intervals and sets of numbers."""
LONGEST_EXPRESSION = 80
MOST_WORDS, MOST_LETTERS = 12, 200
"""Most words and characters of a text that an answer may be expected to repeat."""
MOST_CHOICES = 10
ENOUGH = 0.95
"""Share of the answers that has to be of a kind."""


@dataclass(frozen=True, slots=True)
class RewardChoice:
    """A reward function, and why it is the one."""

    function: str
    reason: str
    kind: Kind
    params: Mapping[str, Any] = field(default_factory=dict)


def reward_for(answers: Sequence[tuple[Any, Mapping[str, Any]]]) -> RewardChoice | None:
    """Return the built-in reward for rows of (answer, further columns); None where none fits."""
    known = [(answer, extra) for answer, extra in answers if answer is not None]
    if not known:
        return None
    if _most(_has_tests(answer, extra) for answer, extra in known):
        return RewardChoice("code", "answers are unit tests: they run on the last block of code", "code")
    if any(not isinstance(answer, str | int | float) for answer, _ in known):
        return None
    texts = [str(answer).strip() for answer, _ in known]
    if _most(_is_number(text) for text in texts):
        return RewardChoice("math_verify", "answers are numbers: the last one counts, or \\boxed{…}", "math")
    lists = [re.split(r"[,;]\s*", text) for text in texts if not _is_number(text) and NUMBERS.fullmatch(text)]
    if len(lists) >= ENOUGH * len(texts):
        if sum(len(set(items)) < len(items) for items in lists) > (1 - ENOUGH) * len(lists):
            return RewardChoice("exact_match", "answers are lists in which numbers repeat: their order counts", "text")
        reason = "answers are lists of numbers: sets, whose order does not count; where it does: exact_match"
        return RewardChoice("math_verify", reason, "math")
    if _most(_is_number(text) or _is_mathematics(text) or NUMBERS.fullmatch(text) is not None for text in texts):
        return RewardChoice("math_verify", "answers are mathematics: \\boxed{…} counts, or the last expression", "math")
    return _of_choices(texts) or _of_texts(texts)


def _of_choices(texts: Sequence[str]) -> RewardChoice | None:
    distinct = sorted(set(texts))
    if all(LETTER.fullmatch(text) for text in distinct):
        letters = [found[1] for text in distinct if (found := LETTER.fullmatch(text))]
        pattern = f"[A-{max('D', *letters)}]"
        plain = {"pattern": rf"\b({pattern})\b"}
        return RewardChoice(
            "regex",
            "answers are letters: the last capital letter that stands alone counts",
            "choice",
            plain if distinct == sorted(set(letters)) else plain | {"answer_pattern": f"({pattern})"},
        )
    few = 1 < len(distinct) <= min(MOST_CHOICES, len(texts) // 3)
    if few and all(WORD.fullmatch(text) for text in distinct):
        pattern = rf"\b({'|'.join(map(re.escape, distinct))})\b"
        return RewardChoice(
            "regex", f"answers are {len(distinct)} words: the last of them counts", "choice", {"pattern": pattern}
        )
    return None


def _of_texts(texts: Sequence[str]) -> RewardChoice | None:
    if not _most("\n" not in text and len(text) <= MOST_LETTERS and len(text.split()) <= MOST_WORDS for text in texts):
        return None
    return RewardChoice(
        "exact_match", "answers are short texts: a response has to be just that; regex finds one within", "text"
    )


def _has_tests(answer: Any, extra: Mapping[str, Any]) -> bool:
    if isinstance(answer, str) and not (
        answer.lstrip()[:1] in ("{", "[")
        or "check(" in answer
        or re.search(r"^\s*(self\.)?assert", answer, re.MULTILINE)
    ):
        return False
    if not isinstance(answer, str | Mapping | list):
        return False
    try:
        return bool(unit_tests_of(answer, extra))
    except (ScoringFailed, TypeError, ValueError, KeyError):
        return False


def _is_number(text: str) -> bool:
    """Tell whether it is a number, or ends with one behind ``####``. A sequence of digits, 0042, is none."""
    number = text.rpartition("####")[2].strip()
    return NUMBER.fullmatch(number) is not None and not (len(number) > 1 and number.isdigit() and number[0] == "0")


def _is_mathematics(text: str) -> bool:
    if "\\boxed" in text:
        return True
    expression = text.rpartition("####")[2].strip()
    if len(expression) > LONGEST_EXPRESSION or SIGNS.fullmatch(expression) is None:
        return False
    return IN_LATEX.search(expression) is not None or OF_NUMBERS.fullmatch(expression) is not None


def _most(of_kind: Iterable[bool]) -> bool:
    found = list(of_kind)
    return sum(found) >= ENOUGH * len(found)
