"""``python -m benchmarks.chaos``: one run on Ray whose processes are killed and stopped at random moments.

The run is attended (``headway train … --restarts``). Each fault hits one process: SIGKILL, or SIGSTOP for one that
hangs. The table says how long it took until the next optimizer step. At the end the record is checked: each group has
one fate, no prompt was trained twice within an epoch, steps that were repeated had the gradients of the first time, and
nothing is left behind. ``--faults 8`` takes about six minutes on two cores.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runner import DEMO, metrics_of, parser, say, summary_of, words
from benchmarks.table import markdown
from headway.events import GroupAdmitted, GroupSettled
from headway.reports.record.events_file import read_events
from headway.runtime.process_tree import descendants

VICTIMS = ("driver", "actor", "rollout", "episode-worker", "reward")
STRAGGLERS_S = 90.0
"""Seconds that processes may take to end after the run: two agents of Ray's notice only after a minute."""
GOES_ON_S = 240.0
"""Seconds within which a run has to make another optimizer step after a fault."""
SHARED_MEMORY = Path("/dev/shm")
SETTINGS = (
    "cluster.backend=ray",
    "rollout.n_gpus_per_node=2",
    "rollout.total_rollout_steps=1000000",
    "data.task.size=1000000",
    "trainer.save_freq=2",
    "param_update.timeout_s=10",
    "cluster.max_replica_restarts=1000",
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(
        "chaos",
        __doc__,
        faults=8,
        life={"type": float, "default": 8.0, "help": "most seconds from a step to the next fault"},
        seed={"type": int, "default": 0, "help": "of victims and moments"},
        victims=words(VICTIMS),
        recipe={"type": Path, "default": DEMO},
        keep={"type": Path, "help": "leave the run's directory here"},
    )
    options.add_argument("overrides", nargs="*", metavar="a.b=c")
    chosen = options.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="headway-chaos-") as scratch:
        directory = chosen.keep or Path(scratch) / "run"
        left = in_shared_memory()
        rows, problems = run_with_faults(directory, chosen)
        print(markdown(rows))
        if took := [row["next step after s"] for row in rows]:
            print(f"next optimizer step after {median(took):.1f} s (median), {max(took):.1f} s at most")
        problems += check(directory) if rows else []
        if behind := in_shared_memory() - left:
            problems.append(f"left behind in {SHARED_MEMORY}: {', '.join(sorted(behind))}")
        print(
            "\n".join(problems) or "the ledger balances; nothing was lost, nothing trained twice, nothing left behind"
        )
    sys.exit(bool(problems))


def run_with_faults(directory: Path, chosen: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a line of the table for each fault, and what went wrong on the way."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    arguments = [str(chosen.recipe), *SETTINGS, f"run.dir={directory}", *chosen.overrides]
    command = [sys.executable, "-m", "headway", "train", *arguments, "--restarts", str(2 * chosen.faults)]
    rows: list[dict[str, Any]] = []
    moments, seen = random.Random(chosen.seed), set[int]()
    with directory.with_suffix(".log").open("ab") as log:
        attending = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for_step(directory, attending, 0, checkpoint=True)
        while len(rows) < chosen.faults:
            time.sleep(moments.uniform(0.0, chosen.life))
            seen.update(descendants(attending.pid))
            victim = moments.choice(chosen.victims)
            hangs = victim in ("actor", "rollout", "episode-worker") and moments.random() < 1 / 4
            if not (found := processes(attending.pid, victim)):
                continue
            pid, written = moments.choice(found), size(directory)
            os.kill(pid, signal.SIGSTOP if hangs else signal.SIGKILL)
            began = time.monotonic()
            wait_for_step(directory, attending, written)
            if hangs:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)  # what comes back after it was given up changes nothing
            rows.append(
                {
                    "fault": len(rows) + 1,
                    "process": victim,
                    "signal": "SIGSTOP" if hangs else "SIGKILL",
                    "next step after s": time.monotonic() - began,
                }
            )
            say(" ".join(f"{key} {value}" for key, value in rows[-1].items()))
        seen.update(descendants(attending.pid))
        attending.send_signal(signal.SIGINT)
        attending.wait(GOES_ON_S)
    except (TimeoutError, subprocess.TimeoutExpired) as failure:
        seen.update(descendants(attending.pid))
        attending.kill()
        last = directory.with_suffix(".log").read_text(errors="replace")[-2000:]
        return rows, [f"after {len(rows)} faults: {failure}; the run's last words:\n{last}"]
    return rows, stragglers(seen)


def processes(attending: int, victim: str) -> list[int]:
    """Ids of the processes of one kind. The driver is the one that is attended."""
    family = descendants(attending)
    drivers = [pid for pid in family if b"headway" in title(pid) and parent(pid) == attending]
    match victim:
        case "driver":
            return drivers
        case "reward":
            return [pid for pid in family if parent(pid) in drivers and b"exec(eval" in title(pid)]
        case _:
            return [pid for pid in family if title(pid).startswith(b"ray::") and f"{victim}-".encode() in title(pid)]


def wait_for_step(directory: Path, attending: subprocess.Popen[bytes], since: int, *, checkpoint: bool = False) -> None:
    """Wait until the record tells of an optimizer step behind byte ``since``. Raises `TimeoutError`."""
    deadline, events = time.monotonic() + GOES_ON_S, directory / "events.jsonl"
    while True:
        if attending.poll() is not None:
            raise TimeoutError(f"the run ended by itself with {attending.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no optimizer step within {GOES_ON_S:g} s")
        if events.exists():
            with events.open("rb") as file:
                file.seek(since if since <= size(directory) else 0)  # parts of a large record go to other files
                new = file.read()
            if b'"optimizer.stepped"' in new and (not checkpoint or b'"checkpoint.saved"' in new):
                return
        time.sleep(0.05)


def in_shared_memory() -> set[str]:
    """Names of what Headway has there."""
    return {path.name for path in SHARED_MEMORY.glob("headway*")}


def size(directory: Path) -> int:
    return (directory / "events.jsonl").stat().st_size


def stragglers(seen: set[int]) -> list[str]:
    """Return what is left of the processes that were ``seen``, `STRAGGLERS_S` after the run."""
    deadline = time.monotonic() + STRAGGLERS_S
    while (left := [pid for pid in seen if title(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"process {pid} was left behind: {title(pid)[:80]!r}" for pid in left]


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def title(pid: int) -> bytes:
    """Command line of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def check(directory: Path) -> list[str]:
    """Return problems of the surviving history, counted from its events alone."""
    events = list(read_events(directory / "events.jsonl"))
    admitted = {event.number: event for event in events if isinstance(event, GroupAdmitted)}
    settled = [event for event in events if isinstance(event, GroupSettled)]
    trained = Counter(
        (admitted[event.number].epoch, admitted[event.number].row) for event in settled if event.fate == "trained"
    )
    versions = Counter(row["version"] for row in metrics_of(directory))
    summary = summary_of(directory)
    found = {
        "groups met two fates": len(settled) - len({event.number for event in settled}),
        "groups have no fate": len(admitted.keys() - {event.number for event in settled}),
        "gaps in the groups' numbers": 0 if sorted(admitted) == list(range(len(admitted))) else 1,
        "prompts were trained twice within an epoch": sum(count > 1 for count in trained.values()),
        "groups were given up at a resume": sum(event.reason == "resume" for event in settled),
        "groups failed": sum(event.fate == "failed" for event in settled),
        "summary.json says that the ledger does not balance": int(not summary["balanced"]),
        "versions have no row in metrics.jsonl, or three": sum(  # a late validation has its own row
            versions[version] not in (1, 2) for version in range(max(versions) + 1)
        ),
    }
    print(f"{len(admitted)} groups survive: {dict(Counter(event.fate for event in settled))}")
    return [f"{count} {what}" for what, count in found.items() if count]


if __name__ == "__main__":
    main()
