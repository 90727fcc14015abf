"""The section of the sandbox: its forms, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.agents.rewards.scorers import RewardSpec
from headway.config.doctor import diagnose
from headway.config.loading import dump, load
from headway.errors import ConfigError
from headway.runtime.sandbox.sandbox_call import SandboxLimits, SandboxSpec

PYTHON = "agent.tools=[python]"


def settings(*more: str) -> list[str]:
    return ["data.epochs=1", "model.path=somewhere", "data.task.name=sort", *more]


def told(*more: str) -> list[str]:
    return diagnose(load(None, settings(*more)))


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ([], SandboxSpec()),
        (["sandbox=process_limits"], SandboxSpec("process_limits")),
        (
            ["sandbox.kind=process_limits", "sandbox.wall_s=30"],
            SandboxSpec("process_limits", SandboxLimits(30.0, 30.0)),
        ),
        (
            ["sandbox={kind: bubblewrap, memory_mib: 256, wall_s: 5}"],
            SandboxSpec("bubblewrap", SandboxLimits(5.0, 10.0, 256)),
        ),
    ],
)
def test_a_bare_name_is_the_kind_and_a_section_has_the_limits(given: list[str], spec: SandboxSpec) -> None:
    config = load(None, settings(PYTHON, *given)).config
    assert config.sandbox.spec == spec
    assert RewardSpec.of(config).sandbox == spec


def test_a_configuration_that_is_written_down_loads_again(tmp_path: Path) -> None:
    loaded = load(None, settings(PYTHON, "sandbox=process_limits"))
    file = tmp_path / "config.yaml"
    file.write_text(dump(loaded.config))
    assert load(file).config == loaded.config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "sandbox=docker",
            r"sandbox\.kind: got 'docker' \(on the command line\), expected 'bubblewrap' or 'process_limits'",
        ),
        ("sandbox=3", "sandbox: got 3.*expected a section"),
        ("sandbox.memory_mib=8", r"sandbox\.memory_mib: got 8\b.* 64"),
        ("sandbox.wall_s=0", r"sandbox\.wall_s: got 0\b.*greater than 0"),
        ("sandbox.memory=512", r"sandbox\.memory.*did you mean sandbox\.memory_mib"),
        ("agent.tools=[pythn]", r"pythn.*expected file\.py:name"),
    ],
)
def test_what_cannot_be_is_told(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        told(PYTHON, given) if not given.startswith("rollout") else told(given)


def test_a_sandbox_without_a_use_is_told() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.memory_mib has no effect: nothing runs"):
        told("sandbox.memory_mib=99")
    with pytest.raises(ConfigError, match=r"sandbox\.wall_s has no effect: .*\breward code\b"):
        told("reward.function=code", "sandbox.wall_s=3")
    assert not any("sandbox" in note for note in told("reward.function=code", "sandbox.memory_mib=99"))


def test_limits_alone_are_told_to_protect_from_little_once() -> None:
    notes = [note for note in told(PYTHON, "sandbox=process_limits") if "sandbox" in note]
    assert len(notes) == 1
    assert "without a sandbox" in notes[0]
    assert not [note for note in told(PYTHON) if "sandbox" in note]


def test_a_call_may_not_take_as_long_as_a_step() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.wall_s=60 .*tool python"):
        told(PYTHON, "sandbox.wall_s=60")


def test_a_parameter_named_python_is_no_file() -> None:
    with pytest.raises(ConfigError, match=r"agent\.environment=python: expected file\.py:name"):
        told("agent.environment=python")
