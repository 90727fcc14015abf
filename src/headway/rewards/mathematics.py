"""A reward that tells whether a response's final expression equals the ground truth, by math-verify: LaTeX, fractions,
numbers, sets.

answer   ─▶ what follows its last ####, if any           ─▶ an expression, as in \\boxed{…}      ─┐
response ─▶ after </think>; in its last <answer>, if any ─▶ its last boxed, else last expression ─┴▶ equal?

math-verify's own time limits stay off: they are alarms, and this process has one timer, which is `killed_after`'s.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parse, parser, verify

from headway.errors import ScoringFailed, shown

NUMBER = re.compile(r"[+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
MOST_DIGITS = 1000
"""Most digits to which a number in exponent notation is written out; a longer one is left as it is."""
IN_MATH = re.compile(r"\\boxed|\\\(|\\\[|(?<!\\)\$.*(?<!\\)\$", re.DOTALL)
EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
"""Extraction of answers: a boxed one counts, wherever it stands."""
ANSWER_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)

for _library in (grader, parser):
    logging.getLogger(_library.__name__).setLevel(logging.ERROR)  # that its time limits are off is meant


def equals(answer: Any, response: str, *, float_rounding: int = 6, strict: bool = True) -> bool:
    """Tell whether ``response`` equals ``answer``, to ``float_rounding`` decimals. ``strict``: variables' names count.

    Raises:
        ScoringFailed: the answer is neither text nor a number, or holds nothing that math-verify can read.
    """
    is_text_or_number = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    gold = _parse(_in_math(ground_truth(answer))) if is_text_or_number else []
    if not gold:
        raise ScoringFailed(f"math_verify cannot read the answer {shown(answer)}; give LaTeX or a number")
    given = _parse(final_answer(response))
    return bool(verify(gold, given, float_rounding=float_rounding, strict=strict, timeout_seconds=None))


def ground_truth(answer: Any) -> str:
    """The text of an answer: of GSM8K's what follows ``####``; numbers without exponent or thousands separators."""
    text = str(answer).rpartition("####")[2].strip()
    if not NUMBER.fullmatch(text):
        return text
    value = Decimal(text.replace(",", ""))
    return f"{value:f}" if abs(value.adjusted()) < MOST_DIGITS else text


def final_answer(response: str) -> str:
    """The part of a response to look for an expression in: after ``</think>``, within its last ``<answer>``.

    Empty for a response that never ends its ``<think>``.
    """
    _, closed, text = response.rpartition("</think>")
    if not closed and "<think>" in text:
        return ""
    tagged = ANSWER_TAG.findall(text)
    return _in_math(tagged[-1].strip()) if tagged else text


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = parse(text, EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None)
    return parsed


def _in_math(text: str) -> str:
    """Put LaTeX into a math environment, for math-verify finds it nowhere else."""
    return text if not text or IN_MATH.search(text) else rf"\boxed{{{text}}}"
