"""Tensors in a model's files against the model that ``config.json`` describes, by the files' headers."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ModelError
from headway.models.model_folder import SAFETENSORS, SAFETENSORS_INDEX

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
