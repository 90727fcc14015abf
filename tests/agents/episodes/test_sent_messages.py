"""Messages go from a program to its episode worker once, and a conversation's digests are made once of each."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from headway.agents.chat import conversations
from headway.agents.chat.conversations import Conversations
from headway.agents.interface.program_messages import ReceivedMessages, SentMessages, TurnAnswer, TurnRequest, said
from tests.agents.episodes.conftest import renderer_of

LONG = 100_000


class FakeWorker:
    """Takes requests as they are pickled; ``lost`` names those that never arrive."""

    def __init__(self) -> None:
        self.received = ReceivedMessages()
        self.bytes: list[int] = []
        self.whole: list[TurnRequest] = []
        self.lost: set[int] = set()

    async def ask(self, request: TurnRequest) -> TurnAnswer:
        payload = pickle.dumps(request)
        self.bytes.append(len(payload))
        if len(self.bytes) - 1 in self.lost:
            raise ConnectionError("lost")
        self.whole.append(self.received.whole(pickle.loads(payload)))
        return TurnAnswer("", "", said("assistant", ""))


async def test_a_turn_sends_only_messages_that_are_new() -> None:
    worker, chat = FakeWorker(), [said("system", "s" * LONG)]
    sent = SentMessages(worker.ask)
    for turn in range(20):
        chat.append(said("user", f"{turn}"))
        await sent.ask(TurnRequest(chat))
        assert worker.whole[-1] == TurnRequest(chat)
    assert worker.bytes[0] > LONG
    assert max(worker.bytes[1:]) < 1000


async def test_several_conversations_each_send_what_is_new_and_changed_messages_are_sent_again() -> None:
    worker = FakeWorker()
    sent = SentMessages(worker.ask)
    parts: list[Any] = [{"type": "text", "text": "t" * LONG}]
    chats: list[list[Any]] = [[said("user", letter * LONG)] for letter in "ab"] + [[{"role": "user", "content": parts}]]
    for _ in range(2):
        for chat in chats:
            await sent.ask(TurnRequest(chat))
            assert worker.whole[-1].messages == chat
    assert max(worker.bytes[3:]) < 1000
    parts[0]["text"] = "changed where it is"
    await sent.ask(TurnRequest(chats[2]))
    assert worker.whole[-1].messages == chats[2]


async def test_messages_of_a_request_that_was_lost_are_sent_again() -> None:
    worker, chat = FakeWorker(), [said("user", "a")]
    worker.lost = {0}
    sent = SentMessages(worker.ask)
    with pytest.raises(ConnectionError):
        await sent.ask(TurnRequest(chat))
    await sent.ask(TurnRequest(chat))
    assert worker.whole[-1].messages == chat


def test_a_turn_digests_only_messages_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = renderer_of("qwen2_5")
    chats, digested = Conversations(renderer), [0]
    compared = conversations.message_key

    def counted(message: Any) -> str:
        digested[-1] += len(str(message.get("content")))
        return compared(message)

    monkeypatch.setattr(conversations, "message_key", counted)
    chat = [said("system", "s" * LONG), said("user", "a")]
    for turn in range(5):
        digested.append(0)
        prompt = chats.prompt(chat)
        chats.answered(prompt, [*renderer.encode("ok").tolist(), *renderer.end_ids])
        chat += [said("assistant", "ok"), said("user", f"{turn}")]
    assert digested[1] > LONG
    assert max(digested[2:]) < 1000
