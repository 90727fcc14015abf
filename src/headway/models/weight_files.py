"""Tensors of a model's files, as parts of its parameters: `transformers` fuses some of them as it reads them.

    files        …experts.0.gate_proj.weight [I, H]   …experts.0.up_proj.weight [I, H]   …experts.1.gate_proj.weight …
    parameter    …experts.gate_up_proj [E, 2 · I, H]

Everybody who does not compute with a model knows it by its files: other engines, exported folders, other releases. So
weights travel, and are written, under the files' names.

Tensors in a model's files against the model that ``config.json`` describes, by the files' headers.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from headway.errors import ModelError, boundary
from headway.models.model_folder import SAFETENSORS, SAFETENSORS_INDEX


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of the files: a box of a parameter."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    start: tuple[int, ...]
    """Indices of its first element in the parameter."""
    dims: tuple[int, ...]
    """The parameter's dimension that each of its own is; the box has one element in each other."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the whole ``parameter``."""
        view = parameter
        for dim in reversed(range(parameter.ndim)):
            if dim in self.dims:
                view = view.narrow(dim, self.start[dim], self.shape[self.dims.index(dim)])
            else:
                view = view.select(dim, self.start[dim])
        return view


def persistent_buffers(lm: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return what the files of ``lm`` have beside its parameters, and training leaves as it is: biases of routers."""
    kept = lm.state_dict().keys()
    return {name: buffer for name, buffer in lm.named_buffers() if name in kept}


def file_tensors(lm: PreTrainedModel, *, buffers: bool = False) -> list[FileTensor]:
    """Return the tensors of the files of ``lm``, which may be divided over ranks, in the order of its parameters.

    ``buffers``: those that the files have, too.

    Raises:
        ModelError: its files hold something else than parts of its parameters: transposed or computed ones.
    """
    held = dict(lm.named_parameters()) | (persistent_buffers(lm) if buffers else {})
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    whole = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owner = {_storage(tensor): name for name, tensor in whole.items()}
    doing = f"{type(lm).__name__}: its parameters cannot be brought into the form of its files"
    with boundary(doing, ModelError), _Views():
        files: Mapping[str, torch.Tensor] = revert_weight_conversion(lm, dict(whole))
    places = {name: place for place, name in enumerate(shapes)}
    found = []
    for name, tensor in files.items():
        parameter = owner.get(_storage(tensor))
        box = None if parameter is None else _box(tensor, shapes[parameter])
        if parameter is None or box is None:
            raise ModelError(f"{doing}: {name} is not a part of one of them")
        found.append(FileTensor(name, tuple(tensor.shape), parameter, *box))
    elements = sum(tensor.numel() for tensor in files.values())
    if elements != sum(tensor.numel() for tensor in whole.values()):
        raise ModelError(f"{doing}: the files' tensors have {elements} elements, which are not all of theirs")
    return sorted(found, key=lambda file: places[file.parameter])


def _storage(tensor: torch.Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _box(view: torch.Tensor, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Start and dimensions of a ``view`` in a contiguous tensor of ``shape``; None where it is no box of it."""
    strides = torch.empty(shape, device="meta").stride()
    rest, start = int(view.storage_offset()), []
    for stride in strides:
        at, rest = divmod(rest, int(stride))
        start.append(at)
    dims: list[int] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        fitting = [dim for dim, of in enumerate(strides) if of == stride and dim not in dims and shape[dim] >= size]
        if not fitting or (dims and fitting[-1] < dims[-1]):
            return None
        # Strides are equal where a dimension has one element: then the last one has more.
        dims.append(fitting[-1])
    return (tuple(start), tuple(dims)) if not rest else None


class _Views(TorchFunctionMode):
    """Mode in which copies of tensors are the tensors themselves, so that what was cut out of one can be traced."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("contiguous", "clone"):
            return args[0]
        return func(*args, **(kwargs or {}))


INTEGERS = ("I", "U", "BOOL")
"""Prefixes of the dtypes, as safetensors spells them, that no weight of a model may have."""
NOT_READ = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"(^|\.)(attn|attention)\.(masked_)?bias$")
"""Patterns for names of buffers that older checkpoints hold: constants, which the model makes itself."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""Pattern for the numbers of layers and experts in names of tensors."""
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file of weights; ``dtype`` as safetensors spells it: F32, BF16, I64."""

    file: Path
    name: str
    shape: list[int]
    dtype: str


def of_common_kinds(
    expected: Mapping[str, list[int]], found: list[StoredTensor], prefix: str
) -> tuple[dict[str, list[int]], list[StoredTensor]]:
    """Return the tensors of the kinds, names but for numbers, that a model's files have and these files, too. Of others
    transformers may know several forms."""
    kinds = {NUMBER.sub("*", name): 0 for name in expected}
    there = {one.name: _name_in_the_model(NUMBER.sub("*", one.name), kinds, prefix) for one in found}
    common = kinds.keys() & there.values()
    known = {name: shape for name, shape in expected.items() if NUMBER.sub("*", name) in common}
    return known, [one for one in found if there[one.name] in common]


def compare(path: str, model: Any, expected: Mapping[str, list[int]], found: list[StoredTensor]) -> None:
    """Compare the tensors ``found`` in the files of ``path`` with the shapes that ``model`` expects, by their names.

    Raises:
        ModelError: one of another shape, that the model or the files lack, or of integers; or two that differ, and are
            one by ``config.json``.
    """
    there = {_name_in_the_model(one.name, expected, model.base_model_prefix): one for one in found}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied: dict[int, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        tied[id(parameter)].append(name)
    copied = {name for names in tied.values() if any(name in there for name in names) for name in names}
    not_read = re.compile("|".join((*NOT_READ, *(model._keys_to_ignore_on_load_unexpected or ()))))
    optional = re.compile("|".join(model._keys_to_ignore_on_load_missing or ()) or "(?!)")
    problems = [
        f"{name} is {one.shape} in the file, and {expected[name]} by config.json"
        for name, one in sorted(there.items())
        if name in expected and one.shape != expected[name]
    ]
    problems = problems or [
        f"the file has {name}, which the model of config.json does not have"
        for name in sorted(there)
        if name not in expected and not not_read.search(name)
    ]
    problems = problems or [
        f"the file lacks {name}, which the model of config.json needs"
        for name in sorted(expected)
        if name not in there and name not in copied and not optional.search(name)
    ]
    problems = problems or [
        f"{name} is of integers ({one.dtype}) in the file"
        for name, one in sorted(there.items())
        if name in parameters and one.dtype.startswith(INTEGERS)
    ]
    problems = problems or [
        f"{first} and {other} differ in the file, and are one by config.json (tie_word_embeddings)"
        for first, *others in ([name for name in names if name in there] for names in tied.values() if len(names) > 1)
        for other in others
        if not _equal(there[first], there[other])
    ]
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ModelError(
            f"{path}: the weights are not those of config.json: {problems[0]}{more}. Give config and weights of one "
            "model"
        )


def _name_in_the_model(name: str, expected: Mapping[str, Any], prefix: str) -> str:
    """Return a weight's name in the model, which may have a head's prefix more or less; else ``name`` itself."""
    if name not in expected:
        for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
            if other in expected:
                return other
    return name


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Tell whether two tensors are equal, in pieces, so that two large embeddings are not in memory at once."""
    from safetensors import safe_open

    with safe_open(one.file, framework="pt") as left, safe_open(other.file, framework="pt") as right:
        a, b = left.get_slice(one.name), right.get_slice(other.name)
        return all(
            bool((a[start : start + ROWS_AT_ONCE] == b[start : start + ROWS_AT_ONCE]).all())
            for start in range(0, one.shape[0], ROWS_AT_ONCE)
        )


def tensors_in_files(folder: Path) -> Iterator[StoredTensor]:
    """Yield the tensors in a folder's safetensors files, of which only the headers are read."""
    from safetensors import safe_open

    if (folder / SAFETENSORS).exists():
        files = [SAFETENSORS]
    elif (folder / SAFETENSORS_INDEX).exists():
        places = json.loads((folder / SAFETENSORS_INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
    else:
        files = []
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                piece = opened.get_slice(name)
                yield StoredTensor(folder / file, name, piece.get_shape(), piece.get_dtype())
