"""The contract of user code that a runner holds.

class Echo:                                             # lives in the runner process
    def describe(self): return "an echo"
    async def serve(self, job, ask): return await ask(job)
    async def close(self): pass

@dataclass(frozen=True)
class EchoSpec:                                         # travels to the process
    shown: str = "echo.py:echo"
    def load(self): return Echo()
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

Ask = Callable[[Any], Awaitable[Any]]
"""A function that sends the host a message that pickles, and returns what the host answers."""


class Hosted(Protocol):
    """User code, loaded: what a runner process holds, and serves one job after another with."""

    def describe(self) -> Any:
        """Return what the user's code turned out to be: plain data that pickles, told to the host at the start."""

    async def serve(self, job: Any, ask: Ask) -> Any:
        """Do ``job`` and return its result, which pickles and unpickles without the user's modules.

        With several jobs at once in a process this runs on the process's event loop; of one job several asks may be
        open at once there. With one job at a time there is no event loop, so that synchronous code may run one of its
        own: then this may await nothing but ``ask``. Global generators are seeded here, by whatever the job says.

        ``ask`` raises the `HeadwayError` that the host answers with. Exceptions of this call end the job, not the
        process: a `HeadwayError` as itself, any other as `UserCodeFailed` with its text.
        """

    async def close(self) -> None:
        """Close what the user's code holds, before its process ends in order. It has a few seconds."""


class HostedSpec(Protocol):
    """A picklable description of user code that can load it."""

    @property
    def shown(self) -> str:
        """The name of the user's code in messages, such as ``reward.py:score``."""

    def load(self) -> Hosted:
        """Load the code, in the runner process. Raises `UserError` where it cannot be used."""
