"""Messages for a run that ends because nothing is left to train on: what became of its groups, and what to do.

The advice depends on how the groups ended: a reward that fails has to be mended, one that is the same for all answers
has to be made to differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from headway.errors import NothingToTrain
from headway.pipeline.admission.ledger import Fate

DISCARDED_VERSIONS = 10
"""Number of versions: the run ends when as many groups as these versions would train are discarded in a row."""
FAILED_AT_FIRST = 32
"""Number of groups after which a run ends when none of them could be scored. It does not depend on B. A reward that
fails for four groups of five scores at least one of 32 with a probability of 1 − 0.8³² = 99.9%: that run goes on."""
FAILED_AT_VALIDATION = 8
"""Number of held-out problems from which on the first validation ends the run when none of them could be scored. A
reward that fails for every second problem is ended by chance in one run of 256. Where all failures are time-outs, this
many of them decide without waiting for the rest."""
SHOWN = 5
"""Number of different reasons that a message lists with their counts; the others are summed up."""
WORTH_ADVICE = 0.1
"""Smallest share of the groups with a common fate for which the message gives advice on that fate."""

SEE_LOG = "What the reward raised and printed is in logs/reward.log in the run's directory"

EPISODE_FAILED = "episode failed"
"""Beginning of the reason of an episode's failure, where it stands for the group or problem that it ends."""

Ends = Counter[tuple[Fate, str]]
"""Number of groups by (fate, reason)."""


def all_discarded(ends: Ends) -> NothingToTrain:
    """Return the error for `DISCARDED_VERSIONS` · B groups in a row that were discarded, counted in ``ends``."""
    reasons = _counted({f"{fate}: {why}": times for (fate, why), times in ends.items()})
    by_fate: Counter[Fate] = Counter()
    for (fate, _), times in ends.items():
        by_fate[fate] += times
    advice = ". ".join(
        _advice(fate, [why for other, why in ends if other is fate])
        for fate, times in by_fate.most_common()
        if times >= WORTH_ADVICE * ends.total()
    )
    return NothingToTrain(
        f"{ends.total()} groups in a row were discarded, nothing is left to train on ({reasons}). {advice}"
    )


def never_scored(what: str, reasons: Iterable[str]) -> NothingToTrain:
    """Return the error for ``what``, like ``the first 32 groups``, none of which could be scored, for ``reasons``."""
    return NothingToTrain(cannot_be_scored(what, list(reasons)))


def cannot_be_scored(what: str, reasons: list[str]) -> str:
    """Message for scores that all failed: a sentence on what happened, and one on what to do."""
    of_programs = all(reason.startswith(EPISODE_FAILED) for reason in reasons)
    failed = "no episode could be made of" if of_programs else "the reward failed for all of"
    return f"{failed} {what} ({_counted(Counter(reasons))}). {_advice(Fate.FAILED, reasons)}"


def timed_out(reason: str) -> bool:
    """Tell whether a score failed because the reward took too long."""
    return "timeout after" in reason


def _counted(times: dict[str, int]) -> str:
    shown = Counter(times).most_common(SHOWN)
    text = "; ".join(f"{count}× {why}" for why, count in shown)
    rest = sum(times.values()) - sum(count for _, count in shown)
    return f"{text}; {rest}× something else" if rest else text


def _advice(fate: Fate, reasons: Sequence[str]) -> str:
    match fate:
        case Fate.FAILED:
            slow = ". Raise reward.timeout_s, or make it faster" if any(map(timed_out, reasons)) else ""
            by_program = any(reason.startswith(EPISODE_FAILED) for reason in reasons)
            see = SEE_LOG.replace("reward raised", "program raised")
            see = see.replace("reward.log", "episode-worker-0-programs.log")
            return f"{see if by_program else SEE_LOG}; headway eval shows it at single answers{slow}"
        case Fate.FILTERED:
            return (
                "Check the reward on a few samples, or make the task easier or harder: when all answers to a prompt "
                "get the same reward there is no gradient. If it had been higher before, the model has collapsed: "
                "resume with a lower actor.optim.lr, and from a checkpoint before that, or it ends here again"
            )
        case _:
            return (
                "They were too old before they could be trained: raise async_training.max_lag, or set "
                "async_training.on_overdue=wait"
            )
