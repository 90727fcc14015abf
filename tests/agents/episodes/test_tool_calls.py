"""Calls are read from answers in the forms of public models, and what cannot be called is a message to the model."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.chat.conversations import Conversations
from headway.agents.chat.tool_call_formats import FORMATS
from headway.agents.chat.tool_calls import ToolParser, choose_parser
from headway.agents.interface.program_messages import CallProblem, said, tool_result
from headway.errors import ConfigError
from tests.agents.episodes.conftest import renderer_of, tokenizer_of
from tests.tiers import searched


def tool(name, properties, required):
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


INT = {"type": "integer"}
TOOLS = [tool("add", {"a": INT, "b": INT}, ["a", "b"]), tool("stop", {}, [])]
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}


def parse(form, text, tools=TOOLS, opening=""):
    return ToolParser(form, lambda text, _: FORMATS[form](text), opening).parse(text, tools)


def made(answer):
    return [(call.name, call.arguments) for call in answer.calls if call.problem is None]


ONE = [("add", {"a": 1, "b": 2})]
CODER = """<tool_call>
<function=add>
<parameter=a>
1
</parameter>
<parameter=b>
2
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>add
<arg_key>a</arg_key>
<arg_value>1</arg_value>
<arg_key>b</arg_key>
<arg_value>2</arg_value>
</tool_call>"""
DEEPSEEK = """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
```json
{"a": 1, "b": 2}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""
DEEPSEEK_V31 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 1, "b": 2}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "b": 2}<|tool_call_end|><|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
HARMONY = (
    "<|channel|>analysis<|message|>I add<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1, "b": 2}'
)
HARMONY_AS_RENDERED = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>'
STOP = ("stop", {})


@pytest.mark.parametrize(
    ("form", "text", "calls", "content"),
    [
        ("hermes", HERMES, ONE, ""),
        ("hermes", f"I add.\n{HERMES}", ONE, "I add."),
        ("hermes", f"{HERMES}\n{HERMES}", ONE * 2, ""),
        ("hermes", HERMES.removesuffix("\n</tool_call>"), ONE, ""),
        ("hermes", '<tool_call>{"name": "stop"}</tool_call>', [("stop", {})], ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', ONE, ""),
        ("hermes", f"<think>\n{HERMES}?\n</think>\n\n12", [], f"<think>\n{HERMES}?\n</think>\n\n12"),
        ("hermes", f"<think>\n{HERMES}", [], f"<think>\n{HERMES}"),
        ("hermes", f"<think>\nhm\n</think>\n\n{HERMES}", ONE, "<think>\nhm\n</think>"),
        ("hermes", "The answer is 12.", [], "The answer is 12."),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2}}', ONE, ""),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', ONE, ""),
        ("llama3_json", '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', ONE, ""),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "stop"}', [*ONE, ("stop", {})], ""),
        ("llama3_json", '{"answer": 12}', [], '{"answer": 12}'),
        ("llama3_json", "The answer is {12}.", [], "The answer is {12}."),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "x"}]', ONE, ""),
        ("mistral", '[TOOL_CALLS] {"name": "add", "arguments": {"a": 1, "b": 2}}', ONE, ""),
        ("mistral", '[TOOL_CALLS]add{"a": 1, "b": 2}[TOOL_CALLS]stop{}', [*ONE, ("stop", {})], ""),
        ("mistral", 'I add.[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1, "b": 2}', ONE, "I add."),
        ("mistral", "The answer is 12.", [], "The answer is 12."),
        ("qwen3_coder", CODER, ONE, ""),
        ("qwen3_coder", f"I add.\n{CODER}\n{CODER}", ONE * 2, "I add."),
        ("qwen3_coder", CODER.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), ONE, ""),
        ("qwen3_coder", "<tool_call>\n<function=stop>\n</function>\n</tool_call>", [STOP], ""),
        ("glm", GLM, ONE, ""),
        ("glm", GLM.replace("\n", ""), ONE, ""),
        ("glm", "I stop.<tool_call>stop</tool_call>", [STOP], "I stop."),
        ("deepseek", f"I add.{DEEPSEEK}", ONE, "I add."),
        ("deepseek", DEEPSEEK_V31, [*ONE, STOP], ""),
        ("kimi", f"I add.{KIMI}", [*ONE, STOP], "I add."),
        ("harmony", HARMONY, ONE, ""),
        ("harmony", HARMONY_AS_RENDERED, ONE, ""),
        ("harmony", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>12", [], "12"),
        *((form, "The answer is 12.", [], "The answer is 12.") for form in FORMATS),
    ],
)
def test_calls_are_read_in_each_form(form, text, calls, content):
    answer = parse(form, text)
    assert all(call.problem is None for call in answer.calls)
    assert (made(answer), answer.content, answer.text) == (calls, content, text)
    assert answer.message["content"] == content
    assert [call["function"]["name"] for call in answer.message.get("tool_calls", [])] == [name for name, _ in calls]


def test_thinking_that_the_generation_prompt_opened_is_no_place_for_calls():
    assert parse("hermes", HERMES, opening="<|im_start|>assistant\n<think>\n").calls == ()
    answer = parse("hermes", f"hm\n</think>\n{HERMES}", opening="<|im_start|>assistant\n<think>\n")
    assert made(answer) == ONE


def test_calls_within_text_of_an_argument_end_nothing():
    answer = parse(
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"x": "</tool_call><tool_call>{"}}</tool_call>',
        [tool("say", {"x": {"type": "string"}}, ["x"])],
    )
    assert made(answer) == [("say", {"x": "</tool_call><tool_call>{"})]


@pytest.mark.parametrize(
    ("form", "text", "said_so"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "it is no valid JSON: "),
        ("hermes", '<tool_call>{"name": "add", "argum', "it is no valid JSON: "),
        ("hermes", "<tool_call></tool_call>", "it is no valid JSON: Expecting value at character 0"),
        ("hermes", "<tool_call>12</tool_call>", "it is 12, expected an object with name and arguments"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "it has no name"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "it has no name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "its arguments are [1], expected an"),
        ("hermes", '<tool_call>{"name": "stop"} and so on</tool_call>', "there is more after it: 'and so on'"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no value of JSON"),
        ("hermes", "<tool_call>" + '{"name":' * 100_000, "nested more than 50 levels"),
        ("hermes", '<tool_call>{"name": "add", "arguments": ' + "[" * 400 + "]" * 400 + "}", "nested more than 50"),
        ("hermes", "<tool_call>" + "1" * 5000, "it is no valid JSON: Exceeds the limit"),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1', "it is no valid JSON: "),
        ("llama3_json", '{"name": "stop"} I stop', "there is more after it: 'I stop'"),
        ("mistral", '[TOOL_CALLS] [{"name": "add"', "it is no valid JSON: "),
        ("mistral", "[TOOL_CALLS]", "it is no valid JSON: "),
        ("mistral", '[TOOL_CALLS]stop{} then "', "there is more after it"),
        ("mistral", '[TOOL_CALLS] ["stop"]', "it is 'stop', expected an object"),
        ("qwen3_coder", CODER[:50], "<parameter=NAME>…</parameter>"),
        ("qwen3_coder", "<tool_call>add(1, 2)</tool_call>", "it is 'add(1, 2)', expected <function=NAME>"),
        ("glm", GLM[:40], "<arg_key>…</arg_key><arg_value>…</arg_value>"),
        ("glm", "<tool_call></tool_call>", "expected a name"),
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{", "it is no valid JSON: "),
        ("deepseek", "<｜tool▁call▁begin｜>add", "expected a name and an object with arguments"),
        ("kimi", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{} {}", "there is more after it"),
        ("kimi", "<|tool_call_begin|>functions.add:0", "expected a name and an object with arguments"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>{1}", "it is no valid JSON: "),
    ],
)
def test_what_cannot_be_read_is_a_message_to_the_model(form, text, said_so):
    answer = parse(form, text)
    [call] = answer.calls
    assert call.problem is CallProblem.UNREADABLE
    assert call.error.startswith("Error: the tool call cannot be read: ")
    assert said_so in call.error
    assert answer.message == said("assistant", text)


@pytest.mark.parametrize(
    ("name", "arguments", "problem", "error"),
    [
        ("sub", {}, CallProblem.UNKNOWN_TOOL, "Error: there is no tool 'sub'; there are: add, stop"),
        (
            "add",
            {"a": 1},
            CallProblem.BAD_ARGUMENTS,
            "Error: the arguments of add do not fit: 'b' is a required property",
        ),
        (
            "add",
            {"a": 1, "b": 2, "c": 3},
            CallProblem.BAD_ARGUMENTS,
            "Error: the arguments of add do not fit: Additional properties are not allowed ('c' was unexpected)",
        ),
        (
            "add",
            {"a": "1", "b": 2},
            CallProblem.BAD_ARGUMENTS,
            "Error: the arguments of add do not fit: a: '1' is not of type 'integer'",
        ),
        (
            "add",
            {"a": True, "b": 2},
            CallProblem.BAD_ARGUMENTS,
            "Error: the arguments of add do not fit: a: True is not of type 'integer'",
        ),
    ],
)
def test_a_call_that_does_not_fit_its_tool_is_a_message_to_the_model(name, arguments, problem, error):
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    answer = parse("hermes", text)
    [call] = answer.calls
    assert (call.problem, call.error, call.arguments) == (problem, error, arguments)
    assert answer.message["tool_calls"][0]["function"] == {"name": name, "arguments": arguments}


def test_a_call_beside_one_that_cannot_be_read_can_be_made():
    answer = parse("hermes", f"{HERMES}<tool_call>{{</tool_call>")
    assert made(answer) == ONE
    assert [call.problem for call in answer.calls] == [None, CallProblem.UNREADABLE]
    assert "tool_calls" not in answer.message


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", "12"),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "array", "items": INT}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"x": "</parameter"}', {"x": "</parameter"}),
        ({"type": "string"}, "two\n  lines", "two\n  lines"),
    ],
)
def test_arguments_that_are_written_as_text_have_the_types_of_the_schema(kind, text, value):
    schema = tool("say", {"x": kind}, ["x"])
    coder = f"<tool_call>\n<function=say>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    glm = f"<tool_call>say\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    for form, written in (("qwen3_coder", coder), ("glm", glm)):
        assert made(parse(form, written, [schema])) == [("say", {"x": value})]


CALLS = {
    "qwen3_coder": (
        "<tool_call>\\n<function={{ c.name }}>\\n{% for k, v in c.arguments.items() %}<parameter={{ k }}>\\n{{ v }}\\n"
        "</parameter>\\n{% endfor %}</function>\\n</tool_call>"
    ),
    "glm": (
        "<tool_call>{{ c.name }}\\n{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\\n<arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>\\n{% endfor %}</tool_call>"
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\\n```json\\n"
        "{{ c.arguments | tojson }}\\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        "{{ c.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "harmony": (" to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}"),
}
"""Calls as the chat templates of these models write them."""


@pytest.mark.parametrize("form", CALLS)
def test_a_call_that_a_template_wrote_is_read_and_written_again_as_it_was(form):
    tokenizer = copy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = (
        "{{ tools | tojson if tools else '' }}"
        "{% for m in messages %}<|im_start|>{{ m.name or m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{% set c = call.function %}"
        + CALLS[form].replace("\\n", "\n")
        + "{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = ChatRenderer(tokenizer)
    parser = choose_parser(renderer)
    assert parser.name == form
    written = renderer.example_call("add", {"a": 1, "b": 2})
    answer = parser.parse(written, TOOLS)
    assert made(answer) == ONE
    sampled = [*renderer.encode(written).tolist(), *renderer.end_ids]
    chats = Conversations(renderer)
    chats.answered(chats.prompt([said("user", "add")], TOOLS), sampled, answer.message)
    chat = [said("user", "add"), answer.message, *answer.results(["3"])]
    assert chats.prompt(chat, TOOLS).extends
    assert written in renderer.render(chat, TOOLS)


def test_thinking_of_gpt_oss_is_apart():
    assert parse("harmony", HARMONY).message["reasoning_content"] == "I add"


def test_without_tools_all_is_text():
    answer = parse("hermes", HERMES, tools=[])
    assert (answer.calls, answer.message) == ((), said("assistant", HERMES))


def test_ids_of_calls_are_numbered_through_a_conversation():
    parser = ToolParser("hermes", lambda text, _: FORMATS["hermes"](text))
    ids = [call.id for call in parser.parse(HERMES * 2, TOOLS, first_id=7).calls]
    assert ids == ["call00007", "call00008"]


def test_results_are_messages_of_the_tools_or_one_of_the_users():
    answer = parse("hermes", HERMES * 2)
    expected = [tool_result("call00000", "add", "3"), tool_result("call00001", "add", "4")]
    assert replace(answer, error_role="user").results(["3", "4"]) == expected
    unreadable = parse("hermes", f"{HERMES}<tool_call>{{")
    assert [message["role"] for message in replace(unreadable, error_role="tool").results(["3", "no"])] == [
        "tool",
        "tool",
    ]
    assert replace(unreadable, error_role="user").results(["3", "no"]) == [said("user", "3\nno")]


@pytest.mark.parametrize(
    ("template", "name"),
    [("qwen2_5", "hermes"), ("qwen3", "hermes"), ("llama3", "llama3_json"), ("mistral", "mistral")],
)
def test_the_parser_is_the_one_that_reads_what_the_template_writes(template, name):
    assert choose_parser(renderer_of(template)).name == name


@pytest.fixture(scope="module")
def with_response_template() -> ChatRenderer:
    tokenizer = copy(tokenizer_of("qwen3"))
    tokenizer.response_template = RESPONSE_TEMPLATE
    return ChatRenderer(tokenizer)


def test_a_response_template_comes_first_and_has_thinking_apart(with_response_template):
    parser = choose_parser(with_response_template)
    assert parser.name == "template"
    answer = parser.parse(f"<think>\nhm\n</think>\n\nI add.\n{HERMES}\n{HERMES}", TOOLS)
    assert made(answer) == ONE * 2
    assert answer.content == "I add."
    assert answer.message["reasoning_content"] == "hm"
    assert choose_parser(with_response_template, "hermes").name == "hermes"


def test_what_a_response_template_cannot_read_is_a_message_to_the_model(with_response_template):
    parser = choose_parser(with_response_template, "template")
    text = '<tool_call>{"name": </tool_call>'
    [call] = parser.parse(text, TOOLS).calls
    assert call.problem is CallProblem.UNREADABLE
    assert "the answer cannot be read: ValueError: json parser could not parse region as JSON" in call.error
    [call] = parser.parse("<tool_call>3</tool_call>", TOOLS).calls
    assert call.problem is CallProblem.UNREADABLE
    assert parser.parse("12", TOOLS).message == said("assistant", "12")


def test_an_answer_that_a_response_template_took_apart_goes_on(with_response_template):
    renderer = with_response_template
    sampled = [*renderer.encode(f"<think>\nhm\n</think>\n\n{HERMES}").tolist(), *renderer.end_ids]
    chats = Conversations(renderer)
    first = chats.prompt([said("user", "add")], TOOLS)
    answer = choose_parser(renderer).parse(renderer.text(sampled), TOOLS)
    chats.answered(first, sampled, answer.message)
    second = chats.prompt([said("user", "add"), answer.message, *answer.results(["3"])], TOOLS)
    assert second.extends


@pytest.mark.parametrize(
    ("template", "choice", "said_so"),
    [
        (
            "deepseek_r1",
            "auto",
            "no parser .*agent.tool_parser .template, hermes, llama3",
        ),
        ("qwen3", "xml", "no such parser; .*template, hermes, llama3_json, mistral, .* auto"),
        ("qwen3", "template", "no response template .*hermes, llama3_json, mistral"),
    ],
)
def test_a_parser_that_does_not_fit_is_refused_and_those_there_are_named(template, choice, said_so):
    with pytest.raises(ConfigError, match=said_so):
        choose_parser(renderer_of(template), choice)


def test_a_form_that_is_not_known_is_shown():
    tokenizer = copy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = tokenizer.chat_template.replace("\\n<tool_call>\\n", "@").replace("</tool_call>", "")
    with pytest.raises(ConfigError, match=r"no parser .*@"):
        choose_parser(ChatRenderer(tokenizer))


pieces = st.sampled_from(
    [
        *["<tool_call>", "</tool_call>", '{"name": "add"', ', "arguments": {"a": 1, "b": 2}', "}", "[TOOL_CALLS]"],
        *["[", "]", "<think>", "</think>", ";", "add", "[ARGS]", '"', "\n", "{}", "<|python_tag|>", "\\u", "1e999"],
        *["null", "\ud800", "<function=add>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>a</arg_key>"],
        *["<arg_value>1</arg_value>", "<｜tool▁call▁begin｜>add", "<|tool_call_begin|>functions.add:0", "<|channel|>"],
        *["<|tool_call_argument_begin|>", " to=functions.add", "<|message|>", "<|end|>"],
    ]
)


@searched(150, st.lists(pieces, max_size=12).map("".join))
def test_no_answer_whatever_raises(text):
    renderer = renderer_of("qwen3")
    parsers = [choose_parser(renderer, name) for name in FORMATS]
    for parser in parsers:
        answer = parser.parse(text, TOOLS)
        assert answer.text == text
        assert all(call.error or call.name in ("add", "stop") for call in answer.calls)
        Conversations(renderer).prompt([said("user", "x"), answer.message, said("user", "y")], TOOLS)
