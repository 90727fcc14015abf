"""``python -m benchmarks.episodes``: what episodes of several turns cost, without a model and with one.

    asleep      a thousand episodes at once, whose engine and steps sleep: throughput against the virtual clock's for
                the same seconds; CPU seconds of a turn
    prefixes    ten turns of a growing context on the native engine: prefilled tokens with its cache and without
    endpoint    calls of agents over HTTP, 500 episodes open, 100 calls a second: what the endpoint adds to a call

Figures of the first part are of a busy machine where others compute: throughput suffers from them, CPU seconds less so.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from benchmarks.episodes_asleep import Measured, Workload, really, virtually
from benchmarks.episodes_endpoint import Load
from benchmarks.episodes_endpoint import measure as latencies
from benchmarks.episodes_endpoint import measure_bare as bare_latencies
from benchmarks.episodes_prefixes import measure
from benchmarks.table import report
from headway.engines.rollout.native.prefix_cache import BLOCK

QUICK = Workload(chains=200, episodes=1, turns=4)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.episodes", description="What episodes cost.")
    parser.add_argument("--only", choices=("asleep", "prefixes", "endpoint"), help="one part; default: all")
    parser.add_argument("--quick", action="store_true", help="200 episodes of 4 turns, in half a minute")
    parser.add_argument("--chains", type=int, help=f"episodes at once; default: {Workload().chains}")
    parser.add_argument("--runners", type=int, default=2, help="processes of the program; default: %(default)s")
    chosen = parser.parse_args(arguments)
    if chosen.only in (None, "asleep"):
        workload = QUICK if chosen.quick else Workload(chains=chosen.chains or Workload().chains)
        asleep(workload, chosen.runners)
    if chosen.only in (None, "prefixes"):
        prefixes()
    if chosen.only in (None, "endpoint"):
        endpoint(Load(seconds=10.0) if chosen.quick else Load())


def asleep(workload: Workload, runners: int) -> None:
    """Measure and report episodes that sleep."""
    busy = os.getloadavg()[0]
    virtual, real = virtually(workload), really(workload, runners)
    rows = [_row("virtual clock", virtual, virtual), _row(f"{runners} runners", real, virtual)]
    notes = [
        f"{workload.chains} at once, {workload.chains * workload.episodes} in all, {workload.turns} turns each; "
        f"load of the machine before: {busy:.1f}",
        "throughput: episodes per second until 95% of them are over, over the virtual clock's; aim: 0.95",
        "CPU of a turn: episode worker, driver and sleeping engine share a process; aim but for rendering: 1 ms + 0.2",
    ]
    report("episodes-asleep", {"Episodes whose engine and steps sleep": rows}, notes)


def _row(name: str, measured: Measured, virtual: Measured) -> dict[str, str | float]:
    turns = max(1, measured.turns)
    own_s = measured.cpu_s - measured.rendering_s
    return {
        "run": name,
        "turns": measured.turns,
        "95% over s": measured.most_s,
        "all over s": measured.wall_s,
        "throughput": virtual.most_s / measured.most_s,
        "CPU of a turn ms": own_s / turns * 1e3,
        "rendering ms": measured.rendering_s / turns * 1e3,
        "runners ms": measured.runners_s / turns * 1e3,
    }


def prefixes() -> None:
    """Measure and report ten turns of a growing context."""
    rows: list[dict[str, str | float]] = []
    for name, cached in (("cache", True), ("no cache", False)):
        run = measure(cached=cached)
        rows.append(
            {
                "run": name,
                "prefilled": run.tokens,
                "new": run.fewest,
                "contexts": run.contexts,
                "over new + a block a turn": run.tokens / (run.fewest + BLOCK * run.turns),
                "wall s": run.wall_s,
            }
        )
    report("episodes-prefixes", {"Ten turns on the native engine (1m)": rows}, [f"a block: {BLOCK} tokens; aim: 1.1"])


def endpoint(load: Load) -> None:
    """Measure and report calls over HTTP."""
    busy = os.getloadavg()[0]
    bare, found = bare_latencies(load), latencies(load)
    rows = [
        {
            "run": name,
            "calls": len(found.ms),
            "failed": found.failed,
            "median ms": found.median,
            "99% ms": found.p99,
            "longest ms": max(found.ms),
            "CPU of the server's process": found.server_cpu_s / found.wall_s,
        }
        for name, found in (("a server that only answers", bare), ("the endpoint", found))
    ]
    notes = [
        f"{load.episodes} episodes open, {load.calls_per_s:g} calls/s, an engine that takes no time; load of the "
        f"machine before: {busy:.1f}",
        "from when a call's time had come until its answer was read; aims: 3 ms added at the median, 20 ms at 99%",
    ]
    report("episodes-endpoint", {"Calls of agents over HTTP": rows}, notes)


if __name__ == "__main__":
    main()
