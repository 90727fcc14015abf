"""Scores of a group: each part of the reward is computed by its kind, checked and added. In a worker, without torch.

ScoreRequest ─▶ part: built-in | task | user's function ─▶ n values, None if it does not apply ────┐
             └▶ part: …                                                                           ─┴▶ Σ weight · value

Further numbers that a user's function reports are kept beside the parts, by name.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.agents.interface.user_calls import finite_number, is_cancelled, plain
from headway.agents.rewards.built_in import BUILT_IN, Rule, make_rule
from headway.agents.rewards.score_request import Response, ScoreRequest
from headway.agents.rewards.user_function import CallingConvention, FurtherNumbers, UserFunction
from headway.data.interfaces.episode_groups import Scores
from headway.data.tasks import TASKS, make_task
from headway.errors import ConfigError, HeadwayError, ScoringFailed, cut, raised_by, writable
from headway.runtime.sandbox.sandbox_call import SandboxSpec
from headway.runtime.user_code import load_function, names_user_code, resolve_spec
from headway.runtime.workers.user_code_boundary import Ask, killed_after

if TYPE_CHECKING:
    from headway.config.schema import Config

Values = list[float | None]
"""Values of one part of the reward, [n]: finite, or None if the part does not apply."""

LARGEST = float(np.finfo(np.float32).max)
"""Largest absolute reward: rewards are float32, where anything larger would become infinite."""
HANGS_S = 60.0
"""Seconds that the sandbox has beyond the time of its programs, to start and to end its last call. It never
waits that long: see `headway.runtime.sandbox.sandbox_call.ENDS_S`."""
REASON_LENGTH = 200
"""Maximum number of characters of an exception's text in the reason of a failed score."""
MOST_NAMES = 50
"""Maximum number of names of further numbers that a process keeps: each is a metric."""
CANCELS_S = 0.5
"""Limit in seconds for cancelled asynchronous calls to end, before their process is killed."""
MOST_CALLS = 8
"""Maximum number of responses whose code runs concurrently in a process: containers may show too many processors."""
PartScorer = Callable[[ScoreRequest, FurtherNumbers], Values | Coroutine[Any, Any, Values]]
"""Function that scores one part of the reward. Its second argument collects further numbers."""


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One reward of a weighted sum."""

    function: str
    """A built-in reward or ``file.py:function`` (absolute path)."""
    name: str
    """The part's name in metrics and messages."""
    weight: float = 1.0
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Rewards that a process scores with. Only `load` checks whether they exist."""

    parts: tuple[RewardPart, ...]
    timeout_s: float
    """Limit in seconds for one call of one function; see `limit_s`."""
    task_name: str | None = None
    task_params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    """The sandbox of the reward ``code``."""
    answer_keys: tuple[str, ...] = ()
    """Names of the ground truth's column, under which a user's function may also take the answer."""
    columns: tuple[str, ...] | None = None
    """Other columns that every row has, if known: a user's function must not require others."""
    lacked: Mapping[str, str] = field(default_factory=dict)
    """Columns that some rows have → the first row that lacks each."""
    workers: int = 1
    """Number of processes that score concurrently on this machine: they share its cores."""
    shared: bool = False
    """True if the process scores several groups concurrently on its event loop, since all parts are asynchronous."""

    @classmethod
    def of(cls, config: Config) -> RewardSpec:
        """Return the rewards that ``config`` asks for."""
        data, task = config.data, config.data.task
        keys = (data.answer_key, *(source.answer_key for source in (*data.train_sources, *data.held_out_sources)))
        return cls(
            parts=tuple(
                RewardPart(resolve_spec(one.function), one.label, one.weight, one.params) for one in config.reward.all
            ),
            timeout_s=config.reward.timeout_s,
            task_name=task.name if task else None,
            task_params=task.params if task else {},
            seed=config.run.seed,
            sandbox=config.sandbox.spec,
            answer_keys=tuple(dict.fromkeys(key for key in keys if key not in (None, "auto") and key.isidentifier())),
        )

    def limit_s(self, part: RewardPart) -> float:
        """Return the seconds after which a call of ``part`` is ended, with its process.

        The reward ``code`` ends its own runs, the trial of a row's tests and then the tests: only a hanging
        sandbox exceeds its limit.
        """
        return 2 * self.timeout_s + HANGS_S if part.function == "code" else self.timeout_s

    @property
    def shown(self) -> str:
        """Functions of the reward, as text for messages."""
        return ", ".join(part.function for part in self.parts)

    @property
    def has_user_code(self) -> bool:
        """Tell whether a part of the reward is a function of the user's own."""
        return any(names_user_code(part.function) for part in self.parts)

    def compares(self, part: RewardPart) -> bool:
        """Tell whether ``part`` is Headway's own comparison of two texts: it takes microseconds, and needs no time
        limit and no process.
        """
        return part.function == "exact_match" or (part.function == "task" and self.task_name in TASKS.names())

    @property
    def needs_process(self) -> bool:
        """Tell whether the rewards are scored in workers: user code, other packages, patterns, mathematics, code."""
        return not all(map(self.compares, self.parts))

    def load(self) -> Scorer:
        """Load the rewards, in the process that scores with them. Raises `ConfigError` or `UserCodeError`."""
        return Scorer(self)


class Scorer:
    """Loaded rewards of a run, in a process that scores."""

    def __init__(self, spec: RewardSpec) -> None:
        """
        Raises:
            ConfigError: unknown reward or task, parameters that it does not take, or no sandbox for code here.
            UserCodeError: the user's file does not load, or its function needs arguments that it does not get.
        """
        self._spec = spec
        self._parts = [(part, _make_part(part, spec)) for part in spec.parts]
        self._names: set[str] = set()
        """Names of further numbers so far."""
        # One loop for the worker's life: a user's client sessions belong to the loop on which they were made.
        self._runner = asyncio.Runner()

    def describe(self) -> bool:
        """Tell whether all parts are asynchronous, so that groups may share a process."""
        return all(iscoroutinefunction(scorer) for _, scorer in self._parts)

    async def close(self) -> None:
        """Close nothing: scorers hold nothing open."""

    async def serve(self, request: ScoreRequest, ask: Ask | None = None) -> Scores:
        """Return the scores of a group. Awaits something only if `RewardSpec.shared`.

        Raises:
            ScoringFailed: with the reason.
        """
        values: dict[str, Values] = {}
        others = {}
        several = len(self._parts) > 1
        for part, scorer in self._parts:
            further = FurtherNumbers(len(request.responses))
            # Around the call and the wait: an asynchronous function raises when it is awaited.
            with _attributed(part.name if several else None):
                found = scorer(request, further)
                if not isinstance(found, Coroutine):
                    values[part.name] = found
                elif self._spec.shared:
                    values[part.name] = await found
                else:
                    with killed_after(self._spec.timeout_s + CANCELS_S):
                        values[part.name] = self._runner.run(found)
            for name, told in further.values.items():
                full = writable(f"{part.name}/{name}" if several or name == part.name else name)
                if full in self._names or len(self._names) < MOST_NAMES:
                    self._names.add(full)
                    others[full] = told
        weighted = [(part.weight, values[part.name]) for part, _ in self._parts]
        rewards = [_sum(weighted, k) for k in range(len(request.responses))]
        # The parts' values come last: no further number may replace a part's.
        return Scores(np.array(rewards, np.float32), others | values)


def _make_part(part: RewardPart, spec: RewardSpec) -> PartScorer:
    match part.function:
        case name if name in BUILT_IN:
            rule = make_rule(name, part.params, sandbox=spec.sandbox, within_s=spec.timeout_s)
            if name == "code":
                # `os.cpu_count` counts cores that this process may not use, too.
                cores = len(os.sched_getaffinity(0)) // spec.workers
                return _side_by_side(rule, spec.limit_s(part), max(1, min(cores, MOST_CALLS)))
        case "task":
            if spec.task_name is None:
                raise ConfigError("reward.function=task needs data.task; for files: exact_match or file.py:function")
            if part.params:
                raise ConfigError("reward.params: task takes none; the task's own are data.task.params")
            task = make_task(spec.task_name, spec.task_params, seed=spec.seed)

            def rule(request: ScoreRequest, response: Response) -> float:
                return 0.0 if response.begin is None else task.score(response.answer, request.answer, request.extra)

        case name if names_user_code(name):
            function = UserFunction(load_function(name), name, part.params, spec.answer_keys)
            if spec.columns is not None:
                function.check_columns(spec.columns, spec.lacked)
            return _user_scorer(function, spec.timeout_s)
        case name:
            raise ConfigError(
                f"reward.function: unknown reward {name!r}; "
                f"known: {', '.join(sorted([*BUILT_IN, 'task']))}, or file.py:function for your own"
            )
    return _one_by_one(rule, None if spec.compares(part) else spec.limit_s(part))


def _one_by_one(rule: Rule, timeout_s: float | None) -> PartScorer:
    def scorer(request: ScoreRequest, _: FurtherNumbers) -> Values:
        values = []
        for k in range(len(request.responses)):
            with nullcontext() if timeout_s is None else killed_after(timeout_s):
                values.append(rule(request, request.response(k)))
        return checked(values, len(request.responses))

    return scorer


def _side_by_side(rule: Rule, limit_s: float, at_once: int) -> PartScorer:
    """Score in ``at_once`` threads, with a rule that waits for processes. A call takes at most ``limit_s``."""

    def scorer(request: ScoreRequest, _: FurtherNumbers) -> Values:
        n = len(request.responses)
        with killed_after(limit_s * math.ceil(n / at_once)), ThreadPoolExecutor(at_once) as threads:
            return checked(list(threads.map(lambda k: rule(request, request.response(k)), range(n))), n)

    return scorer


def _user_scorer(function: UserFunction, timeout_s: float) -> PartScorer:
    def checked_values(values: Any, request: ScoreRequest) -> Values:
        # A function in TRL's form may return None: it does not apply to that response.
        return checked(values, len(request.responses), optional=function.dialect is CallingConvention.TRL)

    async def awaiting(request: ScoreRequest, further: FurtherNumbers) -> Values:
        return checked_values(await function.score_async(request, further, timeout_s), request)

    if function.is_async:
        return awaiting
    return lambda request, further: checked_values(function.score(request, further, timeout_s), request)


@contextmanager
def _attributed(name: str | None) -> Iterator[None]:
    """Turn an exception in the block into `ScoringFailed` under the part's ``name``, and print the traceback."""
    where = f"{name}: " if name is not None else ""
    try:
        yield
    except ScoringFailed as error:
        # With the same class: a `ScoringTimedOut` must be counted as a time-out.
        raise type(error)(writable(f"{where}{error}")) from error
    except HeadwayError:
        raise
    except BaseException as error:  # an interrupt, too: workers ignore Ctrl-C, so that the function itself raised it
        if isinstance(error, asyncio.CancelledError) and is_cancelled():  # else the function itself has raised it
            raise
        with suppress(OSError):  # it may also have closed what this process prints to
            traceback.print_exc()
        # As text: the user's exception may not survive pickling, or need modules that the driver lacks.
        raise ScoringFailed(f"{where}exception: {raised_by(error, REASON_LENGTH)}") from None


def checked(values: Any, n: int, *, optional: bool = False) -> Values:
    """Return ``values`` as n finite floats; ``optional`` allows None. Raises `ScoringFailed` with the wrong value."""
    items = plain(values)
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        raise ScoringFailed(f"returned {_shown(values)} for {n} responses, expected a list of {n} numbers")
    if len(items) != n:
        raise ScoringFailed(f"returned {len(items)} values for {n} responses")
    return [None if optional and value is None else _number(value, k) for k, value in enumerate(items)]


def _number(value: Any, k: int) -> float:
    number = finite_number(value)
    if number is None or abs(number) > LARGEST:
        raise ScoringFailed(f"returned {_shown(value)} for response {k}, expected a finite number")
    return number


def _sum(weighted: Sequence[tuple[float, Values]], k: int) -> float:
    """Return the weighted sum of the values of response ``k`` over the parts that apply to it."""
    terms = [weight * value for weight, values in weighted if (value := values[k]) is not None]
    if not terms:
        raise ScoringFailed(f"no reward applies to response {k}: None was returned for it")
    total = sum(terms)
    # Not `>`: NaN, from infinities of both signs, must be refused, too.
    if not abs(total) <= LARGEST:
        raise ScoringFailed(f"the weighted sum for response {k} is {total:g}, which is no finite float32")
    return total


def _shown(value: Any) -> str:
    return cut(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))  # an address would make each failure another one
