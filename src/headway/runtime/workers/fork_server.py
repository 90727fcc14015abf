"""Nursery: a process that has loaded the user's code once and forks runners, which so have it loaded.

It has one thread and no event loop, and runs no more of the user's code. It reaps an ended runner only when the host
asks how that one ended: until then the system gives its process id to no other process.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from headway.runtime.frames import HEADER, Frame
from headway.runtime.process_tree import adopt_orphans, children, descendants, die_with, end_children
from headway.runtime.workers.wire import BlockingChannel, FrameKind


def fork_runners(sock: socket.socket, close: Callable[[], object]) -> BlockingChannel:
    """Fork runners as the host orders on ``sock``. Returns only in the runners, with the runner's connection.

    ``close`` is called before the nursery ends.
    """
    if threading.active_count() > 1:
        print("the user's code started threads when it was imported; forked processes lack them", file=sys.stderr)
    nursery = os.getpid()
    adopt_orphans()
    kept = set(descendants(os.getpid()))  # runners, and what the user's code started when it was imported
    with suppress(OSError, ValueError):
        sys.stdout.flush()  # else each runner would print it again
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
            if not kept.issuperset(children()):  # an ended runner's: a live one adopts what it started
                end_children(kept)
            sock.sendall(Frame(FrameKind.REAPED, order, end).packed())
            continue
        try:
            pid = os.fork()
        except OSError as error:  # no memory or process id is free now; other runners go on
            pid = -(error.errno or 1)
        if pid == 0:
            os.setsid()
            die_with(nursery)
            adopt_orphans()
            os.close(sock.detach())
            return BlockingChannel(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])
        kept.add(pid)
        sock.sendall(Frame(FrameKind.FORKED, order, pid).packed())
