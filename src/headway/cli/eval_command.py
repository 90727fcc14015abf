"""Command ``headway eval``: a model's answers to questions, counted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.common import EXIT_FAILED, Overrides, check_writable, command, files_of_run, writing
from headway.errors import ConfigError
from headway.reports import human

if TYPE_CHECKING:
    from rich.console import Console

    from headway.api.eval.evaluation_settings import EvaluationJob
    from headway.api.eval.figures import Figures, Solved
    from headway.api.eval.scored_answers import Questions
    from headway.data.tokenize import Counts

MOST_CHARACTERS = 300
"""Maximum length in characters of a prompt or response in the table, of which the end is shown."""


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or name on the hub, or a run's directory.")
]
Data = Annotated[
    str | None,
    typer.Argument(
        metavar="[DATA]",
        help="A data file, a dataset's folder or name on the hub, or a task like reasoning_gym/leg_counting. "
        "Default: what the run held out.",
    ),
]


@command
def evaluate(
    model: Model,
    data: Data = None,
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="CONFIG", help="Take data, reward and engine from this recipe.")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Answers per problem; default: rollout.val_n, 1.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy; default: rollout.val_temperature, 0.")
    ] = None,
    k: Annotated[
        str | None, typer.Option("--k", metavar="LIST", help="Of pass@k, like 1,4,16; default: 1,2,4,…,n.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="An answer is correct, for pass@k, from this reward on.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask only so many problems, the first ones.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Problems to show, with their first answer.")] = 4,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Write every answer as a line of JSON; never over an input."
        ),
    ] = None,
) -> None:
    """Measure a model: mean reward, pass@k, lengths, and a table of samples."""
    from rich.console import Console

    from headway.api.eval.evaluation_settings import settle

    if not math.isfinite(threshold):
        raise ConfigError(f"--threshold {threshold}: expected a finite number, like 1")
    given = list(overrides or [])
    # DATA may be left out: the first setting is then in its place.
    if data is not None and "=" in data and not Path(data).exists():
        given, data = [data, *given], None
    job = settle(model, data, given, config_file=config, n=n, temperature=temperature)
    ks = _ks(k, job.config.rollout.val_n)
    check_writable("--output", output, _inputs(job, model, config))
    questions, solved, whole = _solve(job, limit, output)
    console = Console(markup=False, highlight=False)
    print_figures(console, job, questions.left_out, solved, ks, threshold)
    if samples:
        print_samples(console, solved, samples)
    if not whole:  # the refusal was told when it happened
        raise typer.Exit(EXIT_FAILED)
    if output is not None:
        typer.echo(f"answers: {output}")


def _inputs(job: EvaluationJob, model: str, recipe: Path | None) -> Iterator[Path]:
    """Yield the input files of an evaluation: the run's, the recipe, the model's, the data, and the user's code."""
    from headway.runtime.user_code import names_a_file

    run = Path(os.path.expanduser(model))  # noqa: PTH111  # Path's raises where there is no such user
    yield from files_of_run(run)
    config, agent = job.config, job.config.agent
    sources = [source.label for source in (*config.data.train_sources, *config.data.held_out_sources)]
    task = config.data.task.name if config.data.task is not None else None
    code = [*(one.function for one in config.reward.all), task, *agent.tools, agent.environment, agent.program]
    files = [spec.rpartition(":")[0] for spec in code if spec and names_a_file(spec)]
    yield from (Path(path).expanduser() for path in (recipe, config.model.path, *sources, *files) if path)


def _ks(given: str | None, n: int) -> tuple[int, ...]:
    from headway.api.eval.figures import usual_ks

    if given is None:
        return usual_ks(n)
    words = given.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= n for word in words):
        raise ConfigError(f"--k {given}: expected numbers from 1 to --n, which is {n}, like 1,4")
    return tuple(sorted({int(word) for word in words}))


def _solve(job: EvaluationJob, limit: int | None, output: Path | None) -> tuple[Questions, list[Solved], bool]:
    """Answer the questions. Returns questions, answers, and whether all answers were written to ``output``."""
    from rich.console import Console

    from headway.api.eval.scored_answers import carry_out

    # On stderr: in a pipe standard output has the figures alone.
    console = Console(stderr=True, markup=False, highlight=False)
    if output is None:
        return *carry_out(job, limit, console), True
    file = AnswersFile(output, partial(console.print, soft_wrap=True))
    with ExitStack() as files:
        # Opened last: what fails to load leaves the answers of another time as they are.
        found = carry_out(job, limit, console, ready=lambda: files.enter_context(file), solved=file.write)
    return *found, file.whole


# ---------------------------------------------------------------------------------------------- tables


def print_figures(
    console: Console,
    job: EvaluationJob,
    left_out: Counts,
    solved: Sequence[Solved],
    ks: Sequence[int],
    threshold: float,
) -> None:
    """Print the evaluation's figures and how they were measured; also by source if there are several."""
    from rich.table import Table

    from headway.api.eval.figures import by_source, figures
    from headway.data.tokenize import bad_rows, reasons_told, total

    config, every = job.config, figures(solved, ks, threshold)
    rollout, limit = config.rollout, config.data.max_response_length
    how = "greedy" if rollout.val_temperature == 0 else f"temperature {rollout.val_temperature:g}"
    several = f"{rollout.val_n} answers each, " if rollout.val_n > 1 else ""
    own = config.agent.has_program or any(":" in one.function for one in config.reward.all)
    called = "accuracy" if every.of_right_and_wrong and not own else "mean reward"
    meaning = f"{'mean reward ' if called == 'accuracy' else ''}± standard error over problems"
    lines = {
        "model": str(config.model.path),
        **({"version": str(job.version)} if job.version is not None else {}),
        "data": f"{job.data}: {human.count(every.problems)} problems, {several}{how}",
        "reward": " + ".join(one.label for one in config.reward.all),
        called: f"{every.accuracy}  {meaning}",
    }
    lines |= {f"reward {name}": human.number(mean) for name, mean in every.parts.items()}
    correct = f"a reward of at least {threshold:g} is correct"
    for k in ks:
        lines[f"pass@{k}"] = _pass(every, k) + (f"  {correct}" if k == ks[0] else "")
    lines["length"] = f"mean {every.mean_tokens:.1f}, longest {human.count(every.max_tokens)} tokens"
    lines["cut off"] = f"{human.share(every.cut_off)} of the answers, at {human.count(limit)} tokens"
    table = Table.grid(padding=(0, 2))
    for name, value in lines.items():
        table.add_row(name, value)
    if unusable := bad_rows(left_out):
        table.add_row("left out", f"{human.count(unusable)} rows that cannot be used: {reasons_told(left_out)}")
    if too_long := total(left_out) - unusable:
        table.add_row(
            "left out", f"{human.count(too_long)} prompts of more than {config.data.max_prompt_length} tokens"
        )
    if every.failed:
        why = _reasons(problem.failure for problem in solved)
        table.add_row("failed", f"{human.count(every.failed)} problems, which count as 0: {why}")
    if every.failed_episodes:
        why = _reasons(answer.failure for problem in solved for answer in problem.answers)
        count = f"{human.count(every.failed_episodes)} of {human.count(every.answers)}"
        table.add_row("episodes failed", f"{count}, which do not count where others of their problem did not: {why}")
    sources = by_source(solved)
    for name, of in ((name, figures(sources[name], ks, threshold)) for name in sources if len(sources) > 1):
        passed = "".join(f", pass@{k} {human.score(one.value)}" for k, one in of.pass_at.items())
        table.add_row(f"source {name}", f"{of.accuracy}{passed}, of {human.count(of.problems)} problems")
    console.print(table)


def _pass(figures: Figures, k: int) -> str:
    if k not in figures.pass_at:
        return f"no problem has {k} answers that count"
    some = f"{human.count(figures.too_few[k])} of {human.count(figures.problems)} problems"
    without = f"  without {some}: too few answers count" if figures.too_few[k] else ""
    return f"{figures.pass_at[k]}{without}"


def _reasons(failures: Iterable[str | None]) -> str:
    """Return the first of at least one reason, and the number of others."""
    reasons = list(dict.fromkeys(failure for failure in failures if failure is not None))
    more = f", and {len(reasons) - 1} other reasons" if len(reasons) > 1 else ""
    return f"{reasons[0]}{more}"


def print_samples(console: Console, solved: Sequence[Solved], count: int) -> None:
    """Print ``count`` evenly spaced problems, or all if there are fewer, each with its first answer."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True)
    table.add_column("row", justify="right")
    for name in ("prompt", "answer", "response"):
        table.add_column(name, overflow="fold", ratio=1 if name == "answer" else 3)
    table.add_column("reward", justify="right")
    table.add_column("tokens", justify="right")
    shown = min(count, len(solved))
    for problem in [solved[i * len(solved) // shown] for i in range(shown)]:
        answer = problem.answers[0]
        table.add_row(
            str(problem.row),
            *(Text(_end_of(text)) for text in (problem.question, str(problem.truth), answer.text)),
            "failed" if (problem.failure or answer.failure) is not None else human.number(answer.reward),
            human.count(answer.tokens) + ("+" if answer.cut_off else ""),
        )
    console.print()
    console.print(table)


def _end_of(text: Any) -> str:
    stripped = str(text).strip()
    return stripped if len(stripped) <= MOST_CHARACTERS else "…" + stripped[1 - MOST_CHARACTERS :]


# ---------------------------------------------------------------------------------------------- answers


class AnswersFile:
    """File of JSON lines, one for each answer. A problem's lines are on disk before the next problem's are written.

    A write failure is reported once. The file then ends with the last problem whose answers are complete.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        """Remember ``path``, which is replaced when the context is entered, and ``tell``, which reports a failure."""
        self._path, self._tell = path, tell
        self._problems = self._size = 0
        """Numbers of problems and of bytes written."""
        self.whole = True
        """True until writing fails."""

    def __enter__(self) -> AnswersFile:
        """Open the file. Raises `RunError` when that fails."""
        with writing("--output", self._path):
            self._file = self._path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except OSError as cause:  # a network's disk may refuse only now
            self._give_up(cause)

    def write(self, problem: Solved) -> None:
        if not self.whole:
            return
        lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in _rows(problem))
        text = lines.encode("utf-8", "backslashreplace")  # the spelling of JSON for a lone surrogate, too
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as cause:
            self._give_up(cause)
        else:
            self._problems, self._size = self._problems + 1, self._size + len(text)

    def _give_up(self, cause: OSError) -> None:
        self.whole = False
        with suppress(OSError):
            self._file.close()  # closed before the file is cut: this tries once more to write what was refused
        with suppress(OSError):
            os.truncate(self._path, self._size)
        self._tell(
            f"warning: --output {self._path} cannot be written any more ({cause.strerror or cause}); it has the "
            f"answers to the first {self._problems} problems, and the evaluation goes on without it"
        )


def _rows(problem: Solved) -> Iterator[dict[str, Any]]:
    """Yield the rows of the answers' file, one for each answer."""
    for answer in problem.answers:
        failure = answer.failure or problem.failure
        row = {
            "row": problem.row,
            "k": answer.k,
            "source": problem.source,
            "prompt": problem.prompt,
            "answer": problem.truth,
            "response": answer.text,
            "reward": None if failure is not None else answer.reward,
            "tokens": answer.tokens,
            "finish_reason": answer.finish_reason,
        }
        if len(answer.parts) > 1:
            row["parts"] = answer.parts
        if failure is not None:
            row["failure"] = failure
        yield row
