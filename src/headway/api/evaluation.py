"""Evaluations from Python: a model's answers to questions, and their figures."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.api.eval.evaluation_settings import EvaluationJob, settle
from headway.api.eval.figures import Figures, Solved, by_source, figures, usual_ks
from headway.api.function_files import Functions
from headway.api.python_settings import layer, settings_given
from headway.api.run_handle import Run, Table, table
from headway.api.subprocess_client import carry_out_apart
from headway.api.training import Function, cell_output
from headway.data.tokenize import Counts
from headway.errors import ConfigError
from headway.reports import human

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console


@dataclass(frozen=True)
class Evaluation:
    """A model's answers and their scores."""

    figures: Figures
    """Accuracy, pass@k, lengths, each with its standard error over problems."""
    by_source: dict[str, Figures]
    """The figures of each source's problems."""
    solved: tuple[Solved, ...]
    """The problems with their answers, in order."""
    data: str
    """Description of the data."""
    left_out: Counts
    """Source → reason (``too_long``, ``template``, …) → number of prompts that are left out."""

    @property
    def accuracy(self) -> float:
        """Mean reward over problems."""
        return self.figures.accuracy.value

    def pass_at(self, k: int) -> float:
        """Return pass@k. Raises `KeyError` for a k that no problem has enough answers for."""
        return self.figures.pass_at[k].value

    @property
    def answers(self) -> pd.DataFrame | Table:
        """A row for each answer: a ``DataFrame`` where pandas is installed, else a `Table`."""
        return table(
            [
                {
                    "problem": problem.row,
                    "source": problem.source,
                    "prompt": problem.prompt,
                    "answer": problem.truth,
                    "k": answer.k,
                    "reward": answer.reward,
                    "length": answer.tokens,
                    "finish": answer.finish_reason,
                    "failure": problem.failure or answer.failure,
                    "response": answer.text,
                }
                for problem in self.solved
                for answer in problem.answers
            ]
        )

    def __repr__(self) -> str:
        passed = "".join(f", pass@{k} {human.score(one.value)}" for k, one in self.figures.pass_at.items() if k > 1)
        problems = human.count(self.figures.problems)
        called = "accuracy" if self.figures.of_right_and_wrong else "mean reward"
        return f"<Evaluation of {problems} problems of {self.data}: {called} {self.figures.accuracy}{passed}>"


def evaluate(
    model: str | os.PathLike[str] | Run,
    data: str | os.PathLike[str] | Function | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    n: int | None = None,
    temperature: float | None = None,
    k: Sequence[int] | None = None,
    threshold: float = 1.0,
    limit: int | None = None,
    reward: Function | Sequence[Function | Mapping[str, Any]] | Mapping[str, Any] | None = None,
    tools: Function | Sequence[Function] | None = None,
    environment: Function | None = None,
    program: Function | None = None,
    agent: Function | Mapping[str, Any] | None = None,
    **sections: Any,
) -> Evaluation:
    """Measure a model in a subprocess, as ``headway eval`` does.

    Args:
        model: a run, a run's directory, a folder of Hugging Face's, or a name on the hub.
        data: a file, a task, or a function that makes a task; by default the problems that the run, or ``config``,
            holds out.
        settings: settings of data, reward and rollout, by dotted key or nested.
        config: a recipe whose data, reward and engine are used.
        n: answers per problem; 1 by default.
        temperature: 0, the default, is greedy.
        k: the values of k for pass@k; 1, 2, 4, … by default.
        threshold: the least reward of a correct answer, for pass@k.
        limit: number of problems to ask, from the first one on; None: all.
        reward: as in `headway.train`, like the next four.
        tools: one or several.
        environment: a class.
        program: a function.
        agent: a function, or a section of settings.
        sections: other sections of settings, like ``rollout={"top_p": 0.9}``.

    Raises:
        UserError: what was given is wrong.
        RunError: the evaluation failed.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit: got {limit}, expected at least 1")
    own = {"reward": reward, "tools": tools, "environment": environment, "program": program, "agent": agent}
    task = {"data.task.name": data} if callable(data) else {}
    functions = Functions(settings_given(None, settings, {**own, **sections, **task}))
    path = str(model.path if isinstance(model, Run) else Path(model) if isinstance(model, os.PathLike) else model)
    recipe = None if config is None else Path(config).expanduser()
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        given = functions.settings(Path(folder))
        asked = given.pop("data.task.name", None) if callable(data) else None if data is None else os.fspath(data)
        job = settle(path, asked, layer(given), config_file=recipe, n=n, temperature=temperature)
        if odd := [one for one in k or () if not 1 <= one <= job.config.rollout.val_n]:
            raise ConfigError(f"k: got {odd[0]}, expected numbers from 1 to n, which is {job.config.rollout.val_n}")
        functions.write(Path(folder))
        solved, left_out = carry_out_apart(partial(_ask, job, limit), cell_output())
    ks = tuple(k) if k is not None else usual_ks(job.config.rollout.val_n)
    sources = {source: figures(problems, ks, threshold) for source, problems in by_source(solved).items()}
    return Evaluation(figures(solved, ks, threshold), sources, tuple(solved), job.data, left_out)


def _ask(job: EvaluationJob, limit: int | None, console: Console | None) -> tuple[list[Solved], Counts]:
    """Run an evaluation, in the subprocess. Returns the problems with their answers, and counts of rows left out."""
    from rich.console import Console

    from headway.api.eval.scored_answers import carry_out

    questions, solved = carry_out(job, limit, console or Console(stderr=True, markup=False, highlight=False))
    return solved, questions.left_out
