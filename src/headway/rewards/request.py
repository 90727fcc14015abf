"""What travels to a reward worker: which reward it runs, and one group to score. Plain data that pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.user_code import names_a_file, resolve_spec

if TYPE_CHECKING:
    from headway.config.schema import Config


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Which reward a worker runs. Raises nothing; the worker finds out whether it exists."""

    function: str
    """``exact_match``, ``task`` or ``file.py:function`` (absolute path)."""
    timeout_s: float
    """For one call of the function."""
    task_name: str | None = None
    task_params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    columns: tuple[str, ...] | None = None
    """Other columns of the rows, where they are known: a user's function must not need one that is not there."""

    @classmethod
    def of(cls, config: Config) -> RewardSpec:
        """The reward that ``config`` asks for."""
        function, task = config.reward.function, config.data.task
        return cls(
            function=resolve_spec(function) if names_a_file(function) else function,
            timeout_s=config.reward.timeout_s,
            task_name=task.name if task else None,
            task_params=task.params if task else {},
            seed=config.run.seed,
        )


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One group: a prompt and its n responses."""

    prompt: str
    responses: list[str]
    answer: Any
    source: str
    extra: Mapping[str, Any]
