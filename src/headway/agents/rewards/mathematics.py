"""Reward for a final expression that equals the ground truth, by math-verify: LaTeX, fractions, numbers, sets.

answer   ─▶ what follows its last ####, if any           ─▶ an expression, as in \\boxed{…}      ─┐
response ─▶ after its thought; in its last <answer>, if any ─▶ its last boxed, else last expression ┴▶ equal?

A comma before groups of three digits separates thousands; any other comma makes a list, for math-verify a set.

math-verify's own time limits stay off: they are alarms, and the process's only timer is that of `killed_after`.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parse, parser, verify
from sympy import FiniteSet

from headway.errors import ScoringFailed, shown

# (?>…) gives no digit back: otherwise 1,234 would pass for 1 if the text after 1,234 does not fit.
_DIGITS = r"(?>[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = rf"[+-]?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
NUMBER = re.compile(rf"{_NUMBER}\.?")
SPACED_LIST = re.compile(rf"(?<![\d.,]){_NUMBER}(?:,\s+{_NUMBER})+(?!,?\d)")
"""Pattern of a list with space after each comma between numbers: other commas separate thousands."""
_ITEM = rf"{_NUMBER}(?:/\d+)?"
LAST_LIST = re.compile(rf"(?<![\w.,$+*/^({{\[-])({_ITEM}(?:(?:\s*,\s*(?:and\s+)?|\s+and\s+){_ITEM})+)(?![\w/])[^\d]*\Z")
"""Pattern of a list of numbers without LaTeX that no further number follows."""
LONGEST_LIST = 2000
"""Number of characters at the end of a text in which its last list is searched."""
MOST_DIGITS = 1000
"""Maximum number of digits to which a number in exponent notation is written out; longer ones stay as they are."""
IN_MATH = re.compile(r"\\boxed|\\\(|\\\[|(?<!\\)\$.*(?<!\\)\$", re.DOTALL)
EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
"""Extraction of answers: a boxed one counts, wherever it stands."""
ANSWER_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)

for _library in (grader, parser):
    logging.getLogger(_library.__name__).setLevel(logging.ERROR)  # its warning that time limits are off is expected


def equals(answer: Any, response: str, *, float_rounding: int = 6, strict: bool = True) -> bool:
    """Tell whether ``response`` equals ``answer``, to ``float_rounding`` decimals. ``strict``: variables' names count.

    Raises:
        ScoringFailed: the answer is neither text nor a number, or math-verify can read nothing in it.
    """
    is_text_or_number = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    gold = _parse(_in_math(ground_truth(answer))) if is_text_or_number else []
    if not gold:
        raise ScoringFailed(f"math_verify cannot read the answer {shown(answer)}; give LaTeX or a number")
    given = _parse(_with_list(final_answer(response), for_set=isinstance(gold[0], FiniteSet)))
    # timeout_seconds=None, as in `_parse`: math-verify's own limit is an alarm.
    return bool(verify(gold, given, float_rounding=float_rounding, strict=strict, timeout_seconds=None))


def ground_truth(answer: Any) -> str:
    """Return the text of an answer: in GSM8K the part after ``####``; numbers without exponent or thousands
    separators.
    """
    text = str(answer).rpartition("####")[2].strip()
    if not NUMBER.fullmatch(text):
        return text
    value = Decimal(text.replace(",", ""))
    return f"{value:f}" if abs(value.adjusted()) < MOST_DIGITS else text


def final_answer(response: str) -> str:
    """Return the part of a response to search for an expression: after its thought, within its last ``<answer>``."""
    tagged = ANSWER_TAG.findall(response)
    return _in_math(tagged[-1].strip()) if tagged else response


def _with_list(text: str, *, for_set: bool) -> str:
    """Put the list of numbers that ends a text into LaTeX. Otherwise math-verify reads only its last number, and 1,2,3
    as 1.2. If a number is expected, the last number of 1, 2 still counts, and 1,2 is 1.2.
    """
    found = None if IN_MATH.search(text) else LAST_LIST.search(text[-LONGEST_LIST:])
    if found is None or not (for_set or (found[1].count(",") > 1 and not re.search(r"\s", found[1]))):
        return text
    return rf"\boxed{{{found[1]}}}"


def _parse(text: str) -> list[Any]:
    text = SPACED_LIST.sub(lambda found: re.sub(r",(?=\d)", "", found[0]), text)
    # parsing_timeout=None: math-verify's limit is an alarm, which would replace the one that ends this process.
    parsed: list[Any] = parse(text, EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None)
    return parsed


def _in_math(text: str) -> str:
    """Put LaTeX into a math environment: math-verify finds it nowhere else."""
    return text if not text or IN_MATH.search(text) else rf"\boxed{{{text}}}"
