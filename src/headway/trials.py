"""What ``--dry-run`` checks: trials of the user's code before a run. Each part is called once, as the run will call it.

    reward             a real and an empty answer to the first rows of each source, in the processes of a run
    loss, correction,  a batch of two rows of three tokens, forward and backward
    estimator
    program            its first turn, rendered by the model's own chat template, and not answered

Nothing loads weights. What cannot be tried is told.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.config.schema import Config
from headway.data.files import Record
from headway.data.rows import by_source
from headway.data.sources import Rows
from headway.data.types import Outcomes, Prompt, TrajectoryId
from headway.episodes.hosting import chats_of, limits_of
from headway.episodes.runners import ProgramRunners, program_spec
from headway.errors import EpisodeOver, HeadwayError, RunError, ScoringFailed, UserCodeError, shown
from headway.models.folder import find_folder
from headway.preflight import check_without_torch, load_program, load_reward, one_reward_runner, reward_spec
from headway.programs.messages import EpisodeStart, TurnAnswer, TurnRequest
from headway.programs.program import ProgramDescription
from headway.reports.trackers.check import check_trackers
from headway.rewards.runners import RewardRunners
from headway.user_code import names_a_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 60.0
"""Seconds that rewards and programs take together, at most, and losses and advantages."""
ROWS_TRIED = 4
"""Rows of each source that the reward is tried on."""


def check_dry(config: Config, *, model_there: bool = True, loads: bool = True, calls: bool = False) -> list[str]:
    """Check what ``--dry-run`` checks: trackers and, unless the model's files are still to come, all of
    `check_without_torch`, and return its notes. Raises as these do.

    ``loads``: load user code; ``calls``: load it and call it.
    """
    check_trackers(config)
    if not model_there:
        return []
    notes, rows = check_without_torch(config, user_code=loads and not calls)  # what is called is loaded for that
    return [*notes, *try_user_code(config, rows)] if calls else notes


def try_user_code(config: Config, rows: Rows) -> list[str]:
    """Call what the user has given, and return what was tried and what was not, a line each.

    Raises:
        UserCodeError: something of it fails, with its file and line, or returns what does not fit.
        DataError, ConfigError: as the run would.
    """
    told = asyncio.run(_tried(config, rows))
    specs = list(_own_functions(config))
    if specs:
        _within_thread(partial(_try_algorithm, config), ", ".join(specs))
        told.append(f"tried: {', '.join(specs)}, forward and backward, on a batch of two rows")
    told.append("not tried: weights, devices, and what user code asks of other machines later")
    return told


def _within_thread(trial: Callable[[], None], named: str) -> None:
    """Run a trial that computes, in a thread that ends with the process if it hangs."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            trial()
        except BaseException as failure:
            failed.append(failure)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if thread.is_alive():
        raise UserCodeError(f"{named}: no end within {LIMIT_S:g} s of trials; --dry-run=static calls no user code")
    for failure in failed:
        raise failure


async def _tried(config: Config, rows: Rows) -> list[str]:
    told = []
    try:
        async with asyncio.timeout(LIMIT_S) as limit:
            if not config.reward.by_program:
                told.append(await _try_reward(config, rows))
            if config.rollout.has_program:
                told.append(await _try_program(config, rows))
    except TimeoutError:
        if not limit.expired():
            raise
        raise UserCodeError(
            f"the trials of --dry-run did not end within {LIMIT_S:g} s: a reward or a program does not return. "
            "--dry-run=static runs no user code"
        ) from None
    return told


# ---------------------------------------------------------------------------------------------- rewards


async def _try_reward(config: Config, rows: Rows) -> str:
    spec = reward_spec(config, rows)
    names = ", ".join(one.function for one in config.reward.all)
    reward = one_reward_runner(config, spec)
    firsts = [record for _, records in by_source(rows.train, rows.parts) for record in records[:ROWS_TRIED]]
    try:
        await load_reward(reward, spec)
        scores = [await _score(reward, record, names) for record in firsts]
    finally:
        await reward.close()
    truths, empties = zip(*scores, strict=True)
    return (
        f"tried: the reward {names} gives {_range(truths)} for ground truths and {_range(empties)} for empty answers "
        f"({len(firsts)} rows)"
    )


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


async def _score(reward: RewardRunners, record: Record, names: str) -> Sequence[float]:
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
    """The row as the reward and the program get it; no token of it is looked at."""
    chat = record.prompt if isinstance(record.prompt, list) else None
    text = record.prompt if isinstance(record.prompt, str) else str(record.prompt[-1]["content"])
    return Prompt(0, 0, 0, record.source, text, np.zeros(1, np.int32), record.answer, record.extra, messages=chat)


# ---------------------------------------------------------------------------------------------- programs


async def _try_program(config: Config, rows: Rows) -> str:
    """Begin an episode of the first row, and end it at its first turn, which is rendered."""
    rollout = config.rollout.model_copy(update={"runners": 1})  # one episode needs no more
    programs = ProgramRunners("the trial", config.model_copy(update={"rollout": rollout}), None)
    try:
        described = await load_program(config, rows, programs)
        return await _try_first_turn(config, rows.train[0], programs, described)
    finally:
        await programs.close()


async def _try_first_turn(
    config: Config, record: Record, programs: ProgramRunners, described: ProgramDescription
) -> str:
    named = program_spec(config).shown
    if config.rollout.agent is not None:
        return f"not tried: {named}, which asks for turns over HTTP"
    tokenizer = _tokenizer(config)
    if tokenizer is None:
        return f"not tried: {named}, for the model's tokenizer is not here yet"
    chat, limit = chats_of(config, tokenizer).record(), limits_of(config).max_length
    lengths: list[int] = []

    async def answer(request: TurnRequest) -> TurnAnswer:
        lengths.append(len((await chat.prompt(request)).ids))
        raise EpisodeOver("the trial")

    prompt = _prompt(record)
    start = EpisodeStart(
        "the trial",
        prompt.messages or [{"role": "user", "content": prompt.text}],
        {**record.extra, "answer": record.answer, "source": record.source},
        config.run.seed,
        most_tokens=limit,
        template_kwargs=config.data.chat_template_kwargs,
        text=None if prompt.messages else prompt.text,
    )
    try:
        await programs.get_ready(described)
        await programs.run(start, answer)
    except EpisodeOver:
        pass
    except HeadwayError as cause:
        if isinstance(cause, UserCodeError):
            raise
        raise UserCodeError(f"{named} fails in its first turn ({record.where or record.source}): {cause}") from cause
    if not lengths:
        raise UserCodeError(
            f"{named} made no turn for {record.where or record.source}: it ended without an answer of the model, so "
            "there is nothing to train on"
        )
    if lengths[0] >= limit:
        raise UserCodeError(
            f"{named}: its first turn has {lengths[0]} tokens, and a conversation has room for {limit} "
            "(data.max_prompt_length + data.max_response_length)"
        )
    return f"tried: {named} begins an episode, and its first turn has {lengths[0]} of {limit} tokens"


def _tokenizer(config: Config) -> PreTrainedTokenizerBase | None:
    from headway.models.tokenizer import load_tokenizer, torch_hidden

    with torch_hidden():
        if config.model.make is not None:
            from headway.models.make import make_tokenizer

            return make_tokenizer(config.model.make)
        if config.model.path is None or find_folder(config.model.path) is None:
            return None
        return load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)


# ---------------------------------------------------------------------------------------------- losses


def _own_functions(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    specs = [algorithm.policy_loss.loss_mode, algorithm.adv_estimator]
    specs += [one.name or "" for one in algorithm.rollout_correction.all]
    return (spec for spec in specs if names_a_file(spec))


def _try_algorithm(config: Config) -> None:
    """Compute advantages of four episodes of two prompts, and the loss of two of them with its gradient."""
    import torch

    from headway.algorithms.corrections import CORRECTIONS, CorrectionParams
    from headway.algorithms.losses import POLICY_LOSSES, LossInputs, PolicyLossParams
    from headway.data.collate import Row
    from headway.engines.train.advantages import FetchAdvantages

    algorithm, own = config.algorithm, set(_own_functions(config))
    if algorithm.adv_estimator in own:
        ids = tuple(TrajectoryId(0, row, 0, k) for row in range(2) for k in range(2))
        lengths, numbers = [3, 2, 3, 1], np.arange(4)
        rows = [_row(Row, length, id) for length, id in zip(lengths, ids, strict=True)]
        outcomes = Outcomes(
            ids,
            np.array([1, 0, 0, 1], np.float32),
            np.array([0, 0, 1, 1]),
            numbers,
            np.zeros(4, np.float32),
            lengths=np.array(lengths),
        )
        estimator = FetchAdvantages(algorithm)
        try:
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
        ref_logprobs=logprobs - 0.3,
        entropy=torch.rand(2, 3, generator=generator),
        finished=torch.tensor([True, False]),
    )
    for one in algorithm.rollout_correction.all:
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


def _row(kind: Any, length: int, episode: TrajectoryId) -> Any:
    column = np.full(length, -0.5, np.float32)
    names = ("ref_logprobs", "prox_logprobs", "values")
    return kind(
        np.zeros(2 + length, np.int32),
        2,
        column,
        np.zeros(length, np.int32),
        np.ones(length, np.bool_),
        columns=dict.fromkeys(names, column),
        episode=episode,
    )
