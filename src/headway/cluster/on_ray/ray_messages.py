"""Redirection of what Ray reports of its cluster, such as a worker's death, from the terminal to a log of the run.

Ray has no setting for that: a driver prints what its raylet reports on stdout, in colours, whatever ``log_to_driver``
says. So the function that prints is replaced while a run is connected; where this version of Ray has no such function,
nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray._private.worker as printing

PRINTS = "print_to_stdstream"
"""Name of Ray's printing function: ``(data, ignore_prefix)``, in a thread of Ray's; ``data["lines"]`` is printed."""


@contextmanager
def messages_in(log_file: Path) -> Iterator[None]:
    """Append Ray's messages to ``log_file`` until the block ends. The file is made with the first one."""
    if not hasattr(printing, PRINTS):
        yield
        return
    before = getattr(printing, PRINTS)

    def keep(data: Mapping[str, Any], *_: object, **__: object) -> None:
        with suppress(OSError):  # a full disk would end Ray's thread, with a message on the terminal
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with log_file.open("a", encoding="utf-8") as file:
                file.writelines(f"{time.strftime('%H:%M:%S')}  {line}\n" for line in data["lines"])

    setattr(printing, PRINTS, keep)
    try:
        yield
    finally:
        setattr(printing, PRINTS, before)
