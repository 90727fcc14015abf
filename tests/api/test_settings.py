"""Settings as Python has them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.api.python_settings import layer, settings_given
from headway.api.training import train
from headway.config.loading import load
from headway.errors import ConfigError


def score(response: str, answer: str) -> float:
    return float(response == answer)


def test_nested_settings_dotted_ones_and_keywords_are_one_thing_and_the_last_holds() -> None:
    given = settings_given(
        {"rollout": {"n": 2, "top_p": 0.9}, "mode": "on_policy"},
        {"rollout.n": 4, "actor": {"optim.lr": 1e-5}},
        {"rollout": {"n": 8}, "reward": score, "loss": None},
    )
    assert given == {
        "mode": "on_policy",
        "rollout.n": 8,
        "rollout.top_p": 0.9,
        "actor.optim.lr": 1e-5,
        "reward.function": score,
    }
    assert settings_given(None, None, {"reward": [score, {"function": "exact_match", "weight": 0.5}]}) == {
        "reward.functions": [{"function": score}, {"function": "exact_match", "weight": 0.5}]
    }
    assert settings_given(
        None, None, {"task": {"name": "sort"}, "tools": score, "model": Path("m"), "data": "d.csv"}
    ) == {
        "data.task.name": "sort",
        "agent.tools": [score],
        "model.path": "m",
        "data.train": "d.csv",
    }


def test_numbers_of_numpy_and_fractions_are_settings() -> None:
    given = settings_given(None, {"rollout.n": np.int64(4), "actor.optim.betas": (np.float64(0.5), 0.9)}, {})
    assert (given, type(given["rollout.n"])) == ({"rollout.n": 4, "actor.optim.betas": [0.5, 0.9]}, int)
    third = settings_given(None, {"async_training.staleness_threshold": Fraction(1, 3)}, {"mode": "async_stale"})
    assert load(None, layer(third)).config.async_training.staleness_threshold == Fraction(1, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": {"nn": 4}}, "rollout.nn: unknown key (in Python); did you mean rollout.n?"),
        ({"rollout.n": "many"}, "rollout.n: got 'many' (in Python), expected a whole number"),
        ({"rollout": {"n": object()}}, "rollout.n: got <object object at 0x"),
        ({3.5: 1}, "settings: got the key 3.5, expected the name of a setting, like 'rollout.n'"),
        ({"rollout.n": 1, "rollout": {"n": 2}}, "rollout.n is given twice in settings, with dots and nested"),
        ({"model.path": score}, "model.path: got tests.api.test_settings.score, a function; the settings that take"),
        ([("rollout.n", 4)], "settings: got [('rollout.n', 4)], expected a mapping of settings"),
    ],
)
def test_a_wrong_setting_is_refused_as_on_the_command_line(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        train("recipes/demo.yaml", settings, run={"dir": tmp_path / "run"})
    assert message in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_without_a_recipe_and_with_one_too_many_the_message_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"^expected config, .*; or resume"):
        train()
    with pytest.raises(ConfigError, match=r"^expected config, .*not 3; or resume"):
        train(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: .*no such file"):
        train("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"^resume .*drop config"):
        train("recipes/demo.yaml", resume="nowhere")
