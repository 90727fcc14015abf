"""Summary of a data set: columns, lengths in the model's tokens, the reward that fits its answers.

unit tests ─▶ code     numbers, LaTeX ─▶ math_verify     letters, a few words ─▶ regex     short texts ─▶ exact_match
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headway.agents.rewards.code_tests import unit_tests_of
from headway.config.layers import flatten, lies_in, nest
from headway.config.schema import Config
from headway.config.sections.agent_section import MAKES_EPISODES
from headway.data.files import Record, answer_within, plain_message
from headway.data.rows import TRAIN_SPLIT, first_rows, read_rows, settings_named
from headway.data.tasks import TASKS
from headway.data.tokenize import LeftOut, PromptTokenizer
from headway.errors import ConfigError, DataError, ScoringFailed, shown

if TYPE_CHECKING:
    from headway.api.init.model_summary import ModelFacts

Kind = Literal["code", "math", "choice", "text", "own"]
_NUMBER = r"[-+]?\$?(?:(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\s*%?"
NUMBER = re.compile(_NUMBER)
NUMBERS = re.compile(rf"{_NUMBER}(?:\s*[,;]\s*{_NUMBER})+")
"""Pattern of lists of numbers."""
LETTER = re.compile(r"\(?([A-Z])[).]?")
WORD = re.compile(r"[\w+-]{1,20}")
IN_LATEX = re.compile(r"\\[a-zA-Z]+|\$.+\$|[\w)}]\s*[=^]\s*[\w({]")
SIGNS = re.compile(r"[-+*/^=()\[\]{},.;:<>|!\s\d\w\\$%]*")
"""Pattern of the characters that a mathematical expression may have."""
OF_NUMBERS = re.compile(r"[-+]?\d+\s*/\s*\d+|[(\[{]\s*[-+\d][-+\d,./\s]*[)\]}]")
"""Pattern of fractions, tuples, intervals and sets of numbers."""
LONGEST_EXPRESSION = 80
MOST_WORDS, MOST_LETTERS = 12, 200
"""Maximum number of words and of characters of a text that ``exact_match`` may ask for."""
MOST_CHOICES = 10
ENOUGH = 0.95
"""Minimum share of answers of one kind, in [0, 1], for that kind's reward to be chosen."""


@dataclass(frozen=True, slots=True)
class RewardChoice:
    """A reward function, and the reason for it."""

    function: str
    reason: str
    kind: Kind
    params: Mapping[str, Any] = field(default_factory=dict)


def reward_for(answers: Sequence[tuple[Any, Mapping[str, Any]]]) -> RewardChoice | None:
    """Return the built-in reward for rows of (answer, further columns); None where none fits."""
    known = [(answer, extra) for answer, extra in answers if answer is not None]
    if not known:
        return None
    if _most(_has_tests(answer, extra) for answer, extra in known):
        return RewardChoice("code", "answers are unit tests: they run on the last block of code", "code")
    if any(not isinstance(answer, str | int | float) for answer, _ in known):
        return None
    texts = [str(answer).strip() for answer, _ in known]
    if _most(_is_number(text) for text in texts):
        return RewardChoice("math_verify", "answers are numbers: the last one counts, or \\boxed{…}", "math")
    if _most(_is_number(text) or _is_mathematics(text) for text in texts):
        reason = "answers are mathematics: \\boxed{…} counts, or the last expression; in lists no order does"
        return RewardChoice("math_verify", reason, "math")
    return _of_choices(texts) or _of_texts(texts)


def _of_choices(texts: Sequence[str]) -> RewardChoice | None:
    distinct = sorted(set(texts))
    if all(LETTER.fullmatch(text) for text in distinct):
        letters = [found[1] for text in distinct if (found := LETTER.fullmatch(text))]
        pattern = f"[A-{max('D', *letters)}]"
        plain = {"pattern": rf"\b({pattern})\b"}
        return RewardChoice(
            "regex",
            "answers are letters: the last capital letter that stands alone counts",
            "choice",
            plain if distinct == sorted(set(letters)) else plain | {"answer_pattern": f"({pattern})"},
        )
    few = 1 < len(distinct) <= min(MOST_CHOICES, len(texts) // 3)
    if few and all(WORD.fullmatch(text) for text in distinct):
        pattern = rf"\b({'|'.join(map(re.escape, distinct))})\b"
        return RewardChoice(
            "regex", f"answers are {len(distinct)} words: the last of them counts", "choice", {"pattern": pattern}
        )
    return None


def _of_texts(texts: Sequence[str]) -> RewardChoice | None:
    if not _most("\n" not in text and len(text) <= MOST_LETTERS and len(text.split()) <= MOST_WORDS for text in texts):
        return None
    return RewardChoice(
        "exact_match", "answers are short texts: a response has to be just that; regex finds one within", "text"
    )


def _has_tests(answer: Any, extra: Mapping[str, Any]) -> bool:
    if isinstance(answer, str) and not (
        answer.lstrip()[:1] in ("{", "[")
        or "check(" in answer
        or re.search(r"^\s*(self\.)?assert", answer, re.MULTILINE)
    ):
        return False
    if not isinstance(answer, str | Mapping | list):
        return False
    try:
        return bool(unit_tests_of(answer, extra))
    except (ScoringFailed, TypeError, ValueError, KeyError):
        return False


def _is_number(text: str) -> bool:
    """Tell whether ``text`` is a number, or ends with ``####`` and one. Digits with leading zeros (0042) are none."""
    number = text.rpartition("####")[2].strip()
    return NUMBER.fullmatch(number) is not None and not (len(number) > 1 and number.isdigit() and number[0] == "0")


def _is_mathematics(text: str) -> bool:
    if "\\boxed" in text or NUMBERS.fullmatch(text):
        return True
    expression = text.rpartition("####")[2].strip()
    if len(expression) > LONGEST_EXPRESSION or SIGNS.fullmatch(expression) is None:
        return False
    return IN_LATEX.search(expression) is not None or OF_NUMBERS.fullmatch(expression) is not None


def _most(of_kind: Iterable[bool]) -> bool:
    found = list(of_kind)
    return sum(found) >= ENOUGH * len(found)


PROMPTS = (
    "prompt",
    "messages",
    "question",
    "problem",
    "instruction",
    "query",
    "conversation",
    "conversations",
    "chat",
    "input",
    "task",
    "text",
)
"""Usual names of the prompt column, the most likely first."""
AUTO = "auto"
ANSWERS = (
    "answer",
    "ground_truth",
    "final_answer",
    "expected_answer",
    "correct_answer",
    "answerkey",
    "answer_key",
    "gold",
    "target",
    "label",
    "answers",
    "tests",
    "test_list",
    "test_cases",
    "test",
    "input_output",
    "solution",
    "output",
    "completion",
    "response",
)
"""Usual names of the ground-truth column, beside those that the loader finds by itself (``auto``)."""
BESIDE: Mapping[str, Sequence[str]] = {
    "choices": PROMPTS,
    "options": PROMPTS,
    "input": ("instruction", "question"),
    "context": ("instruction", "question"),
}
"""Column with one part of the question → usual names of the column with the rest."""
VERL = ("reward_model", "ground_truth")


def prompt_column(rows: Sequence[Any], where: str) -> str:
    """Return the name of the prompt's column.

    Raises:
        DataError: no column looks like a prompt, a row has none, a second column belongs to the question, or chats end
            with an answer. The message names the columns.
    """
    columns = _columns(rows, where)
    usable = [name for name in columns if 2 * sum(_is_prompt(row.get(name)) for row in rows) >= len(rows)]
    open_ended = [name for name in usable if not any(_ends_with_an_answer(row.get(name)) for row in rows)]
    found = next(_named(PROMPTS, open_ended), columns[0] if len(columns) == len(open_ended) == 1 else None)
    # Chats that end with an answer are prompts only where that is the ground truth.
    answered = [name for name in usable if name not in open_ended]
    if found is None and answered:
        found = next(_named(PROMPTS, answered), answered[0])
        if not ends_with_answers(rows, found) or _answers_beside(rows, found, where) is not None:
            last = next(last for row in rows if (last := answer_within(row.get(found))) is not None)
            raise DataError(
                f"{where}: chats in {found!r} end with an assistant's message, {shown(last, 60)}, "
                "and it is not the ground truth of each row; a prompt ends with what is to be answered. Take the last "
                "message out, and give it, or what of it is right or wrong, a column answer"
            )
    if found is None:
        likely = f"; {', '.join(usable)} could be it" if usable else ", and none holds text or chat messages"
        raise DataError(
            f"{where}: no column has the name of a prompt ({', '.join(PROMPTS[:5])}, …) and text, or chat messages "
            f'like {{"role": …, "content": …}}; there are {", ".join(columns)}{likely}. '
            "Say which: data.prompt_key=COLUMN"
        )
    lacking = next((number for number, row in enumerate(rows, 1) if not _is_prompt(row.get(found))), None)
    if lacking is not None:
        raise DataError(f"{where}: row {lacking} has no text in {found!r}, the prompt's column; leave such rows out")
    for name in columns:
        if found.lower() in BESIDE.get(name.lower(), ()) and any(row.get(name) for row in rows):
            raise DataError(
                f"{where}: {name!r} belongs to the question, and only {found!r} is asked; write both into one column, "
                f"or say that it is enough: data.prompt_key={found}"
            )
    return found


def answer_column(rows: Sequence[Any], prompt: str, where: str) -> str | None:
    """Return the ground truth's key; ``auto`` if the loader finds it by itself; None if there is none."""
    found = _answers_beside(rows, prompt, where)
    return AUTO if found is None and ends_with_answers(rows, prompt) else found


def ends_with_answers(rows: Sequence[Any], prompt: str) -> bool:
    """Tell whether the chat of each row ends with an answer, which is the ground truth if no column holds one."""
    return all(_ends_with_an_answer(row.get(prompt)) for row in rows)


def _answers_beside(rows: Sequence[Any], prompt: str, where: str) -> str | None:
    columns = _columns(rows, where)
    if all(isinstance(row.get(VERL[0]), Mapping) and VERL[1] in row[VERL[0]] for row in rows) or "answer" in columns:
        return AUTO
    return next(_named(ANSWERS, [name for name in columns if name != prompt]), None)


def _named(usual: Iterable[str], columns: Sequence[str]) -> Iterator[str]:
    """Yield the columns with usual names, in any case, the likeliest first."""
    for name in usual:
        yield from (column for column in columns if column.lower() == name)


def _columns(rows: Sequence[Any], where: str) -> list[str]:
    if not rows:
        raise DataError(f"{where}: there are no rows; expected one for each prompt")
    for row in rows:
        if not isinstance(row, Mapping):
            like = '{"prompt": …, "answer": …}'
            raise DataError(f"{where}: expected rows with columns, like {like}, not {type(row).__name__}")
    return list(dict.fromkeys(name for row in rows for name in row))


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, list) and bool(value) and all(_is_message(one) for one in value)


def _is_message(value: Any) -> bool:
    value = plain_message(value)
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and "content" in value


def _ends_with_an_answer(prompt: Any) -> bool:
    return _is_prompt(prompt) and answer_within(prompt) is not None


LOOKED_AT = 200
"""Number of first rows whose columns are compared."""
MOST_MEASURED, MOST_MADE = 2000, 256
"""Maximum numbers of a file's rows, and of a task's problems, whose tokens are counted."""
LONGEST_MEASURED = 16
"""Number of longest rows, by characters, whose tokens are counted in addition."""
CHARACTERS_OF_A_TOKEN = 3
NO_LIMIT = 2**31
PROGRAMS = tuple(f"agent.{name}" for name in MAKES_EPISODES)
"""Settings that make a program produce the episodes."""
KINDS: Mapping[str, Kind] = {"code": "code", "math_verify": "math", "regex": "choice", "exact_match": "text"}


@dataclass(frozen=True, slots=True)
class TextLengths:
    """Numbers of tokens of some texts."""

    median: int
    p99: int
    longest: int

    @classmethod
    def of(cls, tokens: Sequence[int]) -> TextLengths:
        # higher: the length of one of the texts, not a number between two.
        median, p99, longest = np.percentile(tokens, [50, 99, 100], method="higher")
        return cls(int(median), int(p99), int(longest))


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Properties of a data set."""

    given: str
    """The data set as the user gave it."""
    settings: Mapping[str, Any]
    """Settings of the section ``data`` for this data set, by dotted key."""
    rows: int
    """Number of training rows, held-out ones included; for a task, of problems per epoch."""
    reward: RewardChoice
    prompts: TextLengths
    tokens: Sequence[int]
    """Number of tokens of each measured prompt, ascending."""
    answers: TextLengths | None = None
    """Lengths of the ground truths; None if they are neither text nor numbers."""
    chats: bool = False
    """True where prompts are chat messages."""
    answers_within: bool = False
    """True where the last message of each chat, the assistant's, is the ground truth."""
    template: str = "auto"
    """``data.chat_template``"""
    measured: bool = True
    """False if there is no tokenizer and lengths are estimated from characters."""

    @property
    def is_task(self) -> bool:
        return "data.task.name" in self.settings


def look_at_data(data: str, model: ModelFacts, reward: str | None, given: Mapping[str, Any]) -> DataFacts:
    """Read ``data`` with a run's loader.

    ``reward``: the function that the user named, or None. ``given``: the user's settings. Those of ``data`` are used,
    and whether there is one of `PROGRAMS`.

    Raises:
        ConfigError: no built-in reward fits, and none was named.
        DataError: the data are missing or hold no prompts, or are messages and there is no chat template.
    """
    settings = source_of(data) | {key: value for key, value in given.items() if lies_in(key, "data")}
    chosen = None if reward is None else RewardChoice(reward, "as given", KINDS.get(reward, "own"))
    prompt, answers_within, longest_rows = "prompt", False, []
    if "data.task.name" in settings:
        records = read_rows(_config(settings)).train
        sample: Sequence[Record] = list(islice(records, MOST_MADE))
        kind: Kind = "text" if data in TASKS.names() else "own"
        chosen = chosen or RewardChoice("task", "the task's own verifier", kind)
    else:
        of_source = {key: value for key, value in settings.items() if lies_in(key, "data.train")}
        rows = first_rows(_config(of_source).data.train_sources[0], LOOKED_AT)
        prompt = settings.get("data.prompt_key") or prompt_column(rows, data)
        settings["data.prompt_key"] = prompt
        if "data.answer_key" not in settings:
            settings["data.answer_key"] = _answer_key(rows, prompt, data, reward)
        records = read_rows(_config(settings)).train
        # Every n-th row: a sorted file is sampled throughout.
        sample = records[:: -(-len(records) // MOST_MEASURED)]
        chosen = chosen or _fitting(data, [] if settings["data.answer_key"] == prompt else sample)
        usual = {"data.prompt_key": "prompt", "data.answer_key": AUTO}
        # What the loader assumes anyway needs no line in the recipe.
        settings = {key: value for key, value in settings.items() if usual.get(key) != value}
        answers_within = "data.answer_key" not in settings and ends_with_answers(rows, prompt)
        longest_rows = nlargest(LONGEST_MEASURED, records, key=lambda one: len(str(one.prompt)))
    chats = not isinstance(sample[0].prompt, str)
    # A program makes its own chat messages.
    played = any(lies_in(key, *PROGRAMS) for key in given)
    template = settings.get("data.chat_template") or ("auto" if played else _template(model, sample, chats=chats))
    tokens = sorted(_prompt_tokens(model, sample, template))
    longest = max([tokens[-1], *_prompt_tokens(model, longest_rows, template)])
    answered = settings.get("data.answer_key", AUTO) != prompt and chosen.kind != "code"
    texts = [str(one.answer) for one in sample if answered and isinstance(one.answer, str | int | float)]
    return DataFacts(
        given=data,
        settings=settings,
        rows=len(records),
        reward=chosen,
        prompts=replace(TextLengths.of(tokens), longest=longest),
        tokens=tokens,
        answers=TextLengths.of(_tokens(model, texts)) if texts else None,
        chats=chats,
        answers_within=answers_within,
        template=template,
        measured=model.tokenizer is not None,
    )


def _answer_key(rows: Sequence[Any], prompt: str, data: str, reward: str | None) -> str:
    """Return the ground truth's key; the prompt's if the given reward needs none. Raises `DataError`."""
    answer = answer_column(rows, prompt, data)
    if answer is None and reward is None:
        raise DataError(
            f"{data}: there is no ground truth to compare answers with; there are {', '.join(rows[0])}. Say which "
            "column holds it, data.answer_key=COLUMN, or give a reward that needs none: --reward FILE.py:function"
        )
    return answer or prompt


def _fitting(data: str, sample: Sequence[Record]) -> RewardChoice:
    """Return the built-in reward that fits the answers. Raises `ConfigError` where none does."""
    answers = [(one.answer, one.extra) for one in sample]
    if (chosen := reward_for(answers)) is not None:
        return chosen
    first = next((answer for answer, _ in answers if answer is not None), None)
    raise ConfigError(
        f"{data}: no built-in reward fits its answers, such as {shown(first, 80)}: they are no numbers, "
        "mathematics, choices, short texts or unit tests. Give a function that scores a response, --reward "
        "FILE.py:function (docs/rewards.md), or the column that holds the answer, data.answer_key=COLUMN"
    )


def _template(model: ModelFacts, sample: Sequence[Record], *, chats: bool) -> str:
    """Return ``data.chat_template``: ``always`` for text that the model's chat template has yet to render."""
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
        except Exception:  # the tokenizer may lack an answer's characters, which the model need not write
            pass
    return [-(-len(text) // CHARACTERS_OF_A_TOKEN) for text in texts]


def source_of(data: str) -> dict[str, Any]:
    """Return the setting that names the data: a task, a file, or a dataset by folder or name."""
    source = dict(flatten(nest(settings_named(data, TRAIN_SPLIT))))
    return {key: value for key, value in source.items() if (key, value) != ("data.train.split", TRAIN_SPLIT)}


def _config(settings: Mapping[str, Any]) -> Config:
    """Return a configuration of only the data, with no rows held out."""
    held_out = {"data.task.val_size": 1} if "data.task.name" in settings else {"data.val_size": 0}
    return Config.model_validate(nest({**settings, **held_out}))
