"""The record of a run's trainer, fetch by fetch: its work, and what passed between.

    FetchTaken ──▶ forward ──▶ step ──▶ step ──▶ gather, or the next FetchTaken's wait
          └─ gap ─┘      └ gap ┘  └ gap ┘  └ gap ┘           gaps: the driver's own work, the fetch's latency

On shared devices a fetch is first waited with until the trainer has them: its latency counts from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headway.data.types import Sample
from headway.events import Event, FetchTaken, LeaseChanged, OptimizerStepped, TrainerBusy
from headway.planner.profiles.division import Division


@dataclass(frozen=True, slots=True)
class TrainerWork:
    """A forward pass over a fetch, or one optimizer step."""

    began: float
    seconds: float
    tokens: int
    """Tokens, prompts and answers, that all data ranks would have had if each had as many as the one with most."""


@dataclass(slots=True)
class FetchRecord:
    began: float
    latency_s: float = 0.0
    """Seconds in which the trainer neither computed nor waited for groups, devices or an update."""


@dataclass(slots=True)
class TrainingRecord:
    """Collects the trainer's work from the events of a run, which `add` takes in order."""

    mini_batch: int
    samples_of: Callable[[int], Sequence[Sample]]
    """Function from a group's number to its trajectories; to none where the group is not on record."""
    division: Division
    """Division of each fetch over the trainer's data ranks."""
    steps: list[TrainerWork] = field(default_factory=list)
    forwards: list[TrainerWork] = field(default_factory=list)
    fetches: list[FetchRecord] = field(default_factory=list)
    """Fetches whose training ended, in order."""
    _numbers: list[int] = field(default_factory=list)
    """Groups of the fetch; none where one of them is not on record, and no step's tokens are known."""
    _fetch: FetchRecord | None = None
    _reached: float = 0.0
    """The time up to which the fetch is accounted for."""
    _steps_of_fetch: int = 0
    _step: TrainerBusy | None = None
    """The trainer's last span, as long as no `OptimizerStepped` has identified it as an optimizer step."""

    def add(self, event: Event) -> None:
        match event:
            case FetchTaken(waited=(asked, _)):
                self._end_fetch(asked)
                known = all(map(self.samples_of, event.numbers))
                self._numbers, self._steps_of_fetch = event.numbers if known else [], 0
                self.division.begin([self._samples(numbers) for numbers in self._mini_batches()])
                self._fetch, self._reached = FetchRecord(event.time), event.time
            case LeaseChanged(holder="train"):
                self._reached = event.time
            case TrainerBusy(what="forward", span=(start, end)):
                self._pass_to(start, end)
                self.forwards.append(TrainerWork(start, end - start, self._tokens(self._numbers)))
            case TrainerBusy(what="step", span=(start, end)):
                self._pass_to(start, end)
                self._step = event
            case TrainerBusy(what="gather", span=(start, _)):
                self._end_fetch(start)
            case OptimizerStepped():
                self._stepped()

    def _pass_to(self, start: float, end: float) -> None:
        if self._fetch is not None:
            self._fetch.latency_s += start - self._reached
        self._reached = end

    def _end_fetch(self, at: float) -> None:
        """End the fetch, which has no end event: the trainer's next work or wait begins at ``at``."""
        if self._fetch is not None and self._steps_of_fetch:
            self._pass_to(at, at)
            self.fetches.append(self._fetch)
        self._fetch = None

    def _stepped(self) -> None:
        """Record an optimizer step and its tokens. A fetch is split by group into mini-batches, epoch after epoch."""
        if self._step is None:
            return
        start, end = self._step.span
        self._step = None
        batches = self._mini_batches()
        numbers = batches[self._steps_of_fetch % len(batches)] if batches else []
        self._steps_of_fetch += 1
        self.steps.append(TrainerWork(start, end - start, self._tokens(numbers)))

    def _mini_batches(self) -> list[list[int]]:
        size = self.mini_batch
        return [self._numbers[i : i + size] for i in range(0, len(self._numbers), size)]

    def _samples(self, numbers: Iterable[int]) -> list[Sample]:
        return [sample for number in numbers for sample in self.samples_of(number)]

    def _tokens(self, numbers: Iterable[int]) -> int:
        samples = self._samples(numbers)
        return self.division.tokens(samples) if samples else 0
