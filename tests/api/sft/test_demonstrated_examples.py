"""Examples from conversations that a function makes: as many as are asked for are made, and then they come again."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from headway.agents.chat.chat_template import ChatRenderer
from headway.agents.episodes.episode_tokens import Chats
from headway.api.sft.sft_data import demonstrations
from headway.config.sections.model_section import MakeModelConfig
from headway.models.made_model import make_tokenizer

COUNTING = """
made = []
def demonstrate(rng):
    made.append("abcdefgh"[len(made)])
    with open({log!r}, "a") as log:
        log.write(made[-1])
    return [{{"role": "user", "content": made[-1]}}, {{"role": "assistant", "content": "z"}}]
"""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


def test_conversations_are_made_as_they_are_asked_for_and_come_again_after_the_last(tmp_path: Path) -> None:
    log, file = tmp_path / "log", tmp_path / "counting.py"
    file.write_text(COUNTING.format(log=str(log)))
    tokenizer = make_tokenizer(MakeModelConfig(vocabulary="abcdefghz", chat_template=TEMPLATE))
    examples = demonstrations(
        Chats(ChatRenderer(tokenizer)), f"{file}:demonstrate", [], {"c"}, seed=0, conversations=4, longest=8
    )

    def texts(count: int) -> str:
        return "".join(tokenizer.decode(row.prompt_ids)[0] for [row] in islice(examples, count))

    assert (texts(2), log.read_text()) == ("ab", "ab")
    assert (texts(2), log.read_text()) == ("de", "abcde")  # c is held out
    again = [texts(4) for _ in range(8)]
    assert {"".join(sorted(text)) for text in again} == {"abde"}
    assert len(set(again)) > 1
    assert log.read_text() == "abcde"
