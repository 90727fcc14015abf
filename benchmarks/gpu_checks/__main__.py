"""``python -m benchmarks.gpu_checks SETTING``: a lane's process, which makes the checks that it is asked for by name.

SETTING is a `Setting` as JSON. It says what it is (``machine``), and each ``finding`` as soon as it is known.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from benchmarks.gpu_checks.process import CHECKS
from benchmarks.gpu_checks.setting import CheckFailed, Finding, Setting, Skipped
from benchmarks.runner import Hear, serve


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
