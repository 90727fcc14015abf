from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from headway.config.sections.model_section import MakeModelConfig
from headway.errors import ModelError
from headway.models.made_model import character_tokenizer, make_model, qwen2_character_tokenizer
from headway.models.tokenizer import load_tokenizer, stop_token_ids, text_of
from tests.tiers import crossed

TINY = MakeModelConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48
)
VOCABULARY = TINY.vocabulary


def tiny(**changes: object) -> MakeModelConfig:
    return MakeModelConfig.model_validate({**TINY.model_dump(), **changes})


@crossed(("architecture", "tie"), ["qwen3", "qwen2", "llama"], [True, False])
def test_a_made_folder_opens_with_hugging_face_alone(tmp_path: Path, architecture: str, tie: bool) -> None:
    make_model(tiny(architecture=architecture, tie_word_embeddings=tie), 0, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.model_type == architecture
    assert model.config.vocab_size == len(tokenizer) == len(VOCABULARY) + 2
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tie
    assert model.model.layers[0].self_attn.q_proj.out_features == 4 * 8
    assert tokenizer.pad_token_id == model.config.pad_token_id == 0
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 1
    text = "sort 3 1 2: a  z= -+*|()"
    ids = tokenizer(text).input_ids
    assert ids == [2 + VOCABULARY.index(c) for c in text]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 1, 0], skip_special_tokens=True) == text


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        make_model(TINY, seed, tmp_path / name)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


def test_making_a_model_leaves_the_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    make_model(TINY, 7, tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)


@given(text=st.text(alphabet=VOCABULARY, max_size=40))
def test_text_survives_a_round_trip(text: str) -> None:
    for tokenizer in TOKENIZERS:
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text


TOKENIZERS = [character_tokenizer(VOCABULARY, 64), qwen2_character_tokenizer(VOCABULARY, 64)]


def test_white_space_and_letters_beyond_ascii_are_characters_too() -> None:
    tokenizer = character_tokenizer(" \n\téあ", 64)
    assert tokenizer.decode(tokenizer("\té  あ\n").input_ids) == "\té  あ\n"


def test_an_unknown_character_is_an_error() -> None:
    with pytest.raises(Exception, match="Missing"):
        character_tokenizer("ab", 64)("abc")


def test_a_qwen2_vocabulary_beyond_ascii_is_an_error() -> None:
    with pytest.raises(ModelError, match="works on bytes"):
        qwen2_character_tokenizer("aé", 64)


def test_an_odd_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="head_dim is 7"):
        make_model(tiny(head_dim=7), 0, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_stop_tokens_are_the_generation_config_s_and_the_tokenizer_s(tmp_path: Path) -> None:
    make_model(TINY, 0, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert stop_token_ids(tmp_path / "model", tokenizer) == (1,)
    GenerationConfig(eos_token_id=[9, 5]).save_pretrained(tmp_path / "model")
    assert stop_token_ids(tmp_path / "model", tokenizer) == (1, 5, 9)
    GenerationConfig(eos_token_id=7).save_pretrained(tmp_path / "model")
    assert stop_token_ids(tmp_path / "model", tokenizer) == (1, 7)
    (tmp_path / "model/generation_config.json").unlink()
    assert stop_token_ids(tmp_path / "model", tokenizer) == (1,)


@pytest.mark.parametrize("tidied", [False, True])
def test_the_text_of_ids_is_what_the_tokenizer_decodes_with_the_special_tokens_that_are_wanted(
    tmp_path: Path, tidied: bool
) -> None:
    make_model(TINY, 0, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    tokenizer.clean_up_tokenization_spaces = tidied
    ids = [*tokenizer("sort 3 1 2: a  z= -+*|()").input_ids, tokenizer.eos_token_id]
    assert text_of(tokenizer)(ids) == tokenizer.decode(ids)
    for text in (text_of(tokenizer, [tokenizer.eos_token_id]), text_of(tokenizer, skip_special_tokens=True)):
        assert text(ids) == tokenizer.decode(ids[:-1])


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked_itself(tmp_path: Path) -> None:
    make_model(TINY, 0, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")

    class Own(type(tokenizer)):  # type: ignore[misc]
        def _decode(self, token_ids, **options):  # type: ignore[no-untyped-def]
            return "its own"

    tokenizer.__class__ = Own
    assert text_of(tokenizer)([3, 4]) == "its own"
