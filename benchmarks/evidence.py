"""``python -m benchmarks.evidence RUN``: tokens that a run was trained on, beside those that engines sampled, as bytes.

    journal/: completions, written before anybody acted on them ──┐
                                                                  ├ each trained token is one that was sampled, once
    samples.jsonl: rows, as a training rank had them ─────────────┘

A token is its id, version and log-prob: ids and versions are compared exactly, log-probs to the digits that
samples.jsonl has. ``--other`` is an undisturbed run of the same recipe: what both trained under one group number is
compared, too. The run needs ``reports.samples`` of at least the groups of a version, so that each group leaves a
sample. A journal loses files that no checkpoint needs; `keep` links them before that, while a run goes on.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import parser
from headway.data.journal import records, segments
from headway.errors import UserError
from headway.pipeline.admission.sample_collector import rounded
from headway.reports.run_directory import RunDirectory
from headway.reports.samples.samples_file import read_samples

SIZE = 16
"""Bytes of a token that is compared: id, version and log-prob."""

Episode = tuple[int, int]
"""Number of the group, and k."""


@dataclass(slots=True)
class Evidence:
    """Outcome of a comparison. ``problems`` has a line for each thing that is wrong; none is the proof."""

    compared: int = 0
    """Trained tokens that were found among the sampled ones."""
    groups: int = 0
    """Groups that were compared."""
    unproved: int = 0
    """Trained groups of whose episodes the journal, or the sample, has too little."""
    alike: int = 0
    """Groups that two runs trained on, with the same bytes."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.compared:,} trained tokens of {self.groups} groups are bytes that were sampled; "
            f"{self.unproved} groups unproved, {self.alike} alike in both runs, {len(self.problems)} problems"
        )


def keep(run: Path, into: Path) -> None:
    """Link the journal's files of ``run`` into the folder ``into``, where they outlive their removal. They grow there,
    too: call it from time to time, at least once for each checkpoint.
    """
    into.mkdir(parents=True, exist_ok=True)
    for path in segments(run / "journal"):
        with suppress(FileExistsError, FileNotFoundError):
            os.link(path, into / path.name)


def sampled(journal: Path) -> dict[Episode, list[bytes]]:
    """Return the completions in the folder ``journal``, each the bytes of its tokens."""
    found: dict[Episode, list[bytes]] = defaultdict(list)
    for path in segments(journal):
        for values, data, _ in records(path):
            if values.get("kind") == "completion":
                ids, logprobs, versions = np.frombuffer(data, np.int32).reshape(3, -1)
                tokens = _bytes(ids, versions, rounded(logprobs.view(np.float32)))
                found[values["group"], values["trajectory"][-1]].append(tokens)
    return found


def trained(run: Path) -> Iterator[tuple[int, dict[int, list[bytes]], bool]]:
    """Yield each trained group's number, the sampled tokens in its rows by k, as runs without a hole, and whether the
    sample has all of them.
    """
    last = {sample["group"]: sample for sample in read_samples(run / "samples.jsonl", what="group")}
    for number, sample in sorted(last.items()):
        if sample["fate"] == "trained":
            rows = [(episode["k"], row) for episode in sample["episodes"] for row in episode["rows"]]
            spans: dict[int, list[bytes]] = defaultdict(list)
            for k, row in rows:
                spans[k] += _spans(row)
            yield number, spans, "shortened" not in sample and bool(rows) and not any(row["cut"] for _, row in rows)


def examine(run: Path, journal: Path | None = None) -> Evidence:
    """Compare what ``run`` was trained on with what was sampled for it. ``journal``: where `keep` linked its files."""
    evidence, completions = Evidence(), sampled(journal or run / "journal")
    for number, episodes, whole in trained(run):
        if not whole or any((number, k) not in completions for k in episodes):
            evidence.unproved += 1
            continue
        evidence.groups += 1
        for k, spans in episodes.items():
            evidence.compared += sum(map(len, spans)) // SIZE
            if problem := _unsampled(spans, completions[number, k]):
                evidence.problems.append(f"group {number}, episode {k}: {problem}")
    if not evidence.groups:
        evidence.problems.append(f"nothing could be compared: {run} has no samples of trained groups in its journal")
    return evidence


def compare(evidence: Evidence, run: Path, other: Path) -> None:
    """Add to ``evidence`` what two runs of one recipe were trained on under the same numbers. Tokens alone are equal
    where decoding does not depend on what is decoded beside it, and no version came earlier or later.
    """
    there = {number: spans for number, spans, _ in trained(other)}
    for number, spans, _ in trained(run):
        if number not in there:
            evidence.problems.append(f"group {number} was trained in {run}, and not in {other}")
        elif spans != there[number]:
            evidence.problems.append(f"group {number} was trained on other tokens than in {other}")
        else:
            evidence.alike += 1


def _bytes(ids: Any, versions: Any, logprobs: Iterable[float]) -> bytes:
    tokens = np.zeros(len(ids), [("id", np.int32), ("version", np.int32), ("logprob", np.float64)])
    tokens["id"], tokens["version"], tokens["logprob"] = ids, versions, list(logprobs)
    return tokens.tobytes()


def _spans(row: dict[str, Any]) -> list[bytes]:
    """The runs of trained tokens in a row."""
    tokens = _bytes(row["ids"], row["versions"], row["behaviour"])
    mask = np.concatenate([[0], np.asarray(row["mask"], np.int8), [0]])
    edges = np.flatnonzero(np.diff(mask)).reshape(-1, 2)
    return [tokens[SIZE * start : SIZE * stop] for start, stop in edges.tolist()]


def _unsampled(spans: Sequence[bytes], completions: Sequence[bytes]) -> str | None:
    """Say which of ``spans`` is not made of ``completions``, or uses one of them twice; None where all is well."""
    left = sorted(completions, key=len, reverse=True)
    for span in sorted(spans, key=len, reverse=True):
        at = 0
        while at < len(span):
            one = next((one for one in left if span.startswith(one, at) or one.startswith(span[at:])), None)
            if one is None:
                again = any(span.startswith(one, at) for one in completions)
                return f"{(len(span) - at) // SIZE} tokens " + ("are trained twice" if again else "were never sampled")
            left.remove(one)
            at += len(one)
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(
        "evidence",
        __doc__,
        journal={"type": Path, "help": "folder that the journal's files were linked into"},
        other={"type": Path, "help": "directory of an undisturbed run of the same recipe"},
    )
    made.add_argument("run", type=Path, help="directory of a run that has ended")
    chosen = made.parse_args(arguments)
    try:
        for run in filter(None, (chosen.run, chosen.other)):
            RunDirectory.existing(run)
    except UserError as refused:
        made.error(str(refused))
    evidence = examine(chosen.run, chosen.journal)
    if chosen.other is not None:
        compare(evidence, chosen.run, chosen.other)
    print("\n".join([*evidence.problems[:20], str(evidence)]))
    sys.exit(bool(evidence.problems))


if __name__ == "__main__":
    main()
