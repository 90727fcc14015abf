"""Rollout: joins what engines return with the prompts that were asked, into groups.

consumes        finished groups, or parts of split ones, from Generate
waits for       the other parts of a split group
is unblocked by Generate, with the last part; by whoever discards the group
produces        groups, complete and unrewarded; a group that was aborted ends here as dropped
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from headway.data.types import FinishReason, Group, Prompt, ResponseAt
from headway.events import TrajectoryFinished
from headway.interfaces import FinishedGroup
from headway.pipeline.channel import Channel
from headway.pipeline.ledger import Fate
from headway.pipeline.stage import Stage
from headway.pipeline.state import RunState, now


class Rollout(Stage[FinishedGroup, Group]):
    waits_for_input = "Generate"
    waits_for_output = None

    def __init__(
        self, state: RunState, input: Channel[FinishedGroup], output: Channel[Group], *, n: int, baselines: bool = False
    ) -> None:
        """``baselines``: to the ``n`` trajectories of a group belongs one more, which is not trained on."""
        super().__init__(state.emit, input, output)
        self._state = state
        self._n = n
        self._expected = n + baselines
        self._parts: dict[int, list[FinishedGroup]] = {}
        """Parts of split groups, until all are there."""
        self._discarded = 0
        """Groups discarded when parts of such were last looked for."""

    async def process_data(self, finished: FinishedGroup) -> AsyncGenerator[Group, None]:
        self._report(finished)
        number = finished.number
        self._forget_parts_of_discarded()
        if not self._state.ledger.is_open(number):
            return  # another part of it brought its end
        parts = self._parts.setdefault(number, [])
        parts.append(finished)
        if any(t.finish_reason is FinishReason.ABORTED for t in finished.trajectories):
            del self._parts[number]
            self._state.discard(number, Fate.DROPPED, "overdue" if self._state.staleness.drops_overdue else "aborted")
        elif sum(len(part.trajectories) for part in parts) == self._expected:
            del self._parts[number]
            yield joined(parts, self._state.ledger.prompt(number))

    def _forget_parts_of_discarded(self) -> None:
        """A group may be lost with a replica that had the rest of it."""
        if self._parts and self._discarded != self._state.staleness.discarded:
            self._discarded = self._state.staleness.discarded
            self._parts = {n: parts for n, parts in self._parts.items() if self._state.ledger.is_open(n)}

    def _report(self, finished: FinishedGroup) -> None:
        for trajectory in finished.trajectories:
            self._emit(
                TrajectoryFinished(
                    time=now(),
                    number=finished.number,
                    k=trajectory.id.k,
                    replica=trajectory.replica,
                    prompt_tokens=trajectory.prompt_length,
                    tokens=trajectory.length,
                    finish_reason=trajectory.finish_reason.value,
                    version_spans=trajectory.version_spans,
                    started=trajectory.started,
                    finished=trajectory.finished,
                    baseline=trajectory.id.k >= self._n,
                )
            )


def joined(parts: Sequence[FinishedGroup], prompt: Prompt) -> Group:
    """One group from all of its parts, its trajectories in order of k."""
    pieces = [(t, ResponseAt(part.tokens, i)) for part in parts for i, t in enumerate(part.trajectories)]
    pieces.sort(key=lambda piece: piece[0].id.k)
    trajectories, responses = zip(*pieces, strict=True)
    return Group(parts[0].number, prompt, trajectories, responses)
