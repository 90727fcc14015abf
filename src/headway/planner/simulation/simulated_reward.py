"""A reward that takes its time. Which groups have no gradient is on record, or decided by a hash."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from headway.data.interfaces.rewards import Scores
from headway.data.types import Conversation, Prompt
from headway.planner.profiles.job_profile import RewardProfile


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
        self._scores: dict[tuple[int, bool], Scores] = {}

    async def score(
        self, prompt: Prompt, responses: Sequence[str], conversations: Sequence[Conversation] | None = None
    ) -> Scores:
        if self._seconds > 0:
            async with self._workers:
                await asyncio.sleep(self._seconds)
        filtered = self._uniform(prompt) < self._filtered if prompt.answer is None else bool(prompt.answer)
        return self._shared(len(responses), varied=not filtered)

    async def close(self) -> None: ...

    def _uniform(self, prompt: Prompt) -> float:
        """A number in [0, 1), keyed by the seed and the prompt's epoch, row and attempt."""
        key = struct.pack("<4q", self._seed, prompt.epoch, prompt.row, prompt.attempt)
        digest = hashlib.blake2b(key, digest_size=4, person=b"reward").digest()
        return int.from_bytes(digest, "little") / 2**32

    def _shared(self, n: int, *, varied: bool) -> Scores:
        """The scores of n answers, as one array [n] for all groups: it cannot be written to."""
        if (scores := self._scores.get((n, varied))) is None:
            rewards = np.arange(n, dtype=np.float32) % 2 if varied else np.zeros(n, np.float32)
            rewards.setflags(write=False)
            scores = self._scores[n, varied] = Scores(rewards)
        return scores
