"""Programs and their limits: what clashes, what has no effect, and whose reward is the default."""

import pytest
import yaml

from headway.agents.episodes.program_workers import program_spec
from headway.config.doctor import diagnose
from headway.config.loading import dump
from headway.config.schema import Config
from headway.config.sizing.placement import min_episodes
from headway.errors import ConfigError

from .conftest import Load

GAME = "agent.environment=game.py:Game"
MODEL = ("model.path=/m", "data.train=train.jsonl", "reward.function=judge.py:score")
"""A model that may have a chat template, which one that is made from nothing has not."""


@pytest.mark.parametrize(
    "override",
    [
        "agent.environment=ws://host:8000",
        "agent.environment=https://host/env",
        "agent.tools=[config/tools.yaml, tools.py:look_up]",
        "agent.mcp.search={command: [npx, search-server], env: {PORT: 80, KEY: $KEY}}",
        "agent.mcp.search.url=http://host/mcp",
    ],
)
def test_a_server_a_tool_config_or_an_mcp_server_is_a_program(minimal: Load, override: str) -> None:
    loaded = minimal(*MODEL, override)
    assert diagnose(loaded) == []
    assert loaded.config.agent.has_program
    again = Config.model_validate(yaml.safe_load(dump(loaded.config)))
    assert program_spec(again) == program_spec(loaded.config)


def test_an_environment_is_enough_and_gives_the_reward(minimal: Load) -> None:
    loaded = minimal(GAME, "model.path=/m", "data.train=train.jsonl")
    assert diagnose(loaded) == []
    assert loaded.config.reward.by_program
    assert not minimal(GAME, "reward.function=judge.py:score").config.reward.by_program


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([GAME, "agent.program=a.py:run"], "agent.environment and agent.program are given, and each makes the"),
        (["agent.environment=Game"], "agent.environment=Game: expected file.py:name, such as environment.py:Game"),
        (["agent.tools=[look_up]"], "agent.tools=look_up: expected file.py:name, such as tools.py:look_up"),
        ([GAME, "agent.episode_timeout_s=10"], "agent.step_timeout_s=60 is more than the whole episode may take"),
        ([GAME, "agent.step_timeout_s=300"], "longer than nothing may move, cluster.stall_timeout_s=300; lower"),
        ([GAME, "agent.max_turn_tokens=9000"], "agent.max_turn_tokens=9000 is more than an answer may have"),
        ([GAME, "agent.min_episodes=99"], "agent.min_episodes=99 is more than a group has"),
        (["agent.max_turns=3"], "agent.max_turns has no effect: answers have one turn"),
        ([GAME, "mode=async_partial", "async_training.drain=turn"], "async_training.drain has no effect"),
        (
            ["agent.tools=[t.py:look_up]", "agent.params={a: 1}"],
            "agent.params are for an environment, a program or an agent in Python",
        ),
        (
            ["agent.mcp.a.per_episode=true"],
            "agent.mcp.a needs a command or a url, and none is given; write agent",
        ),
        (["agent.mcp.a={command: [x], url: http://h}"], "agent.mcp.a needs a command or a url, and both are given"),
        (
            ["agent.mcp.a.url=ws://h"],
            "agent.mcp.a.url=ws://h: expected the http:// or https:// address of a server",
        ),
        (
            ["agent.mcp.a={url: http://h, env: {K: v}}"],
            "agent.mcp.a.env is for a command; drop it, or give headers",
        ),
        (["agent.mcp.a={command: [x], headers: {K: v}}"], "agent.mcp.a.headers are for a url; drop them, or give"),
        (["agent.mcp.a={command: [x], tools: []}"], "agent.mcp.a.tools is empty, so that the server is of no use"),
        (
            ["agent.mcp.a={command: [x], timeout_s: 90}"],
            "agent.mcp.a.timeout_s=90 is more than a step may take, agent",
        ),
        (['agent.mcp={"a b": {command: [x]}}'], "agent.mcp: 'a b' is no name for a server; write letters, digits"),
        (['agent.mcp={"": {command: [x]}}'], "agent.mcp: '' is no name for a server"),
        (
            ["agent.mcp.a={command: [x]}", "agent.program=a.py:run"],
            "agent.mcp and agent.program are given, and",
        ),
        (["agent.mcp.a={comand: [x]}"], "agent.mcp.a.comand: unknown key"),
        (["agent.mcp.a={comand: [x]}"], "did you mean agent.mcp.NAME.command?"),
        (["agent.mcp.a={command: x}"], "agent.mcp.a.command: got 'x'"),
        (["agent.mcp.a={command: [x], per_episode: often}"], "agent.mcp.a.per_episode: got 'often'"),
    ],
)
def test_what_clashes_or_does_nothing_is_refused_with_the_reason(
    minimal: Load, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        diagnose(minimal(*MODEL, *overrides))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "least"),
    [
        (["algorithm.adv_estimator=grpo"], 2),
        (["algorithm.adv_estimator=gigpo"], 2),
        (["algorithm.adv_estimator=reinforce_plus_plus"], 1),
        (["algorithm.adv_estimator=pass_at_k", "algorithm.pass_k=3"], 3),
        (["algorithm.adv_estimator=grpo", "rollout.n=1"], 1),
        (["algorithm.adv_estimator=grpo", "agent.min_episodes=4"], 4),
    ],
)
def test_a_group_needs_as_many_episodes_as_its_estimator_compares(
    minimal: Load, overrides: list[str], least: int
) -> None:
    assert min_episodes(minimal(GAME, *overrides).config) == least


def test_a_programs_reward_needs_a_program(minimal: Load) -> None:
    with pytest.raises(ConfigError, match=r"reward\.function=program .*agent\.environment"):
        diagnose(minimal("reward.function=program"))


def test_tools_may_stand_beside_an_environment(minimal: Load) -> None:
    assert diagnose(minimal(*MODEL, GAME, "agent.tools=[tools.py:look_up]")) == []
