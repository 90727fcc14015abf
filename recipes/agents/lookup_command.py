r"""The look-up as a command, which needs nothing beside the standard library: the row comes in on standard input, the
reward goes out as the last line.

headway train recipes/agents/lookup.yaml 'agent.tools=[]' reward.function=program \
    'agent.client=[python, recipes/agents/lookup_command.py]'
"""

import json
import os
import sys
import urllib.request

from lookup import score, value

PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
FUNCTION = {"name": "look_up", "description": "Look a key up in the table.", "parameters": PARAMETERS}
TURNS = 4


def asked(messages):
    """The model's answer: a message."""
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=600) as answer:
        return json.load(answer)["choices"][0]["message"]


row = json.load(sys.stdin)
messages = [*row["messages"]]
for _ in range(TURNS):
    messages.append(asked(messages))
    calls = messages[-1].get("tool_calls") or []
    for call in calls:
        key = json.loads(call["function"]["arguments"]).get("key")
        result = "no key" if key is None else str(value(key))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    if not calls:
        break
print(json.dumps({"reward": score(messages[-1]["content"] or "", row["answer"])}))
