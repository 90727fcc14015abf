"""``python -m benchmarks.sandbox``: what a call in the sandbox costs above an interpreter that does nothing.

One at a time, in turns: the interpreter alone, as ``-I -c pass`` and with the sandbox's own options, and a call of each
kind. Medians count; a busy machine makes all of them longer.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from statistics import median, quantiles

from benchmarks.runner import parser, timed, turns
from benchmarks.table import report
from headway.runtime.sandbox.interpreter import base_python
from headway.runtime.sandbox.sandbox import ISOLATED, Sandbox
from headway.runtime.sandbox.sandbox_call import SandboxSpec

BARE = "bare: python -I -c pass"


def main(arguments: Sequence[str] | None = None) -> None:
    number = parser("sandbox", "What a call costs.", calls=100).parse_args(arguments).calls
    took = measure(number)
    rows = [
        {
            "call": name,
            "median ms": median(ms),
            "90% ms": quantiles(ms, n=10)[-1],
            "above bare ms": median(ms) - median(took[BARE]),
        }
        for name, ms in took.items()
    ]
    notes = [f"As {'root' if os.geteuid() == 0 else 'an ordinary user'}."]
    report("sandbox", {f"A call in the sandbox, {number} of each kind, one at a time": rows}, notes)


def measure(calls: int) -> dict[str, list[float]]:
    """Return milliseconds of each call, by kind, after one of each that does not count."""
    python, room, limits = base_python(), Sandbox(SandboxSpec()), Sandbox(SandboxSpec("process_limits"))
    kinds: dict[str, Callable[[], object]] = {
        BARE: lambda: alone(python, "-I", "-c", "pass"),
        f"bare: python {' '.join(ISOLATED)} -c pass": lambda: alone(python, *ISOLATED, "-c", "pass"),
        "sandbox, bubblewrap": lambda: room.run_blocking("pass"),
        "sandbox, bubblewrap: python -I -c pass": lambda: room.run_blocking([python, "-I", "-c", "pass"]),
        "sandbox, process_limits": lambda: limits.run_blocking("pass"),
    }
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for name, call in turns(kinds, calls + 1):
        took[name].append(timed(call) * 1e3)
    return {name: ms[1:] for name, ms in took.items()}


def alone(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)


if __name__ == "__main__":
    main()
