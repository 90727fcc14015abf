"""Tensors of a model's files, as parts of its parameters: `transformers` fuses some of them as it reads them.

    files        …experts.0.gate_proj.weight [I, H]   …experts.0.up_proj.weight [I, H]   …experts.1.gate_proj.weight …
    parameter    …experts.gate_up_proj [E, 2 · I, H]

Other engines, exported folders and other releases know a model by its files. So weights are sent and written under the
files' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from headway.errors import ModelError, boundary


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of the model's files: a box of a parameter."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    start: tuple[int, ...]
    """Indices of its first element in the parameter."""
    dims: tuple[int, ...]
    """Dimension of the parameter for each dimension of the tensor; in all others the box has one element."""

    def within(self, start: Sequence[int], box: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """Return the part of the tensor that lies in a ``box`` of the parameter, which begins at ``start``: the
        part's first indices in the tensor, and a view of it. Returns None if tensor and box are disjoint.
        """
        place, view = [], box
        for dim, first in enumerate(self.start):
            size = self.shape[self.dims.index(dim)] if dim in self.dims else 1
            low, high = max(first, start[dim]), min(first + size, start[dim] + box.shape[dim])
            if low >= high:
                return None
            view = view.narrow(dim, low - start[dim], high - low)
            place.append(low - first)
        for dim in reversed(range(len(self.start))):  # the last one first: `select` removes a dimension
            if dim not in self.dims:
                view = view.select(dim, 0)
        return tuple(place[dim] for dim in self.dims), view


def persistent_buffers(lm: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors in the files of ``lm`` beside its parameters, which training leaves as they are."""
    kept = lm.state_dict().keys()
    return {name: buffer for name, buffer in lm.named_buffers() if name in kept}


def file_tensors(lm: PreTrainedModel, *, buffers: bool = False) -> list[FileTensor]:
    """Return the tensors of the files of ``lm``, which may be divided over ranks, in the order of its parameters.

    ``buffers``: also return the buffers in the files.

    Raises:
        ModelError: its files hold tensors that are no parts of its parameters, but transposed or computed from them.
    """
    held = dict(lm.named_parameters()) | (persistent_buffers(lm) if buffers else {})
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    # On meta: the conversion is traced by storages and strides, and takes no memory.
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
    storage: int = tensor.untyped_storage()._cdata  # not `data_ptr`, which is 0 for all tensors on meta
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
