"""The runners of one keeper's programs: shared by asynchronous ones, a process for each episode of synchronous ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from headway.config.schema import Config
from headway.episodes.programs import Turn
from headway.errors import ConfigError, RunError
from headway.programs.messages import EpisodeEnd, EpisodeStart
from headway.programs.spec import ProgramSpec
from headway.runners import Runners
from headway.user_code import resolve_spec


class ProgramRunners:
    """`headway.episodes.programs.Programs` in processes of their own."""

    def __init__(self, name: str, config: Config, logs: Path | None) -> None:
        """
        Args:
            name: of the keeper, for messages.
            logs: the directory for what programs print.
        """
        self._name = name
        self._config = config
        self._log = None if logs is None else logs / f"{name}-programs.log"
        self._runners: Runners | None = None

    async def start(self) -> None:
        """Load the user's code, and start the first process.

        Raises:
            UserError: the code cannot be used; says why.
            WorkerDied: a process ended while it loaded the code.
        """
