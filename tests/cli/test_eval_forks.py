"""``headway eval`` with vLLM on a GPU: vLLM forks its workers, and a process that has started CUDA must not fork.

Everything up to vLLM's first import is Headway's own; vLLM is a stand-in that forks at once. Where torch is no CUDA
build (``make test-fake-cuda`` has one), its functions in C have stand-ins that keep CUDA's rule; those in Python are
torch's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headway
from tests.cli.evaluations import SHORT, write

GPU = """
import os
import torch
from headway import devices
from headway.cli import main

started = []
def starts(answer):
    return lambda *_: started.append(os.getpid()) or answer

if torch.version.cuda is None:
    torch.version.cuda, torch.cuda._cudart, torch._C._cuda_getCurrentRawStream = "13.0", object(), None
    torch._C._cuda_getDeviceCount, torch._C._cuda_init = starts(1), starts(None)
    torch.cuda._is_in_bad_fork = lambda: bool(started) and started[0] != os.getpid()
devices.listed_gpus = lambda: [("GPU-1", 80 * 2**30)]
main()
"""
VLLM = """
import os, torch

def fork():
    if (child := os.fork()) == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    return "bad" if os.waitpid(child, 0)[1] else "good"

first = fork()
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
torch.cuda.is_available()
raise RuntimeError(f"a fork is {first}, and {fork()} after torch's own check")
"""


@pytest.mark.slow
def test_vllm_can_fork_after_all_that_goes_before_it(tiny: Path, tmp_path: Path) -> None:
    """In a process of its own, whose imports take seconds. A part of a GPU is the hardest: torch asks CUDA for it."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "config.py").write_text(VLLM)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(headway.__file__).parents[1]}"}
    environment.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    data = write(tmp_path / "test.jsonl", [{"prompt": "1=", "answer": "1"}])
    done = subprocess.run(
        [sys.executable, "-c", GPU, "eval", str(tiny), data, *SHORT, "rollout.name=vllm"],
        env=environment | {"CUDA_VISIBLE_DEVICES": "MIG-1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "a fork is good, and bad after torch's own check" in done.stderr, done.stderr
