"""Trials of the user's code for ``--dry-run``. Each part is called once, as the run will call it.

    reward             a real and an empty answer to the first rows of each source, in the processes of a run
    loss, correction,  a batch of two rows of three tokens, forward and backward
    estimator
    program, agent     its first turn, rendered by the model's own chat template, and not answered

No weights are loaded. The notes say what could not be tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import wait
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.agents.episodes.episode_worker import local_episode_worker
from headway.agents.episodes.program_episode import Hosting
from headway.agents.episodes.program_workers import ProgramWorkers, chat_hosting, limits_of, program_spec
from headway.agents.interface.program_messages import ProgramDescription
from headway.agents.rewards.reward_workers import RewardWorkers
from headway.api.checks import preflight
from headway.config.schema import Config
from headway.config.sizing.placement import needs_critic, needs_reference
from headway.data.files import Record
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Completion, GenerateRequest
from headway.data.packing import CollatedRow
from headway.data.rows import by_source
from headway.data.sources import DataBundle, Rows
from headway.data.types import Outcomes, Prompt, TrajectoryId
from headway.errors import ConfigError, HeadwayError, RunError, ScoringFailed, UserCodeError, shown
from headway.pipeline.stages.prompt_loader import training_sampling
from headway.reports.trackers.tracker_set import check_trackers
from headway.runtime.task_groups import in_daemon_thread
from headway.runtime.user_code import names_user_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 60.0
"""Limit in seconds for the trials of rewards and programs together, and for those of losses and advantages."""
ROWS_TRIED = 4
"""Rows of each source that the reward is tried on."""


def check_dry(config: Config, *, model_there: bool = True, loads: bool = True, calls: bool = False) -> list[str]:
    """Check trackers, and with ``model_there`` all of `check_inputs` and `check_prompts`, for ``--dry-run``. Returns
    notes; raises as these do.

    ``loads``: load user code; ``calls``: load it and call it.
    """
    if missing := preflight.missing_packages(config):
        raise ConfigError("\n".join(missing))
    check_trackers(config)
    if not model_there:
        return []
    task = config.data.task
    if not loads and task is not None and names_user_code(task.name):
        return [f"not checked: data and reward, for {task.name} makes the problems, and no user code is run"]
    rows = preflight.check_inputs(config, user_code=loads and not calls)  # what is called is loaded for that
    if calls:
        return try_user_code(config, rows)
    _, data = preflight.check_prompts(config, rows)
    return [] if data is None else list(data.notes)


def try_user_code(config: Config, rows: Rows) -> list[str]:
    """Load and call the user's code, and check prompts in between. Returns notes, a line each: on prompts, on what was
    tried and on what was not.

    Raises:
        UserCodeError: the user's code fails (the message has its file and line), or returns a wrong value.
        DataError, ConfigError: as the run would.
    """
    told = asyncio.run(_tried(config, rows))
    if specs := ", ".join(spec for spec, *_ in preflight.own_functions(config)):
        # A daemon: user code that hangs cannot be ended, and would keep the command from ending
        trial = in_daemon_thread("headway-trial", partial(_try_algorithm, config))
        if not wait([trial], LIMIT_S).done:
            raise UserCodeError(f"{specs}: no end within {LIMIT_S:g} s of trials; --dry-run=static calls no user code")
        trial.result()
        told.append(f"tried: {specs}, forward and backward, on a batch of two rows")
    told.append("not tried: weights, devices, and what user code asks of other machines later")
    return told


async def _tried(config: Config, rows: Rows) -> list[str]:
    logs, kept = Path(mkdtemp(prefix="headway-dry-run-")), False
    try:
        async with asyncio.timeout(LIMIT_S) as limit, AsyncExitStack() as stack:
            told = await _call(config, rows, logs, stack)
    except TimeoutError:
        # A TimeoutError that the user's code raised is not this limit's
        if not limit.expired():
            raise
        raise UserCodeError(
            f"the trials of --dry-run did not end within {LIMIT_S:g} s: a reward or a program does not return. "
            "--dry-run=static runs no user code"
        ) from None
    except HeadwayError as error:
        printed = _printed(logs)
        if printed:
            error.add_note(f"Its traceback, and what user code printed, are in {logs}")
        kept = printed or str(logs) in str(error)
        raise
    finally:
        if not kept:
            rmtree(logs, ignore_errors=True)
    return told


def _printed(logs: Path) -> bool:
    """Tell whether user code has printed. A log's first line is Headway's own."""
    return any(log.read_bytes().count(b"\n") > 1 for log in logs.iterdir())


async def _call(config: Config, rows: Rows, logs: Path, stack: AsyncExitStack) -> list[str]:
    """Load all user code that runs in processes, check the prompts, and call the code, in a run's order."""
    if config.agent.has_program:
        agent = config.agent.model_copy(update={"workers": 1})  # one episode needs no more
        programs = ProgramWorkers("trial", config.model_copy(update={"agent": agent}), logs)
        stack.push_async_callback(programs.close)
        described = await preflight.load_program(config, rows, programs)
    if not config.reward.by_program:
        spec = preflight.reward_spec(config, rows)
        reward = preflight.one_reward_worker(config, spec, logs / "reward.log")
        stack.push_async_callback(reward.close)
        await preflight.load_reward(reward, spec)
    # After all user code is loaded, as in a run: its messages come in the same order
    tokenizer, data = preflight.check_prompts(config, rows)
    told = [] if data is None else [*data.notes]
    if not config.reward.by_program:
        told.append(await _try_reward(config, rows, reward))
    if config.agent.has_program:
        told.append(await _try_program(config, rows, programs, described, tokenizer, data))
    return told


# ---------------------------------------------------------------------------------------------- rewards


async def _try_reward(config: Config, rows: Rows, reward: RewardWorkers) -> str:
    names = ", ".join(one.function for one in config.reward.all)
    firsts = [rows.train[i] for _, places in by_source(rows.parts) for i in places[:ROWS_TRIED]]
    scores = [await _score(reward, record, names) for record in firsts]
    truths, empties = zip(*scores, strict=True)
    tried = (
        f"tried: the reward {names} gives {_range(truths)} for ground truths and {_range(empties)} for empty answers "
        f"({len(firsts)} rows)"
    )
    if min(truths + empties) < max(truths + empties):
        return tried
    return (
        f"{tried}. It does not tell them apart: fine where a truth is no whole answer, else nothing is learned from it"
    )


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


async def _score(reward: RewardWorkers, record: Record, names: str) -> Sequence[float]:
    truth = record.answer if isinstance(record.answer, str) else "" if record.answer is None else str(record.answer)
    try:
        scores: list[float] = (await reward.score(_prompt(record), [truth, ""])).rewards.tolist()
        return scores
    except ScoringFailed as cause:
        raise UserCodeError(
            f"the reward {names} fails for {record.where or record.source}, with the answers {shown(truth)} and '': "
            f"{cause}; expected a number for each answer, also for an empty one"
        ) from cause


def _prompt(record: Record) -> Prompt:
    """Return the row as the reward and the program get it. Its tokens are not used."""
    chat = record.prompt if isinstance(record.prompt, list) else None
    text = record.prompt if isinstance(record.prompt, str) else str(record.prompt[-1]["content"])
    return Prompt(0, 0, 0, record.source, text, np.zeros(1, np.int32), record.answer, record.extra, messages=chat)


# ---------------------------------------------------------------------------------------------- programs


async def _try_program(
    config: Config,
    rows: Rows,
    programs: ProgramWorkers,
    described: ProgramDescription,
    tokenizer: PreTrainedTokenizerBase | None,
    data: DataBundle | None,
) -> str:
    """Run an episode of the first prompt up to its first call of the policy, which is not answered."""
    named = program_spec(config).shown
    if tokenizer is None or data is None or (prompt := data.train.next()) is None:
        return f"not tried: {named}, for the model's tokenizer is not here yet"
    await programs.get_ready(described)
    tokens, failure = await _first_turn(config, prompt, chat_hosting(config, tokenizer, programs))
    if tokens is None:
        where = rows.train[rows.train_rows.index(prompt.row)].where or prompt.source
        raise UserCodeError(f"{named} fails in its first turn ({where}): {failure}")
    return (
        f"tried: {named} begins an episode, and its first turn has {tokens} of {limits_of(config).max_length} tokens; "
        "what an answer leads to, such as step() and tools, was not tried"
    )


async def _first_turn(config: Config, prompt: Prompt, hosting: Hosting) -> tuple[int | None, str | None]:
    """Return the number of tokens of an episode's first call of the policy, or why there was no call."""
    replica = _Unanswered()
    request = Group(0, prompt, 1, training_sampling(config, hosting.stop_ids))
    async with local_episode_worker(replica, hosting=hosting, name="the trial") as worker:
        if hosting.endpoint is not None:
            await hosting.endpoint.start()
        ending = asyncio.ensure_future(anext(worker.generate([request])))
        either: list[asyncio.Future[Any]] = [ending, replica.asked]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if replica.asked.done():
            ending.cancel()
            return replica.asked.result(), None
        return None, (await ending).trajectories[0].failure


class _Unanswered:
    """Replica that notes the length of the first call's context and never answers."""

    name, slots = "the policy", 1

    def __init__(self) -> None:
        self.asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def submit(self, client: str, calls: Sequence[GenerateRequest]) -> None:
        if not self.asked.done():
            self.asked.set_result(len(calls[0].input_ids))

    async def finished(self, client: str) -> AsyncIterator[Sequence[Completion]]:
        await asyncio.Event().wait()  # for ever: nothing is answered
        yield ()  # never reached; makes this an asynchronous generator

    async def abort(self, client: str, numbers: Sequence[int]) -> None: ...

    async def release(self, trajectories: Sequence[TrajectoryId]) -> None: ...


# ---------------------------------------------------------------------------------------------- losses


def _try_algorithm(config: Config) -> None:
    """Compute advantages of four episodes of two prompts, and the loss of two of them with its gradient."""
    import torch

    from headway.algorithms.corrections import CORRECTIONS, CorrectionParams
    from headway.algorithms.losses import POLICY_LOSSES, LossInputs, PolicyLossParams
    from headway.engines.train.batch_advantages import BatchAdvantages

    algorithm, own = config.algorithm, {spec for spec, *_ in preflight.own_functions(config)}
    if algorithm.adv_estimator in own:
        ids = tuple(TrajectoryId(0, row, 0, k) for row in range(2) for k in range(2))
        lengths, numbers = [3, 2, 3, 1], np.arange(4)
        rows = [_row(config, length, id) for length, id in zip(lengths, ids, strict=True)]
        outcomes = Outcomes(
            ids,
            np.array([1, 0, 0, 1], np.float32),
            np.array([0, 0, 1, 1]),
            numbers,
            np.zeros(4, np.float32),
            lengths=np.array(lengths),
        )
        estimator = BatchAdvantages(algorithm)
        try:
            # None where it has to look at tokens.
            if estimator.of_outcomes(outcomes) is None:
                estimator(rows, outcomes)
        except RunError as cause:
            raise UserCodeError(f"{algorithm.adv_estimator}: {cause}") from cause
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(2, 3, generator=generator)
    inputs = LossInputs(
        logprobs=logprobs.clone().requires_grad_(),
        old_logprobs=logprobs - 0.1,
        behaviour_logprobs=logprobs - 0.2,
        advantages=torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]),
        mask=torch.tensor([[True, True, True], [True, True, False]]),
        ref_logprobs=logprobs - 0.3 if needs_reference(config) else None,
        entropy=torch.rand(2, 3, generator=generator),
        finished=torch.tensor([True, False]),
    )
    for one in algorithm.corrections:
        if one.name in own:
            CORRECTIONS.get(one.name)(inputs, CorrectionParams(one.bound, one.lower, one.level, one.veto, one.delta))
    spec = algorithm.policy_loss.loss_mode
    if spec in own:
        params = PolicyLossParams(algorithm.policy_loss, *config.actor.clip_range)
        losses, _ = POLICY_LOSSES.get(spec)(inputs, params)
        (gradient,) = (
            torch.autograd.grad(losses.sum(), inputs.logprobs, allow_unused=True) if losses.requires_grad else (None,)
        )
        if gradient is None or not torch.isfinite(gradient[inputs.mask]).all():
            found = "no gradient" if gradient is None else "a gradient that is not finite"
            raise UserCodeError(
                f"{spec}: its loss has {found} with respect to inputs.logprobs, so that nothing would be learned; "
                "compute it from inputs.logprobs, without detach()"
            )


def _row(config: Config, length: int, episode: TrajectoryId) -> CollatedRow:
    column = np.full(length, -0.5, np.float32)
    names = ["ref_logprobs", "prox_logprobs", *(["values"] if needs_critic(config) else [])]
    return CollatedRow(
        np.zeros(2 + length, np.int32),
        2,
        column,
        np.zeros(length, np.int32),
        np.ones(length, np.bool_),
        columns=dict.fromkeys(names, column),
        episode=episode,
    )
