"""All dialects that the endpoint understands."""

from __future__ import annotations

from headway.endpoint.chat_completions import ChatCompletions
from headway.endpoint.completions import Completions
from headway.endpoint.dialect import Dialect
from headway.endpoint.generate import Generate
from headway.endpoint.messages import Messages
from headway.endpoint.responses import Responses

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Completions(), Responses(), Messages(), Generate())
