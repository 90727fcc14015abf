"""Serves one job at a time, without an event loop: synchronous user code may run one."""

from __future__ import annotations

import os
import pickle
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from headway.errors import HeadwayError, UserCodeFailed
from headway.runtime.frames import Frame
from headway.runtime.workers.redaction import Redaction
from headway.runtime.workers.user_code_boundary import (
    closed,
    nothing_returns_but_this_process,
    print_traceback,
)
from headway.runtime.workers.wire import BlockingChannel, FrameKind, pickled_error, unpickled
from headway.runtime.workers.worker_protocol import Hosted


def serve_alone(channel: BlockingChannel, hosted: Hosted, redaction: Redaction) -> None:
    """Serve jobs until the host closes the connection."""
    while (frame := channel.receive()) is not None:
        with nothing_returns_but_this_process():
            try:
                job = pickle.loads(frame.payload)
                ended = Frame(
                    FrameKind.RESULT, frame.number, 0, pickle.dumps(_done(_SyncJob(channel, frame.number), hosted, job))
                )
            except BaseException as error:  # an interrupt, too: runners ignore Ctrl-C, so that user code raised it
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
        if os.getpid() != self._pid:  # a child that user code has forked, at the runner's connection
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
