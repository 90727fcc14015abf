"""A program, as each form of user code is one: what is known of it beforehand, and how it makes an episode."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Protocol

from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, ToolSchema


@dataclass(frozen=True, slots=True)
class ProgramDescription:
    """The facts of a program that are known before its first episode."""

    form: str
    """Name of the form by which the user's code was recognised."""
    is_async: bool
    """The program shares an event loop with others; otherwise it blocks, and needs a separate process."""
    tools: tuple[ToolSchema, ...] = ()
    """Schemas of the tools that are known beforehand."""
    gives_reward: bool | None = None
    """The program gives rewards; None where only its episodes tell."""
    columns: tuple[str, ...] = ()
    """Columns that every row of the data has to have."""


class Program(Protocol):
    """One form of user code."""

    is_async: bool
    """The program shares an event loop with others; otherwise it blocks, and needs a separate process."""

    def describe(self) -> ProgramDescription:
        """Return what is known before the first episode. May make an environment for that.

        Raises:
            UserCodeError: the user's code cannot be used; says why.
        """
        ...

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        """Make one episode. What its chat has recorded is added to the end: failed tools, rewards of turns.

        Rewards of turns that the end has itself are one for each turn, in the order in which turns were asked for.

        Raises:
            EpisodeOver: a limit has ended the episode, and nothing is to be added to the rewards that turns were given.
            ProgramFailed: the user's code raised, or returned what it must not.
        """
        ...


def seed_generators(seed: int) -> None:
    """Seed Python's global generator and, where it is imported, numpy's."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
