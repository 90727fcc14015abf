"""Evaluation: prompts to scored answers, with the tokenizer, engine and reward processes of training.

prompts ─▶ engine, all at once ─▶ a finished group ─▶ reward, beside what still decodes ─▶ Solved, in order of prompts

Progress is printed in lines, or in one line of a notebook's cell.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING

from rich.text import Text

from headway.agents.chat.chat_template import answer_decoder
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.agents.episodes.program_workers import ProgramWorkers, chat_hosting, variables
from headway.agents.rewards.reward_workers import RewardWorkers
from headway.agents.rewards.scorers import RewardSpec
from headway.api.eval.evaluation_settings import EvaluationJob
from headway.api.eval.figures import ScoredAnswer, Solved
from headway.cluster.machine.worker_setup import available_cores, math_environment
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Priority, RolloutEngine
from headway.data.tokenize import Counts
from headway.data.types import FinishReason, Prompt
from headway.errors import DataError, ScoringFailed
from headway.models.dtypes import served_dtype
from headway.pipeline.admission.ledger import EPISODE_FAILED
from headway.pipeline.stages.prompt_loader import training_sampling
from headway.pipeline.stages.reward import scores_of
from headway.reports.live.live_view import Cell
from headway.runtime.task_groups import Tasks, failing_as_one

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from headway.config.schema import Config

FROM_A_RECIPE = "lower the lengths, or take them from the recipe that the model is trained by: --config RECIPE"
"""Advice for default lengths that do not fit the model."""


@dataclass(frozen=True, slots=True)
class Questions:
    """The problems that are asked, and the tokenizer and settings with which they were read."""

    prompts: tuple[Prompt, ...]
    left_out: Counts
    """Rows left out: source → reason → number."""
    tokenizer: PreTrainedTokenizerBase
    notes: tuple[str, ...] = ()
    """Notes on the data, for the user."""


def read_questions(job: EvaluationJob, limit: int | None) -> Questions:
    """Read the first ``limit`` prompts of the job's data (None: all), and check the model as before a run.

    Raises:
        UserError: as `headway.api.checks.preflight.check_inputs` and `check_model` do, or no problem is left.
    """
    from headway.api.checks.preflight import LOWER, check_inputs, check_model
    from headway.models.tokenizer import load_tokenizer

    config = job.config
    rows = check_inputs(config)
    sources = check_model(config, rows, when_too_long=FROM_A_RECIPE if job.by_default else LOWER)
    assert sources is not None, "an evaluation has a model"
    tokenizer = load_tokenizer(str(config.model.path), trust_remote_code=config.model.trust_remote_code)
    if job.held_out:
        prompts, left_out = sources.val[:limit], sources.val_left_out.counts
    else:
        prompts = list(islice(iter(sources.train.next, None), limit))
        # After the prompts are taken: it counts the rows that were read until now.
        left_out = sources.train.left_out.counts
    if not prompts:
        raise DataError(
            f"{job.data}: nothing to ask; the configuration holds no problems out (data.val_size=0), give DATA"
        )
    return Questions(tuple(prompts), left_out, tokenizer, sources.notes)


async def solve(
    config: Config, questions: Questions, ready: Callable[[], None], solved: Callable[[Solved], None]
) -> list[Solved]:
    """Answer and score all questions. ``ready`` is called when decoding begins, ``solved`` with each question in order.

    Raises:
        UserError: a reward or a model does not load.
        WorkerDied: the reward's processes, or the engine's, ended.
    """
    from headway.models.tokenizer import stop_token_ids

    prompts = questions.prompts
    # Only columns that every row has: a reward may use them.
    columns = tuple(name for name in prompts[0].extra if all(name in prompt.extra for prompt in prompts))
    spec = replace(RewardSpec.of(config), columns=columns)
    async with AsyncExitStack() as stack:
        reward = hosting = None
        if not config.reward.by_program:
            reward = RewardWorkers(
                spec,
                workers=config.reward.workers,
                retries=config.reward.retries,
                log_path=None,
                env=variables(config.agent.env),
            )
            # Before start(): a worker that fails to load would leave the others running
            stack.push_async_callback(reward.close)
            await reward.start()
        if config.agent.has_program:
            programs = ProgramWorkers("eval", config, None, str(config.model.path))
            hosting = chat_hosting(config, questions.tokenizer, programs)
            stack.push_async_callback(hosting.close)
            await hosting.start()
        engine = await _start_engine(config, questions.tokenizer)
        stack.push_async_callback(engine.close)
        ready()
        ends = stop_token_ids(str(config.model.path), questions.tokenizer)
        # The configuration no longer has the run's filters: those in it were given for this evaluation.
        sampling = replace(training_sampling(config, ends), temperature=config.rollout.val_temperature)
        decode = answer_decoder(questions.tokenizer, skip_special_tokens=config.rollout.skip_special_tokens)
        n, priority = config.rollout.val_n, Priority.VALIDATION
        requests = [Group(i, prompt, n, sampling, priority=priority) for i, prompt in enumerate(prompts)]
        found: dict[int, Solved] = {}
        told = 0

        async def score(finished: Group) -> None:
            nonlocal told
            found[finished.number] = await _scored(reward, finished)
            # Groups end in any order, and are written in the order of the data
            while told in found:
                solved(found[told])
                told += 1

        async def ask(tasks: Tasks) -> None:
            making = local_episode_worker(engine, decode=decode, hosting=hosting)
            # aclosing: after an error the garbage collector would otherwise close the generator, at any time.
            async with making as worker, aclosing(worker.generate(requests)) as groups:
                async for finished in groups:
                    tasks.start(score(finished))

        await failing_as_one(ask)
    return [found[i] for i in range(len(prompts))]


async def _start_engine(config: Config, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """Start the engine of ``rollout.name`` as a replica does, but without weight updates."""
    from headway.cluster.inline_cluster import InlineCluster
    from headway.cluster.roles.rollout_role import ReplicaSpec, start_engine
    from headway.models.tokenizer import text_of

    device = await InlineCluster(config).connect()
    replica = ReplicaSpec(
        config=config,
        model_path=str(config.model.path),
        name="eval",
        device=device,
        decode=text_of(tokenizer),
        dtype=served_dtype(config, device),
        receive=None,
        manifest=None,
        clock=time.monotonic,
    )
    engine: RolloutEngine = await start_engine(replica)
    return engine


async def _scored(reward: RewardWorkers | None, finished: Group) -> Solved:
    """Score the episodes that did not fail. If all failed, the problem has no score."""
    prompt, trajectories, failure = finished.prompt, finished.trajectories, None
    made = [t for t in trajectories if t.failure is None]
    rewards = [0.0] * len(made)
    parts: Mapping[str, Sequence[float | None]] = {}
    try:
        if not made:
            raise ScoringFailed(f"{EPISODE_FAILED}: {trajectories[0].failure}")
        scores = await scores_of(reward, prompt, made)
        rewards, parts = scores.rewards.tolist(), scores.parts
    except ScoringFailed as failed:
        failure = str(failed)
    # Only episodes that did not fail have scores: a score's position is not k.
    scored = {t.id: (rewards[i], {name: values[i] for name, values in parts.items()}) for i, t in enumerate(made)}
    answers = []
    for k, t in enumerate(trajectories):
        own_reward, own_parts = scored.get(t.id, (0.0, {}))
        answers.append(
            ScoredAnswer(
                k=k,
                text=t.text,
                tokens=t.length,
                cut_off=t.finish_reason is FinishReason.LENGTH,
                finish_reason=str(t.finish_reason),
                reward=own_reward,
                parts=own_parts,
                failure=t.failure,
            )
        )
    return Solved(prompt.row, prompt.source, prompt.text, prompt.answer, tuple(answers), prompt.question, failure)


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
    show, answered = progress(console, len(questions.prompts)), count(1)

    def begin() -> None:
        ready()
        show(0)

    def one_more(problem: Solved) -> None:
        solved(problem)
        show(next(answered))

    return questions, asyncio.run(solve(job.config, questions, begin, one_more))


FEWEST_FOR_A_LINE = 10
"""Minimum number of problems between two lines of progress."""


def progress(console: Console, total: int) -> Callable[[int], None]:
    """Return a function that shows on ``console`` how many of ``total`` problems are answered, called with 0 at first.

    A notebook's cell has one line that changes. Elsewhere there are lines: at the start, at each tenth of the problems
    (`FEWEST_FOR_A_LINE` apart at least), and at the end.
    """
    if isinstance(console, Cell):
        return lambda done: console.show(Text(f"{done} of {total} problems answered"))
    every = max(FEWEST_FOR_A_LINE, -(-total // 10))

    def tell(done: int) -> None:
        if not done:
            console.print(f"answering {total} problems", soft_wrap=True)
        elif done % every == 0 or done == total:
            console.print(f"{done} of {total} problems", soft_wrap=True)

    return tell
