"""Tasks of reasoning-gym, with its own verifiers. Importing this module imports reasoning-gym (about a second)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from headway.data.problems import REASONING_GYM, Problem
from headway.errors import ConfigError, DataError, boundary


class GymTask:
    """The dataset ``reasoning_gym/<dataset>``. Its entry's metadata travels in ``extra``, for the verifier."""

    def __init__(self, dataset: str, params: Mapping[str, Any], *, seed: int, problems: int) -> None:
        """Open the dataset. ``problems`` is the size given to it: one more than the largest index asked for.

        Raises:
            ConfigError: no such dataset, or parameters that it does not take.
        """
        self.name = REASONING_GYM + dataset
        _check_names(dataset, params)
        with boundary(f"data.task.params: {self.name} does not take {dict(params)}", ConfigError):
            self._dataset = reasoning_gym.create_dataset(dataset, size=problems, seed=seed, **_typed(params))

    def problem(self, index: int) -> Problem:
        with boundary(f"{self.name}: problem {index} could not be made", DataError):
            entry = self._dataset[index]
        # Some datasets have None for the answer, and only a verifier.
        return Problem(entry["question"], entry["answer"] or "", {"metadata": entry["metadata"]})

    def score(self, response: str, answer: str, extra: Mapping[str, Any]) -> float:
        """Score the response's last ``<answer>…</answer>``, or all of it without one, by the dataset's own verifier."""
        given = extract_answer(response)
        entry = {"answer": answer, **extra}
        try:
            return float(self._dataset.score_answer(response.strip() if given is None else given, entry))
        except ValueError:  # some verifiers parse without a check: text that does not parse is wrong
            return 0.0


def _typed(params: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the ``datasets`` of ``composite``, mappings {name, weight, config}, into the objects that it wants."""
    typed = dict(params)
    if "datasets" in typed:
        typed["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}, **one}) for one in typed["datasets"]]
    return typed


def _check_names(dataset: str, params: Mapping[str, Any]) -> None:
    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, DATASETS, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"it has {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"data.task.name: reasoning-gym has no dataset {dataset!r}; {hint}")
    accepted = {f.name for f in fields(DATASETS[dataset][1])} - {"seed", "size"}
    if unknown := sorted(set(params) - accepted):
        raise ConfigError(
            f"data.task.params: {REASONING_GYM}{dataset} has no parameter {', '.join(map(repr, unknown))}; "
            f"it takes {', '.join(sorted(accepted))} (seed and size come from run.seed and data.task.size)"
        )
