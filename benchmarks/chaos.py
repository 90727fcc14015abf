"""``python -m benchmarks.chaos``: one run on three machines of namespaces, to which one fault after the other happens.

The run is attended (``headway train … --restarts``). A fault is a kind and a victim, as ``kill:rollout`` or
``full:run`` (`benchmarks.nodes.faults`), at a random moment or aimed at a phase of an update or a checkpoint, and is
undone after a while. Then the run has to make another optimizer step. After each fault ledgers are compared, after
every fifth and at the end the tokens that were trained with those that were sampled, as bytes (`benchmarks.evidence`);
at the end that nothing is left on any machine. Machines start again when they were lost. Ray's head and the driver are
on a machine that stays up.

At the end a table tells how memory of each kind of process, and the run's files, grew (`benchmarks.growth`): a soak is
``--life 60 --faults 30``. ``--keep DIR`` leaves everything there. Given again, it goes on at the next fault. Needs
root, ``tc`` and ``mkfs.ext4``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import evidence
from benchmarks.growth import Growth
from benchmarks.nodes.faults import FAULTS, Strike, aim, title
from benchmarks.nodes.machines import RAY, REPOSITORY, Machines, first_child, machines, why_not
from benchmarks.runner import DEMO, metrics_of, parser, say, summary_of
from benchmarks.table import markdown
from headway.events import GroupAdmitted, GroupSettled
from headway.reports.record.events_file import read_events

UPDATE = ("gather", "send", "recv", "register", "load")
CHECKPOINT = {"copy": "", "write": ".version_*.partial", "rename": "version_*", "removal": ".version_*.old"}
"""Phases, and the names in the folder of checkpoints by whose appearance they are known."""
MOMENTS = ("any", *UPDATE, *CHECKPOINT)
STRAGGLERS_S = 90.0
"""Seconds that processes may take to end after the run: two agents of Ray's notice only after a minute."""
GOES_ON_S = 300.0
"""Seconds within which a run has to make another optimizer step after a fault."""
AIM_S = 60.0
"""Most seconds to wait for a phase."""
USUAL_S = (2.0, 25.0)
"""Least and most seconds until a fault is undone. Workers stay stopped until the next step."""
HOLD_S = {"driver": (2.0, 10.0), "run": (1.0, 4.0)}
"""The same for some victims: a run ends by itself, as it should, at the third checkpoint in a row that has no room."""
WORKERS = ("actor", "rollout", "episode-worker", "reward")
FLUSH_S = 1.1
"""Seconds within which an event is in the file: steps from before a fault do not count."""
SLOW = "16mbit"
"""Of links where a fault is aimed at a transfer, which takes milliseconds else."""
DISK = 2 << 30
"""Bytes of the disk that the machines share."""
RUN = "/tmp/shared/run"
SETTINGS = (
    "cluster.backend=ray",
    f"cluster.address={RAY}",
    f"run.dir={RUN}",
    "rollout.nnodes=2",
    "rollout.total_rollout_steps=1000000",
    "data.task.size=1000000",
    "trainer.save_freq=2",
    "trainer.max_restarts=1000",
    "param_update.timeout_s=10",
    "cluster.max_replica_restarts=1000",
    "reward.function=/tmp/shared/reward.py:score",
    "reports.samples=256",
    "algorithm.filter_groups.enable=false",
    "reports.live=off",
)
REWARD = "def score(response, answer):\n    return float(response.strip() == answer)\n"
"""A function of the user's own has processes of its own, which the recipe's task has not."""
OF_RAY = (
    b"ray::IDLE",
    b"ray.util.client.server",
    b"/ray/",
    b"bin/ray",
    b"raylet",
    b"gcs_server",
    b"ray::Dashboard",
    b"ray::RuntimeEnv",
)
"""Parts of the command lines of Ray's own processes."""


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parser(
        "chaos",
        __doc__,
        faults=8,
        life={"type": float, "default": 8.0, "help": "most seconds from a step to the next fault"},
        seed={"type": int, "default": 0, "help": "of victims and moments"},
        only={"default": None, "help": "KIND:VICTIM[:MOMENT],… in this order, in place of all in a random one"},
        keep={"type": Path, "help": "leave all here, and go on with what is here"},
    ).parse_args(arguments)
    if (missing := why_not()) or not shutil.which("mkfs.ext4") or not shutil.which("tc"):
        sys.exit(f"benchmarks.chaos {missing or 'needs tc and mkfs.ext4'}")
    with tempfile.TemporaryDirectory(prefix="headway-chaos-") as scratch:
        directory = (chosen.keep or Path(scratch)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        disk = directory / "disk.img"
        if not disk.exists():
            with disk.open("wb") as file:
                file.truncate(DISK)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", disk], check=True)
        with machines(directory, {"A": 0, "B": 1, "C": 1}, disk=disk) as made:
            chaos = Chaos(made, directory, chosen)
            problems = chaos.run()
            chaos.growth.close()
            chaos.over.set()
            print(markdown(table(chaos.rows)), chaos.proof, markdown(chaos.growth.table()), sep="\n")
            print("\n".join(problems) or "ledgers balance; nothing was lost, trained twice or left behind")
    sys.exit(bool(problems))


class Ended(Exception):
    """The run has ended by itself."""


class Chaos:
    """The run, and what was done to it."""

    def __init__(self, made: Machines, directory: Path, chosen: Any) -> None:
        self.machines, self.chosen, self.directory = made, chosen, directory
        self.record = directory / "faults.jsonl"
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.directory_of_run = made.shared / "run"
        self.events = self.directory_of_run / "events.jsonl"
        self.kept = made.shared / "journal"
        self.told: set[str] = set()
        """Problems that were found before."""
        self.proof = evidence.Evidence()
        self.over = threading.Event()
        threading.Thread(target=self.keep, daemon=True).start()
        self.attending = self.start()

    def keep(self) -> None:
        """Keep what the journal removes: a version may take less than a second."""
        while not self.over.wait(0.2):
            with suppress(OSError):  # the disk may be full
                evidence.keep(self.directory_of_run, self.kept)

    def pids(self) -> list[int]:
        return [pid for machine in self.machines.by_name.values() for pid in machine.processes("")]

    def start(self) -> subprocess.Popen[bytes]:
        """Start the run, or go on with it."""
        recipe = self.machines.shared / "recipe.yaml"
        recipe.write_bytes((REPOSITORY / DEMO).read_bytes())
        (self.machines.shared / "reward.py").write_text(REWARD)
        given = ["--resume", RUN]
        if not any(self.directory_of_run.glob("checkpoints/version_*")):
            given = ["/tmp/shared/recipe.yaml", *SETTINGS]
            shutil.rmtree(self.directory_of_run, ignore_errors=True)
        output = self.directory / f"run-{len(self.rows)}.txt"
        command = ["headway", "train", *given, "--restarts", str(2 * self.chosen.faults)]
        return self.machines["A"].start(*command, output=output)

    @property
    def attending_pid(self) -> int:
        return first_child(self.attending)

    def run(self) -> list[str]:
        """Return what went wrong, fault after fault and at the end."""
        self.wait(lambda: any(self.directory_of_run.glob("checkpoints/version_*")), "a checkpoint")
        self.next_step(self.size())
        self.growth = Growth(self.pids, self.directory_of_run)  # not before: a start takes memory that stays
        while (number := len(self.rows)) < self.chosen.faults:
            row = self.one(number)
            self.rows.append(row)
            with self.record.open("a") as file:
                file.write(json.dumps(row) + "\n")
            say(" ".join(f"{key} {value}" for key, value in row.items()))
            if row["seconds"] is None:
                break
        problems = [f"fault {row['fault']}, {row['what']}: {one}" for row in self.rows for one in row["wrong"]]
        if problems and self.rows[-1]["seconds"] is None:
            return [*problems, self.last_words()]
        os.kill(self.attending_pid, signal.SIGINT)
        try:
            self.attending.wait(GOES_ON_S)
        except subprocess.TimeoutExpired:
            return [*problems, f"the run did not end within {GOES_ON_S:g} s of SIGINT", self.last_words()]
        return problems + self.wrong() + check(self.directory_of_run) + self.left_behind()

    def one(self, number: int) -> dict[str, Any]:
        """One fault, decided by the seed and its number."""
        chance = random.Random(f"{self.chosen.seed}-{number}")
        names = self.chosen.only.split(",") if self.chosen.only else shuffled(FAULTS, self.chosen.seed, number)
        kind, victim, *given = names[number % len(names)].split(":")
        moment = given[0] if given else chance.choice(MOMENTS)
        row = {"fault": number, "what": f"{kind}:{victim}", "moment": moment, "hit": "", "seconds": None, "wrong": []}
        undos = [self.machines.slow(name, SLOW) for name in "BC" if moment in ("send", "recv")]
        row["hit"], strike = self.soon(lambda: self.aimed(row["what"], chance)) or ("nobody", lambda: lambda: None)
        self.await_moment(moment, chance)
        undos.append(strike())
        began = time.monotonic()
        fenced = kind == "stop" and victim in WORKERS
        hold = GOES_ON_S / 2 if fenced else chance.uniform(*HOLD_S.get(victim, USUAL_S))
        time.sleep(FLUSH_S)
        since = self.size()
        with suppress(TimeoutError, Ended):
            row["seconds"] = round(self.next_step(since, hold, tend=False) - began, 1)
        if kind != "kill" and not fenced:
            time.sleep(max(0.0, began + hold - time.monotonic()))
        for undo in undos:
            undo()
        self.boot()
        for again in (True, False):
            try:
                row["seconds"] = row["seconds"] or round(self.next_step(since) - began, 1)
                self.next_step(self.size())
                break
            except (TimeoutError, Ended) as failure:
                row["wrong"].append(str(failure))
                if not again or isinstance(failure, TimeoutError):
                    row["seconds"] = None
                    return row
                self.attending = self.start()
        row["wrong"] += self.wrong(tokens=number % 5 == 4)
        return row

    def aimed(self, what: str, chance: random.Random) -> tuple[str, Strike] | None:
        with suppress(LookupError):
            return aim(what, self.machines, self.attending_pid, chance)
        return None

    # ---------------------------------------------------------------------------------------- when

    def await_moment(self, moment: str, chance: random.Random) -> None:
        """Wait for a random moment, or for one in a phase."""
        folder = self.directory_of_run / "checkpoints"
        if moment == "any":
            time.sleep(chance.uniform(0.0, self.chosen.life))
        elif moment in UPDATE or moment == "copy":
            took = defaultdict(float)
            for event in self.recent("update.phase"):
                took[event["phase"]] = event["seconds"]
            before = sum(took[phase] for phase in UPDATE[: UPDATE.index(moment)]) if moment in UPDATE else 0.0
            since = self.size()
            versions = range(10**9) if moment in UPDATE else range(0, 10**9, 2)
            self.soon(lambda: [one for one in self.new("version.reached", since) if one["version"] in versions])
            time.sleep(before + took[moment] * chance.random())
        else:
            seen = {path.name for path in folder.iterdir()}
            self.soon(lambda: {path.name for path in folder.glob(CHECKPOINT[moment])} - seen)

    def soon(self, look: Callable[[], Any]) -> Any:
        """What ``look`` finds within `AIM_S`."""
        deadline = time.monotonic() + AIM_S
        while not (found := look()) and time.monotonic() < deadline:
            time.sleep(0.002)
        return found

    def size(self) -> int:
        return self.events.stat().st_size if self.events.exists() else 0

    def new(self, kind: str, since: int) -> list[dict[str, Any]]:
        """Events of one kind behind byte ``since`` of the record. (Times in it go back where a run is resumed.)"""
        if not self.events.exists():
            return []
        with self.events.open("rb") as file:
            file.seek(since)
            lines, mark = file.read().split(b"\n")[:-1], f'"kind": "{kind}"'.encode()
        return [json.loads(line) for line in lines if line.find(mark) == 1]

    def recent(self, kind: str) -> list[dict[str, Any]]:
        return self.new(kind, max(0, self.size() - 200_000))

    def next_step(self, since: int, timeout_s: float = GOES_ON_S, *, tend: bool = True) -> float:
        """Return when the next optimizer step was in the record behind byte ``since``. Raises `TimeoutError` and
        `Ended`."""

        def look() -> bool:
            return bool(self.new("optimizer.stepped", since))

        self.wait(look, "another optimizer step", timeout_s, tend=tend)
        return time.monotonic()

    def boot(self) -> None:
        """Start machines again that are down."""
        for name in ("B", "C"):
            if not self.machines[name].is_up:
                self.machines.boot(name, 1)

    def wait(self, look: Callable[[], bool], what: str, timeout_s: float = GOES_ON_S, *, tend: bool = True) -> None:
        """Wait until ``look`` says so. ``tend``: boot machines that are down. Raises `TimeoutError` and `Ended`."""
        deadline = time.monotonic() + timeout_s
        while not look():
            if self.attending.poll() is not None:
                raise Ended(f"the run ended by itself with {self.attending.returncode}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {timeout_s:g} s")
            if tend:
                self.boot()
            time.sleep(0.1)

    # ---------------------------------------------------------------------------------------- what is wrong

    def wrong(self, *, tokens: bool = True) -> list[str]:
        """Problems of the run so far that were not told before; ``tokens``: those of all trained tokens, too."""
        found = []
        if tokens:
            self.proof = evidence.examine(self.directory_of_run, self.kept)
            found += self.proof.problems
        found += [
            f"the ledger of version {event['version']} does not balance: {counts}"
            for event in self.recent("version.reached")
            for counts in (event["groups"], event["episodes"])
            if sum(counts.values()) != 2 * counts["admitted"]
        ]
        new = [one for one in found if one not in self.told]
        self.told.update(new)
        return new

    def left_behind(self) -> list[str]:
        """What there is of Headway's on the machines, `STRAGGLERS_S` after the run. A port has a process."""
        deadline = time.monotonic() + STRAGGLERS_S
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left

    def leftovers(self) -> list[str]:
        found = []
        for machine in self.machines.by_name.values():
            root = Path(f"/proc/{machine.pid}/root")
            files = [path for folder in ("dev/shm", "tmp") for path in (root / folder).glob("*headway*")]
            found += [f"left on {machine.name}: /{path.relative_to(root)}" for path in files]
            for pid in machine.processes(""):
                if (text := title(pid)) and not any(part in text for part in OF_RAY):
                    found.append(f"left on {machine.name}: process {pid}, {text[:80]!r}")
        return found

    def last_words(self) -> str:
        outputs = sorted(self.directory.glob("run-*.txt"), key=lambda path: path.stat().st_mtime)
        return f"the run's last words: {outputs[-1].read_text(errors='replace')[-500:]}"


def shuffled(names: Sequence[str], seed: int, number: int) -> list[str]:
    """All ``names`` in another order for each round of them."""
    return random.Random(f"{seed}-{number // len(names)}").sample(names, len(names))


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each kind of fault and victim."""
    by_what = defaultdict(list)
    for row in rows:
        by_what[row["what"]].append(row)
    return [
        {
            "fault": what.partition(":")[0],
            "victim": what.partition(":")[2],
            "count": len(ours),
            "median s": median(took) if (took := [row["seconds"] for row in ours if row["seconds"]]) else None,
            "most s": max(took, default=None),
            "went wrong": sum(bool(row["wrong"]) for row in ours),
        }
        for what, ours in sorted(by_what.items())
    ]


def check(directory: Path) -> list[str]:
    """Return problems of the surviving history of a run that has ended, counted from its events alone."""
    events = list(read_events(directory / "events.jsonl"))
    admitted = {event.number: event for event in events if isinstance(event, GroupAdmitted)}
    settled = [event for event in events if isinstance(event, GroupSettled)]
    trained = Counter(
        (admitted[event.number].epoch, admitted[event.number].row) for event in settled if event.fate == "trained"
    )
    metrics, summary = metrics_of(directory), summary_of(directory)
    versions = Counter(row["version"] for row in metrics)
    curve = [row["reward/mean"] for row in metrics if "reward/mean" in row]
    quarter = -(-len(curve) // 4)
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
        "curve: the last quarter's reward is below the first one's": int(
            not curve or fmean(curve[-quarter:]) < fmean(curve[:quarter]) - 0.05
        ),
    }
    print(f"{len(admitted)} groups survive: {dict(Counter(event.fate for event in settled))}")
    return [f"{count} {what}" for what, count in found.items() if count]


if __name__ == "__main__":
    main()
