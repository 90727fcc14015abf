"""Trial of a model on packed lines, which must give the same hidden states as single rows.

    two rows with a common beginning, and a third ─▶ one by one, the model's own attention ─▶ hidden states
                       └──────────▶ one packed line, `packed_attention` ─────────────────────▶ the same, or the model
                                                                                               keeps padded rows

Models differ too much for a list of names (own attention, recurrence, own masks). So each model is tried, with its
weights, on a few tokens, and with windows short enough to matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headway.data.packing import Ids, Tree, grow
from headway.errors import ModelError, boundary, said_by
from headway.models.attention.packed_attention import NAME
from headway.models.attention.packed_layout import PackedLayout
from headway.models.pretrained import quiet_transformers

LEAST_HEAD = 16
"""Smallest size of a head that FlexAttention computes on GPUs."""
WINDOW = 3
"""Length in tokens of sliding windows in the trial, for models that have any."""
LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Types of layers that packed attention computes, as configs name them. Small weights hide others from a trial: in
bfloat16 a convolution of a model that was just made differs by less than rounding."""
ROPES_OF_LENGTH = frozenset({"dynamic", "longrope"})
"""Types of rotary embeddings that go by the largest position of a line, which is that of its longest row: so a row's
hidden states depend on the others', and on lengths that no trial reaches."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_window_size", "window_size")


def use_packed_attention(lm: PreTrainedModel, *, on_gpu: bool = False) -> str | None:
    """Make ``lm``, with its weights loaded, attend over packed lines from now on; ``on_gpu``: it will run on a GPU.

    Returns the reason if it cannot. The model is then unchanged, and its rows have to be padded.

    Raises:
        ModelError: its decoder returns no hidden states, which log-probs need.
    """
    before = lm.config._attn_implementation
    if (why := unpackable(lm)) is not None:
        return why
    if on_gpu and (size := _head_size(lm.config.get_text_config())) < LEAST_HEAD:
        return f"its heads have {size} numbers each, and kernels of GPUs take {LEAST_HEAD} at least"
    with quiet_transformers(), torch.no_grad(), _short_windows(lm):
        rows = _rows(lm.config.get_text_config().vocab_size)
        device = lm.get_input_embeddings().weight.device
        with boundary(f"{type(lm).__name__}: its decoder gives no hidden states to compute log-probs from", ModelError):
            single = [_hidden(lm, row, device) for row in rows]
        tree = grow(rows[:2], 9)
        try:
            lm.set_attn_implementation(NAME)
            line = _packed_hidden(lm, [tree, grow(rows[2:])], device)
        except Exception as error:  # any model's own code, which gets arguments that it may not know
            lm.set_attn_implementation(before)
            if isinstance(error, TypeError) and "'layout'" in str(error):
                return "its code does not hand on to its attention which tokens of a line belong together"
            return f"its code does not take packed lines ({said_by(error, 200)})"
        places: list[Any] = [*(torch.from_numpy(of).to(device) for of in tree.places), slice(len(tree.ids), None)]
        if all(_close(line[of], expected) for of, expected in zip(places, single, strict=True)):
            return None
        lm.set_attn_implementation(before)
        return "its hidden states on packed lines are not those of single rows"


def unpackable(lm: PreTrainedModel) -> str | None:
    """Return the reason, from class and config, why a model cannot attend over packed lines. None if only a trial can
    tell more. The model may be on the meta device."""
    if not lm._can_set_attn_implementation():
        return "its attention is its own"
    if lm._is_stateful:
        return "it is recurrent"
    if other := set(getattr(lm.config.get_text_config(), "layer_types", None) or ()) - LAYERS:
        return f"it has layers of other kinds than attention to all tokens or to a window ({', '.join(sorted(other))})"
    if changing := _ropes(lm.config) & ROPES_OF_LENGTH:
        return f"its rotary embedding ({', '.join(sorted(changing))}) depends on the longest of the rows"
    return None


def undivided(path: str, cp: int, why: str) -> ModelError:
    """Return the error for a model at ``path`` that needs padded rows, which ``cp`` ranks cannot divide."""
    return ModelError(
        f"{path}: actor.parallel.cp={cp} divides packed lines of tokens, and this model's rows have to be padded: "
        f"{why}. Set actor.parallel.cp=1"
    )


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size)


def _ropes(config: Any) -> set[str]:
    """Return a model's types of rotary embeddings: one for all layers, or one for each type of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [parameters, *(of for of in parameters.values() if isinstance(of, dict))]
    return {of["rope_type"] for of in each if "rope_type" in of}


def _rows(vocabulary: int) -> list[Ids]:
    """Return two rows with nine tokens in common, and a third row."""
    tokens = ((np.arange(24) * 7 + 1) % vocabulary).astype(np.int32)
    return [tokens[:13], np.concatenate([tokens[:9], tokens[13:18]]), tokens[18:24]]


def _hidden(lm: PreTrainedModel, row: Ids, device: torch.device) -> Float[Tensor, "T H"]:
    ids = torch.from_numpy(row).long().to(device)
    hidden: Tensor = lm.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    return hidden


def _packed_hidden(lm: PreTrainedModel, trees: Sequence[Tree], device: torch.device) -> Float[Tensor, "L H"]:
    layout = PackedLayout.of(trees)
    layout.at(layout.positions_L.to(device), layout.ends_L.to(device))
    ids = torch.from_numpy(np.concatenate([tree.ids for tree in trees])).long().to(device)
    output = lm.base_model(input_ids=ids[None], position_ids=layout.positions_L[None], layout=layout, use_cache=False)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Tell whether both are equal up to rounding, relative to the largest value."""
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    largest = max(1e-3, float(expected.abs().max()))
    return torch.allclose(actual.float(), expected.float(), rtol=0.0, atol=tolerance * largest)


@contextmanager
def _short_windows(lm: PreTrainedModel) -> Iterator[None]:
    """Context in which the sliding windows of ``lm`` are `WINDOW` tokens long."""
    with ExitStack() as windows:
        for owner in (lm.config.get_text_config(), *lm.modules()):
            for name in _WINDOWS:
                value = vars(owner).get(name)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:  # True is an int, too
                    windows.enter_context(patch.object(owner, name, WINDOW))
        yield
