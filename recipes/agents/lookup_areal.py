r"""The look-up as an agent in AReaL's form. Its reward is given to an answer by the answer's id.

headway train recipes/agents/lookup.yaml 'agent.tools=[]' reward.function=program \
    agent.client=recipes/agents/lookup_areal.py:LookUpAgent
"""

import openai
from lookup import score
from lookup_agent import conversation


class LookUpAgent:
    async def run(self, data, **kwargs):
        client = openai.AsyncOpenAI(
            base_url=kwargs["base_url"], api_key=kwargs["api_key"], http_client=kwargs["http_client"], max_retries=0
        )
        last = (await conversation(client, data["messages"]))[-1]
        return {last.id: score(last.choices[0].message.content or "", data["answer"])}
