"""Digests of tensors' bytes: sums of integers, computed where the bytes are; the same value on every kind of device.

    bytes of a tensor  ▶ words of 64 bits, as rows of `COLUMNS`; zeros behind the last byte
    rows, as they pass ▶ sums[c] += weight of row r × word (r, c)               modulo 2⁶⁴; all on the device
    at the end         ▶ digest = Σ mixed(key of c × sums[c]) + LENGTH × bytes    a few integers are read, once

Weights and keys are odd pseudo-random numbers. Odd weights lose no information: a change of at most one word per column
changes the digest, except with probability 2⁻⁶⁴ in the last step. Every change within 4,072 neighbouring bytes is of
this kind. Words swapped within one column are noticed because their weights differ. `COLUMNS` is a prime, so that
patterns with a round period do not stay in one column.

Sums may be added to in parts, even of a word, with zeros for its other bytes: the ends of buckets do not matter.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from headway.devices import CPU, kind_of
from headway.engines.weights.weight_layout import Manifest, TensorSlot, slots_in
from headway.errors import UpdateFailed

COLUMNS = 509
"""Number of columns: 4 KiB of sums stay in the processor's first cache."""
LENGTH = 0x9E3779B97F4A7C15
"""Weight of the number of bytes."""
WORD = 8
"""Bytes of a word."""
_PIECE = 4096 * COLUMNS * WORD
"""Number of bytes that are summed at once, 17 MB: an accelerator writes their products to memory."""
_COPIED = 32 * COLUMNS * WORD
"""Number of misaligned bytes that a CPU copies at once: they stay in its second cache."""
_TOGETHER = 64
"""Number of tensors whose sums are mixed at once."""
_KEYS = 2**40
"""Index of the first key in the sequence of odd numbers, which begins with the weights of rows."""


def digest(data: torch.Tensor) -> int:
    """Return the digest of ``data`` [n] uint8, on any device; 0 for no bytes."""
    running = RunningDigests(Manifest((TensorSlot("", (data.numel(),), "uint8", 0, data.numel()),)))
    running.add(0, data)
    return running.finished()[0]


class RunningDigests:
    """Computes the digest of each tensor of a layout as its bytes pass by, in order, on the device where they are.

    Example:
        >>> digests = RunningDigests(Manifest((TensorSlot("w", (4,), "uint8", 0, 4),)))
        >>> digests.add(0, torch.zeros(3, dtype=torch.uint8))
        >>> digests.add(3, torch.ones(1, dtype=torch.uint8))
        >>> digests.finished() == (digest(torch.tensor([0, 0, 0, 1], dtype=torch.uint8)),)
        True
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._at = manifest.start
        self._begun = 0
        """Number of tensors with bytes that have begun."""
        self._weights: torch.Tensor | None = None
        """Weights of the rows of the largest tensor, and of one more."""
        self._on_host = True
        self._sums: torch.Tensor | None = None
        """Sums [≤ _TOGETHER, COLUMNS] of the latest tensors."""
        self._mixed: list[torch.Tensor] = []
        """Mixed sums [≤ _TOGETHER] of the tensors before those in ``_sums``."""
        self._finished: tuple[int, ...] | None = None

    def add(self, offset: int, data: torch.Tensor) -> None:
        """Take in ``data`` [n] uint8, the flat bytes from ``offset`` on. Raises `UpdateFailed` if out of order.

        On a device the work is queued on the current stream: later work of that stream may write over ``data``.
        """
        if offset != self._at:
            raise UpdateFailed(f"bytes of the weights from {offset} on came where those from {self._at} on were due")
        self._at += data.numel()
        if self._weights is None:
            self._on_host = kind_of(data.device) is CPU
            rows = max((slot.nbytes for slot in self._manifest.slots), default=0) // (COLUMNS * WORD) + 2
            self._weights = _odd(0, rows, data.device)
        for slot, first, last in slots_in(self._manifest.slots, offset, self._at):
            if first == 0:
                self._begin(data.device)
            at = slot.offset + first - offset
            self._add(first, data[at : at + last - first])

    def finished(self) -> tuple[int, ...]:
        """Return all tensors' digests, and wait for the device. Raises `UpdateFailed` before the end."""
        if self._at != self._manifest.stop:
            came = self._at - self._manifest.start
            raise UpdateFailed(f"the weights ended after {came} of {self._manifest.nbytes} bytes")
        if self._finished is None:
            self._mix()
            # One transfer for all tensors: each would wait for the device.
            mixed = iter(torch.cat(self._mixed).tolist() if self._mixed else ())
            sizes = [slot.nbytes for slot in self._manifest.slots]
            self._finished = tuple((next(mixed) + LENGTH * size) % 2**64 if size else 0 for size in sizes)
        return self._finished

    def _begin(self, device: torch.device) -> None:
        if self._begun % _TOGETHER == 0:
            self._mix()
            count = min(_TOGETHER, len(self._manifest.slots) - self._begun)
            self._sums = torch.zeros(count, COLUMNS, dtype=torch.int64, device=device)
        self._begun += 1

    def _mix(self) -> None:
        if self._sums is not None:
            self._mixed.append(_mixed(self._sums * _odd(_KEYS, COLUMNS, self._sums.device)).sum(1))
            self._sums = None

    def _add(self, first: int, data: torch.Tensor) -> None:
        """Add ``data``, bytes ``first …`` of the tensor that has begun last, in pieces that end with a word."""
        while data.numel():
            before = first % WORD
            across = before or data.storage_offset() % WORD
            size = min(data.numel(), (_COPIED if across and self._on_host else _PIECE) - before)
            if across:
                words = pad(data[:size], (before, -(before + size) % WORD))
            elif size >= WORD:
                words = data[: (size := size // WORD * WORD)]
            else:
                words = pad(data, (0, WORD - size))
            self._add_words(first // WORD, words.view(torch.int64))
            first, data = first + size, data[size:]

    def _add_words(self, at: int, words: torch.Tensor) -> None:
        """Add ``words`` [n] int64 of the latest tensor. ``at``: number of the first of them within the tensor."""
        assert self._sums is not None and self._weights is not None
        sums = self._sums[(self._begun - 1) % _TOGETHER]
        row, column = divmod(at, COLUMNS)
        if column:  # the end of a row, perhaps without its own
            end, words = words[: COLUMNS - column], words[COLUMNS - column :]
            sums[column : column + end.numel()].addcmul_(end, self._weights[row])  # int64 wraps around: modulo 2⁶⁴
            row += 1
        rows = words.numel() // COLUMNS
        if rows:
            matrix, weights = words[: rows * COLUMNS].view(rows, COLUMNS), self._weights[row : row + rows]
            if self._on_host:  # nowhere else does torch multiply matrices of integers
                sums += torch.mv(matrix.t(), weights)
            else:
                sums += (matrix * weights[:, None]).sum(0)
        if (rest := words[rows * COLUMNS :]).numel():
            sums[: rest.numel()].addcmul_(rest, self._weights[row + rows])


def _odd(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers ``first …`` of a fixed sequence: [count] int64."""
    return _mixed(torch.arange(first + 1, first + 1 + count, device=device) * _signed(LENGTH)) | 1


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each number, without loss; 0 stays 0.

    The last step of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    # `>>` of int64 brings in the sign: the masks make it the shift of numbers without one.
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & (2**33 - 1))


def _signed(number: int) -> int:
    # torch multiplies no uint64; int64 wraps around to the same bits.
    return number - 2**64 if number >= 2**63 else number
