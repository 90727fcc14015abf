"""Weights as safetensors files, written while they are gathered: the flat bytes of the weights are the files' data.

    model-00001-of-00002.safetensors    [8 bytes: header's length][header: JSON][tensors, without a gap]
    model.safetensors.index.json        which file has which tensor

https://huggingface.co/docs/safetensors has the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headway.engines.weights.weight_layout import Manifest, TensorSlot
from headway.errors import UpdateFailed

if TYPE_CHECKING:
    from headway.engines.weights.outgoing_version import Window

LENGTH_BYTES = 8
"""Bytes at the beginning of a file that tell how long its header is."""
SHARD_BYTES = 5 * 10**9
"""Most bytes of tensors in a file of several, but for a tensor that is larger: what `transformers` writes."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def header(slots: Sequence[TensorSlot], metadata: Mapping[str, str]) -> bytes:
    """Make the header of a file with neighbouring ``slots`` of a layout: its length in 8 bytes, then JSON, padded to a
    multiple of 8.

    Raises `UpdateFailed` for a dtype that the format does not have.
    """
    for slot in slots:
        if slot.dtype not in _DTYPES:
            raise UpdateFailed(f"tensor {slot.name!r} has dtype {slot.dtype}, which safetensors files do not have")
    first = slots[0].offset if slots else 0
    tensors = {
        slot.name: {
            "dtype": _DTYPES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [slot.offset - first, slot.end - first],
        }
        for slot in slots
    }
    text = json.dumps({"__metadata__": {"format": "pt", **metadata}, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def write_files(folder: Path, manifest: Manifest, windows: Iterable[Window], most: int = SHARD_BYTES) -> None:
    """Write weights to ``folder``, in one file or in shards of at most ``most`` bytes with an index.

    ``windows`` are the flat bytes, in order. Holds none of them longer than until the next is drawn. Raises `OSError`.
    """
    shards = _shards(manifest, most)
    names = [f"model-{k:05d}-of-{len(shards):05d}.safetensors" for k in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE]
    files = iter([*zip(names, shards, strict=True)])
    file: BinaryIO | None = None
    end = 0
    for offset, window in windows:
        data = window.cpu().numpy().data
        done = 0
        while done < len(data):
            if file is None or offset + done == end:
                if file is not None:
                    _finish(file)
                name, slots = next(files)
                file = (folder / name).open("wb")
                file.write(header(slots, {}))
                end = slots[-1].end
            size = min(len(data) - done, end - offset - done)
            file.write(data[done : done + size])
            done += size
    if file is not None:
        _finish(file)
    if len(shards) > 1:
        places = {slot.name: name for name, slots in zip(names, shards, strict=True) for slot in slots}
        index = {"metadata": {"total_size": manifest.nbytes}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(manifest: Manifest, most: int) -> list[list[TensorSlot]]:
    """Partition a layout's tensors into neighbours of at most ``most`` bytes each."""
    shards: list[list[TensorSlot]] = [[]]
    for slot in manifest.slots:
        if shards[-1] and slot.end - shards[-1][0].offset > most:
            shards.append([])
        shards[-1].append(slot)
    return shards


def _finish(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
