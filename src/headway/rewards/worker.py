"""The inside of a reward worker process. Everything imported here is imported in each worker: keep it light."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, parent_process
from pathlib import Path

from headway.errors import ConfigError, UserCodeError, UserError, said_by
from headway.interfaces import Scores
from headway.rewards.request import RewardSpec, ScoreRequest
from headway.rewards.scorers import Scorer, make_scorer

PR_SET_PDEATHSIG = 1
HELD_BACK = {signal.SIGINT, signal.SIGHUP}
"""Signals of a terminal, of which workers do not hear while they start."""
MOST_FILES = 65536
"""More than a worker may have open."""
STARTS_A_PROCESS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})
"""Audit events of Python's, raised before each."""


class _Process:
    """The rewards that this process scores with, or why it cannot; set once, by `initialize`."""

    scorer: Scorer | UserError = ConfigError("the reward worker was not initialised")


def initialize(spec: RewardSpec, log_path: Path | None) -> None:
    """Set up a worker process. Never raises: an unusable reward is reported by `check` and `score`."""
    _leave_signals_to_the_driver()
    _leave_no_children()
    die_with_parent()
    _redirect_output(log_path)
    with _nothing_returns_but_this_process():
        try:
            _Process.scorer = make_scorer(spec)
        except UserError as error:
            _Process.scorer = error
        except Exception as error:
            if log_path is not None:
                traceback.print_exc()
            # As text: the user's exception may not survive pickling, or need modules that the driver lacks.
            _Process.scorer = UserCodeError(f"{spec.function} cannot be loaded: {said_by(error)}")


def check() -> None:
    """Check that this worker can score. Raises a `UserError` with the reason if it cannot."""
    _ready_scorer()


def score(request: ScoreRequest) -> Scores:
    """The group's scores. Raises `ScoringFailed` with the reason; a traceback of the user's code goes to the log."""
    scorer = _ready_scorer()
    with _nothing_returns_but_this_process():
        return scorer(request)


@contextmanager
def _nothing_returns_but_this_process() -> Iterator[None]:
    """End at the block's end, whatever that is, the children that user code forked in it and let return.

    Such a child holds the worker's pipes; it would answer the pool a second time.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(0)


def _ready_scorer() -> Scorer:
    if isinstance(_Process.scorer, UserError):
        raise _Process.scorer
    return _Process.scorer


def _leave_signals_to_the_driver() -> None:
    """Lead a session of one's own, which no terminal and no signal to the driver's process group reaches.

    What a terminal sent while this process started is forgotten. A SIGTERM to the group would have ended it then, which
    costs nothing: the driver leaves at that when the run starts, and another worker takes the place of this one later.
    """
    if os.getpid() != os.getpgrp():
        os.setsid()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in HELD_BACK}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)  # held back while the process started
    signal.signal(signal.SIGHUP, before[signal.SIGHUP])


def _leave_no_children() -> None:
    """See to it that processes that user code starts (to run what the model wrote) end with this one."""
    watched = False

    def before(event: str, _arguments: object) -> None:
        nonlocal watched
        if not watched and event in STARTS_A_PROCESS:
            watched = True  # first: what follows forks, too
            _start_watcher()

    sys.addaudithook(before)


def _start_watcher() -> None:
    """Lead a group of processes, with a watcher in it that ends the group once this process has ended, in whatever way.

    A worker that is killed, for a time-out above all, cannot end its children itself.
    """
    if os.getpid() != os.getpgrp():
        os.setpgid(0, 0)
    watched, held_here = os.pipe()  # not inheritable: a process that user code starts does not hold it
    if os.fork() == 0:
        try:
            os.closerange(0, watched)  # above all the pool's pipes, whose ends tell it who is alive
            os.closerange(watched + 1, MOST_FILES)
            os.read(watched, 1)  # nothing is ever written: this returns when nobody holds the other end any more
            os.killpg(0, signal.SIGKILL)
        finally:
            os._exit(1)  # whatever went wrong, the watcher never runs on in the user's code
    os.close(watched)
    held = [held_here]
    os.register_at_fork(after_in_child=lambda: os.close(held.pop()) if held else None)


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


def _redirect_output(log_path: Path | None) -> None:
    """Send everything that this process prints, C code included, to the end of ``log_path``, or to its stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A print that its encoding lacks is no failure of a reward; what a worker printed before it is killed counts.
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    sys.stdout.flush()
    sys.stderr.flush()
    stdout, stderr = (stream.fileno() if stream else fd for fd, stream in ((1, sys.__stdout__), (2, sys.__stderr__)))
    if log_path is None:
        os.dup2(stderr, stdout)
    else:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, stdout)
        os.dup2(log, stderr)
        os.close(log)
