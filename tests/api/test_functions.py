"""Functions that are given as objects reach other processes by value."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.api.function_files import Functions
from headway.api.python_settings import layer
from headway.errors import ConfigError, UserCodeError
from headway.runtime.user_code import load_function, load_object


def made(bonus: float) -> Callable[[str], float]:
    def score(response: str) -> float:
        return len(response) + bonus

    return score


def test_a_function_becomes_a_file_that_every_process_loads_as_one_of_the_users(tmp_path: Path) -> None:
    class Game:
        start = "three"

    functions = Functions({"reward.function": made(0.5), "agent.environment": Game, "rollout.n": 4})
    settings = functions.settings(tmp_path)
    assert settings == {
        "reward.function": f"{tmp_path}/score.py:score",
        "agent.environment": f"{tmp_path}/Game.py:Game",
        "rollout.n": 4,
    }
    functions.write(tmp_path)
    assert load_function(settings["reward.function"])("abc") == 3.5
    assert load_object(settings["agent.environment"]).start == "three"
    assert "return len(response) + bonus" in (tmp_path / "score.py").read_text()


@pytest.mark.slow
def test_a_script_gives_what_only_it_has_and_a_module_beside_it(tmp_path: Path) -> None:
    """It takes seconds, since two processes import Ray's pickling."""
    (tmp_path / "beside.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\nfrom beside import half\nfrom headway.api.function_files import Functions\n"
        "RIGHT = 8\ndef score(response):\n    return half(RIGHT)\n"
        "Functions({'reward.function': score}).write(Path('code'))\n"
    )
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=240)
    function = f"{tmp_path}/code/score.py:score"
    load = f"from headway.runtime.user_code import load_function; print(load_function('{function}')('?'))"
    found = subprocess.run(
        [sys.executable, "-c", load], cwd="/", check=True, timeout=240, capture_output=True, text=True
    )
    assert found.stdout == "4.0\n"


def test_functions_of_one_name_have_files_of_their_own_and_leave_those_of_the_run_alone(tmp_path: Path) -> None:
    first = made(1.0)
    settings: dict[str, Any] = {"reward.functions": [{"function": first}, {"function": made(2.0)}, {"function": first}]}
    functions = Functions({**settings, "algorithm.policy_loss.loss_mode": lambda inputs: inputs})
    functions.write(tmp_path)
    assert sorted(file.name for file in tmp_path.glob("*.py")) == ["loss_mode.py", "score.py", "score_2.py"]
    again = Functions({"reward.function": made(3.0)})
    again.move_away(tmp_path)
    again.write(tmp_path)
    spec = again.settings(tmp_path)["reward.function"]
    assert spec == f"{tmp_path}/score_3.py:score_3"
    assert [load_function(f"{tmp_path}/{name}.py:{name}")("") for name in ("score", "score_2", "score_3")] == [1, 2, 3]


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()

    def helper() -> object:
        return lock.locked()

    def score(response: str) -> object:
        return [helper() for _ in response]

    with pytest.raises(UserCodeError) as refused:
        Functions({"reward.function": score}).write(tmp_path / "code")
    assert str(refused.value) == (
        "score cannot be sent to the processes that call it (TypeError: cannot pickle '_thread.lock' object). Make "
        "what it uses inside the function, or put both into a file and give file.py:name"
    )
    assert not (tmp_path / "code").exists()


def test_a_setting_that_takes_no_function_says_which_do() -> None:
    with pytest.raises(ConfigError, match=r"^run\.name: got .*made, a function; .*reward"):
        Functions({"run.name": made})


def test_the_earlier_name_of_a_setting_takes_functions_too(tmp_path: Path) -> None:
    functions = Functions({"rollout.tools": [made], "rollout.agent": made(1.0)})
    written = {str(file) for file in functions.write(tmp_path)}
    for value in layer(functions.settings(tmp_path)).values.values():
        (spec,) = value if isinstance(value, list) else [value]
        assert spec.rpartition(":")[0] in written


def test_a_function_may_have_the_name_of_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scored.py").write_text("def scored(response):\n    return len(response)\n")
    with monkeypatch.context() as caller:
        caller.syspath_prepend(tmp_path)
        Functions({"reward.function": importlib.import_module("scored").scored}).write(tmp_path / "code")
    del sys.modules["scored"]
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_function(f"{tmp_path}/code/scored.py:scored")("abc") == 3
    del sys.modules["scored"]


def test_a_pickle_of_another_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(sys, "version_info", (3, 99, 0))
        Functions({"reward.function": made(0.0)}).write(tmp_path)
    with pytest.raises(UserCodeError, match=r"score\.pkl .*Python 3\.99.*Python 3\."):
        load_function(f"{tmp_path}/score.py:score")
