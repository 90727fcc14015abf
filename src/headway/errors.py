"""The failure vocabulary: every way in which a run can end early, in one file.

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
"""The exit code of an interrupted run, as shells have it for a program that Ctrl-C ended."""


class HeadwayError(Exception):
    """Base of all errors that Headway raises on purpose."""

    exit_code = 1


class UserError(HeadwayError, ValueError):
    """Something that the user gave is wrong."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration that is unknown, contradictory or without effect."""


class DataError(UserError):
    """A data set that is missing, unreadable or lacks what was asked of it."""


class ModelError(UserError):
    """A model folder that is missing, incomplete or of an unsupported architecture."""


class UserCodeError(UserError):
    """A file of the user's own that does not import, or lacks the function that was named."""


class RunError(HeadwayError, RuntimeError):
    """The run failed."""


class OutputRefused(RunError, OSError):
    """The failure to write what a command prints: the disk behind its standard output is full, most often."""


class WorkerDied(RunError):
    """A worker process ended while the run needed it."""


class StageFailed(RunError):
    """A stage's own code raised; the cause is chained."""


class StallError(RunError, TimeoutError):
    """A wait ran out; the message says who waited for whom."""


class StalenessExceeded(RunError):
    """A group older than the proved bound reached the trainer."""


class LedgerImbalance(RunError):
    """Admitted groups and their fates do not add up."""


class NothingToTrain(RunError):
    """Discards in a row passed the limit, or no reward could ever be computed: nothing is left to train on."""


class StoppedByGuard(RunError):
    """The data was too far off policy, and ``offpolicy.guard.action`` is ``stop``."""


class UpdateFailed(RunError):
    """A parameter update did not complete; replicas still serve the old version."""


class NonFinite(RunError):
    """Loss or gradient was not finite more often than allowed."""


class ScoringFailed(RunError):
    """A reward could not be computed for a trajectory: the user's code raised, timed out or returned nonsense.

    A rollout that cannot be scored is data, not a crash: the pipeline turns this into the group's ``failed`` fate.
    """


@contextmanager
def boundary(doing: str, error: type[HeadwayError]) -> Iterator[None]:
    """Attribute whatever foreign code raises inside to ``error``, once, with ``doing`` in the message.

    Headway's own errors pass through unchanged, and so do cancellation and interrupts.
    """
    try:
        yield
    except HeadwayError:
        raise
    except (Exception, SystemExit) as cause:  # code that calls sys.exit() ends no command, and no event loop
        raise error(f"{doing}: {said_by(cause)}") from cause


def said_by(cause: BaseException, most: int = 300) -> str:
    """Foreign error in one line: its type, and what it says, of which at most ``most`` characters are kept.

    What UTF-8 has no bytes for is spelled out, so that the line can be printed and written anywhere.
    """
    try:
        text = " ".join(str(cause).split())
    except Exception:
        text = "(its message cannot be read)"
    text = cut(text, most)
    return writable(f"{type(cause).__name__}: {text}" if text else type(cause).__name__)


def shown(value: object, most: int = 80) -> str:
    """Value as Python spells it, of which at most ``most`` characters are kept."""
    return cut(repr(value), most)


def cut(text: str, most: int = 80) -> str:
    """Return ``text``, shortened to ``most`` characters with an ellipsis if it is longer."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def writable(text: str) -> str:
    """Return ``text`` as UTF-8 can hold it: a lone surrogate is spelled as its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
