"""Tokens of finished groups, as files in memory: they stay on the machine that made them until a rank reads them.

keeper ──write──▶ file ◀──read── ranks of the same machine; others have a task on that machine read for them
                   └ removed when the driver has forgotten the group

A file outlives the keeper that wrote it, so that a keeper's death costs no finished group. Few tokens travel with their
handle where the keeper is on another machine than the driver, so that the loss of that machine costs nothing either.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir

from headway.cluster.memory_files import SHARED_MEMORY, directory_in_memory, held_directory
from headway.config.schema import Config
from headway.data.types import GroupTokens
from headway.errors import RunError
from headway.pickling import pickled_by_fields

SMALL = 100_000
"""Most bytes of tokens that travel with their handle."""
BYTES_PER_TOKEN = 4 + 4 + 4 + 1
"""Bytes of a token's id, log-prob, version and mask."""


@pickled_by_fields
@dataclass(frozen=True, slots=True, weakref_slot=True)
class TokenFile:
    """Handle of one group's `GroupTokens`."""

    host: str
    """Address of the machine that has the file."""
    path: str
    data: bytes | None = field(default=None, compare=False)
    """The pickled tokens, where they travel with the handle; there is no file then."""


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """Place of a run's token files: one path, the same on each machine."""

    host: str
    """Address of the driver's machine, which has made the directory, and removes it."""
    directory: Path


class TokenFiles:
    """The files of one keeper."""

    def __init__(self, keeper: str, place: TokenPlace, host: str) -> None:
        """Use the directory of this machine, which has the address ``host``. ``keeper``: its name in this run."""
        self._host = host
        self._beside_driver = host == place.host
        self._directory = place.directory
        if not self._beside_driver:
            held_directory(place.directory)
        self._prefix = f"{place.directory}/{keeper}-"
        self._numbers = count()

    def write(self, tokens: GroupTokens) -> TokenFile:
        """Keep ``tokens``, in a new file unless they are few. Raises `RunError` where there is no room."""
        path = f"{self._prefix}{next(self._numbers)}"
        data = pickle.dumps(tokens, pickle.HIGHEST_PROTOCOL)
        if not self._beside_driver and len(data) <= SMALL:
            return TokenFile(self._host, path, data)
        try:
            with open(path, "wb") as file:  # noqa: PTH123 - a Path takes as long to make as the file
                file.write(data)
        except OSError as error:
            Path(path).unlink(missing_ok=True)
            raise RunError(
                f"the tokens of a group cannot be written to {path} ({len(data)} bytes): {error.strerror}. They wait "
                "there for the trainer: make room, or let fewer groups wait (async_training.staleness_threshold)"
            ) from error
        return TokenFile(self._host, path)

    def remove(self, files: Iterable[TokenFile]) -> None:
        """Remove files that nobody will read any more."""
        for file in files:
            Path(file.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory, unless that is the driver's to do."""
        if not self._beside_driver:
            rmtree(self._directory, ignore_errors=True)


def token_directory(config: Config) -> AbstractContextManager[Path]:
    """Make a directory for token files until the block ends: in memory, or where that has too little room on disk."""
    parent = SHARED_MEMORY
    if not parent.is_dir() or _free(parent) < token_bytes(config):
        parent = Path(gettempdir())
    return directory_in_memory(parent)


def token_bytes(config: Config) -> int:
    """Return the bytes of all tokens that may wait at once, one row for an episode."""
    group = (config.rollout.n + 1) * (config.data.max_prompt_length + config.data.max_response_length)
    ahead = (1 + config.async_training.staleness_threshold) * config.groups_per_version
    return int((ahead + config.groups_per_fetch) * group * BYTES_PER_TOKEN)


def read_here(file: TokenFile) -> GroupTokens | None:
    """Return the tokens; None where this machine does not have the file."""
    try:
        data = Path(file.path).read_bytes() if file.data is None else file.data
    except FileNotFoundError:
        return None
    tokens: GroupTokens = pickle.loads(data)
    return tokens


def _free(directory: Path) -> int:
    there = os.statvfs(directory)
    return there.f_bavail * there.f_frsize
