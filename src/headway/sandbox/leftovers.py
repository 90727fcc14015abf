"""What is left where a process was killed in the milliseconds in which it set a room up, and the kernel missed its end.

It waits in vain to be told to go on: nothing of the model's runs in such a room, and never will. It is ended when a
sandbox is tried next.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

HOSTNAME = "headway-sandbox"
"""Beginning of the name of a room's machine, by which rooms are told from what else bwrap makes."""


def hostname() -> str:
    """The name of the machine of a room that this process makes: its end is the maker's process id."""
    return f"{HOSTNAME}-{os.getpid()}"


def end_leftovers() -> None:
    """End first processes of rooms that were never finished, and whose makers are gone."""
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):
                if _is_left(place):
                    os.kill(int(place.name), signal.SIGKILL)


def _is_left(place: Path) -> bool:
    named = [word for word in (place / "cmdline").read_bytes().split(b"\0") if word.startswith(HOSTNAME.encode())]
    told = (line.partition(":") for line in (place / "status").read_text(encoding="utf-8").splitlines())
    namespaces = {key: value.split() for key, _, value in told}.get("NSpid", [])
    if not named or len(namespaces) < 2 or namespaces[-1] != "1":
        return False  # it is no first process of a room
    maker = named[0].rpartition(b"-")[2].decode()
    return maker.isdigit() and not Path("/proc", maker).exists()
