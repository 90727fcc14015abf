"""What the processes that score are given: which rewards they run, and groups. Plain data that pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.data.thoughts import end_of_thought, opened_thought
from headway.runtime.pickling import pickled_by_fields
from headway.runtime.sandbox.sandbox_limits import SandboxSpec
from headway.runtime.user_code import names_a_file, resolve_spec

if TYPE_CHECKING:
    from headway.agents.rewards.scorers import Scorer
    from headway.config.schema import Config
    from headway.data.interfaces.rewards import Scores
    from headway.data.types import Conversation
    from headway.runtime.workers.worker_protocol import Ask


HANGS_S = 60.0
"""Seconds that the sandbox has, beyond the time of what runs in it, to start and to end its last call. It waits for
nothing as long as that: see `headway.runtime.sandbox.sandbox_call.ENDS_S`."""


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One reward of a weighted sum."""

    function: str
    """A built-in reward or ``file.py:function`` (absolute path)."""
    name: str
    """The part's name in metrics and messages."""
    weight: float = 1.0
    params: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, function: str, **params: Any) -> RewardPart:
        """Make a part of weight 1 under the function's own name."""
        return cls(function, function.rpartition(":")[2], params=params)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """The rewards that a process scores with. Nothing is checked here; `load` finds out whether they exist."""

    parts: tuple[RewardPart, ...]
    timeout_s: float
    """Most seconds that one call of one function may take; see `limit_s`."""
    task_name: str | None = None
    task_params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    """The sandbox of the reward ``code``."""
    answer_keys: tuple[str, ...] = ()
    """Columns that ground truths are from: a user's function may ask for the answer by these names, too."""
    columns: tuple[str, ...] | None = None
    """Other columns that every row has, where they are known: a user's function must not need another one."""
    lacked: Mapping[str, str] = field(default_factory=dict)
    """Columns that some rows have → the first row that lacks each."""
    workers: int = 1
    """Processes that score at once on this machine: they share its cores."""
    shared: bool = False
    """The process scores several groups at once, on its event loop: for parts that are all asynchronous."""

    @classmethod
    def of(cls, config: Config) -> RewardSpec:
        """Return the rewards that ``config`` asks for."""
        data, task = config.data, config.data.task
        keys = (data.answer_key, *(source.answer_key for source in (*data.sources, *data.val_sources)))
        return cls(
            parts=tuple(
                RewardPart(
                    resolve_spec(one.function) if names_a_file(one.function) else one.function,
                    one.label,
                    one.weight,
                    one.params,
                )
                for one in config.reward.all
            ),
            timeout_s=config.reward.timeout_s,
            task_name=task.name if task else None,
            task_params=task.params if task else {},
            seed=config.run.seed,
            sandbox=config.sandbox.spec,
            answer_keys=tuple(dict.fromkeys(key for key in keys if key not in (None, "auto") and key.isidentifier())),
        )

    def limit_s(self, part: RewardPart) -> float:
        """Seconds after which a call of ``part`` is ended, with its process.

        The reward ``code`` ends what it runs itself, the trial of a row's tests and then the tests: only a sandbox that
        hangs goes beyond its limit.
        """
        return 2 * self.timeout_s + HANGS_S if part.function == "code" else self.timeout_s

    @property
    def function(self) -> str:
        """The functions of the reward, as text for messages. With one in a file, `names_a_file` says so of the text,
        too.
        """
        return ", ".join(part.function for part in self.parts)

    @property
    def shown(self) -> str:
        return self.function

    def load(self) -> HostedReward:
        """Load the rewards, in the process that scores with them. Raises `ConfigError` or `UserCodeError`."""
        from headway.agents.rewards.scorers import make_scorer  # here, so that only who scores pays for the import

        return HostedReward(make_scorer(self))


class HostedReward:
    """Rewards, loaded: what a runner holds."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def describe(self) -> bool:
        """Tell whether all parts are asynchronous, so that groups may share a process."""
        return self._scorer.is_async

    async def serve(self, job: ScoreRequest, ask: Ask) -> Scores:
        """Return the group's scores. Raises `ScoringFailed` with the reason."""
        return await self._scorer.score(job)

    async def close(self) -> None:
        """Close nothing: scorers hold nothing open."""


@pickled_by_fields
@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One group: a prompt and its n responses."""

    prompt: str
    """The text that the model read, its chat template applied."""
    responses: list[str]
    answer: Any
    source: str
    extra: Mapping[str, Any]
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages, where the row gives it so."""
    conversations: list[Conversation] | None = None
    """The conversations whose last answers the responses are, n of them, where a program made these."""

    def response(self, k: int) -> Response:
        """Return response ``k``, with its thought told from its answer."""
        opened = opened_thought(self.prompt)
        if self.conversations is not None:
            opened = self.conversations[k].opened or opened
        return Response(self.responses[k], opened, end_of_thought(self.responses[k], opened=bool(opened)))


@dataclass(frozen=True, slots=True)
class Response:
    """One response of a group, its thought told from its answer."""

    text: str
    opened: str
    """The tag of a thought, such as ``<think>``, with which its prompt ends; empty where it ends in none."""
    begin: int | None
    """Position in ``text`` at which the answer begins, after a thought; None if a thought has no end."""

    @property
    def answer(self) -> str:
        return self.text[self.begin or 0 :]
