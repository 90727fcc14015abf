"""Small tokenizers with the chat templates of public models, in structure."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headway.agents.chat.chat_template import ChatRenderer

SPECIAL = {
    "qwen2_5": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"],
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"],
    "llama3": ["<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": [
        *["</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]"],
        *["[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    ],
    "deepseek_r1": ["<|end|>", "<|begin|>", "<|User|>", "<|Assistant|>"],
}
"""Template → its tokenizer's special tokens: first the end of sequence, then the beginning where it has one."""
EOS = {"qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}
TEMPLATES = tuple(SPECIAL)
TEXT = [
    'the answer is 12, and 12 is the answer: {"name": "add", "arguments": {"a": 1, "b": 2}}',
    "user assistant system tool think <tool_response>\nresult\n</tool_response>\n",
    "guess a number; the number is too high, too low, equal",
]

MakeTokenizer = Callable[[str], PreTrainedTokenizerFast]


@cache
def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with merges, so that one text has many tokenisations, of which encoding gives one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL[template],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS.get(template, SPECIAL[template][0]),
        bos_token=SPECIAL[template][1] if not template.startswith("qwen") else None,
        chat_template=(Path(__file__).parent / "templates" / f"{template}.jinja").read_text(),
    )


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> str:
    """The name of each template in turn."""
    return str(request.param)


@cache
def renderer_of(template: str, **options: Any) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(template), options)
