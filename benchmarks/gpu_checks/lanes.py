"""The checks, and the processes that make them: what is found is kept, whatever becomes of a check.

lane "compile"   kernels ▷ training ▷ packing ▷ …     a process for each lane, side by side on a GPU,
lane "tokens"    decoding ▷ … ▷ logprobs              in which its checks follow each other
lane "demo"      demo
lane "alone"     sleep ▷ training_speed ▷ …           when the others have ended: it measures time and memory

    python -m benchmarks.gpu_checks.lanes SETTING

is a lane's process. SETTING is a `Setting` as JSON. It says what it is (``machine``), makes the checks that it is asked
for by name, and says each ``finding`` as soon as it is known.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks.setting import CheckFailed, Finding, Setting, Skipped
from benchmarks.runner import Failed, Hear, TimedOut, Worker, serve

ROOT = Path(__file__).parents[2]


WARM_UP, ALONE = "kernels", "alone"
LANES: Mapping[str, str] = {
    "compile": """
        kernels 120 training:kernels             head size 64, head size 128, windows, compiled layers
        training 30 training:training +          float32, bfloat16, with recomputation
        packing 45 training:gradients +          float32, bfloat16, head size 128, windows""",
    "tokens": """
        decoding 60 engine:decoding              CUDA graphs, interrupt, running ahead, mixed prompts, top-p, greedy
        logprobs 45 engine:logprobs +            head size 128, head size 64, attention of a prefill
        fsdp 30 training:fsdp +                  ranks""",
    "weights": """
        transports 45 transports:transports      transports, process group
        broadcast 30 transports:broadcast        rate
        update 35 serving:update                 beside decoding, over the weights
        compiled 60 training:compiled +          float32, bfloat16""",
    "demo": """
        demo 180 demo:demo                       run, reward, validation""",
    ALONE: """
        sleep 35 serving:sleep                   weights kept, weights given up
        training_speed 60 speed:training_speed   headway, plain step, compiled layers
        decoding_speed 60 speed:decoding_speed   native, transformers.generate
        steps 40 speed:steps                     decode step, interrupt, train step
        updating_speed 50 transports:updating_speed    0.5 B, 7 B""",
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
    """A process that makes one check after the other. What they print goes to ``log``.

    A check that failed ends it, and all that was started there: the next one begins in a new one.
    """

    def __init__(self, setting: Setting, log: Path) -> None:
        from headway.cluster.machine.worker_setup import math_environment  # Headway can be run, it is known by now

        path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        # Those of Headway's own processes but for the number of threads, and never a look at the network.
        own = {name: value for name, value in math_environment(0).items() if not name.endswith("_NUM_THREADS")}
        fields = {**asdict(setting), "scratch": str(setting.scratch)}
        self.worker = Worker(
            [sys.executable, "-m", "benchmarks.gpu_checks.lanes", json.dumps(fields)],
            log,
            {**own, "HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": path},
            retried=True,
        )

    def make(self, name: str, limit_s: float, hear: Hear) -> dict[str, Any]:
        """Return the ``outcome`` of a check, its ``reason`` and ``seconds``, after at most ``limit_s``.

        ``hear`` gets every other message of the process as it comes.
        """
        started = time.monotonic()
        try:
            self.worker.start(limit_s, hear)
            ended = self.worker.ask(name, limit_s - (time.monotonic() - started), hear)
        except TimedOut:
            reason = f"it was not over after {limit_s:.0f} s; {self.worker.last_words()}"
            ended = {"outcome": "failed", "reason": reason}
        except Failed as error:
            ended = {"outcome": "failed", "reason": str(error)}
        if ended["outcome"] == "failed":
            self.stop()
        return {**ended, "seconds": time.monotonic() - started}

    def stop(self) -> None:
        self.worker.stop(by_force=True)


# ---------------------------------------------------------------------------------------- the lane's process


def load(setting_json: str, say: Hear) -> Callable[[str], dict[str, str]]:
    fields = json.loads(setting_json)
    setting = Setting(**{**fields, "scratch": Path(fields["scratch"])})
    say({"machine": described(setting)})

    def make(name: str) -> dict[str, str]:
        print(f"== {name}", file=sys.stderr, flush=True)
        ended = outcome(name, setting, lambda finding: say({"finding": asdict(finding)}))
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()  # torch compiles so many variants of a function in a process, and no more
        setting.give_back()
        return ended

    return make


def outcome(name: str, setting: Setting, say: Callable[[Finding], None]) -> dict[str, str]:
    """How the check ended, whatever it raised, and why."""
    try:
        module, function = CHECKS[name].function.split(":")
        missing = set(CHECKS[name].findings)
        for finding in getattr(import_module(f"benchmarks.gpu_checks.{module}"), function)(setting):
            say(finding)
            missing.discard(finding.name)
    except Skipped as reason:
        return {"outcome": "skipped", "reason": str(reason)}
    except CheckFailed as failure:
        return {"outcome": "failed", "reason": str(failure)}
    except Exception as error:
        traceback.print_exc()
        return {"outcome": "failed", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    if missing:
        return {"outcome": "failed", "reason": f"it found nothing for {', '.join(sorted(missing))}"}
    return {"outcome": "passed", "reason": ""}


def described(setting: Setting) -> dict[str, str]:
    """The device and the libraries."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    device = "CPU form, small" if setting.small else "CPU form"
    if setting.on_gpu:
        gibibytes = (setting.kind.total_memory("cuda:0") or 0) / 2**30
        device = f"{setting.kind.count()} × {setting.kind.device_name('cuda:0')}, {gibibytes:.0f} GiB"
    libraries = {one.__name__: f"{one.__name__} {one.__version__}" for one in (torch, transformers)}
    return {"device": device, **libraries, "python": f"Python {sys.version.split()[0]}"}


if __name__ == "__main__":
    serve(lambda say: load(sys.argv[1], say))
