"""A tiny job that runs in seconds: its recipe, and how to run it as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from typer.testing import CliRunner

from headway.cli import cli
from headway.cluster.machine.worker_setup import math_environment
from headway.config.sections.model_section import MakeModelConfig
from headway.models.made_model import make_model
from headway.runtime.process_tree import descendants

START_S = 200
"""For a run of several processes to come so far as a test waits for, on a machine with other work."""
REWARD = '''
def score(response, answer):
    """Denser than exactness, so that an untrained model has something to learn."""
    return sum(c in answer for c in response) / (1 + len(response)) - 0.01 * abs(len(response) - len(answer))
'''

RECIPE = """
mode: on_policy
model: {path: FOLDER/model}
data:
  task: {name: sort, size: 256, val_size: 8, params: {mean_length: 6, max_length: 12}}
  max_prompt_length: 24
  max_response_length: 16
reward: {function: "FOLDER/reward.py:score"}
rollout: {n: 4, total_rollout_steps: 16, max_concurrent: 8, threads: 1}
actor:
  ppo_mini_batch_size: 4
  ppo_max_token_len_per_gpu: 256
  optim: {lr: 1.0e-3}
trainer: {threads: 1}
"""


def make_job(folder: Path) -> Path:
    """Write model, reward and recipe into ``folder``; returns the recipe."""
    model = MakeModelConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16, intermediate_size=64
    )
    make_model(model, 0, folder / "model")
    (folder / "reward.py").write_text(REWARD)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(folder)))
    return recipe


STARTED: list[subprocess.Popen[str]] = []
"""Processes of `start`."""


def start(*arguments: str) -> subprocess.Popen[str]:
    """A Python process in a session of its own, with one math thread."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **math_environment(1)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    STARTED.append(process)
    return process


def end_started() -> None:
    """End what tests that failed have left running; Ray's workers follow."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def finish(process: subprocess.Popen[str], timeout_s: float = 250) -> tuple[int, str]:
    """Exit code and output. A process that outlives the time-out is killed with everything that it started."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out + err


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run_here(*arguments: str) -> Done:
    """The command in this process, which has imported already what takes longer than a tiny job."""
    done = CliRunner().invoke(cli, list(arguments))
    return Done(done.exit_code, done.stdout, done.stderr)


ONE_CORE = ("cluster.backend=inline", "trainer.threads=1", "rollout.threads=1")
"""Settings of a run in this process beside which others compute: two threads on a core that is shared wait longer."""


def train(recipe: Path, run_dir: Path, *overrides: str) -> dict[str, Any]:
    """``headway train`` to its end, in a process of its own where it starts Ray; returns the summary."""
    arguments = ("train", str(recipe), *overrides, f"run.dir={run_dir}")
    if "cluster.backend=inline" in overrides or ray.is_initialized():
        done = run_here(*arguments)
        code, output = done.exit_code, done.output
    else:
        code, output = finish(start("-m", "headway", *arguments))
    assert code == 0, output
    return summary(run_dir)


def summary(run_dir: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return loaded


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def batches_in(taken: list[dict[str, Any]]) -> dict[int, list[list[int]]]:
    """Numbers of the groups of each batch in events ``fetch.taken``, once for each life of the run that took it."""
    batches: dict[int, list[list[int]]] = {}
    for event in taken:
        batches.setdefault(event["fetch"], []).append(event["numbers"])
    return batches


def start_long_run(recipe: Path, run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """A run that would take minutes; returns once it has trained."""
    process = start(
        "-m", "headway", "train", str(recipe), "mode=async_partial", "rollout.total_rollout_steps=65536",
        "rollout.test_freq=-1", f"run.dir={run_dir}", *overrides,
    )  # fmt: skip
    wait_for("fetch.taken" if "require_batches" not in "".join(overrides) else "group.rewarded", process, run_dir)
    return process


def wait_for(wanted: str, process: subprocess.Popen[str], run_dir: Path, times: int = 1) -> None:
    """Until the run's events have ``wanted`` in them, so many times."""
    deadline = time.monotonic() + START_S
    log = run_dir / "events.jsonl"
    while not (log.exists() and log.read_text().count(wanted) >= times):
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, f"not {times} {wanted} within {START_S} s"
        time.sleep(0.01)


def pid_of_worker(parent: int, worker: str) -> int:
    """The descendant whose output goes to the worker's log file."""
    (pid,) = (pid for pid in descendants(parent) if _output(pid).endswith(f"logs/{worker}.log"))
    return pid


def _output(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return ""


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _command_line(pid)]


def _command_line(pid: int) -> bytes:
    """Empty for a process that is gone, also where it goes between the opening of the file and the reading."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
