"""Makes a small causal LM with random weights and a character tokenizer, as a Hugging Face folder.

The tokenizer has one token for each character of ``vocabulary``, after ``<pad>`` (id 0) and ``<eos>`` (id 1). Encoding
adds nothing, decoding joins without spaces, so text survives a round trip exactly. A character outside the vocabulary
is an error rather than an unknown token: a model that was made for a task can say nothing sensible about it.

With special tokens and a chat template the model chats:

    special_tokens: ["<|user|>", "<|assistant|>"]
    chat_template: >-
      {% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}
      {%- if add_generation_prompt %}<|assistant|>{% endif %}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)

from headway.config.sections.model_section import MakeModelConfig
from headway.errors import ModelError

PAD = "<pad>"
EOS = "<eos>"

CONFIG_CLASSES: dict[str, type[PreTrainedConfig]] = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}


def make_model(config: MakeModelConfig, seed: int, path: Path) -> None:
    """Write a model folder to ``path``. The same ``config`` and ``seed`` give the same bytes.

    Raises:
        ModelError: an odd ``head_dim``, or a vocabulary that the architecture's tokenizer cannot have.
    """
    import torch  # here: a tokenizer alone needs none

    from headway.models.pretrained import export

    tokenizer = make_tokenizer(config)
    architecture = _architecture(config, tokenizer)
    # No devices: by default it saves the state of each GPU, which starts CUDA; a process that is forked afterwards, as
    # vLLM forks its workers, cannot use a GPU any more.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
    export(model, tokenizer, path)


def make_tokenizer(config: MakeModelConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of the model that ``config`` makes, with its chat template.

    Raises:
        ModelError: a vocabulary that the architecture's tokenizer cannot have.
    """
    make = qwen2_character_tokenizer if config.architecture == "qwen2" else character_tokenizer
    tokenizer = make(config.vocabulary, config.max_position_embeddings, config.special_tokens)
    tokenizer.chat_template = config.chat_template
    return tokenizer


def character_tokenizer(
    vocabulary: str, max_length: int, special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each character of ``vocabulary``, ``<pad>`` and ``<eos>`` before them, and
    ``special_tokens`` after them.

    Encoding text with any other character raises; see the module's docstring.
    """
    tokenizer = Tokenizer(models.WordLevel(_ids(vocabulary)))  # no unknown token: an unknown character raises
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_special(max_length, special_tokens))


def qwen2_character_tokenizer(
    vocabulary: str, max_length: int, special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A character tokenizer for Qwen2, whose folders `AutoTokenizer` always opens as Qwen2's own byte-level class.

    Qwen2's class leaves characters that it does not know out, without an error.

    Raises:
        ModelError: a character of more than one byte.
    """
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [to_bytes.pre_tokenize_str(c)[0][0] for c in vocabulary]
    if long := [c for c, spelling in zip(vocabulary, spelled, strict=True) if len(spelling) > 1]:
        raise ModelError(f"model.make.vocabulary: a qwen2 tokenizer works on bytes, so not with {long}; use qwen3")
    return Qwen2Tokenizer(
        vocab=_ids(spelled),
        merges=[],
        unk_token=PAD,  # never produced; any other name would be added to the vocabulary
        **_special(max_length, special_tokens),
    )


def _special(max_length: int, special_tokens: Sequence[str]) -> dict[str, Any]:
    """Return the settings that both kinds of tokenizer have in common."""
    return {
        "pad_token": PAD,
        "eos_token": EOS,
        "extra_special_tokens": list(special_tokens),
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }


def _ids(characters: Sequence[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate([PAD, EOS, *characters])}


def _architecture(config: MakeModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    if config.head_dim % 2:
        raise ModelError(f"model.make: head_dim is {config.head_dim}; rotary embeddings need an even number")
    return CONFIG_CLASSES[config.architecture](
        **config.model_dump(exclude={"architecture", "vocabulary", "special_tokens", "chat_template"}),
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
