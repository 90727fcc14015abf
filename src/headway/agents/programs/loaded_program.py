"""A program in the process that runs it, which makes one episode after the other.

loaded = ProgramSpec(environment="game.py:Game").load()       # in a process for user code
loaded.is_async                                               # shares an event loop with others, or is alone
loaded.describe()                                             # its form and tools, before the first episode
end = await loaded.serve(start, ask)                          # one episode; ask() is a turn of the policy
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from headway.agents.interface.failures import Insisted, failing
from headway.agents.interface.program import Program, ProgramDescription, seed_generators
from headway.agents.interface.program_chat import Ask, Chat, Tally
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart
from headway.agents.interface.sent_messages import SentMessages
from headway.errors import EpisodeOver, HeadwayError, ProgramAway, ProgramFailed, UserCodeError


class LoadedProgram:
    """A program in the process that runs it: its episodes, each with one end or one error."""

    def __init__(self, program: Program, shown: str) -> None:
        self._program, self.shown = program, shown

    @property
    def is_async(self) -> bool:
        """The program shares an event loop with others; otherwise it blocks, and needs a separate process."""
        return self._program.is_async

    def describe(self) -> ProgramDescription:
        """Return what is known before the first episode. May make an environment for that.

        Raises:
            UserCodeError: the user's code cannot be used; says why.
            ProgramAway: what it needs is away for a time.
        """
        with beforehand():
            return self._program.describe()

    async def serve(self, start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        """Make the episode ``start``, asking the policy for turns by ``ask``.

        Before a program that is alone in its process begins, the global generators are seeded with the episode's seed.
        Where a limit ends the episode, its end has the rewards that were given before.

        Raises:
            ProgramAway: something that the program needs is away for a time; it may be run again.
            ProgramFailed: the program failed; the message names the user's code, and standard error has the traceback.
        """
        tally = Tally()
        if start.messages_are_kept:
            ask = SentMessages(ask).ask
        if not self._program.is_async:
            seed_generators(start.seed)
        try:
            with failing(self.shown):
                end = await self._program.run(start, Chat(ask, start, tally, self.shown))
                if end.turn_rewards:
                    tally.give(end.turn_rewards, self.shown)
        except EpisodeOver:
            end = EpisodeEnd()
        except Insisted as insisted:
            print(f"{start.name}: {insisted}; it was left there", file=sys.stderr)
            end = EpisodeEnd()
        except ProgramFailed:
            raise
        except HeadwayError as cause:
            raise ProgramFailed(str(cause)) from cause
        finally:
            tally.closed = True
        return replace(end, turn_rewards=tally.turn_rewards, tool_errors=tally.tool_errors)

    async def close(self) -> None:
        """Close the environments that are kept from one episode to the next, where the program's form has any."""
        close = getattr(self._program, "close", None)
        if close is not None:
            await close()


@contextmanager
def beforehand() -> Iterator[None]:
    """Turn failures of user code before the first episode into what they are there: something wrong that was given."""
    try:
        yield
    except ProgramAway:
        raise
    except ProgramFailed as cause:
        raise UserCodeError(str(cause)) from cause
