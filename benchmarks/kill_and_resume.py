"""``python -m benchmarks.kill_and_resume``: one run, killed at random moments and resumed, again and again.

Each process is killed with SIGKILL, together with nothing else: what it started must end by itself. At the end the
record is checked: every group has one fate, no prompt was trained twice within an epoch, as many groups were trained as
the run is long. With ``--compare`` a run from the same model that was not killed stands beside it.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.runner import DEMO, metrics_of, parser, say, summary_of
from benchmarks.table import markdown
from headway.events import GroupAdmitted, GroupSettled, RunStarted
from headway.reports.record.events_file import read_events
from headway.runtime.process_tree import descendants

STRAGGLERS_S = 20.0
"""Seconds that processes of a killed one may take to notice it."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(
        "kill_and_resume",
        __doc__,
        kills=20,
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
        print(markdown(run_with_kills(directory, chosen, settings)))
        problems, runs = check(directory), {"killed": directory}
        if chosen.compare:
            model = directory / "initial_model"
            runs["undisturbed"] = Path(scratch) / "undisturbed"
            settings += [f"model.path={model}"] if model.is_dir() else []
            end(start(runs["undisturbed"], chosen.recipe, settings))
        for name, run in runs.items():
            print(f"{name}: accuracy", *(f"{one['accuracy']:.3f}" for one in summary_of(run)["eval"]))
        print("\n".join(problems) or "the ledger balances; nothing was lost and nothing trained twice")
    sys.exit(bool(problems))


def run_with_kills(directory: Path, chosen: Any, settings: Sequence[str]) -> list[dict[str, Any]]:
    """Return a line of the table for each kill."""
    killed: list[dict[str, Any]] = []
    moments = random.Random(chosen.seed)
    process = start(directory, chosen.recipe, settings)
    while len(killed) < chosen.kills:
        began, before, trained = time.monotonic(), starts(directory), moments.random() >= 1 / 5
        if trained:
            while process.poll() is None and starts(directory) == before:
                time.sleep(0.05)
        with suppress(subprocess.TimeoutExpired):
            process.wait(moments.uniform(0.0, chosen.life if trained else 8.0))
        if process.poll() is not None:
            say(f"the run ended by itself after {len(killed)} kills: give it more groups, or less life")
            return killed
        family, lived = descendants(process.pid), time.monotonic() - began
        process.kill()
        process.wait()
        gone_s = wait_for_stragglers([pid for pid in family if not is_rays_own(pid)])
        versions = [int(path.name.removeprefix("version_")) for path in directory.glob("checkpoints/version_*")]
        if not versions:
            shutil.rmtree(directory, ignore_errors=True)
        process = start(directory, chosen.recipe, settings, resume=bool(versions))
        went_on = f"version {max(versions)}" if versions else "the beginning"
        when = "in training" if trained else "at its start"
        killed.append({"killed": when, "lived s": lived, "went on from": went_on, "its workers gone after s": gone_s})
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


def check(directory: Path) -> list[str]:
    """Return problems of the surviving history, counted from its events alone."""
    events = list(read_events(directory / "events.jsonl"))
    total = next((event.total_groups for event in reversed(events) if isinstance(event, RunStarted)), None)
    admitted = {event.number: event for event in events if isinstance(event, GroupAdmitted)}
    settled = [event for event in events if isinstance(event, GroupSettled)]

    def rows(wanted: Sequence[GroupSettled]) -> Counter[tuple[int, int]]:
        return Counter((admitted[event.number].epoch, admitted[event.number].row) for event in wanted)

    trained = rows([event for event in settled if event.fate == "trained"])
    ended = rows([event for event in settled if event.reason != "resume"])
    versions = Counter(row["version"] for row in metrics_of(directory))
    found = {
        "groups met two fates": len(settled) - len({event.number for event in settled}),
        "groups have no fate": len(admitted.keys() - {event.number for event in settled}),
        "gaps in the groups' numbers": 0 if sorted(admitted) == list(range(len(admitted))) else 1,
        "prompts were trained twice within an epoch": sum(count > 1 for count in trained.values()),
        "prompts were dropped at a resume and never run again": sum(
            ended[event.epoch, event.row] == 0 for event in admitted.values()
        ),
        f"groups were trained, not {total}": 0 if total in (None, trained.total()) else trained.total(),
        "summary.json says that the ledger does not balance": int(not summary_of(directory)["balanced"]),
        "versions have no row in metrics.jsonl, or three": sum(  # a late validation has its own row
            versions[version] not in (1, 2) for version in range(max(versions) + 1)
        ),
    }
    print(f"{len(admitted)} groups survive: {dict(Counter(event.fate for event in settled))}")
    print(f"{sum(event.reason == 'resume' for event in settled)} were in flight at a resume, and ran again")
    return [f"{count} {what}" for what, count in found.items() if count]


if __name__ == "__main__":
    main()
