"""Restarts of a failed run, for ``headway train --restarts N``: another process resumes it.

    this process ── signals ─▶ headway train CONFIG       killed, or failed with exit code 1
          └── ends its leftovers ──▶ headway train --resume RUN       again, at most N times

Only the end of the process is watched: a killed driver reports nothing, and a hanging run ends by its own limits. A
standby process waits beside the run with its imports done, which are a third of the time from a kill to the next step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from shlex import quote
from threading import Event

from headway.cli.common import EXIT_FAILED, say
from headway.errors import DataError, UserError
from headway.reports.checkpoint_folders import Checkpoints
from headway.reports.record.events_file import look_through
from headway.reports.run_directory import RunDirectory
from headway.runtime.process_tree import IMPORTS_AS_HERE, adopt_orphans, end_children, python_command
from headway.runtime.signals import Repeats, handled, interrupting_signals
from headway.runtime.workers.user_code_worker import end_text

HEADWAY = (
    f"{IMPORTS_AS_HERE}import signal; from headway.runtime.process_tree import die_with; "
    "die_with(owner, signal.SIGTERM); from headway.cli import main; main()"
)
"""Program of the training process: the command, which saves and ends as after SIGTERM when this process ends."""
WAITS = """
import json, select, sys
if not select.select([sys.stdin], [], [], 20)[0]:  # until then the run itself starts, and needs the cores
    sys.path[:] = json.loads(sys.argv[-1])
    from headway.cli.restarts import import_ahead
    import_ahead()
sys.stdin.readline() or sys.exit()
"""
"""Beginning of the standby program: it waits for a line on stdin, and ends if stdin is closed."""
IMPORTED = (
    "headway.api.run",
    "headway.cluster.on_ray.ray_cluster",
    "headway.engines.train.fsdp.objective",
    "transformers.models.auto.tokenization_auto",
)
"""Modules that the standby process imports: 5 of the 6 CPU seconds of a run's start."""

AGAIN_S = 20.0
"""Seconds before a refused resumption is retried: for example, a disk was full."""


def keep_going(arguments: Sequence[str], run: Path, restarts: int, *, debug: bool = False) -> int:
    """Run `HEADWAY` with ``arguments``; after a failure with ``train --resume RUN``, at most ``restarts`` times.

    A run is not resumed if it was interrupted, had wrong input, or was stopped by its own settings. A refused
    resumption is retried, since its input was right before. ``debug``: processes show the tracebacks of errors. Returns
    the exit code of the last process, in a shell's form.
    """
    options, resumes = ["--debug"] if debug else [], ("train", "--resume", str(run))
    directory, restart = RunDirectory(run), 0
    written = _changed(directory.config)
    # Before the first process: the workers of a killed process become this one's children, and are ended.
    adopt_orphans()
    attended = _Attended([*resumes, *options])
    with closing(attended), handled(attended.pass_on, interrupting_signals()):
        while True:
            record = _changed(directory.events)
            code = attended.finish([*arguments, *options], again=restart < restarts)
            if code:
                # Workers of a driver that was killed hold devices and ports, some for a minute.
                end_children(but=attended.waiting)
            went_on, wrong = _changed(directory.events) != record, code == UserError.exit_code
            refused = restart > 0 and wrong and not went_on
            # After version 0 the input is not the cause: for example, a file was removed.
            failed = code == EXIT_FAILED or (wrong and went_on and _left_version_0(directory))
            if code >= 0 and not failed and not refused:
                return code
            if code < 0 and sys.stdout.isatty():
                print("\x1b[?25h")  # the live view hides the cursor
            ended = f"the run ended ({end_text(code)})"
            saved = Checkpoints(directory.checkpoints).complete(with_critic=False)
            by_hand = f"go on from version {saved[-1]} with: headway train --resume {quote(str(run))}" if saved else ""
            if attended.stop_asked.is_set():
                say(f"{ended} as it was told to stop; {by_hand or 'it has no checkpoint'}")
            elif not saved:
                say(f"{ended} before its first checkpoint (trainer.save_freq), and is not restarted; start it over")
            elif code > 0 and saved[-1] == 0 and not _left_version_0(directory):  # it would do so again
                say(f"{ended} within version 0, and is not restarted; {by_hand}")
            elif restart == restarts:
                say(f"{ended} after {restarts} restart{'s' * (restarts != 1)} (--restarts); {by_hand}")
            else:
                restart += 1
                wait = f" in {AGAIN_S:g} s" if refused else ""
                say(f"{ended}; going on from version {saved[-1]}{wait}, restart {restart} of {restarts}")
                if refused and attended.stop_asked.wait(AGAIN_S):
                    return code
                if "--resume" not in arguments or _changed(directory.config) != written:  # it has the settings given
                    arguments = resumes
                continue
            return code if code >= 0 else 128 - code


def import_ahead() -> None:
    """Import what ``headway train --resume`` imports."""
    from headway.cluster.machine.worker_setup import available_cores, importing, math_environment

    for variable, value in math_environment(available_cores()).items():
        os.environ.setdefault(variable, value)  # before torch is imported
    with importing():
        for name in IMPORTED:
            import_module(name)


def _left_version_0(directory: RunDirectory) -> bool:
    with suppress(DataError):
        return any(look_through(directory.events).boundaries)
    return False


def _changed(file: Path) -> int | None:
    """Return the modification time of ``file`` in ns; None if it does not exist."""
    return file.stat().st_mtime_ns if file.exists() else None


class _Attended:
    """Successive processes of `HEADWAY`. This process passes its signals on to them.

    Each has its own process group, so that a terminal's Ctrl-C reaches it once.
    """

    def __init__(self, resumes: Sequence[str]) -> None:
        """Set up. ``resumes``: arguments of the command that resumes the run."""
        self._resumes = resumes
        self._waits: subprocess.Popen[bytes] | None = None
        """Standby process, which resumes the run after the current process; None if there is none."""
        self.stop_asked = Event()
        """Set once this process is told to stop."""
        self._process: subprocess.Popen[bytes] | None = None
        self._repeats = Repeats()

    @property
    def waiting(self) -> list[int]:
        """Process ids of standby processes."""
        return [] if self._waits is None else [self._waits.pid]

    def finish(self, arguments: Sequence[str], *, again: bool) -> int:
        """Run `HEADWAY` with ``arguments`` to its end, and return its exit code. ``again``: another may follow."""
        # Separate groups: otherwise a terminal's Ctrl-C would reach them twice, and the second one leaves at once
        went_on = arguments == self._resumes and self._goes_on()
        self._process = went_on or subprocess.Popen(python_command(HEADWAY, *arguments), process_group=0)
        if again and self._waits is None:
            command = python_command(WAITS + HEADWAY, *self._resumes)
            # Started ahead: its imports, which take seconds, are done while the run goes on.
            self._waits = subprocess.Popen(command, process_group=0, stdin=subprocess.PIPE)
        if self.stop_asked.is_set():  # between two processes
            self._process.terminate()
        return self._process.wait()

    def _goes_on(self) -> subprocess.Popen[bytes] | None:
        """Start the standby process on the run and return it; None if there is none, or it has ended."""
        waits, self._waits = self._waits, None
        if waits is None or waits.stdin is None:
            return None
        try:
            with waits.stdin as pipe:
                pipe.write(b"\n")
        except BrokenPipeError:
            waits.wait()
            return None
        return waits

    def close(self) -> None:
        if self._waits is not None:
            self._waits.kill()
            self._waits.communicate()

    def pass_on(self, number: int, frame: object) -> None:
        """Handle a signal."""
        self.stop_asked.set()
        if self._process is not None and not self._repeats.is_one(number):
            self._process.send_signal(number)
