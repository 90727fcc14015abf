"""The line at the start of a run on a chat template that changes the history of an agent."""

from __future__ import annotations

import pytest

from headway.api.run.training_run import template_note
from headway.config.schema import Config
from tests.agents.episodes.conftest import tokenizer_of

PROGRAM, TOOLS = {"program": "agent.py:run"}, {"tools": ["agent.py:look_up"]}


@pytest.mark.parametrize(
    ("template", "agent", "says"),
    [
        ("qwen3", PROGRAM, "changes the history once a message follows thinking"),
        ("qwen3", {}, None),
        ("qwen2_5", PROGRAM, None),
        ("llama3", PROGRAM, None),
        ("llama3", TOOLS, "a tool call with text"),
    ],
)
def test_a_run_of_agents_is_told_what_the_template_changes(
    template: str, agent: dict[str, object], says: str | None
) -> None:
    config = Config.model_validate({"agent": agent})
    note = template_note(config, tokenizer_of(template))
    assert note is None if says is None else note is not None and says in note
