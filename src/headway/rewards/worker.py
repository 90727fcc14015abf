"""The inside of a reward worker process. Everything imported here is imported in each worker: keep it light."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from multiprocessing import connection, parent_process
from pathlib import Path

from headway.errors import ConfigError, HeadwayError, ScoringFailed, UserError
from headway.rewards.request import RewardSpec, ScoreRequest
from headway.rewards.scorers import Scorer, make_scorer

PR_SET_PDEATHSIG = 1
REASON_LENGTH = 200


class _Process:
    """What this process scores with, or why it cannot; set once, by `initialize`."""

    scorer: Scorer | UserError = ConfigError("the reward worker was not initialised")


def initialize(spec: RewardSpec, log_path: Path | None) -> None:
    """Run first in every worker. Never raises: what is wrong with the reward is told by `check` and `score`."""
    die_with_parent()
    if log_path is not None:
        _redirect_output(log_path)
    try:
        _Process.scorer = make_scorer(spec)
    except UserError as error:
        _Process.scorer = error


def check() -> None:
    """Raises the `UserError` for which this worker cannot score."""
    _ready_scorer()


def score(request: ScoreRequest) -> list[float]:
    """One finite float per response. Raises `ScoringFailed` with the reason; the traceback goes to the log."""
    scorer = _ready_scorer()
    try:
        return scorer(request)
    except HeadwayError:
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        # As text: the user's exception may not survive pickling, or need modules that the driver lacks.
        text = " ".join(f"exception: {type(error).__name__}: {error}".split())
        raise ScoringFailed(text if len(text) <= REASON_LENGTH else f"{text[: REASON_LENGTH - 1]}…") from None


def _ready_scorer() -> Scorer:
    if isinstance(_Process.scorer, UserError):
        raise _Process.scorer
    return _Process.scorer


def die_with_parent() -> None:
    """End this process when its parent ends, however that ends.

    Linux signals it, even inside a call that never returns to the interpreter; elsewhere a thread watches the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if (parent := parent_process()) is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _exit_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _redirect_output(log_path: Path) -> None:
    """Send everything that this process prints, C code included, to the end of ``log_path``."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.__stdout__.fileno() if sys.__stdout__ else 1)
    os.dup2(log, sys.__stderr__.fileno() if sys.__stderr__ else 2)
    os.close(log)
