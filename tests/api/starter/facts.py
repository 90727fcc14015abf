"""Facts of models and data that are nowhere: what choices are made from, without files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.memory_choices import MODELS
from headway.api.init.data_summary import DataFacts, RewardChoice, TextLengths
from headway.api.init.device_layout import Choice
from headway.api.init.model_summary import Machine, ModelFacts, shape_of
from headway.api.init.recipe_builder import choose

GB = 1_000_000_000


def model(name: str = "8 B", **changed: Any) -> ModelFacts:
    """A model of the table of docs/training.md, or another by its ``config``."""
    config = {"max_position_embeddings": 40_960, **MODELS.get(name, {}), **changed.pop("config", {})}
    shape = shape_of(config)
    assert shape is not None
    return ModelFacts(path="MODEL", config=config, shape=shape, **{"chats": True, **changed})


def data(prompts: Sequence[int] = (100, 200, 300), kind: Any = "math", **changed: Any) -> DataFacts:
    """A file of 10,000 rows with prompts of so many tokens."""
    facts = {
        "given": "train.jsonl",
        "settings": {"data.train": "train.jsonl"},
        "rows": 10_000,
        "reward": RewardChoice("math_verify", "for a test", kind),
        "prompts": TextLengths.of(prompts),
        "tokens": sorted(prompts),
        "answers": TextLengths.of([4]),
    }
    return DataFacts(**{**facts, **changed})


def gpus(count: int, gb: float = 80, **changed: Any) -> Machine:
    """So many GPUs somewhere."""
    return Machine(**{"gpus": count, "device_bytes": int(gb * GB), "cores": 16, "here": False, **changed})


def choices(of: ModelFacts, on: Machine, read: DataFacts | None = None, **given: Any) -> list[Choice]:
    """Choices for a run; ``given``: settings of the user's, with ``__`` for the dots."""
    settings = {key.replace("__", "."): value for key, value in given.items()}
    return choose(of, read or data(), on, settings, name="run")


def values(made: Sequence[Choice]) -> dict[str, Any]:
    return {choice.key: choice.value for choice in made}
