"""Runs to look at: events with the metrics of learning and two sources, samples, and a run's directory made of both."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.events import (
    Event,
    GroupAdmitted,
    OptimizerStepped,
    TrajectoryFinished,
    UpdateFinished,
    ValidationFinished,
    VersionReached,
)
from headway.reports.record.events_file import DENSE_PREFIXES, look_through, to_json_line
from tests.reports.scripted_run import ScriptedRun

SOURCES = ("addition", "word problems")
WORDS = (
    "Let",
    " us",
    " add",
    " the",
    " two",
    " numbers",
    ":\n",
    " 17",
    " +",
    " 25",
    " =",
    " 42",
    ".",
    " So",
    " <answer>",
)


def story(versions: int = 4, per_version: int = 4, n: int = 2, *, programs: bool = True) -> list[Event]:
    """A whole run with two sources, validated by source, whose episodes programs made."""
    events: list[Event] = []
    for event in ScriptedRun(versions=versions, per_version=per_version, n=n, discard_every=11).build():
        events.append(_told(event, programs))
        if isinstance(event, UpdateFinished):
            events.append(VersionReached(time=event.time, version=event.version, groups={}))
    return events


def _told(event: Event, programs: bool) -> Event:
    match event:
        case GroupAdmitted():
            return replace(event, source=SOURCES[event.number % 2])
        case TrajectoryFinished() if programs:
            return replace(event, turns=1 + event.number % 3, metrics={"environment_s": 0.1})
        case OptimizerStepped():
            rng, v = random.Random(event.version), event.version
            further = {
                "approx_kl": 0.002 + 0.001 * rng.random(),
                "ref_kl": 0.02 * (1 - math.exp(-v / 60)),
                "offpolicy/ess": 0.97 - 0.1 * rng.random(),
                "offpolicy/kl": 0.003 + 0.002 * rng.random(),
                "offpolicy/clip_fraction": 0.03 * rng.random(),
            }
            return replace(event, metrics=event.metrics | further)
        case ValidationFinished():
            by_source = dict(zip(SOURCES, (event.accuracy + 0.02, event.accuracy - 0.02), strict=True))
            return replace(event, by_source=by_source)
    return event


def sample(number: int, version: int, *, tokens: int = 40, episodes: int = 2, rows: int = 1) -> dict[str, Any]:
    """A trained group as ``samples.jsonl`` has it."""
    rng = random.Random(number)
    return {
        "group": number,
        "version": version,
        "source": SOURCES[number % 2],
        "fate": "trained",
        "reason": None,
        "lag": 1,
        "prompt": "What is 17 + 25? <b>Think</b>, then answer.",
        "messages": None,
        "answer": "42",
        "baseline": None,
        "times": {"admitted": 101.0, "generated": 103.5, "rewarded": 103.6, "settled": 107.0},
        "episodes": [_episode(rng, k, version, tokens, rows) for k in range(episodes)],
    }


def _episode(rng: random.Random, k: int, version: int, tokens: int, rows: int) -> dict[str, Any]:
    return {
        "k": k,
        "replica": "rollout-0",
        "reward": float(k % 2),
        "parts": {"exact": float(k % 2), "format": None},
        "turns": 1,
        "turn_rewards": [],
        "length": tokens,
        "finish": "stop",
        "limit": None,
        "failure": None,
        "started": 101.2,
        "finished": 103.0 + 0.1 * k,
        "waited_s": 0.0,
        "worked_s": 0.0,
        "text": "".join(WORDS[i % len(WORDS)] for i in range(tokens)),
        "conversation": None,
        "rows": [_row(rng, version, tokens) for _ in range(rows)],
    }


def _row(rng: random.Random, version: int, tokens: int) -> dict[str, Any]:
    mask = [0 if 10 <= i % 20 < 13 else 1 for i in range(tokens)]
    behaviour = [round(-2 * rng.random() ** 3, 5) for _ in range(tokens)]
    return {
        "context": None,
        "prompt_length": 9,
        "cut": 0,
        "ids": list(range(tokens)),
        "pieces": [WORDS[i % len(WORDS)] for i in range(tokens)],
        "mask": mask,
        "versions": [-1 if not on else max(version - 1, 0) if i < tokens / 3 else version for i, on in enumerate(mask)],
        "behaviour": behaviour,
        "logprobs": [round(value + rng.gauss(0, 0.02), 5) for value in behaviour],
        "entropy": [round(rng.random(), 5) for _ in range(tokens)],
        "columns": {"advantages": [0.7 if i % 2 else -0.7 for i in range(tokens)]},
    }


def validated(version: int, problem: int) -> dict[str, Any]:
    """A held-out problem's sample."""
    episode = {
        "k": 0,
        "reward": 1.0,
        "parts": {},
        "turns": 1,
        "length": 12,
        "finish": "stop",
        "text": "It is 42.",
        "conversation": None,
    }
    return {
        "validation": version,
        "problem": problem,
        "source": SOURCES[0],
        "prompt": "What is 40 + 2?",
        "answer": "42",
        "time": 1.0,
        "episodes": [episode],
    }


def lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(f"{to_json_line(row)}\n" for row in rows)


def written(
    run: Path, events: Sequence[Event], samples: Sequence[dict[str, Any]] = (), config: dict[str, Any] | None = None
) -> Path:
    """Write a run's directory: its events, samples and settings."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "events.jsonl").write_text(lines(event.to_json() for event in events))
    (run / "config.yaml").write_text(json.dumps(config or {"mode": "async_partial", "run": {"dir": str(run)}}))
    if samples:
        (run / "samples.jsonl").write_text(lines(samples))
    return run


def only_late(run: Path, versions: int = 3) -> Path:
    """Let frequent events before the last ``versions`` be no events: nobody may parse them."""
    begin = sorted(look_through(run / "events.jsonl").boundaries.values())[-1 - versions]
    at, kept = 0, []
    for line in (run / "events.jsonl").read_bytes().splitlines(keepends=True):
        kept.append(line.replace(b'"time"', b'"emit"', 1) if at < begin and line.startswith(DENSE_PREFIXES) else line)
        at += len(line)
    (run / "events.jsonl").write_bytes(b"".join(kept))
    return run
