"""Checks of a model's folder by its files alone: no torch, so that ``--dry-run`` and the doctor ask, too.

config.json ─▶ a whole model, trainable? ─▶ the other JSON files ─▶ a tokenizer ─▶ weights: every shard, whole

Also here: the tensors in its files (`tensors_in_files`) against the model that ``config.json`` describes (`compare`).
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from headway.errors import ModelError

SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Other files of weights that transformers reads; their contents are known only after loading."""
ADAPTER = "adapter_config.json"
OPTIONAL_JSON = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Files of tokenizers. A folder has at least one, unless the model has its own tokenizer code."""
MODEL_SUFFIXES = (".bin", ".jinja", ".json", ".model", ".py", ".safetensors", ".tiktoken", ".txt")
"""Suffixes of files by which a model's folder differs from another's."""
WHOLE_BYTES = 4 * 2**20
"""Bytes above which files are not read as a whole to tell them apart."""
LFS_POINTER = b"version https://git-lfs"
GET_AGAIN = "copy or download it again"


def check_folder(path: str) -> str | None:
    """Check a model's folder without loading anything, and return the ``model_type`` of ``config.json``.

    None if only the model's own code can tell more, and for a name on the hub, whose files are not here yet.

    Raises:
        ModelError: not a folder, an adapter, a quantised model; or a file that is missing, cut short or not readable.
    """
    folder = find_folder(path)
    if folder is None:
        return None
    if not (folder / "config.json").exists():
        if (folder / ADAPTER).exists():
            raise _adapter(path, folder)
        raise without_config(path)
    config = read_object(folder / "config.json")
    for name in OPTIONAL_JSON:
        if (folder / name).exists():
            read_object(folder / name)
    if not config.get("model_type") and "auto_map" not in config:
        raise ModelError(f"{folder / 'config.json'}: there is no model_type; give a Hugging Face model folder")
    if quantisation := config.get("quantization_config"):
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
        raise ModelError(
            f"{path}: a quantised model ({method or 'quantization_config in config.json'}) cannot be trained; give the "
            "model that it was made from, in bfloat16 or float32"
        )
    _check_weights(path, folder)
    if "auto_map" not in config and not any((folder / name).exists() for name in TOKENIZERS):
        raise ModelError(f"{path}: the folder has no tokenizer: expected tokenizer.json or its parts; copy them there")
    return None if "auto_map" in config else str(config["model_type"])


def hidden_size(path: str) -> int | None:
    """Return the width of the model at ``path``, as its ``config.json`` has it; None where nothing there says it."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return None
    known = text_config(file)
    sizes = (known.get(name) for name in ("hidden_size", "n_embd", "d_model"))
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def text_config(file: Path) -> dict[str, Any]:
    """Read a ``config.json``; values for the model's text part override those for the whole model."""
    config = read_object(file)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def find_folder(path: str | Path) -> Path | None:
    """Return ``path`` if it is a folder; None if it may be a model's name on the hub (``owner/name``).

    Raises:
        ModelError: it is a file, or neither a folder nor a possible name.
    """
    if not str(path).strip():
        raise ModelError(f"model.path: got {str(path)!r}, expected a Hugging Face model folder")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{path} is a file; give a Hugging Face model folder")
    spelled = str(path)
    if isinstance(path, Path) or spelled.startswith(("/", ".", "~")) or spelled.count("/") != 1:
        raise ModelError(f"{path}: no such folder; give a Hugging Face model folder or a model's name on the hub")
    return None


def fingerprint(folder: Path) -> dict[str, str] | None:
    """Return a fingerprint that tells this model's folder from others: each file's name, and a digest of its content.

    Of files above ``WHOLE_BYTES``, such as weights, the size and both ends stand for the content. Files without
    influence on the model, such as a README, are left out. None where ``folder`` is no folder.

    Raises:
        ModelError: a file cannot be read.
    """
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.iterdir() if file.suffix in MODEL_SUFFIXES and file.is_file())
    return {file.name: _digest(file) for file in files}


def _digest(file: Path) -> str:
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            if size <= WHOLE_BYTES:
                return sha256(opened.read()).hexdigest()
            digest = sha256(opened.read(WHOLE_BYTES // 2))
            opened.seek(-WHOLE_BYTES // 2, os.SEEK_END)
            digest.update(opened.read())
    except OSError as cause:
        raise ModelError(f"{file} cannot be read ({cause.strerror or cause})") from cause
    return f"{size}:{digest.hexdigest()}"


def _check_weights(path: str, folder: Path) -> None:
    files = _safetensors_files(folder)
    if missing := [name for name in files if not (folder / name).exists()]:
        raise ModelError(
            f"{path}: {len(missing)} of the {len(files)} files of weights that {SAFETENSORS_INDEX} names are not "
            f"there: {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}; copy or download the rest"
        )
    for name in files:
        _check_safetensors(folder / name)
    if not files and not any((folder / name).exists() for name in OTHER_WEIGHTS):
        if (folder / ADAPTER).exists():
            raise _adapter(path, folder)
        there = ""
        if next(folder.glob("*.gguf"), None) is not None:
            there = "; a GGUF file cannot be trained"
        elif next(folder.glob("*.safetensors"), None) is not None:
            there = f"; its shards need {SAFETENSORS_INDEX}"
        raise ModelError(
            f"{path}: the folder has no weights: expected {SAFETENSORS}, or shards with {SAFETENSORS_INDEX}{there}"
        )


def _safetensors_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files that hold, or should hold, a folder's weights; empty if none."""
    if (folder / SAFETENSORS).exists():
        return [SAFETENSORS]
    if not (folder / SAFETENSORS_INDEX).exists():
        return []
    places = read_object(folder / SAFETENSORS_INDEX).get("weight_map")
    if not isinstance(places, Mapping) or not places or not all(isinstance(v, str) for v in places.values()):
        raise ModelError(f"{folder / SAFETENSORS_INDEX}: there is no weight_map of tensors to files; {GET_AGAIN}")
    return sorted(set(places.values()))


def _check_safetensors(file: Path) -> None:
    """Check the header against the file's size: [8 bytes: header's length][header: JSON][tensors, without a gap]."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            length = int.from_bytes(start, "little")
            header = opened.read(length) if 8 + length <= size else b""  # a damaged length may be any number
    except OSError as cause:
        raise ModelError(f"{file} cannot be read ({cause.strerror or cause})") from cause
    # An empty file is no pointer, though every text begins with no bytes.
    if LFS_POINTER.startswith(start) and size < 1024 and start:
        raise ModelError(f"{file} is a pointer of Git LFS, not the file itself; get it with: git lfs pull")
    try:
        tensors = json.loads(header)
        ends = [place["data_offsets"][1] for name, place in tensors.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise ModelError(f"{file}: not a safetensors file, or its beginning is damaged; {GET_AGAIN}") from None
    if size != whole:
        raise ModelError(f"{file}: has {size} bytes, and its header tells of {whole}; {GET_AGAIN}")


def read_object(file: Path) -> dict[str, Any]:
    """Read the object that a JSON file holds."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))  # some editors write a byte-order mark
    except OSError as cause:
        raise ModelError(f"{file} cannot be read ({cause.strerror or cause})") from cause
    except (ValueError, RecursionError):
        empty = file.stat().st_size == 0
        raise ModelError(f"{file}: {'the file is empty' if empty else 'not JSON'}; {GET_AGAIN}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file}: expected a JSON object, not {type(content).__name__}; {GET_AGAIN}")
    return content


def needs_own_code(path: str | Path) -> ModelError:
    """Return the error for a model that needs its own Python code, which the user has not allowed."""
    return ModelError(
        f"{path}: the model brings Python code of its own, which runs only with model.trust_remote_code=true; set "
        "that if you trust the code"
    )


def without_config(path: str | Path) -> ModelError:
    """Return the error for a folder without ``config.json``."""
    own = Path(path, "model")
    of_run = f", as {own}" if (own / "config.json").is_file() else ""
    return ModelError(f"{path}: the folder has no config.json; give a Hugging Face model folder{of_run}")


def _adapter(path: str, folder: Path) -> ModelError:
    base = read_object(folder / ADAPTER).get("base_model_name_or_path") or "its base model"
    return ModelError(
        f"{path}: an adapter (LoRA), not a whole model; merge it into {base} (merge_and_unload() of peft) and give the "
        "merged folder"
    )


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
    """Return the tensors whose kind (their name without numbers) both the model and these files have. transformers may
    know several forms of other kinds."""
    kinds = {NUMBER.sub("*", name): 0 for name in expected}
    there = {one.name: _name_in_the_model(NUMBER.sub("*", one.name), kinds, prefix) for one in found}
    common = kinds.keys() & there.values()
    known = {name: shape for name, shape in expected.items() if NUMBER.sub("*", name) in common}
    return known, [one for one in found if there[one.name] in common]


def compare(path: str, model: Any, expected: Mapping[str, list[int]], found: list[StoredTensor]) -> None:
    """Compare the tensors ``found`` in the files of ``path`` with the shapes that ``model`` expects, by their names.

    Raises:
        ModelError: a tensor has another shape, is missing in the model or the files, or holds integers; or two tensors
            differ that ``config.json`` ties.
    """
    there = {_name_in_the_model(one.name, expected, model.base_model_prefix): one for one in found}
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied ones under each of their names
    tied: dict[int, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        tied[id(parameter)].append(name)
    copied = {name for names in tied.values() if any(name in there for name in names) for name in names}
    not_read = re.compile("|".join((*NOT_READ, *(model._keys_to_ignore_on_load_unexpected or ()))))
    # "(?!)" matches nothing, and an empty pattern would match every name.
    optional = re.compile("|".join(model._keys_to_ignore_on_load_missing or ()) or "(?!)")
    # Each kind of problem only if the earlier ones found nothing: one mistake would show up as several.
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
    """Return a weight's name in the model, which may have one head prefix more or less; else ``name`` itself."""
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

    for file in _safetensors_files(folder):
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                piece = opened.get_slice(name)
                yield StoredTensor(folder / file, name, piece.get_shape(), piece.get_dtype())
