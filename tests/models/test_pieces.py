"""The text of single tokens, of the kinds of vocabularies that there are."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headway.config.sections.model_section import MakeModelConfig
from headway.models.made_model import make_tokenizer
from headway.models.tokenizer import TokenTexts


def byte_level() -> PreTrainedTokenizerFast:
    """One token for each byte, and one of two bytes of a character of three."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("€")[0][0]
    vocabulary = {letter: id for id, letter in enumerate([*letters, spelled[:2]])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(spelled[0], spelled[1])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def words() -> PreTrainedTokenizerFast:
    """Words with a mark for the space before them, of which a decoder drops the first; and bytes by name."""
    vocabulary = {"▁two": 0, "▁words": 1, "s": 2, "<0xE2>": 3, "a": 4, "<unk>": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def test_bytes_that_are_no_whole_character_are_spelled() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("é: 5€")
    pieces = texts.pieces(ids)
    assert pieces == ["<0xC3>", "<0xA9>", ":", " ", "5", "<0xE2><0x82>", "<0xAC>"]
    assert texts.text(ids) == "é: 5€"


def test_spaces_before_words_stay_and_special_tokens_are_named() -> None:
    texts = TokenTexts(words())
    end = words().convert_tokens_to_ids("<|end|>")
    assert texts.pieces([0, 1, 2, 3, end]) == [" two", " words", "s", "<0xE2>", "<|end|>"]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2"])
@pytest.mark.parametrize("vocabulary", ["0123456789abc+= ", "+= xyz"])
def test_pieces_of_models_that_are_made_here_are_their_text(architecture: str, vocabulary: str) -> None:
    """With a token to decode others behind, and without one."""
    config = MakeModelConfig.model_validate(
        {"architecture": architecture, "vocabulary": vocabulary, "special_tokens": ["<|user|>"]}
    )
    tokenizer = make_tokenizer(config)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("<|user|>+= =")
    assert texts.pieces([*ids, tokenizer.eos_token_id]) == ["<|user|>", "+", "=", " ", "=", "<eos>"]
    assert texts.text(ids) == "<|user|>+= ="
