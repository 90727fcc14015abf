"""What is left where a process was killed in the milliseconds in which it set a room up: bwrap, waiting in vain for it.

Nothing of the model's runs in such a room, and never will. It is ended when a sandbox is tried next.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

HOSTNAME = "headway-sandbox"
"""The name of a room's machine, by which rooms are told from what else bwrap makes."""


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
    told = (line.partition(":") for line in (place / "status").read_text(encoding="utf-8").splitlines())
    status = {key: value.split() for key, _, value in told}
    if status["PPid"] != ["1"] or len(status["NSpid"]) < 2 or status["NSpid"][-1] != "1":
        return False  # a room that is being made has a maker
    return HOSTNAME.encode() in (place / "cmdline").read_bytes().split(b"\0")
