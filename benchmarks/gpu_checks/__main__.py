"""``python -m benchmarks.gpu_checks NAME SETTING ANSWER``: one check in this process, its answer in a file.

SETTING is a `Setting` as JSON. What the check prints goes where this process's output goes. There is no answer where
the process ends before the check does: whoever started it has to say so.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks.process import CHECKS
from benchmarks.gpu_checks.setting import CheckFailed, Passed, Setting, Skipped


def main(name: str, setting_json: str, answer: str) -> None:
    fields = json.loads(setting_json)
    setting = Setting(**{**fields, "scratch": Path(fields["scratch"])})
    started = time.monotonic()
    said = outcome(name, setting)
    Path(answer).write_text(json.dumps({**said, "seconds": time.monotonic() - started}), encoding="utf-8")


def outcome(name: str, setting: Setting) -> dict[str, Any]:
    """How the check ended, whatever it raised."""
    try:
        module, function = CHECKS[name].function.split(":")
        passed: Passed = getattr(import_module(f"benchmarks.gpu_checks.{module}"), function)(setting)
    except Skipped as reason:
        return {"outcome": "skipped", "lines": [str(reason)], "figures": {}}
    except CheckFailed as failure:
        return {"outcome": "failed", "lines": [str(failure)], "figures": {}}
    except Exception as error:
        traceback.print_exc()
        told = " ".join(str(error).split())[:500]
        return {"outcome": "failed", "lines": [f"{type(error).__name__}: {told}"], "figures": {}}
    return {"outcome": "passed", "lines": passed.lines, "figures": passed.figures}


if __name__ == "__main__":
    main(*sys.argv[1:])
