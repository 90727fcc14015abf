"""A few fixed sequences whose log-probs tell whether two holders of a policy serve the same weights.

Checksums prove that the right bytes arrived; the probe proves that what computes uses them. It is cheap enough for
every update, and its sequences are spread over the vocabulary so that embedding and head are sampled broadly.

    ids [4, 6]:   │ p p p p │ r r │      log-probs of the r, sequence by sequence: [8]
                    prefill   first from the prefill's logits, the other after decoding it
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.data.packing import CollatedRow

PROBE_SEQUENCES = 4
PROBE_PREFILL = 4
"""Number of tokens of each sequence that are given: its prompt."""
PROBE_SCORED = 2
"""Number of last tokens of each sequence whose log-probs are compared."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2⁶⁴ divided by the golden ratio: multiples of it, modulo 2⁶⁴, are spread evenly however many there are."""


def probe_sequences(vocab_size: int) -> NDArray[np.int64]:
    """Token ids [4, 6] below ``vocab_size``: the same for the same size, everywhere."""
    count = PROBE_SEQUENCES * (PROBE_PREFILL + PROBE_SCORED)
    ids = [((k * _GOLDEN) % 2**64 * vocab_size) >> 64 for k in range(1, count + 1)]
    return np.array(ids, np.int64).reshape(PROBE_SEQUENCES, -1)


def probe_rows(vocab_size: int) -> list[CollatedRow]:
    """The sequences as an engine's rows: `PROBE_PREFILL` prompt tokens, then the response."""
    blank = np.zeros(PROBE_SCORED, np.float32)
    return [
        CollatedRow(
            input_ids=ids.astype(np.int32),
            prompt_length=PROBE_PREFILL,
            logprobs=blank,
            versions=np.zeros(PROBE_SCORED, np.int32),
            loss_mask=np.ones(PROBE_SCORED, np.bool_),
        )
        for ids in probe_sequences(vocab_size)
    ]


def probe_vector(responses: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The probe [8] from the [2] log-probs of each of `probe_rows`, in order: what a replica's ``probe`` returns."""
    return np.concatenate(responses).astype(np.float32)
