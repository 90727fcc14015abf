r"""The look-up as an agent loop in verl's form: token ids in and out, and the tool's results between them.

headway train recipes/agents/lookup.yaml 'agent.tools=[]' reward.function=program \
    agent.program=recipes/agents/lookup_loop.py:LookUpLoop
"""

import re
from types import SimpleNamespace

from lookup import score, value
from lookup_agent import TOOLS

CALL = re.compile(r'\[TOOL_CALLS\]look_up\{"key": "(\w+)"\}')
TURNS = 4


class LookUpLoop:  # with verl: of AgentLoopBase, and AgentLoopOutput in place of the namespace
    def __init__(self, server_manager, tokenizer, **kwargs):
        self.server_manager, self.tokenizer = server_manager, tokenizer

    async def run(self, sampling_params, **row):
        prompt = self.tokenizer.apply_chat_template(
            row["raw_prompt"], tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
        ids, mask, turns, text = [], [], 0, ""
        while turns < TURNS:
            said = await self.server_manager.generate("0", prompt_ids=prompt + ids, sampling_params=sampling_params)
            ids, mask, turns = ids + said.token_ids, mask + [1] * len(said.token_ids), turns + 1
            text = self.tokenizer.decode(said.token_ids)
            if (call := CALL.search(text)) is None:
                break
            told = self.tokenizer.encode(f"<|tool|>{value(call[1])}<|assistant|>", add_special_tokens=False)
            ids, mask = ids + told, mask + [0] * len(told)
        answer = text.removesuffix(self.tokenizer.eos_token)
        return SimpleNamespace(
            prompt_ids=prompt,
            response_ids=ids,
            response_mask=mask,
            reward_score=score(answer, row["answer"]),
            num_turns=turns,
            metrics={},
        )
