"""``python -m benchmarks.rollout_worker ENGINE FOLDER SETTING``: one engine in a process of its own.

    stdin  ──a cell, one line of JSON──▶ run it ──{"seconds", "tokens", …} or {"error"}──▶ stdout

Between two cells it is blocked on its input: nothing computes while another engine is measured. The first line that it
writes says that it is loaded. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rollout_engines import ENGINES, Engine
from benchmarks.rollout_workload import PROMPT, Cell, Request, Setting, requests, work

WARM_UP_TOKENS = 4


def main(name: str, folder: str, setting_json: str) -> None:
    # What libraries print goes to the log: the pipe is for answers alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    setting = Setting(**json.loads(setting_json))
    try:
        engine = load(name, Path(folder), setting)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": told(error)}), file=answers)
        return
    print(json.dumps({"ready": name}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(engine, Cell.from_json(json.loads(line)))), file=answers)
    os._exit(0)  # threads of the libraries would keep the process


def load(name: str, folder: Path, setting: Setting) -> Engine:
    """The engine, after a short run that touches what is touched first."""
    import torch

    torch.set_num_threads(setting.threads)
    engine = ENGINES[name](folder, setting)
    engine.run([Request((1,) * PROMPT, WARM_UP_TOKENS)] * setting.concurrent)
    return engine


def answer(engine: Engine, cell: Cell) -> dict[str, Any]:
    """Tokens of one run, and its seconds by the clock and on cores; or why there are none."""
    asked = requests(cell)
    try:
        start, computed = time.perf_counter(), time.process_time()
        lengths = engine.run(asked)
        seconds, computed = time.perf_counter() - start, time.process_time() - computed
        check(lengths, asked)
    except Exception as error:
        traceback.print_exc()
        return {"error": told(error)}
    return {"seconds": seconds, "cpu_seconds": computed, "tokens": work(cell, asked)}


def check(lengths: Sequence[int], asked: Sequence[Request]) -> None:
    """Raise `ValueError` unless every answer has as many tokens as were wanted."""
    wanted = [request.tokens for request in asked]
    if len(lengths) != len(wanted):
        raise ValueError(f"{len(lengths)} answers to {len(wanted)} requests")
    if list(lengths) != wanted:
        wrong = next(k for k, pair in enumerate(zip(lengths, wanted, strict=True)) if pair[0] != pair[1])
        raise ValueError(f"answer {wrong} has {lengths[wrong]} tokens; {wanted[wrong]} were wanted")


def told(error: Exception) -> str:
    """In one line, for a table."""
    text = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}: {text[:200]}"


if __name__ == "__main__":
    main(*sys.argv[1:])
