"""Commands that a live run takes through its control socket."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from headway.api.control_socket import Message
from headway.errors import ConfigError, UserError
from headway.pipeline.observing.profile_window import ProfileWindow


class RunControl:
    """Answers of one run to ``headway ctl``: a method for each command."""

    def __init__(self) -> None:
        self.window: ProfileWindow | None = None
        """Window of the run's profiles; None before training begins."""
        self._commands = {"profile": self._profile}

    async def answer(self, message: Message) -> AsyncGenerator[str, None]:
        """Do what ``message`` asks for, and yield lines for the user. Raises `UserError` where that cannot be."""
        command = self._commands.get(str(message.get("command")))
        if command is None:
            known = ", ".join(self._commands)
            raise UserError(f"this run can be asked for {known}, not for {message.get('command')!r}")
        async with aclosing(command(message)) as lines:
            async for line in lines:
                yield line

    async def _profile(self, message: Message) -> AsyncGenerator[str, None]:
        if self.window is None:
            raise UserError("this run is still starting, and has nothing to profile; ask again when it trains")
        match message:
            case {"versions": int(versions), "seconds": int() | float() as seconds}:
                told = self.window.ask(versions=versions, seconds=seconds)
            case _:
                raise ConfigError("expected the numbers versions and seconds")
        async with aclosing(told.lines()) as lines:
            async for line in lines:
                yield line
