"""What a template will cost is found before the run, and said."""

import pytest

from headway.agents.chat.conversations import history_note
from headway.errors import ConfigError
from tests.agents.episodes.conftest import renderer_of


@pytest.mark.parametrize(
    ("template", "tools", "changes", "error_role"),
    [
        ("qwen2_5", True, None, "tool"),
        ("qwen3", True, "thinking", "tool"),
        ("llama3", False, None, "tool"),
        ("llama3", True, "a tool call with text, a tool call with thinking", "tool"),
        ("mistral", False, "an answer behind a system prompt", "user"),
        ("mistral", True, "an answer, an answer behind a system prompt", "user"),
        ("deepseek_r1", False, "an answer", "user"),
    ],
)
def test_each_template_is_found_out(template, tools, changes, error_role):
    renderer = renderer_of(template)
    note = history_note(renderer, tools=tools)
    assert (note is None) == (changes is None)
    assert note is None or f"once a message follows {changes}" in note
    assert renderer.error_role == error_role


def test_the_note_says_what_it_costs_and_what_to_do():
    note = history_note(renderer_of("qwen3"), tools=True)
    assert note.startswith("the model's chat template changes the history once a message follows thinking. ")
    assert "rendered whole" in note
    assert "a fork" in note
    assert note.endswith("give the tokenizer a template that only appends")


def test_what_the_generation_prompt_opens_and_the_history_lacks_is_found():
    assert "a tool call" in history_note(renderer_of("qwen3", enable_thinking=False), tools=True)


def test_tools_for_a_template_without_them_are_refused():
    with pytest.raises(ConfigError, match="does not show them"):
        history_note(renderer_of("deepseek_r1"), tools=True)
