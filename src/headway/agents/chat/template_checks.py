"""Trials of a chat template: what it changes in the history of an agent, found by rendering small chats.

report = try_template(renderer, tools=True)
if report.note:
    print(report.note)              # "the model's chat template changes the history: it cuts thinking out of …"
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.agents.chat.chat_messages import THINKING
from headway.agents.chat.chat_template import CALL_ID, ChatRenderer, probe_tool
from headway.agents.chat.conversations import Conversations, PromptKind
from headway.agents.interface.program_messages import Message, ToolSchema, calls_made, said, tool_result
from headway.errors import DataError

_THOUGHT, _TOOL = "hWqXthoughtZ", "look_up"
_FOLLOWING = {"user": "a user's message", "tool": "a tool's result"}


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The findings about one template."""

    cuts_thinking: bool
    """Thinking is left out of earlier answers, before some messages at least."""
    changes: tuple[str, ...]
    """All that the template changes in what it wrote before: each costs a fork where it happens."""
    error_role: str
    """Role of the message that tells the model of a call that could not be read, in an answer without any other:
    ``tool``, or ``user`` where the template wants a call before each result."""

    @property
    def note(self) -> str | None:
        """Warning about the changes; None without changes."""
        if not self.changes:
            return None
        return (
            f"the model's chat template changes the history: it {'; it '.join(self.changes)}. The next prompt then "
            "does not begin with the ids that were sampled: it is rendered whole, prefilled again, and begins a "
            "further sample (a fork, counted in the metrics). To avoid that, give the tokenizer a template that only "
            "appends"
        )


def try_template(renderer: ChatRenderer, *, tools: bool) -> TemplateReport:
    """Try the template of ``renderer``, with ``tools`` or without.

    Raises:
        ConfigError: there are to be tools, and the template does not show them.
    """
    if tools:
        renderer.demand_tools()
    cuts: list[str] = []
    changes: list[str] = []
    for role in ("user", "tool") if tools else ("user",):
        if role == "tool" and not _keeps(renderer, role, _THOUGHT):
            changes.append("leaves out the text that an answer has beside its calls")
        elif not all(_keeps(renderer, role, f"{start}\n{_THOUGHT}\n{end}\n\nok") for start, end in THINKING):
            cuts.append(role)
        changes += [f"{change} before {_FOLLOWING[role]}" for change in _rewrites(renderer, role, tools, role in cuts)]
    if cuts:
        changes.insert(0, f"cuts thinking out of the history before {' and '.join(_FOLLOWING[role] for role in cuts)}")
    return TemplateReport(bool(cuts), tuple(changes), _error_role(renderer))


def _keeps(renderer: ChatRenderer, role: str, text: str) -> bool:
    """Tell whether a thought in an answer's text is there once a message of ``role`` follows, or all is refused."""
    try:
        return _THOUGHT in renderer.render(
            [said("user", "x"), _answer(role, text), _follow(role)], _tools(role == "tool")
        )
    except DataError:
        return True


def _rewrites(renderer: ChatRenderer, role: str, tools: bool, cuts: bool) -> Iterator[str]:
    """Yield the rest of what is written differently once a message of ``role`` follows."""
    text = "" if role == "tool" else "ok"
    for start, end in THINKING:
        if renderer.generation_prompt.rstrip().endswith(start):
            if cuts:
                return  # what answers open with goes with their thinking
            text = f"{_THOUGHT}\n{end}\n\n{text}"
    answer, follow, question = _answer(role, text), _follow(role), said("user", "x")
    if not _extends(renderer, [question], answer, follow, _tools(role == "tool")):
        yield "writes earlier turns differently"
        return
    if tools and not _extends(renderer, [question], answer, follow, _tools(True)):
        yield "moves the tools"
    if not _extends(renderer, [said("system", "s"), question], answer, follow, _tools(role == "tool")):
        yield "moves the system prompt, or leaves it out,"


def _extends(
    renderer: ChatRenderer, start: Sequence[Message], answer: Message, follow: Message, tools: Sequence[ToolSchema]
) -> bool:
    """Tell whether the prompt after ``follow`` is that of ``start``, the answer and a tail; also if it is refused."""
    chats = Conversations(renderer)
    try:
        chats.answered(chats.prompt(start, tools), renderer.encode("ok"), answer)
        return chats.prompt([*start, answer, follow], tools).kind is PromptKind.EXTENDED
    except DataError:
        return True  # a chat that the template refuses has no turns


def _error_role(renderer: ChatRenderer) -> str:
    answered = [said("assistant", "ok"), tool_result(CALL_ID, _TOOL, _THOUGHT)]
    try:
        text = renderer.render([said("user", "x"), *answered, *answered])
    except DataError:
        return "user"
    return "tool" if text.count(_THOUGHT) == 2 else "user"


def _answer(role: str, text: str) -> Message:
    """An answer that a message of ``role`` may follow."""
    return calls_made(text, [(CALL_ID, _TOOL, {"x": "y"})]) if role == "tool" else said("assistant", text)


def _follow(role: str) -> Message:
    return tool_result(CALL_ID, _TOOL, "z") if role == "tool" else said(role, "z")


def _tools(wanted: bool) -> list[ToolSchema]:
    return [probe_tool(_TOOL)] if wanted else []
