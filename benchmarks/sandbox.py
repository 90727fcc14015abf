"""``python -m benchmarks.sandbox``: what a call in the sandbox costs above an interpreter that does nothing.

Turn by turn, one at a time: the interpreter alone, as ``-I -c pass`` and with the sandbox's own options, and a call of
each kind. Medians count; a busy machine makes all of them longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.table import report
from headway.runtime.sandbox.interpreter import base_python
from headway.runtime.sandbox.sandbox import ISOLATED, Sandbox
from headway.runtime.sandbox.sandbox_limits import SandboxSpec

BARE = "bare: python -I -c pass"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox", description="What a call costs.")
    parser.add_argument("--calls", type=int, default=100, help="calls of each kind; default: %(default)s")
    calls = parser.parse_args(arguments).calls
    seconds = measure(calls)
    bare = statistics.median(seconds[BARE])
    rows = [
        {
            "call": name,
            "median, ms": statistics.median(took) * 1e3,
            "90%, ms": statistics.quantiles(took, n=10)[-1] * 1e3,
            "above bare, ms": (statistics.median(took) - bare) * 1e3,
        }
        for name, took in seconds.items()
    ]
    report(
        "sandbox",
        f"A call in the sandbox, {calls} of each kind, one at a time",
        [{key: f"{value:.1f}" if isinstance(value, float) else value for key, value in row.items()} for row in rows],
        [f"As {'root' if os.geteuid() == 0 else 'an ordinary user'}. Load at the end: {os.getloadavg()[0]:.1f}."],
    )


def measure(calls: int) -> Mapping[str, list[float]]:
    """Seconds of each call, by kind, after one of each that does not count."""
    python, room, limits = base_python(), Sandbox(SandboxSpec()), Sandbox(SandboxSpec("process_limits"))
    kinds: dict[str, Callable[[], object]] = {
        BARE: lambda: alone([python, "-I", "-c", "pass"]),
        f"bare: python {' '.join(ISOLATED)} -c pass": lambda: alone([python, *ISOLATED, "-c", "pass"]),
        "sandbox, bubblewrap": lambda: room.run_blocking("pass"),
        "sandbox, bubblewrap: python -I -c pass": lambda: room.run_blocking([python, "-I", "-c", "pass"]),
        "sandbox, process_limits": lambda: limits.run_blocking("pass"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(calls + 1):
        for name, call in kinds.items():
            began = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def alone(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)


if __name__ == "__main__":
    main()
