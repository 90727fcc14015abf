r"""The look-up as an agent on OpenAI's client, which asks the model over HTTP and calls the tool itself.

headway train recipes/agents/lookup.yaml 'agent.tools=[]' reward.function=program \
    agent.client=recipes/agents/lookup_agent.py:run
"""

import json

import openai
from lookup import look_up, score

PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
FUNCTION = {"name": "look_up", "description": "Look a key up in the table.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
TURNS = 4
CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="each episode has its own")
"""Made once, since making a client takes longer than a turn."""


async def run(row, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    said = await conversation(client, row["messages"])
    return score(said[-1].choices[0].message.content or "", row["answer"])


async def conversation(client, prompt):
    """All answers of the model, the last of them without a call."""
    messages, said = [*prompt], []
    while len(said) < TURNS:
        said.append(await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS))
        message = said[-1].choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            key = json.loads(call.function.arguments).get("key")
            result = "no key" if key is None else str(await look_up(key))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return said
