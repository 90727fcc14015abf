"""A character tokenizer as users have them: a Hugging Face one, here with or without a chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from headway.config.schema import DataConfig
from headway.data.files import Record
from headway.data.mixing import SourceShare
from headway.data.rows import Rows
from headway.data.sources import RowSource

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


def row_source(
    records: Sequence[Record],
    prompts: Any,
    *,
    seed: int = 0,
    parts: Sequence[SourceShare] | None = None,
    digests: Sequence[str] = (),
    row_numbers: Sequence[int] | None = None,
    held_out: int = 0,
    prefetch: int = 64,
    **data: Any,
) -> RowSource:
    """Return a source of ``records``, beside so many that are held out. ``data``: settings of that section."""
    own = tuple(parts or [SourceShare("", len(records))])
    val = [Record("held out", None, "val")] * held_out
    numbers = range(len(records)) if row_numbers is None else row_numbers
    rows = Rows(records, numbers, val, range(len(records), len(records) + held_out), own, tuple(digests))
    return RowSource(rows, prompts, DataConfig(**data), seed, prefetch=prefetch)
