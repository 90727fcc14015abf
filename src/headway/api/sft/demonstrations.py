"""Conversations that somebody else had, made rows to learn from by what makes the rows of episodes.

messages ─▶ for each answer: its context ─▶ the answer's ids, as the template writes it ─▶ Record.answered ─▶ rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.agents.chat.chat_messages import plain_messages
from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.interface.program_messages import Message, ToolSchema, TurnRequest
from headway.data.interfaces.rollout import FinishedCall
from headway.data.types import FinishReason, RowTokens, SampledTokens
from headway.errors import ConfigError, DataError, UserCodeError


def demonstrated(
    chats: Chats, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema] | None = None
) -> list[RowTokens]:
    """The rows of a conversation, as if each answer in ``messages`` had been sampled, the end of its turn included.

    ``tools`` are those that every turn has.

    Raises:
        UserCodeError: ``messages`` are no chat messages, or have no answer after the first one.
        DataError: the template refuses the messages, or does not write an answer behind its prompt.
        ConfigError: the template ends answers with no token of the tokenizer's that ends a turn.
    """
    chat, record = plain_messages(messages), chats.record()
    answers = [at for at, message in enumerate(chat) if message["role"] == "assistant" and at > 0]
    if not answers:
        roles = ", ".join(str(message["role"]) for message in chat)
        raise UserCodeError(f"there is nothing to learn from messages of {roles}: no answer of role assistant follows")
    for number, at in enumerate(answers):
        request = TurnRequest(chat[:at], list(tools) if tools else None)
        draft = record.draft(request)
        prompted = record.prompted(request, draft, chats.renderer.encode(draft.text))
        ids = _answer_ids(chats.renderer, chat[: at + 1], tools)
        tokens = SampledTokens(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))
        finished = FinishedCall(at, len(ids), [[0, 0]], FinishReason.STOP, 0.0, 0.0, tokens)
        record.answered(prompted, request, finished, number)
    return record.rows()


def _answer_ids(
    renderer: ChatRenderer, chat: Sequence[Message], tools: Sequence[ToolSchema] | None
) -> NDArray[np.int32]:
    """The ids [T] of the last message of ``chat``, an answer, up to the token that ends its turn."""
    opening = renderer.render(chat[:-1], tools)
    text = renderer.render(chat, tools, generation_prompt=False)
    if not text.startswith(opening):
        raise DataError(
            f"the chat template writes {text!r}, which does not begin with the prompt of its last answer, {opening!r}; "
            "answers are learned as they are asked for, so use a template that writes them behind their prompt"
        )
    ids = renderer.encode(text[len(opening) :])
    ends = [n for n, id in enumerate(ids.tolist()) if id in renderer.end_ids]
    if not ends:
        raise ConfigError(
            f"the chat template writes an answer as {text[len(opening) :]!r}, without a token that ends it; let it end "
            "answers with {{ eos_token }}"
        )
    return ids[: ends[0] + 1]
