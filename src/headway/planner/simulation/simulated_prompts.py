"""Simulated prompts, tokens, programs and rewards: lengths without contents, and seconds without user code.

    messages ─▶ a path: what was said, and the keys of the answers in it ─▶ a context that has a length ─▶ RowAt

A message says how many tokens it has; two messages are the same where role, content and number of tokens are. The key
of its call identifies an answer, so that equal paths stand for equal contexts.

    a program ─▶ waits for an environment ─▶ turn, step, turn, step … ─▶ EpisodeEnd

Every draw is a hash of the episode's seed, which is one of (run's seed, trajectory), and of what is drawn: the same
seed gives the same events.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from headway.agents.episodes.episode_tokens import TurnContext
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, Message, TurnAnswer, TurnRequest, said
from headway.data.interfaces.episode_groups import Scores
from headway.data.interfaces.rollout import Completion
from headway.data.types import (
    Column,
    ColumnName,
    Conversation,
    FinishReason,
    Outcomes,
    Prompt,
    RowAt,
    TrainSample,
    TrajectoryId,
)
from headway.errors import EpisodeOver
from headway.planner.profiles.job_profile import NumberProfile, ProgramProfile, RewardProfile
from headway.planner.profiles.lengths import FilterSampler, LengthSampler, uniform_of

HELD_OUT = -1
"""Epoch number of held-out prompts, which training never reaches."""


class SimulatedSource:
    """A `PromptSource`: one epoch that never ends.

    A prompt's ``answer`` is what ``filtered`` says of its group: True, False, or None where nothing is known.
    """

    def __init__(self, lengths: LengthSampler, *, filtered: FilterSampler | None = None) -> None:
        self._lengths = lengths
        self._filtered = filtered
        self._given = 0

    def next(self) -> Prompt:
        self._given += 1
        return self.find(0, self._given - 1)

    def again(self, prompt: Prompt) -> Prompt:
        return self._with_fate(replace(prompt, attempt=prompt.attempt + 1))

    def state(self) -> dict[str, Any]:
        return {"given": self._given}

    def find(self, epoch: int, row: int) -> Prompt:
        return self._with_fate(_prompt(epoch, row, self._lengths(TrajectoryId(0, row, 0, 0))))

    def restore(self, state: Mapping[str, Any]) -> None:
        self._given = state["given"]

    def _with_fate(self, prompt: Prompt) -> Prompt:
        if self._filtered is None:
            return prompt
        return replace(prompt, answer=self._filtered(prompt.trajectory_id(0)))


def held_out_prompts(count: int, lengths: LengthSampler) -> list[Prompt]:
    """The held-out prompts, for validation."""
    return [_prompt(HELD_OUT, row, lengths(TrajectoryId(HELD_OUT, row, 0, 0))) for row in range(count)]


def _prompt(epoch: int, row: int, length: int) -> Prompt:
    messages = [said_in_tokens("user", "", length)]
    return Prompt(epoch, row, 0, source="simulated", text="", token_ids=same_ids(length), messages=messages)


def same_ids(length: int, value: int = 0) -> NDArray[np.int32]:
    """Return [length] ids that are all ``value`` and take no memory: one element, seen ``length`` times."""
    return np.ndarray((length,), np.int32, value.to_bytes(4, sys.byteorder), 0, (0,))


async def zero_advantages(samples: Sequence[TrainSample], outcomes: Outcomes) -> dict[str, list[Column]]:
    """Return advantages without contents, for a simulated trainer, which never reads them. An `AdvantageFn`."""
    return {ColumnName.ADVANTAGES: [Column(None, index) for index in range(len(samples))]}


Item = int | tuple[str, str, int]
"""Identity of a message: the key of an answer, or (role, content, tokens)."""
Path = tuple[Item, ...]
"""The messages of a context."""


def said_in_tokens(role: str, content: str, tokens: int) -> Message:
    """Make a message that is ``tokens`` tokens long. ``content`` tells it apart from others."""
    return {**said(role, content), "tokens": tokens}


@dataclass(slots=True)
class _SimulatedTurn:
    """A turn that has its answer."""

    path: Path
    """Its context."""
    tokens: int
    """Sampled tokens."""
    row: int
    """Index of the row that it continued or began."""


class SimulatedEpisodeTokens:
    """`headway.agents.episodes.episode_tokens.EpisodeTokens` without tokens: lengths alone. Rows are `RowAt`.

    All ids of a context are one number, which takes no memory: the number of its tokens, up to the last answer in it,
    that earlier turns of the episode have computed; 0 for a first turn. `SimulatedPrefixCache` reads it.
    """

    def __init__(self) -> None:
        self._turns: dict[int, _SimulatedTurn] = {}
        """Turn of each call, by the call's key."""
        self._rows: list[RowAt] = []
        self._last: list[int] = []
        """Key of the last turn of each row."""
        self._first: Path | None = None

    async def prompt(self, request: TurnRequest, taken: Container[int] = ()) -> TurnContext:
        """See `headway.agents.episodes.episode_tokens.EpisodeTokens.prompt`."""
        path: Path = tuple(map(_item, request.messages))
        if self._first is None:
            self._first = path
        key = next(key for occurrence in count() if (key := _key(path, occurrence)) not in taken)
        lengths = [self._tokens(item) for item in path]
        answers = [place for place, item in enumerate(path) if isinstance(item, int)]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(path, self._first, strict=False))
        known = answers[-1] + 1 if answers else len(list(same))
        return TurnContext(same_ids(sum(lengths), sum(lengths[:known]) if self._turns else 0), key, path)

    def answered(self, prompted: TurnContext, request: TurnRequest, finished: Completion, number: int) -> TurnAnswer:
        """See `headway.agents.episodes.episode_tokens.EpisodeTokens.answered`."""
        path: Path = prompted.chat
        context, row = len(prompted.ids), self._continued(path)
        if row is None:
            row = len(self._rows)
            self._rows.append(RowAt(row, context, finished.length))
            self._last.append(prompted.key)
        else:
            self._rows[row] = replace(self._rows[row], length=context + finished.length - self._rows[row].prompt_length)
            self._last[row] = prompted.key
        self._turns[prompted.key] = _SimulatedTurn(path, finished.length, row)
        reason = "stop" if finished.finish_reason is FinishReason.STOP else "length"
        return TurnAnswer("", "", {**said("assistant", ""), "key": prompted.key}, finish_reason=reason)

    def rows(self) -> list[RowAt]:
        """See `headway.agents.episodes.episode_tokens.EpisodeTokens.rows`."""
        return self._rows

    @property
    def metrics(self) -> Mapping[str, float]:
        """Number of forks."""
        return {"forks": max(0, len(self._rows) - 1)}

    def _tokens(self, item: Item) -> int:
        return self._turns[item].tokens if isinstance(item, int) else item[2]

    def _continued(self, path: Path) -> int | None:
        """The row that a turn with the context ``path`` continues: one whose last answer, and all before it, it has."""
        for place in range(len(path) - 1, -1, -1):
            if isinstance(key := path[place], int):
                turn = self._turns[key]
                return turn.row if self._last[turn.row] == key and turn.path == path[:place] else None
        return None


def _item(message: Message) -> Item:
    if "key" in message:
        return int(message["key"])
    return message["role"], message["content"], message.get("tokens", len(message["content"]))


def _key(path: Path, occurrence: int) -> int:
    """The key of a call: 64 bits, never 0, the same in every process."""
    return xxhash.xxh3_64_intdigest(repr((path, occurrence)).encode()) or 1


# ------------------------------------------------------------------------------------- programs and rewards


class SimulatedPrograms:
    """`headway.agents.episodes.program_episode.Programs` on the clock of the running loop.

    Messages are those of `headway.planner.simulation.simulated_prompts`.
    """

    def __init__(self, profile: ProgramProfile) -> None:
        self._profile = profile
        self._room: AbstractAsyncContextManager[object] = nullcontext()
        if profile.environments is not None:
            self._room = asyncio.Semaphore(profile.environments)

    async def start(self) -> None:
        """Start nothing: there is no user code."""

    async def run(self, job: EpisodeStart, on_ask: Ask, *, on_begin: Callable[[], object] | None = None) -> EpisodeEnd:
        """See `headway.agents.episodes.program_episode.Programs.run`."""
        async with self._room:
            if on_begin is not None:
                on_begin()
            with suppress(EpisodeOver):
                await self._play(job, on_ask)
            return EpisodeEnd()

    async def close(self) -> None:
        """Do nothing: programs are their callers' tasks."""

    async def _play(self, job: EpisodeStart, ask: Ask) -> None:
        """Ask for all turns, each followed by a step."""

        def uniform(what: str, *key: int) -> float:
            # Not `hash`: that of text differs from process to process.
            return uniform_of(job.seed, zlib.crc32(what.encode()), *key)

        def drawn(number: NumberProfile, what: str, turn: int) -> float:
            return number.draw(episode=episode, own=uniform(what, turn, 0))

        profile, episode, messages = self._profile, uniform("episode"), list(job.messages)
        for turn in range(1, (round(drawn(profile.turns, "turns", 0)) or 1) + 1):
            answer = await ask(TurnRequest(messages))
            if (seconds := drawn(profile.step_s, "step_s", turn)) > 0:
                await asyncio.sleep(seconds)
            said = said_in_tokens("tool", str(turn), round(drawn(profile.step_tokens, "tokens", turn)))
            begins_again = uniform("forks", turn, 0) < profile.forks
            messages = [*job.messages, said] if begins_again else [*messages, answer.message, said]


class SimulatedReward:
    """A `RewardFn`: ``workers`` servers, first come, first served.

    Groups to be filtered get rewards that are all 0, all others 0 and 1 in turn. A prompt's ``answer`` says which ones
    these are; where it is None, the share ``filtered`` of them, by seed, epoch, row and attempt alone.
    """

    def __init__(self, profile: RewardProfile, seed: int) -> None:
        self._seconds = profile.seconds
        self._filtered = profile.filtered
        self._seed = seed
        self._workers = asyncio.Semaphore(profile.workers)

    async def score(
        self, prompt: Prompt, responses: Sequence[str], conversations: Sequence[Conversation] | None = None
    ) -> Scores:
        if self._seconds > 0:
            async with self._workers:
                await asyncio.sleep(self._seconds)
        filtered = bool(prompt.answer)
        if prompt.answer is None:
            key = self._seed, zlib.crc32(b"reward"), prompt.epoch, prompt.row, prompt.attempt
            filtered = uniform_of(*key) < self._filtered
        n = len(responses)
        return Scores(np.zeros(n, np.float32) if filtered else np.arange(n, dtype=np.float32) % 2)

    async def close(self) -> None: ...
