"""The sections of the model: a loaded one, or one that is made and warmed up."""

from __future__ import annotations

import os.path
from collections import Counter
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from headway.config.sections.section import NonNegative, Positive, Section


class MakeModelConfig(Section):
    """A model with random initial weights: a Qwen3-style causal LM with a character tokenizer."""

    architecture: Literal["qwen3", "qwen2", "llama"] = "qwen3"
    """Model family of ``transformers``."""
    hidden_size: Positive = 128
    """Width of the residual stream."""
    num_hidden_layers: Positive = 3
    """Number of decoder layers."""
    num_attention_heads: Positive = 4
    """Number of query heads of a layer."""
    num_key_value_heads: Positive = 2
    """Number of key and value heads of a layer; a divisor of ``num_attention_heads``."""
    head_dim: Positive = 32
    """Width of an attention head."""
    intermediate_size: Positive = 384
    """Width of the feed-forward layer."""
    max_position_embeddings: Positive = 256
    """Longest context, in tokens of prompt and response together."""
    tie_word_embeddings: bool = True
    """Use the embedding as the output layer, too."""
    vocabulary: str = Field("0123456789abcdefghijklmnopqrstuvwxyz:=,|+-*() ", min_length=1)
    """Characters of the tokenizer; ``<pad>`` and ``<eos>``, padding and end-of-sequence, are added."""
    special_tokens: tuple[str, ...] = ()
    """Further tokens of several characters, such as ``<|user|>``. Each is one id wherever it occurs in a text."""
    chat_template: str | None = None
    """Jinja chat template of the tokenizer. Answers have to end with its ``eos_token``, ``<eos>``. Default: none, and
    prompts are text."""

    @field_validator("vocabulary")
    @classmethod
    def _each_character_once(cls, value: str) -> str:
        if repeated := [character for character, count in Counter(value).items() if count > 1]:
            raise ValueError(f"expected each character once, but {', '.join(map(repr, repeated))} repeats")
        return value

    @field_validator("special_tokens")
    @classmethod
    def _longer_than_characters(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if short := [token for token in value if len(token) < 2]:
            raise ValueError(f"expected tokens of two characters or more, not {', '.join(map(repr, short))}")
        if repeated := [token for token, count in Counter([*value, "<pad>", "<eos>"]).items() if count > 1]:
            raise ValueError(f"expected each token once beside <pad> and <eos>, not {', '.join(map(repr, repeated))}")
        return value

    @model_validator(mode="after")
    def _heads_share_keys_evenly(self) -> MakeModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"expected num_attention_heads ({self.num_attention_heads}) to be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        return self


class GiveUpConfig(Section):
    """A teacher that writes ``?`` instead of some answers, so that reinforcement learning has to find them."""

    above: Positive
    """Length of an answer, in characters, above which the teacher may give up."""
    rate: float = Field(gt=0, lt=1)
    """Probability that the teacher gives up on an answer of more characters than ``above``."""


class WarmupConfig(Section):
    """Supervised steps on the task's solutions until held-out greedy accuracy lies in ``target``, or ``max_steps``
    steps on ``demonstrations``."""

    demonstrations: str | None = None
    """Teach from conversations instead of the task's solutions: ``file.py:function`` is called with a ``random.Random``
    and returns one as a list of chat messages, which may call ``agent.tools``. The assistant's messages are learned,
    for exactly ``max_steps`` steps."""
    conversations: Positive = 8192
    """Maximum number of demonstrations: rendering one takes about as long as learning from it. A longer warm-up repeats
    them, each time in another order."""
    target: tuple[float, float] = (0.4, 0.6)
    """Window of held-out greedy accuracy in which warm-up stops."""
    batch_size: Positive = 128
    """Number of problems, or of demonstrations, in one supervised step."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of the first supervised step."""
    eval_every: Positive = 20
    """Optimizer steps between two evaluations or, without evaluations, reports of the loss. If accuracy jumps over the
    window, training resumes from the last weights below it, with a quarter of the learning rate and of these steps."""
    min_steps: NonNegative = 0
    """First step at which the window counts. Before, accuracy may be in it with half-learned skills."""
    max_steps: Positive = 2000
    """Step at which the linearly falling learning rate reaches zero. A warm-up that is outside the window then fails;
    one on demonstrations ends."""
    give_up: GiveUpConfig | None = None
    """Teach from imperfect solutions. Default: the task's own, correct solutions."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the task in warm-up, where they differ: for example shorter problems."""

    @field_validator("target")
    @classmethod
    def _a_window_of_accuracies(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] < value[1] <= 1:
            raise ValueError("expected [low, high] with 0 <= low < high <= 1")
        return value


class ModelConfig(Section):
    """The model to train: a loaded one, or a small one that is made."""

    path: str | None = None
    """A Hugging Face folder (config, weights, tokenizer). Replaces ``make`` and ``warmup``."""
    make: MakeModelConfig | None = None
    """Make a small model instead of loading one."""
    warmup: WarmupConfig | None = None
    """Supervised warm-up of a made model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Training compute dtype; ``auto`` is bfloat16 on GPUs, float32 on CPUs. Master weights are float32."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    compile: bool = False
    """Compile the decoder layers and the chunked log-probs with ``torch.compile``: takes a minute at the start, and
    gives fewer, larger kernels. Results differ in the last bits."""
    packing: Literal["shared", "packed", "padded"] = "shared"
    """Layout of micro-batches: ``shared`` puts rows into one line without padding, and computes once what the rows of a
    group have in common; ``packed`` computes it for each row; ``padded`` pads rows. Models whose attention cannot be
    packed always have padded rows, and the run notes it."""
    trust_remote_code: bool = False
    """Allow code from the model's folder to run."""

    @field_validator("path", mode="after")
    @classmethod
    def _at_home(cls, value: str | None) -> str | None:
        return None if value is None else os.path.expanduser(value)  # noqa: PTH111 - a name on the hub is no path
