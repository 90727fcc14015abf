"""Guard against data that is too far off policy to learn from.

    effective sample size of a step < min_ess ──▶ warn │ tighten the trust region │ lower η │ stop
                                    ≥ min_ess ──▶ what was tightened or lowered comes back, step by step

The effective sample size is (Σw)²/(N·Σw²) with w = π_θ/π_behav over the step's tokens: 1 on policy, 1/N when one token
has all the weight.

Also here: the count of optimizer steps that were skipped because loss or gradient was not finite. Many in a row end the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headway.config.sections.learning import GuardConfig
from headway.errors import NonFinite
from headway.events import GuardActed
from headway.pipeline.admission.pipeline_state import RunState, now

ESS = "offpolicy/ess"
TIGHTER = 0.5
"""Factor by which one step of tightening shrinks the trust region."""
TIGHTEST = 0.125
"""Smallest share of the configured trust region that tightening leaves."""


class Guard:
    def __init__(self, settings: GuardConfig, state: RunState, stop: Callable[[str], None]) -> None:
        """Create the guard. ``stop`` is called with a reason, and ends the run after the current version."""
        self.clip_scale = 1.0
        """Width of the trust region, as a multiple of the configured one."""
        self._settings = settings
        self._state = state
        self._stop = stop
        self.lowers_eta = settings.action == "lower_eta"
        """True if the guard may reduce the η that limits admission."""
        self._acted_at: int | None = None
        """Version for which the guard acted last."""
        self._version: int | None = None
        """Version of the last step that the guard examined; None before the first one."""
        self._was_low = False
        """True once a step of the version examined last had a low effective sample size."""

    def state(self) -> dict[str, Any]:
        """Return the guard's part of a checkpoint. The current η is in the part of `RunState`."""
        return {"clip_scale": self.clip_scale, "version": self._version, "was_low": self._was_low}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Warnings given before the checkpoint may be repeated."""
        if self._settings.action == "tighten":  # under another action nothing would widen the range again
            self.clip_scale = state["clip_scale"]
        self._version, self._was_low = state["version"], state["was_low"]

    def look(self, ess: float | None, version: int) -> None:
        """Act on the effective sample size of one optimizer step of ``version``. ``ess``: None if the step has none."""
        least = self._settings.min_ess
        if ess is None or least is None:
            return
        low = ess < least
        match self._settings.action:
            case "warn" if low and self._acted_at != version:
                self._acted_at = version
                self._tell(version, ess, least, "warned")
            case "tighten":
                scale = max(TIGHTEST, self.clip_scale * TIGHTER) if low else min(1.0, self.clip_scale / TIGHTER)
                if scale != self.clip_scale:
                    self.clip_scale = scale
                    self._tell(version, ess, least, "tightened" if low else "widened")
            case "lower_eta":
                self._lower_or_recover(low, version, ess, least)
            case "stop" if low and self._acted_at is None:
                self._acted_at = version
                self._tell(version, ess, least, "stopped")
                self._stop(
                    f"algorithm.guard: the effective sample size of a step of version {version} is {ess:.3g}, below "
                    f"algorithm.guard.min_ess={least:g}"
                )

    def _lower_or_recover(self, low: bool, version: int, ess: float, least: float) -> None:
        """Lower or raise η, at most once per version.

        η is lowered at a version's first low step. It is raised at a version's first step if the version before had no
        low step: the first step is the closest to its data, and says nothing about later ones.
        """
        if version != self._version:
            # In one assignment: `recovers` reads the previous version's values, which are overwritten here.
            recovers, self._version, self._was_low = self._version is not None and not self._was_low, version, False
            if recovers and not low and self._state.staleness.recover():
                self._state.changed.changed()
                self._tell(version, ess, least, "raised η")
        if low and not self._was_low:
            self._was_low = True
            if self._state.staleness.lower():
                self._tell(version, ess, least, "lowered η")

    def _tell(self, version: int, ess: float, least: float, did: str) -> None:
        clip_scale, eta = self.clip_scale, float(self._state.staleness.eta_now)
        self._state.emit(
            GuardActed(time=now(), version=version, ess=ess, min_ess=least, did=did, clip_scale=clip_scale, eta=eta)
        )
        self._state.note(
            f"version {version}: effective sample size {ess:.3g}, algorithm.guard.min_ess={least:g}: {did}; η is "
            f"{eta:g}, the clip range {clip_scale:g} of what is configured",
            "warning" if ess < least else "info",
        )


MOST_SKIPPED = 10
"""Most optimizer steps that may be skipped in a row: a spike passes in a few, diverged weights never recover."""


class StepCounter:
    """Counter of a model's optimizer steps. Too many skipped in a row end the run.

    Example:
        >>> steps = StepCounter("actor.optim.lr")
        >>> steps.count(skipped=True)
        >>> steps.count(skipped=False)
        >>> steps.state()
        {'steps': 2, 'skipped_in_row': 0}
    """

    def __init__(self, lr_key: str) -> None:
        """Start at zero. ``lr_key``: name of the learning rate's setting, for messages."""
        self.made = 0
        """Number of steps, skipped ones included."""
        self._lr_key = lr_key
        self._skipped_in_row = 0

    def count(self, *, skipped: bool) -> None:
        """Count a step. Raises `NonFinite` where more than `MOST_SKIPPED` in a row were skipped."""
        self.made += 1
        self._skipped_in_row = self._skipped_in_row + 1 if skipped else 0
        if self._skipped_in_row > MOST_SKIPPED:
            raise NonFinite(
                f"{self._skipped_in_row} optimizer steps in a row were skipped because loss or gradient was not "
                f"finite; lower {self._lr_key}, or look at the rewards for extreme values"
            )

    def state(self) -> dict[str, Any]:
        """Return the count's part of a checkpoint."""
        return {"steps": self.made, "skipped_in_row": self._skipped_in_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.made, self._skipped_in_row = state["steps"], state["skipped_in_row"]
