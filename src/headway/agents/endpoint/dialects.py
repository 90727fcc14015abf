"""All dialects that the endpoint understands."""

from __future__ import annotations

from headway.agents.endpoint.anthropic_messages import Messages
from headway.agents.endpoint.chat_completions import ChatCompletions
from headway.agents.endpoint.completions import Completions
from headway.agents.endpoint.dialect import Dialect
from headway.agents.endpoint.responses import Responses
from headway.agents.endpoint.token_generate import TokenGenerate

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Completions(), Responses(), Messages(), TokenGenerate())
