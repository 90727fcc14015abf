"""``python -m benchmarks.kill_and_resume``: one run, killed at random moments and resumed, again and again.

Each process is killed with SIGKILL, together with nothing else: what it started must end by itself. At the end the
record is checked: every group has one fate, no prompt was trained twice within an epoch, as many groups were trained as
the run is long. The learning curve is printed beside that of a run that nobody killed.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.runner import DEMO, parser, say
from benchmarks.table import markdown
from headway.events import GroupAdmitted, GroupSettled, RunResumed, RunStarted
from headway.reports.record.events_file import read_events
from headway.runtime.process_tree import descendants

STRAGGLERS_S = 20.0
"""What a killed process started may take to notice it."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(
        "kill_and_resume",
        __doc__,
        kills={"type": int, "default": 20},
        life={"type": float, "default": 10.0, "help": "most seconds that a process trains before it is killed"},
        seed={"type": int, "default": 0, "help": "of the moments"},
        recipe={"type": Path, "default": DEMO},
        compare={"action": "store_true", "help": "also run once without kills, from the same model"},
        keep={"type": Path, "help": "leave the run's directory here"},
    )
    options.add_argument("overrides", nargs="*", metavar="a.b=c")
    chosen = options.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="headway-kills-") as scratch:
        directory = chosen.keep or Path(scratch) / "run"
        settings = ["trainer.save_freq=1", *chosen.overrides]
        moments = random.Random(chosen.seed)
        killed = run_with_kills(directory, chosen.recipe, settings, chosen.kills, chosen.life, moments)
        problems = check(directory)
        print(markdown(killed))
        curves = {"killed": curve(directory)}
        if chosen.compare:
            model = directory / "initial_model"
            same_model = [f"model.path={model}"] if model.is_dir() else []
            undisturbed = Path(scratch) / "undisturbed"
            end(start(undisturbed, chosen.recipe, [*settings, *same_model]))
            curves["undisturbed"] = curve(undisturbed)
        print(markdown(curve_table(curves)))
        print("\n".join(problems) or "the ledger balances; nothing was lost and nothing trained twice")
    sys.exit(bool(problems))


def run_with_kills(
    directory: Path, recipe: Path, settings: Sequence[str], kills: int, life: float, moments: random.Random
) -> list[dict[str, Any]]:
    """Return a line of the table for each kill."""
    killed: list[dict[str, Any]] = []
    process = start(directory, recipe, settings)
    while len(killed) < kills:
        began, trained = time.monotonic(), wait_until_it_trains(process, directory, moments)
        if trained:
            wait(process, moments.uniform(0.0, life))
        if process.poll() is not None:
            say(f"the run ended by itself after {len(killed)} kills: give it more groups, or less life")
            return killed
        family = [pid for pid in descendants(process.pid) if not is_rays_own(pid)]
        lived = time.monotonic() - began
        process.send_signal(signal.SIGKILL)
        process.wait()
        stragglers_s = wait_for_stragglers(family)
        can_resume = any((directory / "checkpoints").glob("version_*"))
        if not can_resume:
            shutil.rmtree(directory, ignore_errors=True)
        process = start(directory, recipe, settings, resume=can_resume)
        went_on = f"version {newest(directory)}" if can_resume else "the beginning"
        killed.append(
            {
                "kill": str(len(killed) + 1),
                "killed": "in training" if trained else "at its start",
                "lived s": lived,
                "went on from": went_on,
                "its workers gone after s": stragglers_s,
            }
        )
        say(f"kill {len(killed)}: lived {lived:.1f} s; goes on from {went_on}")
    end(process)
    return killed


def start(directory: Path, recipe: Path, settings: Sequence[str], resume: bool = False) -> subprocess.Popen[bytes]:
    arguments = ["--resume", str(directory)] if resume else [str(recipe), *settings, f"run.dir={directory}"]
    directory.parent.mkdir(parents=True, exist_ok=True)
    log = directory.with_suffix(".log").open("ab")
    command = [sys.executable, "-m", "headway", "train", *arguments]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.wait() != 0:
        sys.exit(f"the last process failed with {process.returncode}")


def wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def wait_until_it_trains(process: subprocess.Popen[bytes], directory: Path, moments: random.Random) -> bool:
    """False: it is to be killed before that, one time in five."""
    if moments.random() < 1 / 5:
        wait(process, moments.uniform(0.0, 8.0))
        return False
    before = starts(directory)
    while process.poll() is None and starts(directory) == before:
        time.sleep(0.05)
    return True


def starts(directory: Path) -> int:
    events = directory / "events.jsonl"
    return events.read_bytes().count(b'"kind": "run.started"') if events.exists() else 0


def wait_for_stragglers(pids: Sequence[int]) -> float:
    """Seconds until all have ended. Exits when one stays."""
    began = time.monotonic()
    while left := [pid for pid in pids if title(pid)]:
        if time.monotonic() - began > STRAGGLERS_S:
            sys.exit(f"processes {left} outlived the run that started them by {STRAGGLERS_S:g} s")
        time.sleep(0.05)
    return time.monotonic() - began


def is_rays_own(pid: int) -> bool:
    """Two agents of Ray's notice only after a minute that their node is gone. They have nothing of the run's."""
    return title(pid).startswith((b"ray::DashboardAgent", b"ray::RuntimeEnvAgent"))


def title(pid: int) -> bytes:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def newest(directory: Path) -> int:
    return max(int(path.name.removeprefix("version_")) for path in (directory / "checkpoints").glob("version_*"))


def check(directory: Path) -> list[str]:
    """Problems of the surviving history, counted from its events alone."""
    admitted: dict[int, GroupAdmitted] = {}
    fates: dict[int, GroupSettled] = {}
    started: RunStarted | None = None
    resumed = 0
    for event in read_events(directory / "events.jsonl"):
        match event:
            case RunStarted():
                started = event
            case RunResumed():
                resumed = event.times
            case GroupAdmitted():
                admitted[event.number] = event
            case GroupSettled():
                if event.number in fates:
                    return [f"group {event.number} met two fates"]
                fates[event.number] = event
    problems: list[str] = []
    trained = Counter((admitted[n].epoch, admitted[n].row) for n, settled in fates.items() if settled.fate == "trained")
    ended = Counter((admitted[n].epoch, admitted[n].row) for n, settled in fates.items() if settled.reason != "resume")
    if admitted.keys() != fates.keys():
        problems.append(f"{len(admitted.keys() - fates.keys())} groups have no fate")
    if sorted(admitted) != list(range(len(admitted))):
        problems.append("group numbers do not follow each other")
    if twice := [row for row, count in trained.items() if count > 1]:
        problems.append(f"trained twice within an epoch: {twice[:10]}")
    if lost := [row for row in {(e.epoch, e.row) for e in admitted.values()} if ended[row] == 0]:
        problems.append(f"dropped at a resume and never run again: {sorted(lost)[:10]}")
    if started is not None and started.total_groups not in (None, trained.total()):
        problems.append(f"{trained.total()} groups were trained, not {started.total_groups}")
    summary = json.loads((directory / "summary.json").read_text())
    if not summary["balanced"]:
        problems.append("summary.json says that the ledger does not balance")
    rows = [json.loads(line)["version"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    repeated = [version for version, count in Counter(rows).items() if count > 2]  # a late validation has its own row
    if repeated or sorted(set(rows)) != list(range(max(rows) + 1)):
        problems.append(f"metrics.jsonl has not one row for each version: {rows}")
    fate_counts = Counter(settled.fate for settled in fates.values())
    resume_drops = sum(settled.reason == "resume" for settled in fates.values())
    print(f"resumed {resumed} times; {len(admitted)} groups survive: {dict(fate_counts)}")
    print(f"{resume_drops} groups were in flight at a checkpoint that was gone back to, and ran again")
    return problems


def curve(directory: Path) -> dict[int, dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["version"], {}).update(row)
    return rows


def curve_table(curves: dict[str, dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    shown = (("reward", "reward/mean"), ("accuracy", "validation/accuracy"))
    return [
        {"version": version}
        | {f"{name}: {word}": rows.get(version, {}).get(key) for name, rows in curves.items() for word, key in shown}
        for version in sorted({version for rows in curves.values() for version in rows})
    ]


if __name__ == "__main__":
    main()
