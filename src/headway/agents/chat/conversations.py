"""Chat messages to token ids, turn by turn: a turn's prompt is the earlier ids and the rendered tail.

    messages ──template──▶  [ what was there ][ the answer ][ end of turn, new messages, generation prompt ]
                                                             └──────────── tail: rendered, tokenised ─────┘
    ids      ────────────▶  [ the prompt's ids + the sampled ids, as stored ][ the tail's ids ]

If the template writes anything before the end of the answer (`ChatRenderer.tail`) differently than when the answer was
sampled, or leaves out a part of the answer, the whole chat is rendered and the episode forks. Sampled ids are never
made from text again.

    renderer = ChatRenderer(tokenizer)                  # one for a run
    chats = Conversations(renderer)                     # one for each episode
    prompt = chats.prompt(messages)                     # prompt.ids is the context of the turn
    sampled = ...                                       # the ids that the engine sampled after it
    chats.answered(prompt, sampled)
    messages.append({"role": "assistant", "content": renderer.text(sampled)})
    messages.append({"role": "user", "content": "Go on."})
    prompt = chats.prompt(messages)                     # begins with the first prompt's ids and ``sampled``
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.agents.chat.chat_messages import (
    THINKING,
    digest_of,
    marked,
    message_key,
    normalise,
    plain_messages,
    without_reasoning,
)
from headway.agents.chat.chat_template import CALL_ID, ChatRenderer, probe_tool
from headway.agents.interface.program_messages import Message, ToolSchema, calls_made, said, tool_result
from headway.data.thoughts import opened_thought
from headway.errors import DataError


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of one turn."""

    digest: bytes = field(repr=False)
    """Digest of the messages and the tools."""
    parts: tuple[NDArray[np.int32], ...] = field(repr=False)
    """Arrays that make up ``ids``. Prompts share them, so that an episode's memory grows with its tokens. The last one
    was rendered for this prompt; a prompt that extends no other has only this one."""
    answers: Mapping[int, Message] = field(repr=False)
    """Index among the messages → answer of this episode, in the form in which it was rendered."""
    text: tuple[int, bytes] = field(repr=False)
    """Length and digest of the rendered chat, with marks in ``answers``."""
    opened: str = ""
    """Tag of a thought with which the prompt ends; empty for none."""

    @property
    def extends(self) -> bool:
        """True if the ids are those of an earlier prompt, the ids sampled after it, and a rendered tail.

        Otherwise the whole chat was rendered: it continues no answer of this episode, or the template now writes its
        past differently.
        """
        return len(self.parts) > 1

    @property
    def ids(self) -> NDArray[np.int32]:
        """Context to call the policy with, [P], joined at each access."""
        return np.concatenate(self.parts)


@dataclass(frozen=True, slots=True)
class _StoredAnswer:
    """An answer of the episode: its prompt and its sampled ids."""

    prompt: ChatPrompt
    sampled: NDArray[np.int32]
    message: Message
    """The complete answer as a plain message."""


class Conversations:
    """Chat turns of one episode, which may hold several conversations.

    Messages continue an earlier answer if they begin with the messages of its prompt and the answer, with the same
    tools. Of several equal answers to the same messages, they continue the last.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._answers: dict[bytes, _StoredAnswer] = {}
        """Digest of the messages up to an answer → the answer."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema] | None = None) -> ChatPrompt:
        """Return the prompt of the turn that answers ``messages``.

        Raises:
            UserCodeError: ``messages`` are not chat messages.
            ConfigError: there are ``tools``, and the template does not show them.
            DataError: the template refuses the messages, or the tokenizer has no tokens for them.
        """
        if tools:
            self._renderer.demand_tools()
        answered = self._answers.copy()  # this may be called in a thread
        chat = plain_messages(messages)
        digests = [digest_of(json.dumps(list(tools or ()), sort_keys=True, default=str))]
        for message in chat:
            digests.append(digest_of(message_key(message), digests[-1]))
        # Backwards: the last known answer of the chat has the longest known beginning.
        last = next((i for i in reversed(range(len(chat))) if digests[i + 1] in answered), None)
        if last is None:
            return self._whole(chat, tools, digests[-1])
        stored = answered[digests[last + 1]]
        # First the answer as the client has it, then as it was made: a template may show only one of its forms.
        tail, text, answers = self._behind(stored, chat, tools, last, chat[last])
        if tail is None and chat[last] != stored.message:
            tail, text, answers = self._behind(stored, chat, tools, last, stored.message)
        if tail is None:
            return self._whole(chat, tools, digests[-1], text, answers)

        behind = self._renderer.behind(self._renderer.encode(tail), stored.sampled)
        parts = (*stored.prompt.parts, stored.sampled, behind)
        return ChatPrompt(digests[-1], parts, answers, _extent(text), opened_thought(tail))

    def answered(
        self, prompt: ChatPrompt, sampled: Sequence[int] | NDArray[np.int32], *messages: Mapping[str, Any]
    ) -> None:
        """Store the ids sampled after ``prompt``.

        Args:
            sampled: the ids [T].
            messages: forms of the answer that its program or agent may send back, the preferred one first. Its whole
                text as ``content``, and each form without its thinking, are added.
        """
        ids = np.array(sampled, np.int32)
        forms = plain_messages([*messages, said("assistant", self._renderer.text(ids))])
        stored = _StoredAnswer(prompt, ids, forms[0])
        for form in map(normalise, forms):
            for sent in (form, without_reasoning(form)):  # clients may keep only what they show
                self._answers[digest_of(message_key(sent), prompt.digest)] = stored

    def _behind(
        self,
        stored: _StoredAnswer,
        chat: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        last: int,
        form: Message,
    ) -> tuple[str | None, str, Mapping[int, Message]]:
        """Return the tail after a stored answer, the message ``last`` of ``chat``, in one form (None if the template
        writes earlier text differently); the rendered chat, with marks in the answers; and these answers.
        """
        answers = {**stored.prompt.answers, last: form}
        marks = {i: marked(answer, i) for i, answer in answers.items()}
        text = self._renderer.render([marks[i].message if i in marks else one for i, one in enumerate(chat)], tools)
        # By digest: the text before the answer must be equal to the last character, or ids would not match it.
        start = stored.prompt.text[0]
        same = _extent(text[:start]) == stored.prompt.text
        return (self._renderer.tail(start, text, form, marks[last]) if same else None), text, answers

    def _whole(
        self,
        chat: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        digest: bytes,
        text: str | None = None,
        answers: Mapping[int, Message] = MappingProxyType({}),
    ) -> ChatPrompt:
        whole = self._renderer.render(chat, tools)
        extent = _extent(whole if text is None else text)
        return ChatPrompt(digest, (self._renderer.encode(whole),), answers, extent, opened_thought(whole))


def _extent(text: str) -> tuple[int, bytes]:
    """Return the length and the digest of ``text``."""
    return len(text), digest_of(text)


def history_note(renderer: ChatRenderer, *, tools: bool) -> str | None:
    """Return a warning if the template of ``renderer`` rewrites the history of small trial chats; else None.

    Raises:
        ConfigError: ``tools`` are wanted, and the template does not show them.
    """
    question, name = said("user", "x"), "look_up"
    opened = [pair for pair in THINKING if renderer.generation_prompt.rstrip().endswith(pair[0])]
    thoughts = [f"{'' if opened else start}\nwell\n{end}\n\n" for start, end in opened or THINKING]
    plain = thoughts[0] if opened else ""
    called, result = [(CALL_ID, name, {"x": "y"})], tool_result(CALL_ID, name, "z")
    alone, z = [question], said("user", "z")
    trials = [
        ("an answer", alone, said("assistant", f"{plain}ok"), z),
        ("an answer behind a system prompt", [said("system", "s"), question], said("assistant", f"{plain}ok"), z),
        *(("thinking", alone, said("assistant", f"{one}ok"), z) for one in thoughts),
    ]
    if tools:
        texts = [("", plain), (" with text", f"{plain}ok"), *((" with thinking", one) for one in thoughts)]
        trials += [(f"a tool call{how}", alone, calls_made(text, called), result) for how, text in texts]
    schemas = [probe_tool(name)] if tools else []
    rewritten = [
        what for what, start, answer, follow in trials if not _extends(renderer, start, answer, follow, schemas)
    ]
    if not rewritten:
        return None
    return (
        f"the model's chat template changes the history once a message follows {', '.join(dict.fromkeys(rewritten))}. "
        "The next prompt then does not begin with the ids that were sampled: it is rendered whole, prefilled again, "
        "and begins a further sample (a fork, counted in the metrics). To avoid that, give the tokenizer a template "
        "that only appends"
    )


def _extends(
    renderer: ChatRenderer, start: Sequence[Message], answer: Message, follow: Message, tools: Sequence[ToolSchema]
) -> bool:
    """Tell whether the prompt after ``follow`` extends that of ``start`` and the answer; also if it is refused."""
    chats = Conversations(renderer)
    try:
        chats.answered(chats.prompt(start, tools), renderer.encode("ok"), answer)
        return chats.prompt([*start, answer, follow], tools).extends
    except DataError:
        return True  # a chat that the template refuses has no turns
