"""Errors of the SDK for MCP in plain words, in one line each, and without what it would print of them."""

from __future__ import annotations

import logging
import re
from typing import Any

from headway.errors import cut, said_by, shown

_LOGGERS = ("mcp.client.stdio", "mcp.client.streamable_http")


def root(cause: BaseException) -> BaseException:
    """The exception that a group of exceptions comes down to."""
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause


def is_unfit(cause: BaseException) -> bool:
    """Tell whether a message does not fit MCP's schema."""
    from pydantic import ValidationError

    return isinstance(root(cause), ValidationError)


def unreadable(cause: Exception) -> Any:
    """The text or error in place of a message."""
    errors: Any = getattr(cause, "errors", list)()
    return errors[0].get("input") if errors else said_by(cause)


def in_words(cause: BaseException) -> str:
    """Say what ``cause`` comes down to: of what does not fit a schema which field, what is there, what was expected."""
    cause = root(cause)
    if is_unfit(cause):
        return _unfit(cause)
    by_the_tool: Any = cause.__cause__
    if isinstance(cause, RuntimeError) and hasattr(by_the_tool, "json_path"):  # jsonschema's, of a tool's result
        where = str(by_the_tool.json_path).replace("$", "structuredContent", 1)
        return f"{where}: {cut(' '.join(str(by_the_tool.message).split()), 200)}"
    return said_by(cause)


def _unfit(error: Any) -> str:
    """The words of pydantic's ``ValidationError``. Of a block that may be of several kinds it has errors for each."""
    errors = error.errors(include_url=False, include_context=False)
    other_kinds = {one["loc"][:-1] for one in errors if one["type"] == "literal_error"}
    first = next((one for one in errors if one["loc"][:-1] not in other_kinds), None)
    first = first or next(one for one in errors if one["type"] == "literal_error")
    where = ".".join(str(part) for part in first["loc"] if not str(part)[:1].isupper())  # no names of the SDK's classes
    if first["type"] == "missing":
        return f"{where} is missing in {shown(first['input'])}"
    expected = re.sub(r" or instance of \w+", "", first["msg"]).removeprefix("Input should be ")
    return f"{where or 'it'} is {shown(first['input'])}, expected {expected}"


def keep_to_one_line() -> None:
    """Keep the SDK from printing tracebacks: what it cannot read is heard of as noise, and all else is one line."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_one_line)


def _one_line(record: logging.LogRecord) -> bool:
    cause = record.exc_info[1] if record.exc_info else None
    if cause is not None:
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {said_by(cause)}", (), None
    return not isinstance(cause, ValueError)
