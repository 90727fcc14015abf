"""Carrying out an evaluation: its questions read, asked and scored, with progress shown."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.api.eval.progress_bar import progress
from headway.cluster.hardware import available_cores
from headway.cluster.machine.worker_setup import math_environment

if TYPE_CHECKING:
    from rich.console import Console

    from headway.api.eval.evaluation_settings import EvaluationJob
    from headway.api.eval.figures import Solved
    from headway.api.eval.scored_answers import Questions


def carry_out(
    job: EvaluationJob,
    limit: int | None,
    console: Console,
    *,
    ready: Callable[[], object] = lambda: None,
    solved: Callable[[Solved], object] = lambda _: None,
) -> tuple[Questions, list[Solved]]:
    """Answer the first ``limit`` questions of ``job`` (None: all); notes and progress are shown on ``console``.

    ``ready`` is called when decoding begins, ``solved`` with each question in order. Returns the questions and their
    answers. Raises what `headway.api.eval.scored_answers.read_questions` and `solve` do.
    """
    for variable, value in math_environment(job.config.rollout.threads or available_cores()).items():
        os.environ.setdefault(variable, value)  # before torch is imported: the math libraries read these once
    from headway.api.eval.scored_answers import read_questions, solve

    for note in job.notes:
        console.print(f"note: {note}", soft_wrap=True)
    if job.newer is not None:
        console.print(
            f"warning: the checkpoint of version {job.newer} is newer than the model, which is version {job.version}. "
            "A run exports its model when it ends; `headway train --resume RUN` goes on with one that was cut short",
            soft_wrap=True,
        )
    questions = read_questions(job, limit)
    for note in questions.notes:
        console.print(f"note: {note}", soft_wrap=True)
    with progress(console, len(questions.prompts)) as shown:

        def begin() -> None:
            ready()
            shown.start()

        def one_more(problem: Solved) -> None:
            solved(problem)
            shown.advance()

        return questions, asyncio.run(solve(job.config, questions, begin, one_more))
