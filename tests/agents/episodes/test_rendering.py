"""Prompts go on with the ids that were there, whatever their text, or are rendered whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from headway.agents.chat.chat_template import ChatRenderer, answer_decoder, probe_tool
from headway.agents.chat.conversations import Conversations
from headway.agents.episodes.episode_tokens import TokenRows
from headway.agents.interface.program_messages import calls_made, said, tool_result
from headway.data.types import SampledTokens
from headway.errors import ConfigError, DataError, UserCodeError
from tests.agents.episodes.conftest import TEMPLATES, renderer_of, tokenizer_of
from tests.tiers import searched

APPENDING = ("qwen2_5", "llama3", "mistral")
"""Templates under which a chat without tools and system prompt only grows."""
WITH_TOOLS = ("qwen2_5", "qwen3", "llama3", "mistral")
TOOLS = [probe_tool("add")]
USER = said("user", "guess a number")


def ended(renderer: ChatRenderer, text: str) -> list[int]:
    """An answer that ends its turn."""
    [end] = renderer.end_ids
    return [*renderer.encode(text).tolist(), end]


def two_turns(renderer, sampled, answer, *follow, tools=None, start=(USER,)):
    """The prompts of two turns, ``answer`` being the message of the first one's ``sampled`` ids."""
    chats = Conversations(renderer)
    first = chats.prompt(start, tools)
    chats.answered(first, sampled, answer)
    return first, chats.prompt([*start, answer, *follow], tools)


def rewritten(prompt):
    """Its messages go on with an answer, before which the template writes something else now."""
    return not prompt.extends and len(prompt.answers) > 0


def grows(first, second, sampled):
    return second.ids[: len(first.ids) + len(sampled)].tolist() == [*first.ids, *sampled]


@pytest.mark.parametrize("template", APPENDING)
@pytest.mark.parametrize("cut_off", [False, True])
def test_the_next_prompt_is_what_was_there_and_the_rendered_tail(template, cut_off):
    renderer = renderer_of(template)
    sampled = ended(renderer, "the answer is 12")[: -1 if cut_off else None]
    answer = said("assistant", renderer.text(sampled))
    assert answer["content"] == "the answer is 12"
    first, second = two_turns(renderer, sampled, answer, said("user", "too low"))
    assert not first.extends and not first.answers
    assert second.extends
    assert grows(first, second, sampled)
    assert len(second.parts[-1]) == len(second.ids) - len(first.ids) - len(sampled)
    # With the end of the turn that was sampled, or was missing, the text is what the template makes of the messages.
    whole = renderer.render([USER, answer, said("user", "too low")])
    written = renderer.tokenizer.decode(second.ids)
    assert written == whole if template != "mistral" else written == whole.replace(" the answer", "the answer")


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_first_prompt_is_that_of_the_tokenizer(template):
    renderer = renderer_of(template)
    expected = tokenizer_of(template).apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert Conversations(renderer).prompt([USER]).ids.tolist() == expected


@pytest.mark.parametrize("template", WITH_TOOLS)
@pytest.mark.parametrize("as_text", [False, True])
def test_results_of_tools_are_a_tail_after_the_call_as_it_was_sampled(template, as_text):
    renderer = renderer_of(template)
    text = renderer.example_call("add", {"a": 1, "b": 2}).removeprefix("<think>\n\n</think>\n\n")
    text = text.replace('", ', '" ,  ')  # not as the template writes it
    sampled = ended(renderer, text)
    call = calls_made("", [("call00000", "add", {"a": 1, "b": 2})])
    answer = said("assistant", renderer.text(sampled)) if as_text else call
    first, second = two_turns(renderer, sampled, answer, tool_result("call00000", "add", "3"), tools=TOOLS)
    assert second.extends
    assert grows(first, second, sampled)
    tail = renderer.tokenizer.decode(second.parts[-1])
    assert "3" in tail
    assert "add" not in tail
    assert "add" in renderer.tokenizer.decode(first.ids)


def test_several_calls_and_text_beside_them_are_one_answer():
    renderer = renderer_of("qwen2_5")
    sampled = ended(renderer, "I add.\n<tool_call>…</tool_call> <tool_call>…</tool_call>")
    answer = calls_made("I add.", [("call00000", "add", {"a": 1}), ("call00001", "add", {"a": "<|im_end|>"})])
    results = [tool_result("call00000", "add", "1"), tool_result("call00001", "add", "2")]
    first, second = two_turns(renderer, sampled, answer, *results, tools=TOOLS)
    assert second.extends
    assert renderer.tokenizer.decode(second.ids[len(first.ids) + len(sampled) :]) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_qwen3_keeps_thinking_before_results_of_tools_and_cuts_it_before_a_users_message():
    renderer = renderer_of("qwen3")
    thinking = "<think>\nhm\n</think>\n\n"
    call = ended(renderer, thinking + renderer.example_call("add", {"a": 1}).partition("\n\n")[2])
    asked = calls_made(thinking, [("call00000", "add", {"a": 1})])
    chats = Conversations(renderer)
    first = chats.prompt([USER], TOOLS)
    chats.answered(first, call, asked)
    chat = [USER, asked, tool_result("call00000", "add", "3")]
    second = chats.prompt(chat, TOOLS)
    assert second.extends
    sampled = ended(renderer, "<think>\nah\n</think>\n\nthe answer")
    chats.answered(second, sampled)
    chat += [said("assistant", renderer.text(sampled)), said("user", "and now?")]
    third = chats.prompt(chat, TOOLS)
    assert rewritten(third)
    assert third.ids.tolist() == renderer.encode(renderer.render(chat, TOOLS)).tolist()
    assert "think" not in renderer.tokenizer.decode(third.ids)
    sampled = ended(renderer, "12")
    chats.answered(third, sampled)
    chat += [said("assistant", "12"), said("user", "and now?")]
    assert grows(third, chats.prompt(chat, TOOLS), sampled)


def test_qwen3_without_thinking_loses_the_empty_thinking_of_its_generation_prompt():
    renderer = renderer_of("qwen3", enable_thinking=False)
    assert renderer.generation_prompt == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    _, second = two_turns(renderer, ended(renderer, "12"), said("assistant", "12"), said("user", "no"))
    assert rewritten(second)


@pytest.mark.parametrize("template", ["qwen2_5", "llama3"])
def test_many_turns_are_one_row(template):
    renderer = renderer_of(template)
    chats, token_rows, chat = Conversations(renderer), TokenRows(), [USER]
    for turn in range(5):
        prompt = chats.prompt(chat, TOOLS)
        assert prompt.extends is (turn > 0)
        sampled = np.array(ended(renderer, f"the answer is {turn}\n"), np.int32)
        tokens = SampledTokens(sampled, np.zeros(len(sampled), np.float32), np.zeros(len(sampled), np.int32))
        assert token_rows.add(prompt.ids, tokens) is (turn > 0)
        chats.answered(prompt, sampled)
        chat += [said("assistant", f"the answer is {turn}"), said("user", "no")]  # as a program that strips text
    [row] = token_rows.rows()
    assert len(row.turns) == 5
    assert renderer.tokenizer.decode(row.ids[row.loss_mask]).count("the answer is") == 5


def test_an_answer_whose_own_thinking_is_cut_is_rendered_whole():
    renderer = renderer_of("qwen3")
    sampled = ended(renderer, "<think>\nhm\n</think>\n\n12")
    first, second = two_turns(renderer, sampled, said("assistant", renderer.text(sampled)), said("user", "no"))
    assert rewritten(second)
    assert not grows(first, second, sampled)


def test_thinking_apart_from_the_text_counts_as_part_of_the_answer():
    extending = []
    for template in ("qwen3", "llama3"):
        renderer = renderer_of(template)
        call = calls_made("", [("call00000", "add", {"a": 1})]) | {"reasoning_content": "hm"}
        sampled = ended(renderer, "<think>hm</think>")
        extending.append(
            two_turns(renderer, sampled, call, tool_result("call00000", "add", "3"), tools=TOOLS)[1].extends
        )
    assert extending == [True, False]


def test_a_template_that_adds_to_an_answer_renders_whole():
    old = "{{ ' (old)' if m.role == 'assistant' and loop.revindex > 2 else '' }}"
    template = (
        "{% for m in messages %}{{ m.role + m.content }}" + old + "{{ '<|im_end|>' }}{% endfor %}"
        "{{ 'assistant' if add_generation_prompt else '' }}"
    )
    renderer = ChatRenderer(plain_tokenizer(template))
    no = said("user", "no")
    extending = [
        two_turns(renderer, renderer.encode("12"), said("assistant", "12"), *[no] * n)[1].extends for n in (1, 2)
    ]
    assert extending == [True, False]


def test_a_template_that_always_cuts_thinking_renders_whole():
    renderer = renderer_of("deepseek_r1")
    sampled = ended(renderer, "hm\n</think>\n\n12")
    first, second = two_turns(renderer, sampled, said("assistant", renderer.text(sampled)), said("user", "no"))
    assert rewritten(second)
    assert not grows(first, second, sampled)


def test_mistral_moves_tools_and_the_system_prompt_to_the_last_message_of_the_users():
    renderer = renderer_of("mistral")
    answer, sampled = said("assistant", "12"), ended(renderer, "12")
    extending = [
        two_turns(renderer, sampled, answer, said("user", "no"), tools=tools, start=start)[1].extends
        for tools, start in [(None, [USER]), (TOOLS, [USER]), (None, [said("system", "be brief"), USER])]
    ]
    assert extending == [True, False, False]


def test_an_edited_answer_or_other_tools_are_another_chat():
    renderer = renderer_of("qwen2_5")
    chats = Conversations(renderer)
    sampled = ended(renderer, "12")
    chats.answered(chats.prompt([USER], TOOLS), sampled)
    edited = chats.prompt([USER, said("assistant", "13"), said("user", "no")], TOOLS)
    assert not edited.extends and not edited.answers
    assert not chats.prompt([USER, said("assistant", "12"), said("user", "no")]).extends
    assert chats.prompt([USER, said("assistant", "12"), said("user", "no")], TOOLS).extends


def test_an_edit_after_an_answer_goes_on_with_that_answer():
    renderer = renderer_of("qwen2_5")
    chats = Conversations(renderer)
    chat = [USER]
    for text in ("12", "7"):
        prompt = chats.prompt(chat)
        sampled = ended(renderer, text)
        chats.answered(prompt, sampled)
        chat += [said("assistant", text), said("user", "no")]
        if text == "12":
            first, first_sampled = prompt, sampled
    chat[3] = said("assistant", "8")
    again = chats.prompt(chat)
    assert again.extends
    assert grows(first, again, first_sampled)
    assert "8" in renderer.tokenizer.decode(again.parts[-1])


def test_conversations_side_by_side_go_on_with_their_own_ids():
    renderer = renderer_of("llama3")
    chats = Conversations(renderer)
    starts = [[said("system", "you ask")], [said("system", "you guess"), USER]]
    prompts = [chats.prompt(start) for start in starts]
    answers = [ended(renderer, "high?"), ended(renderer, "12")]
    for prompt, sampled in zip(prompts, answers, strict=True):
        chats.answered(prompt, sampled)
    for start, prompt, sampled in reversed(list(zip(starts, prompts, answers, strict=True))):
        chat = [*start, said("assistant", renderer.text(sampled)), said("user", "low")]
        assert grows(prompt, chats.prompt(chat), sampled)


def test_messages_as_openais_clients_write_them_go_on_all_the_same():
    renderer = renderer_of("qwen2_5")
    sampled = ended(renderer, renderer.example_call("add", {"a": 1}))
    chats = Conversations(renderer)
    first = chats.prompt([{"role": "user", "content": [{"type": "text", "text": "add"}], "name": None}], TOOLS)
    chats.answered(first, sampled, calls_made("", [("call00000", "add", {"a": 1})]))
    function = {"name": "add", "arguments": '{"a": 1}'}
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "another id", "type": "function", "function": function}],
    }
    second = chats.prompt([said("user", "add"), answer, tool_result("another id", "add", "3")], TOOLS)
    assert second.extends
    assert answer["content"] is None
    assert function["arguments"] == '{"a": 1}'


def test_a_tokenizer_that_would_give_other_ids_is_not_asked():
    renderer = renderer_of("qwen2_5")
    letters = [int(renderer.encode(letter)[0]) for letter in "the answer"]
    assert renderer.text(letters) == "the answer"
    assert renderer.encode("the answer").tolist() != letters
    first, second = two_turns(renderer, letters, said("assistant", "the answer"), said("user", "no"))
    assert grows(first, second, letters)


def test_a_further_token_can_end_a_turn_in_place_of_the_templates():
    tokenizer = tokenizer_of("qwen2_5")
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    renderer = ChatRenderer(tokenizer, stop_ids=[other])
    sampled = [*renderer.encode("12").tolist(), other]
    assert renderer.text(sampled) == "12"
    first, second = two_turns(renderer, sampled, said("assistant", "12"), said("user", "no"))
    assert renderer.tokenizer.decode(second.ids[len(first.ids) :]).startswith("12<|endoftext|>\n<|im_start|>user")


@pytest.mark.parametrize("ended_by", ["<|endoftext|>", "<|im_end|><|endoftext|>"])
def test_the_text_of_an_answer_has_all_special_tokens_but_those_that_end_it(ended_by):
    template = tokenizer_of("qwen2_5").chat_template if "im_end" in ended_by else None
    tokenizer = plain_tokenizer(template)
    ids = tokenizer.encode("<tool_call>a</tool_call>" + ended_by, add_special_tokens=False)
    assert answer_decoder(tokenizer)(ids) == "<tool_call>a</tool_call>"
    assert answer_decoder(tokenizer, skip_special_tokens=True)(ids) == "a"


def plain_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_of("qwen2_5")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>", chat_template=chat_template
    )


@pytest.mark.parametrize("between", ["\n", ""])
def test_a_template_that_ends_turns_with_plain_text_or_nothing_goes_on_too(between):
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '" + between.replace("\n", "\\n") + "' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    renderer = ChatRenderer(plain_tokenizer(template))
    sampled = [*renderer.encode("12").tolist(), renderer.tokenizer.eos_token_id]
    first, second = two_turns(renderer, sampled, said("assistant", "12"), said("user", "no"))
    assert grows(first, second, sampled)
    assert renderer.tokenizer.decode(second.parts[-1]) == f"{between}user: no{between}assistant: "


def test_text_that_has_marks_in_it_is_rendered_whole():
    renderer = renderer_of("qwen2_5")
    _, second = two_turns(
        renderer, ended(renderer, "12"), said("assistant", "12"), said("user", "hWqXanswerZ1n0z hWqXanswerZ")
    )
    assert rewritten(second)
    assert "hWqXanswerZ1n0z" in renderer.tokenizer.decode(second.ids)


def test_what_utf_8_has_no_bytes_for_is_spelled_out():
    renderer = renderer_of("qwen2_5")
    prompt = Conversations(renderer).prompt([said("user", "\ud800")])
    assert "\\ud800" in renderer.tokenizer.decode(prompt.ids)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ConfigError, match="no chat template"):
        ChatRenderer(plain_tokenizer(None))


def test_a_template_that_leaves_answers_out_is_refused():
    with pytest.raises(ConfigError, match="leaves an answer out"):
        ChatRenderer(plain_tokenizer("{{ messages[0].content }}"))


def test_tools_for_a_template_that_does_not_show_them_are_refused():
    with pytest.raises(ConfigError, match="does not show them"):
        Conversations(renderer_of("deepseek_r1")).prompt([USER], TOOLS)


def test_a_chat_that_the_template_refuses_is_named_with_its_reason():
    with pytest.raises(DataError, match=r"\buser, user: .*must alternate"):
        Conversations(renderer_of("mistral")).prompt([USER, USER])


@pytest.mark.parametrize(
    ("messages", "said_so"),
    [
        ([], "there are no chat messages"),
        (["hello"], "a chat message is 'hello'; expected a dict"),
        ([{"content": "hello"}], "expected a dict"),
        ([{"role": "assistant", "content": "", "tool_calls": [1]}], r"tool_calls of a chat message are \[1\]"),
    ],
)
def test_what_is_no_chat_is_refused(messages, said_so):
    with pytest.raises(UserCodeError, match=said_so):
        Conversations(renderer_of("qwen2_5")).prompt(messages)


@st.composite
def dialogs(draw):
    """A template, and for each turn the sampled ids as numbers to choose from, their end, and what follows."""
    template = draw(st.sampled_from(TEMPLATES))
    turn = st.tuples(
        st.lists(st.integers(0, 10_000), max_size=8),
        st.booleans(),
        st.sampled_from(["user", "tool", "raw tool", "tool", "user", "edit"]),
        st.text("ab <|>{}\n", max_size=6),
    )
    return template, draw(st.booleans()), draw(st.lists(turn, min_size=1, max_size=5))


@searched(60, dialogs())
def test_whatever_was_sampled_is_trained_unchanged_after_the_context_that_the_engine_saw(dialog):
    template, with_tools, turns = dialog
    renderer = renderer_of(template)
    tools = TOOLS if with_tools and template in WITH_TOOLS else None
    [end] = renderer.end_ids
    chats, token_rows = Conversations(renderer), TokenRows()
    chat, calls, extending = [USER], [], []
    for numbers, ends, follow, text in turns:
        ids = [n % len(renderer.tokenizer) for n in numbers]
        assume(end not in ids)
        sampled = [*ids, end] if ends else ids
        prompt = chats.prompt(chat, tools)
        extending.append(prompt.extends)
        if prompt.extends:
            assert any(prompt.ids[: len(c) + len(s)].tolist() == c + s for c, s in calls)
        else:
            assert prompt.ids.tolist() == renderer.encode(renderer.render(chat, tools)).tolist()
        calls.append((prompt.ids.tolist(), sampled))
        tokens = SampledTokens(
            np.array(sampled, np.int32), np.zeros(len(sampled), np.float32), np.zeros(len(sampled), np.int32)
        )
        continues = token_rows.add(prompt.ids, tokens)
        edited = any(turn[2] == "edit" for turn in turns)
        assert continues or edited or not prompt.extends
        answer = said("assistant", renderer.text(sampled))
        if "tool" in follow and tools:
            call = calls_made("", [("call00000", "add", {"a": text})])
            chats.answered(prompt, sampled, call)
            chat += [answer if follow == "raw tool" and template != "mistral" else call]
            chat += [tool_result("call00000", "add", text)]
        else:
            chats.answered(prompt, sampled, answer)
            chat += [said("assistant", "edited") if follow == "edit" else answer, said("user", text)]
    seen = {turn.number: row for row in token_rows.rows() for turn in row.turns}
    trained = 0
    for number, (context, sampled) in enumerate(calls):
        if number not in seen:
            assert not sampled
            continue
        row = seen[number]
        [turn] = [turn for turn in row.turns if turn.number == number]
        until = len(row.prompt_ids) + turn.stop
        assert np.concatenate([row.prompt_ids, row.ids])[:until].tolist() == context + sampled
        assert row.loss_mask[turn.start : turn.stop].all()
        trained += len(sampled)
    assert sum(int(row.loss_mask.sum()) for row in token_rows.rows()) == trained
    if template in ("qwen2_5", "llama3") and not edited:
        assert all(extending[1:])
        assert token_rows.forks == 0
