"""Find the columns of the prompt and the ground truth of a data set, by names and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headway.data.files import answer_within, plain_message
from headway.errors import DataError, shown

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
"""Usual names of the prompt's column, the likeliest first."""
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
"""Usual names of the ground truth's column after those that the loader finds by itself (``auto``)."""
BESIDE: Mapping[str, Sequence[str]] = {
    "choices": PROMPTS,
    "options": PROMPTS,
    "input": ("instruction", "question"),
    "context": ("instruction", "question"),
}
"""Columns that belong to the question, and those that they belong to."""
VERL = ("reward_model", "ground_truth")


def prompt_column(rows: Sequence[Any], where: str) -> str:
    """Return the name of the prompt's column.

    Raises:
        DataError: none of the columns looks like it, a row lacks it, another one belongs to the question, too, or
            chats end with an answer; names the columns.
    """
    columns = _columns(rows, where)
    usable = [name for name in columns if 2 * sum(_is_prompt(row.get(name)) for row in rows) >= len(rows)]
    open_ended = [name for name in usable if not any(_ends_with_an_answer(row.get(name)) for row in rows)]
    found = next(_named(PROMPTS, open_ended), columns[0] if len(columns) == len(open_ended) == 1 else None)
    if found is not None:
        _check_whole(rows, found, where)
        return found
    if answered := [name for name in usable if name not in open_ended]:
        found = next(_named(PROMPTS, answered), answered[0])
        if ends_with_answers(rows, found) and _answers_beside(rows, found, where) is None:
            _check_whole(rows, found, where)
            return found
        last = next(last for row in rows if (last := answer_within(row.get(found))) is not None)
        raise DataError(
            f"{where}: chats in {found!r} end with an assistant's message, {shown(last, 60)}, "
            "and it is not the ground truth of each row; a prompt ends with what is to be answered. Take the last "
            "message out, and give it, or what of it is right or wrong, a column answer"
        )
    likely = f"; {', '.join(usable)} could be it" if usable else ", and none holds text or chat messages"
    raise DataError(
        f"{where}: no column has the name of a prompt ({', '.join(PROMPTS[:5])}, …) and text, or chat messages "
        f'like {{"role": …, "content": …}}; there are {", ".join(columns)}{likely}. '
        "Say which: data.prompt_key=COLUMN"
    )


def _check_whole(rows: Sequence[Any], prompt: str, where: str) -> None:
    """Check that each row has a prompt, and that nothing of the question is in another column."""
    lacking = next((number for number, row in enumerate(rows, 1) if not _is_prompt(row.get(prompt))), None)
    if lacking is not None:
        raise DataError(f"{where}: row {lacking} has no text in {prompt!r}, the prompt's column; leave such rows out")
    for name in _columns(rows, where):
        if prompt.lower() in BESIDE.get(name.lower(), ()) and any(row.get(name) for row in rows):
            raise DataError(
                f"{where}: {name!r} belongs to the question, and only {prompt!r} is asked; write both into one column, "
                f"or say that it is enough: data.prompt_key={prompt}"
            )


def answer_column(rows: Sequence[Any], prompt: str, where: str) -> str | None:
    """Return the key of the ground truth, ``auto`` where the loader finds it by itself; None where there is none."""
    found = _answers_beside(rows, prompt, where)
    return AUTO if found is None and ends_with_answers(rows, prompt) else found


def ends_with_answers(rows: Sequence[Any], prompt: str) -> bool:
    """Tell whether the chat of each row ends with an answer, which is its ground truth where no column holds that."""
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
