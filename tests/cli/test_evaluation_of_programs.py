"""``headway eval`` where a program makes the episodes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.model_section import MakeModelConfig
from headway.models.made_model import make_model
from tests.cli.evaluations import SHORT, lines_of, said, write
from tests.cli.test_commands import run

CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}assistant:"


def chatting_model(directory: Path, **more: Any) -> None:
    """Make a tiny model with a chat template, in the folder ``model``."""
    model = MakeModelConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=64,
        chat_template=CHAT,
        **more,
    )
    make_model(model, 0, directory / "model")


PROGRAM = """
async def talk(row, chat):
    await chat.turn(row["messages"])
    if row["fails"] == "all" or row["fails"] == "some" and chat.seed % 2:
        raise RuntimeError("the sandbox has burnt down")
    return 1.0
"""


def test_a_problem_is_counted_by_its_episodes_that_did_not_fail(tmp_path: Path) -> None:
    """Starts a process for the program, once to look at it and once to make the episodes."""
    chatting_model(tmp_path)
    (tmp_path / "talk.py").write_text(PROGRAM)
    rows = [{"prompt": f"{i}+1=", "answer": "1", "fails": fails} for i, fails in enumerate(["none", "some", "all"])]
    data, output = write(tmp_path / "test.jsonl", rows), tmp_path / "answers.jsonl"
    settings = [
        "data.max_prompt_length=32",
        f"agent.program={tmp_path / 'talk.py'}:talk",
        "--n",
        "4",
        "--temperature",
        "1",
        "-o",
        str(output),
    ]
    figures = said(run("eval", str(tmp_path / "model"), data, *SHORT, *settings))
    answers = lines_of(output)
    failed = [sum("failure" in answer for answer in answers if answer["row"] == row) for row in range(3)]
    assert failed[0] == 0 < failed[1] < failed[2] == 4
    assert {answer["reward"] for answer in answers if "failure" not in answer} == {1.0}
    assert re.match(r"reward +0\.667 ", figures["mean"])  # 1, 1, and no score
    assert "without" not in figures["pass@1"]
    assert figures["pass@4"].endswith("without 1 of 3 problems: too few answers count")
    assert figures["failed"].startswith("1 problems, which count as 0: episode failed: program")
    assert figures["episodes"].startswith(f"failed  {sum(failed)} of 12, which do not count where others")
    why = "program talk.py:talk raised RuntimeError: the sandbox has burnt down"
    assert {answer["failure"].partition(" (talk.py:")[0] for answer in answers if answer["row"] == 2} == {why}


TWO_TURNS = """
async def talk(row, chat):
    messages = [*row["messages"], {"role": "user", "content": "please"}]
    answer = await chat.turn(messages)
    await chat.turn([*messages, answer.message, {"role": "user", "content": "go on"}])

def score(prompts, completions):
    assert [message["content"] for message in prompts[0]] == ["1+1=", "please"]
    assert completions[0][1] == {"role": "user", "content": "go on"}
    return [len(completion) for completion in completions]
"""


@pytest.mark.slow
def test_a_reward_for_trl_reads_the_conversation_of_a_program(tmp_path: Path) -> None:
    """Starts processes for the program and the reward, each once to look at it and once to work."""
    chatting_model(tmp_path, vocabulary="0123456789abcdefghijklmnopqrstuvwxyz:+= ")
    (tmp_path / "talk.py").write_text(TWO_TURNS)
    data = write(tmp_path / "test.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    user = [f"agent.program={tmp_path / 'talk.py'}:talk", f"reward.function={tmp_path / 'talk.py'}:score"]
    settings = ["data.max_prompt_length=48", "data.max_response_length=48", "agent.max_turn_tokens=4"]
    figures = said(run("eval", str(tmp_path / "model"), data, *user, *settings, "rollout.threads=1"))
    assert re.match(r"reward +3\.00", figures["mean"]), figures
