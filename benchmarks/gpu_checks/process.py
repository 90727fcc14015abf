"""The checks, and the processes that make them: what is found is kept, whatever becomes of a check.

lane "compile"   kernels ▷ training ▷ packing ▷ …     a process for each lane, side by side on a GPU,
lane "tokens"    decoding ▷ … ▷ logprobs              in which its checks follow each other
lane "demo"      demo
lane "alone"     sleep ▷ training_speed ▷ …           when the others have ended: it measures time and memory
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks.setting import Setting

ROOT = Path(__file__).parents[2]
LAST_CHARACTERS = 300
"""The most that an answer quotes of a log."""


@dataclass(frozen=True, slots=True)
class Check:
    function: str
    """``module:name`` in this package; imported by the process that makes the check, and by no other."""
    title: str
    findings: tuple[str, ...]
    """Names of its findings: rows of the table. A check that passes has found something for each."""
    limit_s: float
    """Seconds on a GPU, those included in which its lane's process is started, if it has to be."""
    lane: str = "alone"
    compiled: bool = False
    """It begins when `WARM_UP` has ended, which compiles its kernels."""


WARM_UP = "kernels"
ALONE = "alone"
CHECKS: Mapping[str, Check] = {
    WARM_UP: Check(
        "warm_up:kernels",
        "kernels are compiled, once for all",
        ("head size 64", "head size 128", "windows", "compiled layers"),
        110,
        "compile",
    ),
    "training": Check(
        "training:training",
        "gradient and step are the CPU's",
        ("float32", "bfloat16", "with recomputation"),
        30,
        "compile",
        compiled=True,
    ),
    "packing": Check(
        "packing:gradients",
        "packed rows, shared prompts: the gradient of single rows",
        ("float32", "bfloat16", "head size 128", "windows"),
        45,
        "compile",
        compiled=True,
    ),
    "decoding": Check(
        "engine:decoding",
        "decoding: the same tokens in each way",
        ("CUDA graphs", "interrupt", "mixed prompts", "top-p", "greedy"),
        60,
        "tokens",
    ),
    "logprobs": Check(
        "engine:logprobs",
        "the engine's log-probs are the trainer's",
        ("head size 128", "head size 64", "attention of a prefill"),
        45,
        "tokens",
        compiled=True,
    ),
    "fsdp": Check("training:fsdp", "FSDP2 on all GPUs", ("ranks",), 30, "tokens", compiled=True),
    "transports": Check(
        "transports:transports", "every transport, onto the device", ("transports", "process group"), 45, "weights"
    ),
    "broadcast": Check("transports:broadcast", "broadcast between two processes", ("rate",), 30, "weights"),
    "update": Check(
        "serving:update", "updates while a replica decodes", ("beside decoding", "over the weights"), 35, "weights"
    ),
    "compiled": Check(
        "training:compiled", "compiled layers: the gradient is the CPU's", ("bfloat16",), 60, "weights", compiled=True
    ),
    "demo": Check("demo:demo", "the demo, on this device", ("run", "reward", "validation"), 180, "demo"),
    "sleep": Check(
        "serving:sleep", "sleep frees memory, waking restores", ("weights kept", "weights given up"), 35, ALONE
    ),
    "training_speed": Check(
        "speed:training_speed",
        "training, 0.5 B",
        ("headway", "plain step", "with recomputation", "compiled layers"),
        60,
    ),
    "decoding_speed": Check(
        "speed:decoding_speed", "decoding, 0.5 B", ("native", "top-p", "transformers.generate", "without graphs"), 60
    ),
    "steps": Check(
        "steps:steps",
        "where a step's time goes, 0.5 B",
        ("decode step", "train step", "16 prompts of 16 lengths", "interrupt"),
        40,
    ),
    "updating_speed": Check("updating:updating_speed", "seconds of an update", ("0.5 B", "7 B"), 50),
    "packing_speed": Check(
        "packing:speed", "training by the layout of rows, 0.5 B", ("padded", "packed", "shared"), 35
    ),
}
"""By name. Those of a lane are made in this order: what has to be right first, how fast it is last."""


class Lane:
    """A process that makes one check after the other. The next check starts one that has ended again.

    Its other output, and that of all processes that it started, goes to ``log``; these end with it.
    """

    def __init__(self, setting: Setting, log: Path) -> None:
        fields = {**asdict(setting), "scratch": str(setting.scratch)}
        self.command = [sys.executable, "-m", "benchmarks.gpu_checks", json.dumps(fields)]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        log.unlink(missing_ok=True)

    def make(self, name: str, limit_s: float, hear: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Return the ``outcome`` of a check, its ``reason`` and ``seconds``, after at most ``limit_s``.

        ``hear`` gets every other message of the process as it comes.
        """
        started = time.monotonic()
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # what became of it is said below
            process.stdin.write(f"{name}\n".encode())
            process.stdin.flush()
        ended = os.pidfd_open(process.pid)
        poll, unread = select.poll(), b""
        for one in (process.stdout.fileno(), ended):
            poll.register(one, select.POLLIN)
        became = f"it was not over after {limit_s:.0f} s"
        try:
            while ready := dict(poll.poll(max(0.0, started + limit_s - time.monotonic()) * 1000)):
                if not (ready.get(process.stdout.fileno(), 0) & select.POLLIN):
                    became = f"its process {_ended(process.wait())}"
                    break
                unread += os.read(process.stdout.fileno(), 2**16)
                *lines, unread = unread.split(b"\n")
                for message in map(json.loads, lines):
                    if "outcome" not in message:
                        hear(message)
                        continue
                    if message["outcome"] == "failed":  # the process ends, and all that the check has left
                        self.stop()
                    return {**message, "seconds": time.monotonic() - started}
        finally:
            os.close(ended)
        self.stop()
        reason = f"{became}; the last that it printed: {self._last()}"
        return {"outcome": "failed", "reason": reason, "seconds": time.monotonic() - started}

    def stop(self) -> None:
        """End the process, and all that it started."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        from headway.cluster.machine.worker_setup import math_environment  # Headway can be run, it is known by now

        path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        # Those of Headway's own processes but for the number of threads, and never a look at the network.
        own = {name: value for name, value in math_environment(0).items() if not name.endswith("_NUM_THREADS")}
        environment = {**own, "HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": path}
        pipe = subprocess.PIPE
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True
            )

    def _last(self) -> str:
        text = " ".join(self._log.read_text(encoding="utf-8", errors="replace").split())
        return text[-LAST_CHARACTERS:] or "nothing"


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    known = -code in {one.value for one in signal.Signals}
    return f"was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"
