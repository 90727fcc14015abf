"""The inside of a worker process: where it starts, and how it is set apart from its host.

Everything imported here is imported in each worker: keep it light.
"""

from __future__ import annotations

import faulthandler
import io
import mmap
import os
import pickle
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from headway.errors import HeadwayError, UserCodeError, cut, said_by
from headway.runtime.frames import Frame
from headway.runtime.process_tree import guarded
from headway.runtime.workers.redaction import Redaction
from headway.runtime.workers.user_code_boundary import (
    Hosted,
    HostedSpec,
    nothing_returns_but_this_process,
    print_traceback,
)
from headway.runtime.workers.wire import MOST_SAID, BlockingChannel, FrameKind, pickled_error

HELD_BACK = {signal.SIGINT, signal.SIGHUP}
"""Signals of a terminal, of which workers do not hear while they start."""
SHOWS_WHERE = signal.SIGUSR2
"""Signal at which a worker prints where its threads stand, even while C code keeps the interpreter's lock."""
BOOT = f"{guarded()}from headway.runtime.workers.worker_main import main; main(*map(int, sys.argv[2:]))"
"""Program of a worker process; its arguments are a name for people, and those of `main`."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The first message to a worker process."""

    spec: bytes
    """The pickled `HostedSpec`; apart, so that one that does not unpickle is told as a failure to load."""
    shown: str
    forks: bool
    """The process is a fork server: it serves nothing itself, and forks workers."""
    alone: bool
    """One job at a time, without an event loop."""
    secrets: tuple[str, ...]
    prints: bool
    """Tracebacks of failures to load are printed."""


def main(descriptor: int, note: int) -> None:
    """Run a worker process on the connection ``descriptor`` to its host.

    ``note`` is the descriptor of the file in which an event loop notes whose step it makes, or -1.
    """
    _leave_signals_to_the_host()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A print that its encoding lacks is no failure of user code; what is printed before a process is killed counts.
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    with suppress(OSError, RuntimeError):  # stderr may be closed
        faulthandler.register(SHOWS_WHERE, all_threads=True)
    os.set_inheritable(descriptor, False)
    channel = BlockingChannel(socket.socket(fileno=descriptor))
    first = channel.receive()
    if first is None:
        return
    start: WorkerStart = pickle.loads(first.payload)
    redaction = Redaction(start.secrets)
    hosted = _loaded(start, channel, redaction)
    if hosted is None:
        return
    if start.alone:
        from headway.runtime.workers.sync_worker import close_alone, fork_workers, serve_alone
    if start.forks:
        channel = fork_workers(channel.sock, partial(close_alone, hosted))  # goes on in each of the forked processes
    if start.alone:
        serve_alone(channel, hosted, redaction)
    else:
        from headway.runtime.workers.async_worker import serve_shared

        serve_shared(channel.sock, hosted, redaction, memoryview(mmap.mmap(note, mmap.PAGESIZE)).cast("Q"))


def _loaded(start: WorkerStart, channel: BlockingChannel, redaction: Redaction) -> Hosted | None:
    """Load the user's code and tell the host what it is, or why there is none."""
    with nothing_returns_but_this_process():
        try:
            spec: HostedSpec = pickle.loads(start.spec)
            hosted = spec.load()
            told = Frame(FrameKind.LOADED, payload=pickle.dumps(hosted.describe()))
        except HeadwayError as error:
            hosted, told = None, Frame(FrameKind.FAILED, payload=pickled_error(error, redaction))
        except BaseException as error:
            if start.prints:
                print_traceback()
            text = cut(redaction.of(said_by(error, most=1 << 20)), MOST_SAID)
            error = UserCodeError(f"{start.shown} cannot be loaded: {text}")
            hosted, told = None, Frame(FrameKind.FAILED, payload=pickled_error(error, redaction))
    channel.send(told)
    return hosted


def _leave_signals_to_the_host() -> None:
    """Ignore SIGINT, and drop a SIGHUP that came during the start. This process leads a new session.

    A SIGTERM to the host's group would have ended it before it left the group, which costs nothing: the host leaves at
    that when it starts, and another worker takes the place of this one later.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)  # held back while the process started
    signal.signal(signal.SIGHUP, before)
