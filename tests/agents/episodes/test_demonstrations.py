"""Conversations as rows to learn from: the answers are learned, each with the end of its turn."""

from __future__ import annotations

import pytest

from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.interface.program_messages import calls_made, said, tool_result
from headway.agents.interface.tool import make_tool
from headway.api.sft.sft_data import demonstrated
from headway.config.sections.model_section import MakeModelConfig
from headway.errors import ConfigError, DataError, UserCodeError
from headway.models.made_model import make_tokenizer
from tests.agents.episodes.conftest import renderer_of

TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ eos_token }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chats(template: str = TEMPLATE) -> Chats:
    special = ("<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>", "[TOOL_CALLS]")
    vocabulary = '0123456789abcdefghijklmnopqrstuvwxyz_+<>-{}": '
    make = MakeModelConfig(vocabulary=vocabulary, special_tokens=special, chat_template=template)
    return Chats(ChatRenderer(make_tokenizer(make)))


def learned(of: Chats, messages, tools=None) -> tuple[str, list[str]]:
    """The one row of a conversation as text, and the stretches of it that are learned."""
    [row] = demonstrated(of, messages, tools)
    decode = of.renderer.tokenizer.decode
    stretches = [decode(row.ids[turn.start : turn.stop]) for turn in row.turns]
    assert sum(turn.stop - turn.start for turn in row.turns) == row.loss_mask.sum()
    assert all(row.loss_mask[turn.start : turn.stop].all() for turn in row.turns)
    return decode([*row.prompt_ids, *row.ids]), stretches


def test_answers_are_learned_with_their_ends_and_nothing_else_is():
    game = [said("user", "20-34"), said("assistant", "27"), said("user", "<20-26"), said("assistant", "23")]
    assert learned(chats(), game) == (
        "<|user|>20-34<eos><|assistant|>27<eos><|user|><20-26<eos><|assistant|>23<eos>",
        ["27<eos>", "23<eos>"],
    )


def test_what_follows_the_last_answer_is_left_out():
    assert learned(chats(), [said("user", "1"), said("assistant", "2"), said("user", "3")])[0].endswith("2<eos>")


def look_up(key: str) -> int:
    """Look a key up.

    Args:
        key: the key
    """
    return 7


def test_calls_are_learned_as_the_template_writes_them():
    tools = [make_tool(look_up, "here").schema]
    messages = [
        said("user", "ab"),
        calls_made("", [("call00000", "look_up", {"key": "ab"})]),
        tool_result("call00000", "look_up", "7"),
        said("assistant", "7"),
    ]
    text, stretches = learned(chats(), messages, tools)
    assert stretches == ['[TOOL_CALLS]look_up{"key": "ab"}<eos>', "7<eos>"]
    assert text.startswith("<|tools|>look_up<eos><|user|>ab<eos><|assistant|>[TOOL_CALLS]")
    assert "<|tool|>7<eos>" in text


@pytest.mark.parametrize("template", ["qwen2_5", "llama3", "mistral"])
def test_templates_of_large_models_are_learned_up_to_the_token_that_ends_a_turn(template):
    of = Chats(renderer_of(template))
    turns = [said("user", "x"), said("assistant", "yes"), said("user", "y"), said("assistant", "no")]
    _, stretches = learned(of, turns)
    ended = [of.renderer.encode(one) for one in stretches]
    assert [of.renderer.text(ids).strip() for ids in ended] == ["yes", "no"]
    assert all(of.renderer.ended(ids) for ids in ended)


def test_messages_without_an_answer_are_refused():
    with pytest.raises(UserCodeError, match=r"nothing to learn .*\buser: no answer"):
        demonstrated(chats(), [said("user", "1")])


def test_a_template_whose_answers_do_not_end_is_refused():
    endless = TEMPLATE.replace("{{ eos_token }}", "")
    with pytest.raises(ConfigError, match="without a token that ends"):
        demonstrated(chats(endless), [said("user", "1"), said("assistant", "2")])


def test_a_template_that_opens_answers_otherwise_than_it_asks_for_them_is_refused():
    other = TEMPLATE.replace("%}<|assistant|>{%", "%}<|assistant|>:{%")
    with pytest.raises(DataError, match="does not begin with the prompt"):
        demonstrated(chats(other), [said("user", "1"), said("assistant", "2")])


def test_a_character_that_the_tokenizer_does_not_know_is_named():
    with pytest.raises(DataError, match=r"tokenizer cannot encode .*Ü"):
        demonstrated(chats(), [said("user", "1"), said("assistant", "Ü")])
