"""Beginning of a run by ``headway train``, with the user's model or with one that is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headway.agents.adapters.program_loader import load_toolbox
from headway.agents.episodes.program_workers import chats_of, program_spec
from headway.api.checks.preflight import check_inputs, check_model
from headway.api.run.interrupts import note
from headway.api.run.run_execution import carry_out, set_math_environment
from headway.api.run.training_run import WARMING, StartingModel
from headway.cluster.machine.worker_setup import importing
from headway.config.loading import LoadedConfig
from headway.config.schema import Config
from headway.config.sections.model_section import WarmupConfig
from headway.data.sources import Rows, build_sources
from headway.data.tokenize import PromptTokenizer
from headway.data.types import Prompt
from headway.errors import UserError
from headway.reports.report_manager import Reports, open_reports
from headway.reports.run_directory import Occupied, RunDirectory, free_names
from headway.reports.trackers.tracker_checks import check_trackers

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from headway.api.sft.sft_data import Example
    from headway.api.sft.warmup import Evaluate


def train(loaded: LoadedConfig, console: Console | None = None) -> int:
    """Run ``headway train`` for a new run, shown on ``console``, or where this process prints.

    Returns the exit code, raises the errors of `headway.errors`.
    """
    config = loaded.config
    set_math_environment(config)
    if config.run.dir is not None:
        RunDirectory(config.run.dir).check_free()  # the check of `create`, which comes after much that takes longer
    check_trackers(config)  # all checks come before the run's directory: an error leaves no trace
    with importing():
        rows = check_inputs(config)
        data = check_model(config, rows)
    reports = _open_reports(config, console)
    for text in data.notes if data is not None else ():
        note(reports, text)
    try:
        return carry_out(loaded, rows, reports, lambda: _starting_model(config, rows, reports))
    except UserError:
        if not reports.began:  # left as it is, the directory would refuse the corrected command
            with suppress(OSError):
                reports.directory.discard()
        raise


def _open_reports(config: Config, console: Console | None = None) -> Reports:
    """Open the reports in ``run.dir``, or in a directory named by the time, which runs that begin in the same second do
    not share.
    """
    if config.run.dir is not None:
        return open_reports(config, config.run.dir, console)
    for path in free_names(config.run.name):
        with suppress(Occupied):
            return open_reports(config, path, console)
    raise AssertionError("unreachable: there is always another number")


def _starting_model(config: Config, rows: Rows, reports: Reports) -> StartingModel:
    """Return the model to start from: the user's, or one that is made here in the run's directory."""
    if config.model.path is not None:
        return StartingModel(config.model.path)
    if config.model.make is None:
        raise AssertionError("unreachable: the doctor asks for one of model.path and model.make")
    from headway.models.made_model import make_model

    path = reports.directory.initial_model
    reports.phase("making the model")
    make_model(config.model.make, config.run.seed, path)
    warm_up = None if config.model.warmup is None else partial(_warm_up, config, rows, path, reports)
    return StartingModel(str(path), warm_up)


def _warm_up(config: Config, rows: Rows, path: Path, reports: Reports, go_on: Callable[[], None]) -> None:
    """Warm the model at ``path`` up. ``go_on`` is called after each step and each answer, and may raise."""
    from headway.api.sft.warmup import warm_up
    from headway.models.tokenizer import load_tokenizer

    if config.model.warmup is None:
        raise AssertionError("unreachable: called where there is a warm-up")
    tokenizer = load_tokenizer(str(path))
    val = build_sources(config, tokenizer, rows).val
    examples, evaluate = _teaching(config, config.model.warmup, tokenizer, val, go_on)
    asyncio.run(
        warm_up(
            path,
            config,
            config.model.warmup,
            examples,
            evaluate,
            report=lambda detail: reports.phase(WARMING, detail),
            go_on=go_on,
        )
    )


def _teaching(
    config: Config,
    warmup: WarmupConfig,
    tokenizer: PreTrainedTokenizerBase,
    val: list[Prompt],
    go_on: Callable[[], None],
) -> tuple[Iterator[Example], Evaluate | None]:
    """Return what the warm-up teaches, and the evaluation of what was learned; None for demonstrations."""
    from headway.api.sft.sft_data import demonstrations, solutions
    from headway.api.sft.warmup import WarmupEvaluation

    data, seed = config.data, config.run.seed
    held_out = {prompt.text for prompt in val}
    if warmup.demonstrations is not None:
        examples = demonstrations(
            chats_of(config, tokenizer),
            warmup.demonstrations,
            load_toolbox(program_spec(config)).schemas,
            held_out,
            seed=seed,
            conversations=warmup.conversations,
            longest=tokenizer.model_max_length,
        )
        return examples, None
    if data.task is None:
        raise AssertionError("unreachable: the doctor asks for a task where there are no demonstrations")
    prompts = PromptTokenizer(tokenizer, data.chat_template, data.max_prompt_length, kwargs=data.chat_template_kwargs)
    examples = solutions(tokenizer, prompts, data.task, warmup, held_out, seed)
    return examples, WarmupEvaluation(tokenizer, data.task, val, seed, data.max_response_length, go_on)
