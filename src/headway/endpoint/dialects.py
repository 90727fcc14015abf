"""All dialects that the endpoint understands."""

from __future__ import annotations

from headway.endpoint.chat_completions import ChatCompletions
from headway.endpoint.dialect import Dialect

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(),)
