"""Long texts are encoded as they are, or known to be too long from their beginning; and hold up nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.episodes.episode_limits import EpisodeLimits
from headway.agents.episodes.episode_tokens import Chats
from headway.agents.episodes.episode_worker import local_episode_worker
from headway.agents.episodes.program_episode import Hosting
from headway.agents.episodes.program_workers import chats_of
from headway.agents.interface.program_chat import Ask
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, TurnRequest, said
from headway.config.schema import Config
from headway.planner.simulation.virtual_clock import run_virtual
from headway.runtime.task_groups import LONG
from tests.agents.episodes.program_episodes import RENDERER, Here, Policy, request
from tests.tiers import searched

TOKENIZER = RENDERER.tokenizer
PIECES = st.sampled_from(["word ", "a", " ", "é", "\n", "1234", "<|im_end|>", "\U0001f600", "\ud800", "==="])
TEXTS = st.lists(st.tuples(PIECES, st.integers(1, 400)), max_size=6).map(
    lambda parts: "".join(part * times for part, times in parts)
)


@searched(100, text=TEXTS, most=st.integers(1, 300))
def test_ids_are_all_of_the_text_where_it_fits_and_more_than_fit_where_not(text: str, most: int) -> None:
    whole, ids = RENDERER.encode(text), ChatRenderer(TOKENIZER, most_tokens=most).encode(text)
    assert ids.tolist() == whole.tolist() or min(len(ids), len(whole)) > most


def test_a_text_of_few_tokens_fits_whatever_its_length() -> None:
    longest = max((token for token in TOKENIZER.get_vocab() if token.isalpha() and token.isascii()), key=len)
    text = longest * 500
    whole = RENDERER.encode(text)
    assert ChatRenderer(TOKENIZER, most_tokens=len(whole)).encode(text).tolist() == whole.tolist()


def test_the_chats_of_a_run_encode_no_more_than_its_limits_need() -> None:
    data = {"task": {"name": "sort"}, "max_prompt_length": 100, "max_response_length": 20}
    renderer = chats_of(Config.model_validate({"data": data}), TOKENIZER).renderer
    assert 120 < len(renderer.encode("word " * 100_000)) < 1000


class Held(ChatRenderer):
    """A renderer whose long texts take until ``let_go`` is set."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self.let_go = threading.Event()

    def encode(self, text: str) -> NDArray[np.int32]:
        assert len(text) < LONG or self.let_go.wait(60), "the other episode had no answer while a text was encoded"
        return super().encode(text)


async def a_long_one_and_another(renderer: Held, in_parts: bool) -> list[tuple[int, int, int, list[int]]]:
    """(episode, number, key, context) of the calls of two episodes; texts are let go once the second has its answer.

    ``in_parts``: the content of messages is a list of parts.
    """
    started = 0

    async def program(start: EpisodeStart, ask: Ask) -> EpisodeEnd:
        nonlocal started
        started += 1
        long_and_short = started == 1
        texts = ["word " * (LONG // 4), "asked behind it"] if long_and_short else ["begin"]
        contents: list[Any] = [[{"type": "text", "text": text}] if in_parts else text for text in texts]
        await asyncio.gather(*(ask(TurnRequest([said("user", content)])) for content in contents))
        if not long_and_short:
            renderer.let_go.set()
        return EpisodeEnd(1.0)

    policy = Policy(seconds=0.0)
    hosting = Hosting(Here(program), Chats(renderer).new_episode, EpisodeLimits(max_length=100_000, max_turns=5))
    async with local_episode_worker(policy, hosting=hosting) as worker:
        (group,) = [group async for group in worker.generate([request(2)])]
    assert [episode.failure for episode in group.trajectories] == [None, None]
    return sorted((call.trajectory.k, n, call.key, call.input_ids.tolist()) for n, call in enumerate(policy.calls))


@pytest.mark.parametrize("in_parts", [False, True])
def test_an_episode_is_answered_while_a_text_of_another_is_encoded_and_calls_are_those_without_threads(
    in_parts: bool,
) -> None:
    def calls(run: Callable[[Any], Any], renderer: Held) -> list[Any]:
        return [(k, key, ids) for k, _, key, ids in run(a_long_one_and_another(renderer, in_parts))]

    at_once = Held()
    at_once.let_go.set()
    assert calls(asyncio.run, Held()) == calls(run_virtual, at_once)
