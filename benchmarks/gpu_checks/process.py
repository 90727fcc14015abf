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
LOOK_S = 1.0
"""Seconds after which a process that says nothing is looked at: it may have ended, and one that it forked live on."""
LAST_CHARACTERS = 300
"""The most that an answer quotes of a log."""


WARM_UP, ALONE = "kernels", "alone"
LANES: Mapping[str, str] = {
    "compile": """
        kernels 110 packing:kernels              head size 64, head size 128, windows, compiled layers
        training 30 training:training +          float32, bfloat16, with recomputation
        packing 45 packing:gradients +           float32, bfloat16, head size 128, windows""",
    "tokens": """
        decoding 60 engine:decoding              CUDA graphs, interrupt, running ahead, mixed prompts, top-p, greedy
        logprobs 45 engine:logprobs +            head size 128, head size 64, attention of a prefill
        fsdp 30 training:fsdp +                  ranks""",
    "weights": """
        transports 45 transports:transports      transports, process group
        broadcast 30 transports:broadcast        rate
        update 35 serving:update                 beside decoding, over the weights
        compiled 60 training:compiled +          bfloat16""",
    "demo": """
        demo 180 demo:demo                       run, reward, validation""",
    ALONE: """
        sleep 35 serving:sleep                   weights kept, weights given up
        training_speed 60 speed:training_speed   headway, plain step, with recomputation, compiled layers
        decoding_speed 60 speed:decoding_speed   native, top-p, transformers.generate, without graphs
        steps 40 speed:steps                     decode step, train step, 16 prompts of 16 lengths, interrupt
        updating_speed 50 transports:updating_speed    0.5 B, 7 B
        packing_speed 35 packing:speed           padded, packed, shared""",
}
"""Checks by lane, in their order: name, seconds on a GPU, function, and findings; +: after `WARM_UP`, which compiles
its kernels. The seconds include those in which the lane's process is started."""


@dataclass(frozen=True, slots=True)
class Check:
    lane: str
    limit_s: float
    function: str
    """``module:name`` in this package; imported by the process that makes the check, and by no other."""
    compiled: bool
    """It begins when `WARM_UP` has ended."""
    findings: tuple[str, ...]
    """Names of its findings: rows of the table. A check that passes has found something for each."""


def _listed(lane: str, line: str) -> tuple[str, Check]:
    head, _, findings = line.strip().partition("  ")
    name, limit_s, function, *compiled = head.split()
    return name, Check(lane, float(limit_s), function, bool(compiled), tuple(findings.strip().split(", ")))


CHECKS = dict(_listed(lane, line) for lane, lines in LANES.items() for line in lines.strip().splitlines())
"""By name: what has to be right first, how fast it is last."""


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
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # what became of it is said below
            process.stdin.write(f"{name}\n".encode())
            process.stdin.flush()
        output, unread = process.stdout.fileno(), b""
        became = f"it was not over after {limit_s:.0f} s"
        while (left := started + limit_s - time.monotonic()) > 0:
            readable = select.select([output], [], [], min(left, LOOK_S))[0]
            if not readable and process.poll() is None:
                continue
            if not (read := os.read(output, 2**16) if readable else b""):
                with suppress(subprocess.TimeoutExpired):
                    became = f"its process {_ended(process.wait(LOOK_S))}"
                break
            *lines, unread = (unread + read).split(b"\n")
            for message in map(json.loads, lines):
                if "outcome" not in message:
                    hear(message)
                    continue
                if message["outcome"] == "failed":  # the process ends, and all that the check has left
                    self.stop()
                return {**message, "seconds": time.monotonic() - started}
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
