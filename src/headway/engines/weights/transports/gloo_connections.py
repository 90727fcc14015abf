"""A Gloo group's TCP connections, so that one of its members can cut them.

Gloo ends a collective that is under way only when its time is up, whatever it is told meanwhile: a member whose machine
lost its power, and says nothing more, keeps all the others waiting for so long. A connection that was cut fails at
once, at both ends.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

Endpoint = tuple[str, int]
"""IP address and port of one end of a connection."""
DESCRIPTORS = Path("/proc/self/fd")
"""The folder of this process's file descriptors, on Linux."""
_making = Lock()
"""Lock that is held while a device is made: two made at once could not tell their listeners apart."""


def device_and_listener(make: Callable[[], Any]) -> tuple[Any, Endpoint | None]:
    """Make a Gloo device, and find where it listens for the group's other members; None where that cannot be told."""
    with _making:
        before = _listeners()
        device = make()
        new = _listeners() - before
    return device, new.pop() if len(new) == 1 else None


def cut(own: Endpoint, others: set[Endpoint]) -> None:
    """Shut down every connection of this process that came in at ``own``, or went to one of ``others``."""
    for connection in _tcp_sockets():
        with suppress(OSError):  # it is not connected, or not any more
            peer = connection.getpeername()[:2]  # a listener has none, and Gloo ends the process without it
            if peer in others or connection.getsockname()[:2] == own:
                connection.shutdown(socket.SHUT_RDWR)


def _listeners() -> set[Endpoint]:
    return {
        connection.getsockname()[:2]
        for connection in _tcp_sockets()
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _tcp_sockets() -> Iterator[socket.socket]:
    """TCP sockets of this process, each as a duplicate that is closed before the next one is yielded."""
    try:
        descriptors = [int(entry.name) for entry in DESCRIPTORS.iterdir()]
    except OSError:  # another system than Linux
        return
    for descriptor in descriptors:
        with _duplicate(descriptor) as found:
            if found is not None:
                yield found


@contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket | None]:
    """The TCP socket behind ``descriptor``; None where it is something else, or closed meanwhile."""
    found = None
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            duplicate = os.dup(descriptor)
            try:
                found = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
    if found is None:
        yield None
        return
    with found:
        yield found if found.family in (socket.AF_INET, socket.AF_INET6) else None
