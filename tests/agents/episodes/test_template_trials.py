"""What a template will cost is found before the run, and said."""

import pytest

from headway.agents.chat.template_checks import try_template
from headway.errors import ConfigError
from tests.agents.episodes.conftest import renderer_of


@pytest.mark.parametrize(
    ("template", "tools", "cuts", "changes", "error_role"),
    [
        ("qwen2_5", True, False, [], "tool"),
        ("qwen3", True, True, ["cuts thinking out of the history before a user's message"], "tool"),
        ("llama3", False, False, [], "tool"),
        ("llama3", True, False, ["leaves out the text that an answer has beside its calls"], "tool"),
        ("mistral", False, False, ["moves the system prompt, or leaves it out, before a user's message"], "user"),
        (
            "mistral",
            True,
            False,
            [
                "moves the tools before a user's message",
                "moves the system prompt, or leaves it out, before a user's message",
                "leaves out the text that an answer has beside its calls",
                "moves the system prompt, or leaves it out, before a tool's result",
            ],
            "user",
        ),
        ("deepseek_r1", False, True, ["cuts thinking out of the history before a user's message"], "user"),
    ],
)
def test_each_template_is_found_out(template, tools, cuts, changes, error_role):
    report = try_template(renderer_of(template), tools=tools)
    assert (report.cuts_thinking, list(report.changes), report.error_role) == (cuts, changes, error_role)


def test_the_note_says_what_is_changed_what_it_costs_and_what_to_do():
    note = try_template(renderer_of("qwen3"), tools=True).note
    assert note.startswith(
        "the model's chat template changes the history: it cuts thinking out of the history before a user's message. "
    )
    assert "rendered whole" in note
    assert "a fork" in note
    assert note.endswith("give the tokenizer a template that only appends")


def test_there_is_no_note_where_nothing_is_changed():
    assert try_template(renderer_of("qwen2_5"), tools=True).note is None


def test_what_the_generation_prompt_opens_and_the_history_lacks_is_found():
    report = try_template(renderer_of("qwen3", enable_thinking=False), tools=True)
    assert "writes earlier turns differently before a tool's result" in report.changes


def test_tools_for_a_template_without_them_are_refused():
    with pytest.raises(ConfigError, match="does not show them"):
        try_template(renderer_of("deepseek_r1"), tools=True)
