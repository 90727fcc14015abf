"""Errors of Headway: every way in which a run can end early, in one file.

Two families, told apart by what the user has to do:

    HeadwayError
    ├── UserError      exit code 2: something that was given is wrong (config, model, data, reward file)
    └── RunError       exit code 1: the run itself failed (a worker died, a wait ran out, a bound was broken)

Each class refines the matching standard type, carries one message (so that it survives pickling between processes), and
the message says what was given, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130
"""Exit code of an interrupted run, as shells have it for a program that Ctrl-C ended."""


class HeadwayError(Exception):
    """Base of all errors that Headway raises on purpose."""

    exit_code = 1


class UserError(HeadwayError, ValueError):
    """Error in something that the user gave."""

    exit_code = 2


class ConfigError(UserError):
    """Error in the configuration: a setting is unknown, contradictory or without effect."""


class DataError(UserError):
    """Error in a data set: it is missing, unreadable or lacks what was asked of it."""


class ModelError(UserError):
    """Error in a model folder: it is missing, incomplete or of an unsupported architecture."""


class UserCodeError(UserError):
    """Error in a file of the user's own: it does not import, or lacks the function that was named."""


class RunError(HeadwayError, RuntimeError):
    """Error of the run itself, where what the user gave was right."""


class OutputRefused(RunError, OSError):
    """Error of writing what a command prints: the disk behind its standard output is full, most often."""


class WorkerDied(RunError):
    """Error for a worker process that ended while the run needed it."""


class ClientGone(RunError):
    """Error that ends what an engine yields to a client that is gone."""


class StageFailed(RunError):
    """Error for an exception of a stage's own code; the cause is chained."""


class StallError(RunError, TimeoutError):
    """Error for a wait that took too long; the message says who waited for whom."""


class StalenessExceeded(RunError):
    """Error for a group older than the proved bound that reached the trainer."""


class LedgerImbalance(RunError):
    """Error in the bookkeeping: admitted groups and their fates do not add up."""


class NothingToTrain(RunError):
    """Error when nothing is left to train on: too many groups in a row were discarded, or none could be scored."""


class StoppedByGuard(RunError):
    """Error when data was too far off policy, and ``offpolicy.guard.action`` is ``stop``."""


class UpdateFailed(RunError):
    """Error when a parameter update did not complete; replicas still serve the old version."""


class NonFinite(RunError):
    """Error when loss or gradient was not finite more often than allowed."""


class ScoringFailed(RunError):
    """Error when a trajectory's reward could not be computed: the user's code raised, timed out or returned nonsense.

    A rollout that cannot be scored is data, not a crash: the pipeline turns this into the group's ``failed`` fate.
    """


class EpisodeOver(HeadwayError):
    """Error in place of a turn: a limit has ended the episode. ``limit``: "turns", "tokens", "time" or "step"."""

    @property
    def limit(self) -> str:
        """Name of the limit."""
        return str(self.args[0])


class ProgramFailed(RunError):
    """Error of an episode's program: user code raised, or returned what it may not."""


class ProgramAway(ProgramFailed):
    """Error of a program for what is away for a time, such as a server; the program is run again after a pause."""


class ProgramLost(RunError):
    """Error for a program whose process ended. ``culprit``: whether it was the one that ran then; None if unknown."""

    def __init__(self, message: str, culprit: bool | None = None) -> None:
        super().__init__(message)
        self.culprit = culprit


@contextmanager
def boundary(doing: str, error: type[HeadwayError]) -> Iterator[None]:
    """Turn every exception of foreign code in the block into ``error``, once, with ``doing`` in the message.

    Headway's own errors pass through unchanged, and so do cancellation and interrupts.
    """
    try:
        yield
    except HeadwayError:
        raise
    except (Exception, SystemExit) as cause:  # code that calls sys.exit() ends no command, and no event loop
        raise error(f"{doing}: {said_by(cause)}") from cause


def said_by(cause: BaseException, most: int = 300) -> str:
    """Describe a foreign error in one line: its type and its message, of which at most ``most`` characters are kept.

    Characters that UTF-8 cannot encode are spelled as escapes, so that the line can be printed and written anywhere.
    """
    try:
        text = " ".join(str(cause).split())
    except Exception:
        text = "(its message cannot be read)"
    text = cut(text, most)
    return writable(f"{type(cause).__name__}: {text}" if text else type(cause).__name__)


def shown(value: object, most: int = 80) -> str:
    """Return ``value`` as Python spells it, shortened to ``most`` characters."""
    return cut(repr(value), most)


def cut(text: str, most: int = 80) -> str:
    """Return ``text``, shortened to ``most`` characters with an ellipsis if it is longer."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def writable(text: str) -> str:
    """Return ``text`` with lone surrogates, which UTF-8 cannot encode, spelled as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
