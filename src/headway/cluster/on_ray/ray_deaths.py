"""Deaths of workers on Ray, in one message each."""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError, RayError

from headway.errors import WorkerDied

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_VANISHED = "Worker unexpectedly exits with a connection error"
"""Text in Ray's error for a process of which only a closed connection is left: SIGKILL ended it, or a crash."""


def death(name: str, pid: int | None, log: str, doing: str, error: RayError) -> WorkerDied:
    """Make the error for a worker whose process ended while it was asked for ``doing``. ``log``: path of its log."""
    process = "its process" if pid is None else f"its process (pid {pid})"
    return WorkerDied(f"worker {name} died: {process} ended during {doing!r}. Its log: {log}. {why_it_died(error)}")


def why_it_died(error: RayError) -> str:
    """Describe for the user why a process ended. If somebody else killed it, Ray lists only possible causes."""
    ray_says = str(error)
    if isinstance(error, OutOfMemoryError):
        return (
            f"Ray ended it because its machine's memory had almost run out: {ray_says.splitlines()[0]}. Fewer "
            "workers or smaller batches need less; RAY_memory_usage_threshold says how full is too full"
        )
    if _VANISHED in ray_says:
        return (
            "If the log does not tell why, the process was killed from outside: most often by the kernel, because "
            "memory had run out (`dmesg` tells; fewer workers or smaller batches need less)"
        )
    # The first lines, without their colours and the list of ids.
    lines = (_COLOUR.sub("", line).strip() for line in ray_says.splitlines() if line.strip() and line[0] != "\t")
    return f"Ray says: {' '.join(lines)[:300]}"
