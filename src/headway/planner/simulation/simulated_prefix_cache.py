"""The prefix cache of a simulated replica: which tokens of a context need no prefill.

Contexts have lengths and no contents here, so it is the episodes that say what is common: first calls of one prompt
share a context of the same length while one of them is open, and a further call of an episode begins with what the call
before it left behind. Where it goes on with only a part of that, all of its ids are the number of tokens in that part
(`headway.planner.simulation.simulated_prompts`). Of each episode that is what its last finished call left: of turns
that were asked for at once, the first to finish counts as prefilled again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headway.data.interfaces.rollout import GenerateRequest
from headway.data.types import TrajectoryId
from headway.planner.simulation.processor_sharing import SharedContext, SimulatedCall


@dataclass(frozen=True, slots=True)
class _LastCall:
    """The context and continuation of an episode's last call."""

    client: str
    tokens: int
    computed_by: int


class SimulatedPrefixCache:
    """The contexts of open calls, and what is kept for further calls of episodes. What one version computed is nothing
    to another one, unless the episode goes on in place (`go_on_in_place`).

    Kept tokens take what decoding leaves of the memory: those that were used least recently go first (`fit`).
    """

    def __init__(self) -> None:
        self._contexts: dict[tuple[int, ...], SharedContext] = {}
        self._kept: dict[TrajectoryId, _LastCall] = {}
        """By episode, the least recently used one first."""
        self._kept_tokens = 0

    def open(self, call: GenerateRequest) -> SharedContext:
        """The context of ``call``, which is open from now on."""
        length = len(call.input_ids)
        key = (*call.trajectory, call.key, length) if call.key else (*call.trajectory[:3], length)
        if (context := self._contexts.get(key)) is None:
            context = self._contexts[key] = SharedContext(key)
        context.calls += 1
        return context

    def close(self, run: SimulatedCall) -> None:
        """Count the run's call as open no more; a context without open calls is forgotten."""
        context = run.prompt
        context.calls -= 1
        if not context.calls:
            del self._contexts[context.key]

    def prefill(self, run: SimulatedCall, version: int) -> int:
        """Compute the context of ``run`` under ``version``: tokens that this takes, beside ``run.found``.

        A call that goes on with tokens of its own is prefilled whole.
        """
        if run.tokens:
            return run.context
        run.found = run.context if run.prompt.computed_by == version else self._found(run, version)
        run.prompt.computed_by = version
        return run.context - run.found

    def _found(self, run: SimulatedCall, version: int) -> int:
        kept = self._kept.pop(run.call.trajectory, None)
        if kept is None:
            return 0
        self._kept[run.call.trajectory] = kept
        if kept.computed_by != version:
            return 0
        ids = run.call.input_ids
        known = int(ids[0]) if run.call.key and len(ids) else 0
        return min(kept.tokens, run.context, known or run.context)

    # ------------------------------------------------------------------------------------- between calls

    def keep(self, run: SimulatedCall, version: int) -> None:
        """Keep all tokens of a finished ``run`` for its episode's next call under ``version``."""
        self._forget(run.call.trajectory)
        self._kept[run.call.trajectory] = _LastCall(run.client, run.context, version)
        self._kept_tokens += run.context

    def go_on_in_place(self, version: int) -> None:
        """Keep what the previous version computed for episodes, for use under ``version``."""
        for episode, kept in self._kept.items():
            self._kept[episode] = replace(kept, computed_by=version)

    def fit(self, room: float) -> None:
        """Give up what is kept beyond ``room`` tokens."""
        while self._kept and self._kept_tokens > room:
            self._forget(next(iter(self._kept)))

    def release(self, episodes: Iterable[TrajectoryId]) -> None:
        """Give up what is kept for ``episodes``."""
        for episode in episodes:
            self._forget(episode)

    def leave(self, client: str) -> None:
        """Give up what is kept for all episodes of ``client``."""
        self.release([episode for episode, kept in self._kept.items() if kept.client == client])

    def clear(self) -> None:
        """Drop everything that was computed."""
        self._kept.clear()
        self._kept_tokens = 0
        for context in self._contexts.values():
            context.computed_by = None

    def _forget(self, episode: TrajectoryId) -> None:
        if (kept := self._kept.pop(episode, None)) is not None:
            self._kept_tokens -= kept.tokens
