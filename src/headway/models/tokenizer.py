"""Opening tokenizers, with one message on what is wrong with one that cannot be opened. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ModelError, boundary
from headway.models.model_folder import find_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""transformers' name of the variable without which it gives advice on what is not installed."""
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
"""transformers' name of its warning of a text with more tokens than ``model_max_length``; a tokenizer gives it once."""


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Open the tokenizer at ``path``. Without a padding token it pads with end-of-sequence. It says nothing of texts
    that are longer than the model's limit: prompts above ``data.max_prompt_length`` are left out and counted.

    Raises:
        ModelError: no tokenizer there, or one without an end-of-sequence token.
    """
    from transformers import AutoTokenizer

    check_folder(path)
    with boundary(f"{path}: cannot open the tokenizer (a folder needs tokenizer.json or its parts)", ModelError):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            expanded(path), trust_remote_code=trust_remote_code
        )
    files = set(tokenizer.vocab_files_names.values())
    folder = Path(expanded(path))
    if folder.is_dir() and files and not any((folder / name).is_file() for name in files):
        # transformers makes an empty tokenizer of the model's kind instead of failing
        raise ModelError(f"{path}: the folder has no tokenizer; give one of {', '.join(sorted(files))}")
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{path}: the tokenizer has no end-of-sequence token, so no answer could ever end; set eos_token in "
            "tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.deprecation_warnings[TOO_LONG] = True  # as if it had been given
    return tokenizer


def eos_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokenizer's end-of-sequence tokens; most have one."""
    eos = tokenizer.eos_token_id
    return frozenset(int(id) for id in (eos if isinstance(eos, list) else [eos]) if id is not None)


def text_of(
    tokenizer: Any, without: Collection[int] = (), *, skip_special_tokens: bool = False
) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to their text, special tokens and all, but those of ``without``.

    A tokenizer of transformers' usual kind, which tidies up no spaces, is called without its wrapper: that takes 2.5 of
    the 3.5 µs for each answer of ten tokens.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    usual = issubclass(kind, PreTrainedTokenizerFast) and kind._decode is PreTrainedTokenizerFast._decode
    if usual and kind.decode is PreTrainedTokenizerBase.decode and not tokenizer.clean_up_tokenization_spaces:
        decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    else:
        decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
    if not without:
        return decode
    left_out = frozenset(without)
    return lambda ids: decode(ids if left_out.isdisjoint(ids) else [id for id in ids if id not in left_out])


@contextmanager
def torch_hidden() -> Iterator[None]:
    """Hide torch from what is imported meanwhile, where it is not imported yet.

    transformers imports it wherever it finds it: 180 MiB and 2.5 s of a process that needs tokenizers alone.
    """
    if "torch" in sys.modules:
        yield
        return
    before, said = list(sys.meta_path), os.environ.get(NO_ADVICE)
    sys.meta_path[:] = [_WithoutTorch(finder) for finder in before]
    os.environ[NO_ADVICE] = "1"  # transformers would say that there is no torch, which is meant
    try:
        yield
    finally:
        sys.meta_path[:] = before
        if said is None:
            del os.environ[NO_ADVICE]
        else:
            os.environ[NO_ADVICE] = said


class _WithoutTorch:
    """A finder of modules that does not find torch."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] == "torch" else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def check_folder(path: str | Path) -> None:
    """Check a path: one that is there must be a model's folder, another may be a name on the hub (``owner/name``)."""
    folder = find_folder(path)
    if folder is not None and not (folder / "config.json").is_file():
        raise ModelError(f"{path}: the folder has no config.json; give a Hugging Face model folder")


def expanded(path: str | Path) -> str:
    """Return ``path`` with a leading ``~`` expanded; a model's name as it is."""
    return str(Path(path).expanduser()) if str(path).startswith("~") else str(path)
