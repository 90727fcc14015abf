"""Real runs of the demo for benchmarks: as a user starts them, in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

RECIPE = Path("recipes/demo.yaml")
WARMED_UP = 64
"""Groups of the run whose warmed-up model is used; it has to train something."""
TIMEOUT_S = 900


def warmed_up_model(scratch: Path, *settings: str) -> Path:
    """The recipe's model after warm-up, made once for all runs."""
    directory = scratch / "model-run"
    train(directory, *settings, f"rollout.total_rollout_steps={WARMED_UP}")
    return Path(shutil.copytree(directory / "initial_model", scratch / "model"))


def train(directory: Path, *settings: str) -> Path:
    """``headway train`` to its end; a run that fails ends the benchmark with its output."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}  # as Headway's own processes have it
    command = [sys.executable, "-m", "headway", "train", str(RECIPE), *settings, f"run.dir={directory}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return directory
