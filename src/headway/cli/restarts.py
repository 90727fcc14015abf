"""Restarts of a failed run, for ``headway train --restarts N``: its process is watched, and another one resumes it.

    this process ── signals ─▶ headway train CONFIG       killed, or failed with exit code 1
          └── ends what that left ─▶ headway train --resume RUN       again, N times at the most

The process's end is the only thing that is looked at: a driver that is killed says nothing. What hangs ends itself, by
the run's own limits.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from headway.cli.common import EXIT_FAILED, say
from headway.reports.checkpoint_folders import Checkpoints
from headway.reports.run_directory import RunDirectory
from headway.runtime.process_tree import IMPORTS_AS_HERE, adopt_orphans, end_children, python_command
from headway.runtime.signals import Repeats, interrupting_signals
from headway.runtime.workers.worker_process import end_text

HEADWAY = (
    f"{IMPORTS_AS_HERE}import signal; from headway.runtime.process_tree import die_with; "
    "die_with(owner, signal.SIGTERM); from headway.cli import main; main()"
)
"""Program of the process that trains: the command, which saves and ends, as after SIGTERM, when this process ends."""


def keep_going(
    arguments: Sequence[str], run: Path, restarts: int, program: str = HEADWAY, *, debug: bool = False
) -> int:
    """Run ``program`` with ``arguments``; after each failure with ``train --resume RUN``, ``restarts`` times at most.

    A run that was interrupted, given wrong input, or stopped by its own settings is not resumed. ``debug``: processes
    show the tracebacks of errors. Returns the exit code of the last process, as a shell gives it.
    """
    options = ["--debug"] if debug else []
    adopt_orphans()
    for restart in range(restarts + 1):
        code, interrupted = _finish(python_command(program, *arguments, *options))
        if interrupted or (code >= 0 and code != EXIT_FAILED):
            break
        if sys.platform == "linux":
            end_children()  # workers of a driver that was killed hold devices and ports, some for a minute
        if restart == restarts:
            if restarts:
                say(f"the run ended ({end_text(code)}) after {restarts} restarts (--restarts)")
            break
        saved = Checkpoints(RunDirectory(run).checkpoints).complete(with_critic=False)
        if not saved:
            say(f"the run ended ({end_text(code)}) before its first checkpoint (trainer.save_freq): not restarted")
            break
        say(f"the run ended ({end_text(code)}); going on from version {saved[-1]}, restart {restart + 1} of {restarts}")
        arguments = ("train", "--resume", str(run))
    return code if code >= 0 else 128 - code


def _finish(command: Sequence[str]) -> tuple[int, bool]:
    """Run ``command`` to its end, and return its exit code and whether this process was told to stop meanwhile.

    Signals are passed on. The process is in a group of its own, so that a terminal's Ctrl-C reaches it once.
    """
    told: list[int] = []
    repeats = Repeats()
    process = subprocess.Popen(command, process_group=0)

    def pass_on(number: int, frame: object) -> None:
        told.append(number)
        if not repeats.is_one(number):
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in interrupting_signals()}
    try:
        return process.wait(), bool(told)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
