"""Worker that serves one job at a time, without an event loop: synchronous user code may run one.

A fork server may have forked it: a process that has loaded the user's code once, so that the workers it forks have it
loaded. The fork server has one thread and no event loop, and runs no more of the user's code. It reaps an ended worker
only when the host asks how that one ended: until then the system gives its process id to no other process.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from headway.errors import HeadwayError, UserCodeFailed
from headway.runtime.frames import HEADER, Frame
from headway.runtime.process_tree import adopt_orphans, children, descendants, die_with, end_children
from headway.runtime.workers.redaction import Redaction
from headway.runtime.workers.user_code_boundary import (
    Hosted,
    closed,
    nothing_returns_but_this_process,
    print_traceback,
)
from headway.runtime.workers.wire import BlockingChannel, FrameKind, pickled_error, unpickled


def serve_alone(channel: BlockingChannel, hosted: Hosted, redaction: Redaction) -> None:
    """Serve jobs until the host closes the connection."""
    while (frame := channel.receive()) is not None:
        with nothing_returns_but_this_process():
            try:
                job = pickle.loads(frame.payload)
                ended = Frame(
                    FrameKind.RESULT, frame.number, 0, pickle.dumps(_done(_SyncJob(channel, frame.number), hosted, job))
                )
            except BaseException as error:  # an interrupt, too: workers ignore Ctrl-C, so that user code raised it
                if not isinstance(error, HeadwayError):
                    print_traceback()
                ended = Frame(FrameKind.ERROR, frame.number, 0, pickled_error(error, redaction))
        channel.send(ended)
    close_alone(hosted)


def close_alone(hosted: Hosted) -> None:
    """Have the user's code close what it holds, in one step."""
    with suppress(StopIteration):
        closed(hosted).send(None)


class _SyncJob:
    """Requests of one job."""

    def __init__(self, channel: BlockingChannel, number: int) -> None:
        self._channel, self._number = channel, number
        self._asks = 0
        self._pid = os.getpid()

    async def ask(self, message: Any) -> Any:
        payload = pickle.dumps(message)
        if os.getpid() != self._pid:  # a child that user code has forked, at the worker's connection
            os._exit(0)
        self._asks += 1
        self._channel.send(Frame(FrameKind.ASK, self._number, self._asks, payload))
        answer = self._channel.receive()
        if answer is None:  # the host is gone
            os._exit(1)
        if answer.kind == FrameKind.REFUSAL:
            raise pickle.loads(answer.payload)
        return unpickled(answer.payload, "the answer")


def _done(job: _SyncJob, hosted: Hosted, what: Any) -> Any:
    """Run the job's coroutine, which waits for nothing but the host, in one step."""
    coroutine: Coroutine[Any, Any, Any] = hosted.serve(what, job.ask)
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise UserCodeFailed(
        "synchronous code has awaited something; it runs without an event loop: make it async, or use asyncio.run"
    )


def fork_workers(sock: socket.socket, close: Callable[[], object]) -> BlockingChannel:
    """Fork workers as the host orders on ``sock``. Returns only in the workers, with the worker's connection.

    ``close`` is called before the fork server ends.
    """
    if threading.active_count() > 1:
        print("the user's code started threads when it was imported; forked processes lack them", file=sys.stderr)
    fork_server = os.getpid()
    adopt_orphans()
    kept = set(descendants(os.getpid()))  # workers, and what the user's code started when it was imported
    with suppress(OSError, ValueError):
        sys.stdout.flush()  # else each worker would print it again
    gc.collect()
    gc.freeze()  # pages that the collector does not write to stay shared
    sock.setblocking(True)
    while True:
        data, descriptors, *_ = socket.recv_fds(sock, HEADER.size, 1)
        if not data:
            close()
            os._exit(0)
        _, kind, order, detail = HEADER.unpack(data)
        if kind == FrameKind.REAP:
            end = os.waitstatus_to_exitcode(os.waitpid(detail, 0)[1])
            kept.discard(detail)
            if not kept.issuperset(children()):  # an ended worker's: a live one adopts what it started
                end_children(kept)
            sock.sendall(Frame(FrameKind.REAPED, order, end).packed())
            continue
        try:
            pid = os.fork()
        except OSError as error:  # no memory or process id is free now; other workers go on
            pid = -(error.errno or 1)
        if pid == 0:
            os.setsid()
            die_with(fork_server)
            adopt_orphans()
            os.close(sock.detach())
            return BlockingChannel(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])
        kept.add(pid)
        sock.sendall(Frame(FrameKind.FORKED, order, pid).packed())
