"""Rows that are left out of a run: the reasons, their counts, and the limit ``data.max_bad_rows``.

record ─▶ PromptTokenizer ─▶ prompt, or LeftOut ─▶ counted by source and reason ─▶ too many bad rows: `DataError`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

from headway.errors import DataError

FIRST_ROWS = 64
"""Rows of which one has to be good: data that begin with this many bad ones are wrong as a whole."""
Counts = Mapping[str, Mapping[str, int]]
"""Source → reason → number of rows that are left out."""


class Reason(StrEnum):
    """Reason for which a row is left out. Rows with another one than ``too_long`` are *bad*."""

    TOO_LONG = "too_long"
    """More tokens than ``data.max_prompt_length``."""
    TEMPLATE = "template"
    """The tokenizer's chat template raises, or does not show the row's tools."""
    COLUMNS = "columns"
    """The row's ``tools`` or ``chat_template_kwargs`` are something else."""
    TOKENIZER = "tokenizer"
    """The tokenizer cannot encode the text, such as half of a surrogate pair."""
    EMPTY = "empty"
    """The prompt has no tokens."""
    TASK = "task"
    """The task raises, or returns no problem."""
    CONVERSATION = "conversation"
    """The row has no conversation to learn from (``headway sft``)."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row without a prompt."""

    reason: Reason
    source: str
    why: str = ""
    """What is wrong, and in which row, in one line; empty for a prompt that is too long."""


@dataclass(slots=True)
class LeftOutRows:
    """Counts of the rows left out, and an example of each reason."""

    counts: Counts = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, row: LeftOut) -> None:
        """Count a row. `counts` is replaced, so that a cursor keeps the ones that it has."""
        reasons = dict(self.counts.get(row.source, {}))
        reasons[row.reason] = reasons.get(row.reason, 0) + 1
        self.counts = {**self.counts, row.source: reasons}
        self.examples.setdefault(row.reason, row.why)

    def check(self, rows: int, share: Fraction, what: str = "rows") -> None:
        """Raise `DataError` with the commonest reason if more than ``share`` of ``rows`` are bad."""
        if (bad := bad_rows(self.counts)) > share * rows:
            raise self.error(f"{bad} of {rows} {what}, more than data.max_bad_rows={float(share):g} of them,")

    def note(self, part: str = "training") -> str | None:
        """Describe the rows of a ``part`` that are left out, by reason; None without any."""
        if not (count := total(self.counts)):
            return None
        example = next((f": {why}" for why in self.examples.values() if why), "")
        rows = "row cannot be used and is" if count == 1 else "rows cannot be used and are"
        return f"{count} {part} {rows} left out ({reasons_told(self.counts, too_long=True)}){example}"

    def error(self, which: str) -> DataError:
        """Return the error over rows that cannot be used, with the commonest reason."""
        example = next((why for reason, _ in _bad(self.counts).most_common() if (why := self.examples.get(reason))), "")
        return DataError(
            f"{which} cannot be used ({reasons_told(self.counts)}){f': {example}' if example else ''}. Mend or remove "
            "such rows, or raise data.max_bad_rows"
        )


def bad_rows(counts: Counts) -> int:
    """Return the number of rows that are left out for another reason than their length."""
    return _bad(counts).total()


def reasons_told(counts: Counts, *, too_long: bool = False) -> str:
    """Return the reasons of bad rows, the commonest first, in one line: ``template 3, empty 1``.

    ``too_long``: tell of rows that are too long, too.
    """
    return ", ".join(f"{reason} {count}" for reason, count in _bad(counts, too_long=too_long).most_common())


def _bad(counts: Counts, *, too_long: bool = False) -> Counter[str]:
    found = Counter[str]()
    for reasons in counts.values():
        found.update({str(reason): n for reason, n in reasons.items() if too_long or reason != Reason.TOO_LONG})
    return found


def total(counts: Counts) -> int:
    """Return the number of rows that are left out."""
    return sum(sum(reasons.values()) for reasons in counts.values())
