"""Small jobs to simulate, and what their events show."""

from __future__ import annotations

from typing import Any, TypeVar

from headway.events import Event
from headway.planner.profiles.job_profile import Profile

E = TypeVar("E", bound=Event)

PLAIN: dict[str, Any] = {
    "name": "plain",
    "devices": 8,
    "batch": {"groups_per_version": 2, "ppo_mini_batch_size": 2, "n": 2},
    "prompt": {"kind": "constant", "tokens": 10},
    "response": {"kind": "constant", "tokens": 100},
    "rollout": {"slots": 8, "decode": [[1, 0.01], [4, 0.02]]},
    "train": {"points": [{"devices": 1, "token_s": 1e-3}]},
}
"""Four answers decode together in 100 × 0.02 = 2 s; a step trains on 4 × 110 tokens in 0.44 s; all else is free."""

RICH: dict[str, Any] = {
    "name": "rich",
    "devices": 8,
    "batch": {"groups_per_version": 8, "ppo_mini_batch_size": 2, "n": 4, "ppo_epochs": 2},
    "prompt": {"kind": "lognormal", "mean": 30, "sigma": 0.5, "max": 90},
    "response": {"kind": "lognormal", "mean": 200, "sigma": 1, "max": 1500, "within_group": 0.5},
    "rollout": {
        "slots": 6,
        "kv_tokens": 4000,
        "decode": [[1, 0.01], [8, 0.02]],
        "kv_token_s": 1e-7,
        "prefill_token_s": 1e-5,
        "prefill_s": 0.01,
    },
    "train": {
        "points": [{"devices": 1, "step_s": 0.1, "token_s": 1e-3, "forward_token_s": 3e-4}],
        "recompute_old_log_probs": "always",
        "reference": True,
    },
    "update": {
        "nbytes": 1_000_000_000,
        "gather": {"latency_s": 0.2},
        "send": {"bytes_per_s": 1e9},
        "recv": {"bytes_per_s": 2e9},
        "register": {"latency_s": 0.1},
        "load": {"latency_s": 0.3},
    },
    "shared": {"to_train_s": 1.0, "to_generate_s": 2.0},
    "reward": {"seconds": 0.5, "workers": 3, "filtered": 0.25},
    "validation": {"problems": 5, "n": 2, "test_freq": 2},
}
"""A little of everything."""


def profile(values: dict[str, Any] = PLAIN, **sections: Any) -> Profile:
    """``values`` with some sections changed; a section's keys lie on those that there are."""
    merged = dict(values)
    for name, change in sections.items():
        both = isinstance(change, dict) and isinstance(merged.get(name), dict) and "kind" not in change
        merged[name] = {**merged[name], **change} if both else change
    return Profile.model_validate(merged)


class Recorder:
    """An observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None: ...

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]
