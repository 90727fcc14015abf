"""Environments that are made once and reset often: episodes of a process take one and give it back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headway.errors import EpisodeOver
from headway.programs.failures import failing


class Instances:
    """Environments of one kind. One that failed, or whose episode was cancelled, is not used again."""

    def __init__(self, make: Callable[[], Any], who: str) -> None:
        self._make, self._who = make, who
        self._free: list[Any] = []
        self._process = os.getpid()

    @contextmanager
    def one(self) -> Iterator[Any]:
        """Lend an environment for the time of an episode; makes one where none is free."""
        instance = self._take()
        try:
            yield instance
        except EpisodeOver:
            self._free.append(instance)
            raise
        self._free.append(instance)

    def _take(self) -> Any:
        # A forked process shares the connections of what was made before the fork with its siblings: it makes its own.
        if self._process != os.getpid():
            self._process, self._free = os.getpid(), []
        if self._free:
            return self._free.pop()
        with failing(f"{self._who}: making it"):
            return self._make()
