"""What the tests of ``headway eval`` have in common: short answers, files of rows, and what was printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import Result

LENGTH = 6
SHORT = (f"data.max_response_length={LENGTH}", "rollout.threads=1")
RUN = """\
mode: async_partial
run: {seed: 7}
model: {make: {}}
data: {task: {name: sort, val_size: 5, params: {max_length: 9, mean_length: 4}}, max_response_length: 4}
reward: {function: task}
actor: {ppo_mini_batch_size: 16, optim: {lr: 1.0e-4}}
rollout: {total_rollout_steps: 64, top_p: 0.5, val_n: 2, val_temperature: 0.7}
async_training: {use_rollout_log_probs: false}
algorithm: {rollout_correction: {name: truncate}}
"""


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(result: Result) -> dict[str, str]:
    """The figures that were printed, by name."""
    assert result.exit_code == 0, result.output
    words = [line.split(maxsplit=1) for line in result.stdout.partition("\n\n")[0].splitlines()]
    return {name: rest.strip() for name, rest in words}
