"""Procedural tasks: problems with answers, made from a seed, without files or downloads.

    TaskConfig ─▶ make_task ─▶ Task ─▶ split ─▶ training problems (made on demand) and held-out problems (disjoint)

Reward workers build the same task to score with it, so this module stays light: no torch, no pydantic, and
reasoning-gym is imported only for its own tasks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from headway.algorithms.registry import Registry
from headway.data.problems import REASONING_GYM, Problem, Task
from headway.errors import ConfigError, DataError, UserCodeError, boundary, cut
from headway.runtime.user_code import check_call, did_you_mean, load_function, names_user_code

HELD_OUT_TRIES = 4
"""Maximum number of problems made per held-out problem, to find enough distinct ones."""
COLLISION_TRIES = 100
"""Maximum number of consecutive training problems that collide before the task counts as too small."""

P = TypeVar("P")


TaskFactory = Callable[[Mapping[str, Any], int, int], Task]
"""Maker of tasks: ``factory(params, seed, problems)``; ``problems`` is the number of indices that will be used."""

TASKS: Registry[TaskFactory] = Registry("task", "data.task.name", also=f"{REASONING_GYM}<dataset>, or file.py:function")


def is_task(data: str) -> bool:
    """Tell whether the user's text ``data`` names a task rather than a file or a dataset."""
    return data.startswith(REASONING_GYM) or names_user_code(data) or data in TASKS.names()


def make_task(name: str, params: Mapping[str, Any], *, seed: int, problems: int = 1) -> Task:
    """Return the task called ``name``: one of `TASKS`, ``reasoning_gym/<dataset>``, or the user's own factory.

    Raises:
        ConfigError: unknown name, or parameters that it does not take.
        UserCodeError: a ``file.py:function`` that does not load, does not take these arguments, raises, or does not
            return a task.
    """
    if name.startswith(REASONING_GYM):
        from headway.data.gym import GymTask  # here, so that only its users import reasoning-gym

        return GymTask(name.removeprefix(REASONING_GYM), params, seed=seed, problems=problems)
    if not names_user_code(name):
        return TASKS.get(name)(params, seed, problems)
    factory = load_function(name)
    check_call(name, factory, ("params", "seed", "problems"))
    with boundary(f"{name}: cannot be made with data.task.params={dict(params)}", UserCodeError):
        return OwnTask(name, factory(params, seed, problems))


class OwnTask:
    """Task from the user's file: errors in making problems are reported as the user's.

    Exceptions of its `score` are passed on: the caller turns them into a reason, with the traceback in a log.
    """

    def __init__(self, spec: str, task: Any) -> None:
        """Wrap ``task``, the result of the user's factory. ``spec``: the user's name of the factory.

        Raises:
            UserCodeError: ``task`` lacks ``problem`` or ``score``.
        """
        for name, takes in (("problem", ("index",)), ("score", ("response", "answer", "extra"))):
            method = getattr(task, name, None)
            if not callable(method):
                raise UserCodeError(
                    f"{spec}: returned {_shown(task)}, which has no {name}; expected an object with problem(index), "
                    "which returns a headway.data.tasks.Problem, and score(response, answer, extra), a number"
                )
            check_call(f"{spec}: {name}", method, takes)
        self.name = spec
        self._task = task

    def problem(self, index: int) -> Problem:
        """Make problem ``index``. Raises `UserCodeError` if the user's code fails or returns no valid `Problem`."""
        call = f"{self.name}: problem({index})"
        with boundary(call, UserCodeError):
            problem = self._task.problem(index)
            if not isinstance(problem, Problem):
                raise UserCodeError(f"{call} returned {_shown(problem)}, expected a headway.data.tasks.Problem")
            for name, kind in (("prompt", str), ("answer", str), ("extra", Mapping)):
                if not isinstance(value := getattr(problem, name), kind):
                    expected = "text" if kind is str else "a mapping"
                    raise UserCodeError(
                        f"{call} returned a Problem whose {name} is {_shown(value)}, expected {expected}"
                    )
            return problem

    def score(self, response: str, answer: str, extra: Mapping[str, Any]) -> float:
        score: float = self._task.score(response, answer, extra)
        return score


def _shown(value: Any) -> str:
    return cut(f"{type(value).__name__} {value!r}" if value is not None else "None")


# ---------------------------------------------------------------------------------------------- held-out split


class TrainingProblems:
    """The first ``size`` problems without the prompt of a held-out one, made on demand.

    A colliding problem is replaced by the next index that does not collide, so every row depends on the seed alone.
    """

    def __init__(self, task: Task, size: int, held_out: frozenset[str]) -> None:
        self._task, self._held_out = task, held_out
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> Problem:
        if not 0 <= row < self._size:
            raise IndexError(f"row {row} of {self._size} training problems")
        # A function of the row alone: a resumed run makes the same problem without the earlier ones
        for index in range(row, row + COLLISION_TRIES):
            problem = self._task.problem(index)
            if problem.prompt not in self._held_out:
                return problem
        raise ConfigError(
            f"data.task: {self._task.name} makes too few distinct problems: {COLLISION_TRIES} in a row were among the "
            f"{len(self._held_out)} held-out ones; make them longer, or data.task.val_size smaller"
        )


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """A task's problems: ``train`` (lazy) and ``val`` (distinct prompts, disjoint from ``train``)."""

    task: Task
    train: TrainingProblems
    val: list[Problem]
    failures: tuple[str, ...] = ()
    """Reason for each held-out problem that could not be made and was replaced."""


def split_task(name: str, params: Mapping[str, Any], *, seed: int, size: int, val_size: int) -> TaskSplit:
    """Split a task: ``size`` training problems, and ``val_size`` distinct ones at indices that training never uses.

    A problem that the task cannot make is replaced by the next one.

    Raises:
        ConfigError: as `make_task`; also when the task makes fewer than ``val_size`` distinct problems.
        DataError, UserCodeError: it makes too few because it fails.
    """
    # After all indices that training may reach by collisions
    first = size + COLLISION_TRIES
    last = first + HELD_OUT_TRIES * val_size
    task = make_task(name, params, seed=seed, problems=last)
    val: dict[str, Problem] = {}
    failures: list[DataError | UserCodeError] = []
    for index in range(first, last):
        if len(val) == val_size:
            break
        try:
            problem = task.problem(index)
        except (DataError, UserCodeError) as error:
            failures.append(error)
            continue
        val.setdefault(problem.prompt, problem)
    if len(val) < val_size:
        if failures:
            raise failures[0]
        raise ConfigError(
            f"data.task: {name} made only {len(val)} distinct problems in {last - first} tries, and data.task.val_size "
            f"asks for {val_size}; make the problems longer, or val_size smaller"
        )
    told = tuple(str(error) for error in failures)
    return TaskSplit(task, TrainingProblems(task, size, frozenset(val)), list(val.values()), told)


# ---------------------------------------------------------------------------------------------- sequences


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """Parameters of ``sort`` and ``reverse``.

    A sequence has ``min_length`` + k characters, P(k) ∝ qᵏ for k ≤ ``max_length`` − ``min_length``: a discrete
    exponential distribution. q is chosen so that the mean length is ``mean_length`` before ``max_length`` cuts the
    tail.
    """

    alphabet: str = "0123456789"
    """Characters to draw from, uniformly; ``sort`` sorts in this order."""
    distinct: bool = False
    """Draw without replacement: no character twice in a sequence."""
    min_length: int = 3
    mean_length: float = 8.0
    max_length: int = 32
    prompt_format: str | None = None
    """The prompt, with ``{sequence}`` in place of the characters; default ``<task>:{sequence}=``."""

    def __post_init__(self) -> None:
        if len(set(self.alphabet)) != len(self.alphabet) or len(self.alphabet) < 2:
            raise ConfigError(f"data.task.params.alphabet: two or more different characters, not {self.alphabet!r}")
        if self.distinct and self.max_length > len(self.alphabet):
            raise ConfigError(
                f"data.task.params: distinct sequences of max_length={self.max_length} need an alphabet of as many "
                f"characters, and {self.alphabet!r} has {len(self.alphabet)}"
            )
        if not 1 <= self.min_length <= self.mean_length <= self.max_length:
            raise ConfigError(
                "data.task.params: lengths need 1 ≤ min_length ≤ mean_length ≤ max_length, "
                f"not {self.min_length}, {self.mean_length:g}, {self.max_length}"
            )
        if self.prompt_format is not None and "{sequence}" not in self.prompt_format:
            raise ConfigError(
                f"data.task.params.prompt_format: must contain {{sequence}}, and {self.prompt_format!r} does not"
            )


class SequenceTask:
    """Task that turns a sequence of characters into another; only the exact sequence is right, outer space aside."""

    def __init__(self, name: str, solve: Callable[[str], str], params: SequenceParams, seed: int) -> None:
        self.name = name
        self._solve = solve
        self._params = params
        self._prompt_format = params.prompt_format or name + ":{sequence}="
        self._seed = seed

    def problem(self, index: int) -> Problem:
        # Seeding by text hashes it (SHA-512), so neighbouring indices and seeds share nothing.
        rng = random.Random(f"{self.name}/{self._seed}/{index}")
        alphabet = self._params.alphabet
        length = self._length(rng.random())
        sequence = "".join(rng.sample(alphabet, length) if self._params.distinct else rng.choices(alphabet, k=length))
        # Not by `format`: a prompt may have other braces.
        return Problem(self._prompt_format.replace("{sequence}", sequence), self._solve(sequence), {"length": length})

    def score(self, response: str, answer: str, extra: Mapping[str, Any]) -> float:
        return float(response.strip() == answer)

    def _length(self, u: float) -> int:
        """Return a length: the inverse of the truncated geometric distribution function at ``u`` in [0, 1)."""
        p = self._params
        mean_extra, most_extra = p.mean_length - p.min_length, p.max_length - p.min_length
        if mean_extra == 0:
            return p.min_length
        # From the mean of a geometric distribution, q / (1 - q).
        q = mean_extra / (1 + mean_extra)
        extra = math.floor(math.log1p(-u * (1 - q ** (most_extra + 1))) / math.log(q))
        return p.min_length + min(extra, most_extra)  # rounding may give one above the maximum


@TASKS.register("sort")
def sort_task(params: Mapping[str, Any], seed: int, problems: int) -> Task:
    """Make the task of sorting characters: ``sort:3142=`` → ``1234``."""
    checked = build_params(SequenceParams, params, "sort")
    rank = {character: i for i, character in enumerate(checked.alphabet)}
    return SequenceTask("sort", lambda s: "".join(sorted(s, key=rank.__getitem__)), checked, seed)


@TASKS.register("reverse")
def reverse_task(params: Mapping[str, Any], seed: int, problems: int) -> Task:
    """Make the task of reversing characters: ``reverse:3142=`` → ``2413``."""
    return SequenceTask("reverse", lambda s: s[::-1], build_params(SequenceParams, params, "reverse"), seed)


def build_params(cls: type[P], params: Mapping[str, Any], task: str) -> P:
    """Build a dataclass of numbers and text from ``params``. Raises `ConfigError` on a wrong name or type."""
    defaults = {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]
    for name, value in params.items():
        if name not in defaults:
            hint = did_you_mean(name, defaults)
            raise ConfigError(
                f"data.task.params: {task} has no parameter {name!r}{hint}; it takes {', '.join(sorted(defaults))}"
            )
        expected = str if defaults[name] is None else type(defaults[name])
        accepted = (int, float) if expected is float else expected
        # The second test: `isinstance` takes a bool for an int.
        if not isinstance(value, accepted) or isinstance(value, bool) != (expected is bool):
            raise ConfigError(f"data.task.params.{name}: expected {expected.__name__}, not {value!r}")
    return cls(**params)
