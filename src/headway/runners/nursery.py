"""The nursery: a process that has loaded the user's code once, and forks runners that have it, too.

It has one thread and no event loop, and runs nothing of the user's any more. An ended runner stays a zombie until the
host asks for its end, so that its process id is nobody else's meanwhile.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from headway.frames import HEADER, Frame
from headway.process_tree import adopt_orphans, children, descendants, die_with, end_children
from headway.runners.wire import BlockingChannel, Kind


def fork_runners(sock: socket.socket, close: Callable[[], object]) -> BlockingChannel:
    """Fork runners by the host's orders on ``sock``. Returns in each runner alone, with its connection. ``close`` is
    called before the nursery ends."""
    if threading.active_count() > 1:
        print("the user's code has started threads when it was imported; forked processes lack them", file=sys.stderr)
    nursery = os.getpid()
    adopt_orphans()
    kept = set(descendants(os.getpid()))  # what the user's code has started when it was imported, and runners
    with suppress(OSError, ValueError):
        sys.stdout.flush()  # else each runner would print what is left
    gc.collect()
    gc.freeze()  # pages that the collector does not write to stay shared
    sock.setblocking(True)
    while True:
        data, descriptors, *_ = socket.recv_fds(sock, HEADER.size, 1)
        if not data:
            close()
            os._exit(0)
        _, kind, order, detail = HEADER.unpack(data)
        if kind == Kind.REAP:
            end = os.waitstatus_to_exitcode(os.waitpid(detail, 0)[1])
            kept.discard(detail)
            if not kept.issuperset(children()):  # left by one that has ended: a live one adopts what it has started
                end_children(kept)
            sock.sendall(Frame(Kind.REAPED, order, end).packed())
            continue
        try:
            pid = os.fork()
        except OSError as error:  # no memory or no process is left for now: those that run go on
            pid = -(error.errno or 1)
        if pid == 0:
            os.setsid()
            die_with(nursery)
            adopt_orphans()
            os.close(sock.detach())
            return BlockingChannel(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])
        kept.add(pid)
        sock.sendall(Frame(Kind.FORKED, order, pid).packed())
