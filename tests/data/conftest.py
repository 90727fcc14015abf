"""A character tokenizer as users have them: a Hugging Face one, here with or without a chat template."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    def make(chat_template: str | None = None, bos: bool = False) -> PreTrainedTokenizerFast:
        characters = [chr(c) for c in range(32, 127)]
        vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *characters])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
        if bos:
            tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            chat_template=chat_template,
        )

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer()
