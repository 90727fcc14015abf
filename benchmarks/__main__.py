"""``python -m benchmarks [NAME] [options]``: ``python -m benchmarks.NAME``; the main job unless told otherwise."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "main_job"
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
