"""Summary of a data set: columns, lengths in the model's tokens, the reward that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.api.init.columns import AUTO, answer_column, ends_with_answers, prompt_column
from headway.api.init.reward_choice import Kind, RewardChoice, reward_for
from headway.config.layers import flatten, lies_in, nest
from headway.config.schema import Config, SourceConfig
from headway.data.files import Record
from headway.data.rows import TRAIN_SPLIT, first_rows, read_rows, settings_named
from headway.data.tasks import TASKS
from headway.data.tokenize import LeftOut, PromptTokenizer
from headway.errors import ConfigError, DataError, shown

if TYPE_CHECKING:
    from headway.api.init.model_summary import ModelFacts

LOOKED_AT = 200
"""First rows whose columns are compared."""
MOST_MEASURED, MOST_MADE = 2000, 256
"""Rows of a file, and problems of a task, whose tokens are counted."""
LONGEST_MEASURED = 16
"""Rows of the most characters whose tokens are counted beside these."""
CHARACTERS_OF_A_TOKEN = 3
NO_LIMIT = 2**31
PROGRAMS = ("agent.tools", "agent.mcp", "agent.environment", "agent.program", "agent.client")
"""Settings of which one makes episodes by a program."""
KINDS: Mapping[str, Kind] = {"code": "code", "math_verify": "math", "regex": "choice", "exact_match": "text"}


@dataclass(frozen=True, slots=True)
class TextLengths:
    """Numbers of tokens of some texts."""

    median: int
    p99: int
    longest: int

    @classmethod
    def of(cls, tokens: Sequence[int]) -> TextLengths:
        median, p99, longest = np.percentile(tokens, [50, 99, 100], method="higher")
        return cls(int(median), int(p99), int(longest))


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Properties of a data set."""

    given: str
    """The data set as the user gave it."""
    settings: Mapping[str, Any]
    """What a configuration says of it: flat keys of the section ``data``."""
    rows: int
    """Training rows, held-out ones included; of a task, problems of an epoch."""
    reward: RewardChoice
    prompts: TextLengths
    tokens: Sequence[int]
    """Tokens of each prompt that was measured, ascending."""
    answers: TextLengths | None = None
    """None where there are no answers that are text or numbers."""
    chats: bool = False
    """True where prompts are chat messages."""
    answers_within: bool = False
    """True where the last message of each chat, the assistant's, is the ground truth."""
    template: str = "auto"
    """``data.chat_template``"""
    measured: bool = True
    """False where there is no tokenizer, and lengths are guessed by characters."""

    @property
    def is_task(self) -> bool:
        return "data.task.name" in self.settings


def look_at_data(data: str, model: ModelFacts, reward: str | None, given: Mapping[str, Any]) -> DataFacts:
    """Read ``data``, with the loader that a run reads with.

    ``reward``: the function that the user named. ``given``: flat settings, of which those of ``data`` count.

    Raises:
        ConfigError: no built-in reward fits, and none was named.
        DataError: no such data, or none that holds prompts; messages without a chat template.
    """
    settings = source_of(data) | {key: value for key, value in given.items() if lies_in(key, "data")}
    played = any(lies_in(key, *PROGRAMS) for key in given)
    if "data.task.name" in settings:
        return _of_task(data, settings, model, reward, played=played)
    rows = first_rows(_source_config(settings), LOOKED_AT)
    prompt = settings.get("data.prompt_key") or prompt_column(rows, data)
    settings["data.prompt_key"] = prompt
    if "data.answer_key" not in settings:
        answer = answer_column(rows, prompt, data)
        if answer is None and reward is None:
            raise DataError(
                f"{data}: there is no ground truth to compare answers with; there are {', '.join(rows[0])}. Say which "
                "column holds it, data.answer_key=COLUMN, or give a reward that needs none: --reward FILE.py:function"
            )
        settings["data.answer_key"] = answer or prompt
    records = read_rows(_config(settings)).train
    sample = records[:: -(-len(records) // MOST_MEASURED)]
    answers = [] if settings["data.answer_key"] == prompt else [(one.answer, one.extra) for one in sample]
    chosen = _own(reward) if reward is not None else reward_for(answers)
    if chosen is None:
        first = next((answer for answer, _ in answers if answer is not None), None)
        raise ConfigError(
            f"{data}: no built-in reward fits its answers, such as {shown(first, 80)}: they are no numbers, "
            "mathematics, choices, short texts or unit tests. Give a function that scores a response, --reward "
            "FILE.py:function (docs/rewards.md), or the column that holds the answer, data.answer_key=COLUMN"
        )
    usual = {"data.prompt_key": "prompt", "data.answer_key": AUTO}
    settings = {key: value for key, value in settings.items() if usual.get(key) != value}
    longest = (
        nlargest(LONGEST_MEASURED, records, key=lambda one: len(str(one.prompt))) if len(sample) < len(records) else []
    )
    facts = _measured(data, settings, len(records), sample, chosen, model, longest, played=played)
    return replace(facts, answers_within="data.answer_key" not in settings and ends_with_answers(rows, prompt))


def _of_task(
    data: str, settings: Mapping[str, Any], model: ModelFacts, reward: str | None, *, played: bool
) -> DataFacts:
    config = _config(settings)
    problems = read_rows(config).train
    kind: Kind = "text" if data in TASKS.names() else "own"
    chosen = _own(reward) if reward is not None else RewardChoice("task", "the task's own verifier", kind)
    return _measured(data, settings, len(problems), problems[:MOST_MADE], chosen, model, played=played)


def _measured(
    data: str,
    settings: Mapping[str, Any],
    rows: int,
    sample: Sequence[Record],
    reward: RewardChoice,
    model: ModelFacts,
    longest_rows: Sequence[Record] = (),
    *,
    played: bool,
) -> DataFacts:
    """``longest_rows``: those of the most characters, beside the sample. ``played``: a program speaks to the model, by
    chat messages of its own.
    """
    chats = not isinstance(sample[0].prompt, str)
    template = settings.get("data.chat_template") or ("auto" if played else _template(model, sample, chats=chats))
    tokens = sorted(_prompt_tokens(model, sample, template))
    longest = max([tokens[-1], *_prompt_tokens(model, longest_rows, template)])
    answered = settings.get("data.answer_key", AUTO) != settings.get("data.prompt_key", "prompt")
    texts = [str(one.answer) for one in sample if answered and isinstance(one.answer, str | int | float)]
    return DataFacts(
        given=data,
        settings=settings,
        rows=rows,
        reward=reward,
        prompts=replace(TextLengths.of(tokens), longest=longest),
        tokens=tokens,
        answers=TextLengths.of(_tokens(model, texts)) if texts and reward.kind != "code" else None,
        chats=chats,
        template=template,
        measured=model.tokenizer is not None,
    )


def _template(model: ModelFacts, sample: Sequence[Record], *, chats: bool) -> str:
    """Return how prompts are to be rendered: as a user's message where they are plain text, and the model chats."""
    if chats or not model.chats:
        return "auto"
    marks = [mark for mark in model.marks if len(mark) > 2]
    rendered = any(mark in str(one.prompt) for one in sample for mark in marks)
    return "auto" if rendered else "always"


def _prompt_tokens(model: ModelFacts, sample: Sequence[Record], template: Any) -> list[int]:
    if model.tokenizer is None:
        return [-(-len(str(one.prompt)) // CHARACTERS_OF_A_TOKEN) for one in sample]
    tokenised = PromptTokenizer(model.tokenizer, template, NO_LIMIT)(sample)
    bad = [one.why for one in tokenised if isinstance(one, LeftOut)]
    if bad and len(bad) == len(tokenised):
        raise DataError(f"no row that was looked at can be used: {bad[0]}")
    return [len(one[1]) for one in tokenised if not isinstance(one, LeftOut)]


def _tokens(model: ModelFacts, texts: Sequence[str]) -> list[int]:
    if model.tokenizer is not None:
        try:
            return [len(ids) for ids in model.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
        except Exception:  # it may lack an answer's characters, which the model need not write
            pass
    return [-(-len(text) // CHARACTERS_OF_A_TOKEN) for text in texts]


def _own(reward: str) -> RewardChoice:
    return RewardChoice(reward, "as given", KINDS.get(reward, "own"))


def source_of(data: str) -> dict[str, Any]:
    """Return the setting that names the data: a task, a file, or a dataset by folder or name."""
    source = dict(flatten(nest(settings_named(data, TRAIN_SPLIT))))
    return {key: value for key, value in source.items() if (key, value) != ("data.train.split", TRAIN_SPLIT)}


def _source_config(settings: Mapping[str, Any]) -> SourceConfig:
    return _config({key: value for key, value in settings.items() if lies_in(key, "data.train")}).data.train_sources[0]


def _config(settings: Mapping[str, Any]) -> Config:
    """Return a configuration of the data alone, nothing of which is held out."""
    held_out = {"data.task.val_size": 1} if "data.task.name" in settings else {"data.val_size": 0}
    return Config.model_validate(nest({**settings, **held_out}))
