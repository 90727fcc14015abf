"""What is left where a process was killed in the milliseconds in which it set a room up: bwrap, waiting in vain for it.

Nothing of the model's runs in such a room, and never will. It is ended when a sandbox is tried next.
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
    if (place / "comm").read_text(encoding="utf-8", errors="replace") != "bwrap\n":
        return False
    named = [word for word in (place / "cmdline").read_bytes().split(b"\0") if word.startswith(HOSTNAME.encode())]
    if not named:
        return False
    maker = named[0].rpartition(b"-")[2].decode()
    return maker.isdigit() and not Path("/proc", maker).exists()
