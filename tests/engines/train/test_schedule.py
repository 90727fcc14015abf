from __future__ import annotations

import math
from typing import Any

import pytest

from headway.config.sections.learning import OptimConfig
from headway.engines.train.fsdp.learner import learning_rate


def rates(total: int, **optim: Any) -> list[float]:
    config = OptimConfig.model_validate({"lr": 1.0, **optim})
    return [learning_rate(config, step, total) for step in range(total)]


def test_a_constant_rate_stays() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warm_up_rises_linearly_and_wastes_no_step() -> None:
    assert rates(6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_rate_falls_to_its_minimum_at_the_last_step() -> None:
    assert rates(5, lr_scheduler_type="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_a_cosine_rate_is_half_way_down_in_the_middle() -> None:
    values = rates(7, lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1)
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    assert values == pytest.approx([0.5, 1.0, *expected])
    assert values[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_schedules_of_one_step_and_steps_beyond_the_last_are_defined(kind: str) -> None:
    config = OptimConfig.model_validate({"lr": 1.0, "lr_scheduler_type": kind, "min_lr_ratio": 0.5})
    assert learning_rate(config, 0, 1) == 1.0
    assert learning_rate(config, 99, 10) == pytest.approx(1.0 if kind == "constant" else 0.5)


def test_a_warm_up_longer_than_the_run_never_ends() -> None:
    assert rates(3, lr_warmup_steps=10, lr_scheduler_type="linear") == pytest.approx([0.1, 0.2, 0.3])
