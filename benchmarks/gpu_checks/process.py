"""The checks, each in a process of its own: there is an answer whatever becomes of it, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks.setting import Setting

ROOT = Path(__file__).parents[2]
RUNNING: set[int] = set()
"""Process groups of the checks that are being made."""
LAST_CHARACTERS = 300
"""The most that an answer quotes of a log."""


@dataclass(frozen=True, slots=True)
class Check:
    function: str
    """``module:name`` in this package; imported by the process that makes the check, and by no other."""
    title: str
    limit_s: float
    """Seconds from the start of its process, or what is left of the run's."""
    alone: bool = False
    """It measures time, or the device's free memory: no other check is made beside it."""


CHECKS: Mapping[str, Check] = {
    "logprobs": Check("engine:logprobs", "the engine's log-probs are the trainer's", 90),
    "decoding": Check("engine:decoding", "decoding, prefill, CUDA graphs: the same tokens", 90),
    "training": Check("training:training", "gradient and step are the CPU's", 90),
    "packing": Check("packing:gradients", "packed rows, shared prompts: the gradient of single rows", 120),
    "compiled": Check("training:compiled", "compiled layers: the gradient is the CPU's", 120),
    "fsdp": Check("training:fsdp", "FSDP2 on all GPUs", 90),
    "transports": Check("transports:transports", "every transport, onto the device", 60),
    "broadcast": Check("transports:broadcast", "broadcast between two processes", 90),
    "update": Check("serving:update", "updates while a replica decodes", 90),
    "demo": Check("demo:demo", "the demo, on this device", 150),
    "sleep": Check("serving:sleep", "sleep frees memory, waking restores", 60, alone=True),
    "training_speed": Check("speed:training_speed", "training, 0.5 B", 120, alone=True),
    "packing_speed": Check("packing:speed", "training by the layout of rows, 0.5 B", 120, alone=True),
    "decoding_speed": Check("speed:decoding_speed", "decoding, 0.5 B", 150, alone=True),
}
"""By name, in the order in which they are made: what has to be right first, how fast it is last."""


def command(name: str, setting: Setting, answer: Path) -> list[str]:
    fields = {**asdict(setting), "scratch": str(setting.scratch)}
    return [sys.executable, "-m", "benchmarks.gpu_checks", name, json.dumps(fields), str(answer)]


def answer_of(command: Sequence[str], answer: Path, log: Path, limit_s: float) -> dict[str, Any]:
    """Run ``command``, which writes ``answer``, for at most ``limit_s``; what it answered, or what became of it.

    Its output, and that of all processes that it started, goes to ``log``; these end with it.
    """
    from headway.cluster.machine.worker_setup import math_environment  # it is known by now that Headway can be run

    answer.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # Those of Headway's own processes but for the number of threads, and never a look at the network.
    own = {name: value for name, value in math_environment(0).items() if not name.endswith("_NUM_THREADS")}
    environment = {**own, "HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": path}
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    RUNNING.add(process.pid)
    try:
        process.wait(limit_s)
        became = "" if process.returncode == 0 else f"its process {_ended(process.returncode)}"
    except subprocess.TimeoutExpired:
        became = f"it was not over after {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        RUNNING.discard(process.pid)
    if not became and answer.exists():
        return dict(json.loads(answer.read_text(encoding="utf-8")))
    became = became or "its process ended without an answer"
    lines = [f"{became}; the last that it printed: {_last(log)}"]
    return {"outcome": "failed", "lines": lines, "figures": {}, "seconds": time.monotonic() - started}


def end_all() -> None:
    """End the checks that other threads are waiting for."""
    for group in tuple(RUNNING):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    known = -code in {one.value for one in signal.Signals}
    return f"was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _last(log: Path) -> str:
    text = " ".join(log.read_text(encoding="utf-8", errors="replace").split())
    return text[-LAST_CHARACTERS:] or "nothing"
