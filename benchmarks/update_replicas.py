"""``python -m benchmarks.update_replicas``: what an update costs with four replicas on a machine, against one.

Runs of real training with one replica and with four alternate. Seconds are those of an update,
gather to the last load and probe, medians over versions. Memory is that of the copies of new weights, as the kernel
divides it over the processes that map it (``Pss``), the most that was seen.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.runner import parser, turns
from benchmarks.table import Ratio, report
from benchmarks.update_runs import AT_THE_END, SIZES, WARM_UP, Kind, Model, make, update_run
from headway.events import UpdateFinished, UpdatePhase
from headway.reports.record.events_file import read_events

REPLICAS = (1, 4)
COPY = "memfd:headway-weights"
"""What the kernel calls memory of `headway.engines.weights.incoming_version`."""
EVERY_S = 1.0


@dataclass(slots=True)
class Seen:
    seconds: list[float] = field(default_factory=list)
    """Of each version's update."""
    nbytes: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parser(
        "update_replicas",
        "Updates of 4 replicas.",
        models={"default": "1m,25m,100m", "help": "default: %(default)s"},
        versions={"type": int, "default": 6, "help": "measured in each run; default: %(default)s"},
        rounds={"type": int, "default": 2, "help": "of all runs, interleaved; default: %(default)s"},
    ).parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as scratch:
        for name in chosen.models.split(","):
            model = make(SIZES[name], Path(scratch) / name)
            seen = {str(replicas): Seen() for replicas in REPLICAS}
            for number, (replicas, found) in enumerate(turns(seen, chosen.rounds)):
                directory = Path(scratch) / f"{name}-{replicas}-{number}"
                measure(found, directory, model, SIZES[name].groups, int(replicas), chosen.versions)
            one = seen[str(REPLICAS[0])]
            for replicas, found in seen.items():
                seconds, copies = median(found.seconds), found.nbytes / 1e6
                over = {"÷ one": Ratio(seconds / median(one.seconds))}
                row = {"model": name, "replicas": replicas, "an update s": seconds, **over, "copies MB": copies}
                rows.append({**row, "copies ÷ one": Ratio(found.nbytes / one.nbytes)})
            report(
                "update-replicas",
                {"Updates by the number of replicas": rows},
                show=name == chosen.models.split(",")[-1],
            )


def measure(seen: Seen, directory: Path, model: Model, groups: int, replicas: int, versions: int) -> None:
    """Add what a run with ``replicas`` shows."""
    with most_in_copies() as most:
        update_run(
            directory,
            model,
            Kind("broadcast"),
            groups=groups,
            versions=WARM_UP + versions + AT_THE_END,
            extra=(f"rollout.n_gpus_per_node={replicas}",),
        )
    seen.nbytes = max(seen.nbytes, *most)
    gathering: dict[int, float] = {}
    for event in read_events(directory / "events.jsonl"):
        match event:
            case UpdatePhase(version=version, phase="gather"):
                gathering[version] = event.seconds
            case UpdateFinished(version=version) if WARM_UP < version <= WARM_UP + versions:
                seen.seconds.append(gathering[version] + event.trainer_stall_s)


@contextmanager
def most_in_copies() -> Iterator[list[int]]:
    """Look at the memory of copies until the block ends; the numbers of bytes that were seen."""
    seen = [0]
    over = threading.Event()

    def look() -> None:
        while not over.wait(EVERY_S):
            seen.append(sum(in_copies(process) for process in Path("/proc").glob("[0-9]*")))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        over.set()
        looking.join()


def in_copies(process: Path) -> int:
    """Bytes of copies that a process accounts for."""
    total, inside = 0, False
    with suppress(OSError):  # it has ended, or is another user's
        for line in (process / "smaps").read_text().splitlines():
            name, *rest = line.split()
            if "-" in name and not name.endswith(":"):
                inside = COPY in line
            elif inside and name == "Pss:":
                total += int(rest[0]) * 1024
    return total


if __name__ == "__main__":
    main()
