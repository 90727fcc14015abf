"""The cost of work beside the other side's, and what it would have been alone.

    cost of a step = cost alone · (1 + (slowdown − 1) · share of its time in which the other side computed)

Both shares must occur in a run for its slowdown to be known: a synchronous run, in which sides take turns, measures
costs alone, and one in which both always compute measures costs that contain the slowdown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from headway.events import PrefillSteps, ReplicaActivity
from headway.planner.measurement.cost_fitting import DecodeSample, OverlapSample, fit_slowdown
from headway.planner.measurement.record_training import TrainerWork
from headway.planner.measurement.recording import Recording
from headway.reports.metrics.intervals import IntervalUnion


class Overlap:
    """A recording's measurements, as if each side had computed alone, where that is known."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._trainer = IntervalUnion()
        for work in (*recording.training.steps, *recording.training.forwards):
            self._trainer.add((work.began, work.began + work.seconds))
        self.training = self._training_slowdown()
        """Factor by which training takes longer while a replica computes; None if it cannot be determined."""
        self.generation = self._generation_slowdown()
        """Factor by which generation takes longer while the trainer computes; None if it cannot be determined."""

    def share(self) -> float:
        """The share of the time that replicas computed in which the trainer did so, too."""
        busy = [span for report in self._recording.activity for span in report.busy]
        return self._share_of(busy)

    def steps(self) -> list[TrainerWork]:
        """The recording's optimizer steps, as if the trainer had computed alone, where that is known."""
        return self._alone(self._recording.training.steps)

    def forwards(self) -> list[TrainerWork]:
        """The recording's forward passes, as if the trainer had computed alone, where that is known."""
        return self._alone(self._recording.training.forwards)

    def decode_samples(self) -> list[DecodeSample]:
        """Decode samples: one for each report of a replica and number of active sequences."""
        return [replace(sample, step_s=sample.step_s / self._slowed(report)) for report, sample in self._samples()]

    def prefill_steps(self) -> list[PrefillSteps]:
        """Prefill steps: one for each report of a replica and size of prefills."""
        return [
            (steps, active, tokens, seconds / self._slowed(report), cached)
            for report in self._recording.warm_activity("prefill_steps")
            for steps, active, tokens, seconds, cached in report.prefill_steps.values()
        ]

    def _samples(self) -> Iterable[tuple[ReplicaActivity, DecodeSample]]:
        for report in self._recording.warm_activity("decode_steps"):
            for active, (steps, seconds, cached) in report.decode_steps.items():
                yield report, DecodeSample(active, steps, seconds / steps, cached / steps)

    def _alone(self, works: Iterable[TrainerWork]) -> list[TrainerWork]:
        slowdown = self.training or 1.0
        return [
            replace(work, seconds=work.seconds / (1 + (slowdown - 1) * self._beside_generation(work)))
            for work in self._recording.warm(works)
        ]

    def _slowed(self, report: ReplicaActivity) -> float:
        return 1 + ((self.generation or 1.0) - 1) * self._share_of(report.busy)

    def _training_slowdown(self) -> float | None:
        steps = [step for step in self._recording.warm(self._recording.training.steps) if step.tokens]
        return fit_slowdown(
            OverlapSample(self._beside_generation(step), step.seconds, step.tokens, weight=1.0) for step in steps
        )

    def _generation_slowdown(self) -> float | None:
        """Fit generation's slowdown to steps with one number of active sequences, the one that most reports have."""
        samples = list(self._samples())
        counts = Counter(sample.active for _, sample in samples)
        most = max(counts, key=lambda active: (counts[active], active), default=0)
        return fit_slowdown(
            OverlapSample(self._share_of(report.busy), sample.step_s, sample.cached, weight=sample.steps)
            for report, sample in samples
            if sample.active == most
        )

    def _beside_generation(self, work: TrainerWork) -> float:
        """Share of the work's time during which the busiest replica computed."""
        window = (work.began, work.began + work.seconds)
        busy = (self._recording.busy_within(replica, window) for replica in self._recording.replicas)
        return max(busy, default=0.0) / work.seconds if work.seconds > 0 else 0.0

    def _share_of(self, busy: Iterable[tuple[float, float]]) -> float:
        """The share of the time in the spans ``busy`` during which the trainer computed."""
        spans = list(busy)
        seconds = sum(end - start for start, end in spans)
        return sum(map(self._trainer.within, spans)) / seconds if seconds > 0 else 0.0
