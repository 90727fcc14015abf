"""Errors of Headway: every way in which a run can end early, in one file.

Two families, by what the user has to do:

    HeadwayError
    ├── UserError      exit code 2: the user's input is wrong (config, model, data, reward file)
    └── RunError       exit code 1: the run itself failed (a worker died, a wait ran out, a bound was broken)

Each class refines the matching standard type and carries one message, so that it survives pickling between processes.
The message says what was given, what was expected and what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

NOT_THE_USERS = ("<", str(Path(__file__).parent), str(Path(os.__file__).parent))
"""Prefixes of the paths of files that are not the user's: Headway's own, and Python's."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of folders of installed packages."""
EXIT_STOPPED = 3
"""Exit code of a run that would end again in the same way until a setting changes."""
EXIT_INTERRUPTED = 130
"""Exit code of an interrupted run: the one that shells report for a program ended by Ctrl-C."""


class HeadwayError(Exception):
    """Base of all errors that Headway raises on purpose."""

    exit_code = 1


class UserError(HeadwayError, ValueError):
    """Error in the user's input."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and notebooks print: the message, as on the command line."""
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class ConfigError(UserError):
    """Error in the configuration: a setting is unknown, contradictory or without effect."""


class DataError(UserError):
    """Error in a data set: it is missing or unreadable, or lacks a field or rows that are needed."""


class ModelError(UserError):
    """Error in a model folder: it is missing, incomplete or of an unsupported architecture."""


class UserCodeError(UserError):
    """Error in a file of user code: it does not import, or lacks the named function."""


class RunError(HeadwayError, RuntimeError):
    """Error of the run itself: the user's input was right."""


class WorkerDied(RunError):
    """Error for a worker process that ended while the run needed it."""


class TokensLost(RunError):
    """Error for tokens or columns of groups that were lost with a machine: the run cannot train on them."""


class UserCodeFailed(RunError):
    """Error for a job whose user code raised in a worker. The message is the exception's type and text, on one line."""


class RunnerLost(RunError):
    """Error for a job whose worker process, which ran the user code, ended or was killed before the job was over."""

    def __init__(self, message: str, *, end: str = "", culprit: bool | None = None, timed_out: bool = False) -> None:
        """Set the message and the details.

        ``end``: how the process ended, such as ``exit code 3`` or ``SIGKILL``. ``culprit``: True if it was executing
        this very job; None: not known. ``timed_out``: True if a time limit of the job ended it.
        """
        super().__init__(message)
        self.end = end
        self.culprit = culprit
        self.timed_out = timed_out


class ClientGone(RunError):
    """Error that ends an engine's stream of finished calls to a client that is gone."""


class StageFailed(RunError):
    """Error for an exception in a stage's own code; the cause is chained."""


class StallError(RunError, TimeoutError):
    """Error for a wait that took too long; the message says who waited for whom."""


class StalenessExceeded(RunError):
    """Error for a group that reached the trainer with a lag above the proved bound."""


class LedgerImbalance(RunError):
    """Error in the bookkeeping: admitted groups and their fates do not add up."""


class NothingToTrain(RunError):
    """Error when nothing is left to train on: too many groups in a row were discarded, or none could be scored."""

    exit_code = EXIT_STOPPED


class StoppedByGuard(RunError):
    """Error when data was too far off policy and ``algorithm.guard.action`` is ``stop``."""

    exit_code = EXIT_STOPPED


class UpdateFailed(RunError):
    """Error when a parameter update did not complete; replicas still serve the old version."""


class UpdateMissed(UpdateFailed):
    """Error when a receiver missed a version because the receiver that shares its copy on the machine missed it."""


class NonFinite(RunError):
    """Error when loss or gradient was not finite more often than allowed, or logits give no distribution."""

    exit_code = EXIT_STOPPED


class ScoringFailed(RunError):
    """Error when a trajectory's reward could not be computed: the user's code raised, timed out or returned nonsense.

    A rollout that cannot be scored is data, not a crash: the pipeline turns this into the group's ``failed`` fate.
    """


class ScoringTimedOut(ScoringFailed):
    """Error when an asynchronous reward function was cancelled because it took too long for one response."""


class ProgramFailed(RunError):
    """Error when an episode's program failed: user code raised, or returned an invalid result.

    A failed episode is data, not a crash. It is not trained on; an episode with a reward of 0 would be.
    """


class ProgramAway(ProgramFailed):
    """Error when an episode's program failed because something is unavailable for a time: it may be run again."""


class Unavailable(HeadwayError, ConnectionError):
    """Error for user code to raise when something it needs is unavailable for a time: the program is run again.

    The model is told of every other error of a tool, but not of this one.
    """


class SandboxFailed(RunError):
    """Error when the sandbox could not make a call, through no fault of the given code."""


class EpisodeOver(HeadwayError):
    """Error that a program gets instead of a turn once a limit of the episode is reached: no further turn follows.

    A program may catch it and return a reward. If it does not, the rewards that it gave before count.
    """

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit
        """The limit that was reached: ``turns``, ``tokens``, ``time`` (seconds of the episode) or ``step`` (seconds
        between two turns)."""

    def __str__(self) -> str:
        return f"the episode is over: its limit of {self.limit} is reached, and there will be no further turn"


@contextmanager
def boundary(doing: str, error: type[HeadwayError]) -> Iterator[None]:
    """Turn every exception of foreign code in the block into one ``error``, with ``doing`` in the message.

    Headway's own errors pass through unchanged, and so do cancellation and interrupts.
    """
    try:
        yield
    except HeadwayError:
        raise
    except (Exception, SystemExit) as cause:  # sys.exit() in foreign code must not end a command or an event loop
        raise error(f"{doing}: {raised_by(cause)}") from cause


def said_by(cause: BaseException, most: int = 300) -> str:
    """Describe a foreign error in one line: its type and its message, cut to ``most`` characters.

    Characters that UTF-8 cannot encode become escapes, so that the line can be printed and written anywhere.
    """
    try:
        text = " ".join(str(cause).split())
    except Exception:
        text = "(its message cannot be read)"
    text = cut(text, most)
    return writable(f"{type(cause).__name__}: {text}" if text else type(cause).__name__)


def raised_by(cause: BaseException, most: int = 300) -> str:
    """Describe an error of user code as `said_by` does, with its place: ``"KeyError: 'a' (own.py:12, in score)"``.

    The place is the last frame in a file of the user: not of Headway, of an installed package or of Python itself.
    """
    said = said_by(cause, most)
    for frame, line in reversed([*walk_tb(cause.__traceback__)]):
        code = frame.f_code
        if not code.co_filename.startswith(NOT_THE_USERS) and not INSTALLED & {*Path(code.co_filename).parts}:
            return f"{said} ({Path(code.co_filename).name}:{line}, in {code.co_name})"
    return said


def shown(value: object, most: int = 80) -> str:
    """Return the ``repr`` of ``value``, shortened to ``most`` characters."""
    return cut(repr(value), most)


def cut(text: str, most: int = 80) -> str:
    """Return ``text``, shortened to ``most`` characters with an ellipsis if it is longer."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def writable(text: str) -> str:
    """Return ``text`` with lone surrogates, which UTF-8 cannot encode, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def writable_json(text: str) -> str:
    """Return the JSON ``text`` with lone surrogates in its strings escaped. ``text`` must not escape characters yet."""
    return _SURROGATES.sub(lambda found: f"\\\\u{ord(found[0]):04x}", text)


_SURROGATES = re.compile("[\ud800-\udfff]")
