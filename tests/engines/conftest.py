"""What the tests of all engines share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from headway.engines.rollout.native import fused_forward, model_runner
from headway.engines.rollout.native.model_runner import ModelRunner


@pytest.fixture(scope="session", autouse=True)
def one_look_at_each_kind_of_model() -> Iterator[None]:
    """Whether a row's bits depend on the rows beside it follows from a model's sizes, and the kernels for them.

    Each engine looks for itself, which takes longer than most tests decode. Here the first one of a kind looks.
    """
    look, make = ModelRunner._least_invariant_rows, ModelRunner.__init__
    found: dict[Any, int | None] = {}

    def made(runner: Any, model: Any, *args: Any, **named: Any) -> None:
        runner._kind = (model.config.to_json_string(), model.dtype)
        make(runner, model, *args, **named)

    def known(runner: Any) -> int | None:
        forward, by = runner._forward, (fused_forward.PACKED_FROM, model_runner.least_invariant_rows)
        kind = (*runner._kind, type(forward), forward.varlen, runner.max_context, *by)
        if kind not in found:
            found[kind] = look(runner)
        return found[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "__init__", made)
        patch.setattr(ModelRunner, "_least_invariant_rows", known)
        patch.setattr(fused_forward, "places_do_not_matter", cache(fused_forward.places_do_not_matter))
        yield
