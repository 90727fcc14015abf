"""Opening tokenizers, with a single message if one cannot be opened. Imports no torch.

Also here: the text of single tokens, to show answers token by token.

Ids have a text only in context: a tokenizer drops the space before a first word, and a byte-level token may be part of
a character. So each token is decoded after another one, whose text is then removed, and bytes that are no whole
character are written out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ModelError, boundary
from headway.models.model_folder import find_folder, without_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
"""Variable that silences transformers' advice on packages that are not installed."""
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
    tokenizer.deprecation_warnings[TOO_LONG] = True  # marks the warning as already given
    return tokenizer


def eos_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokenizer's end-of-sequence tokens; most have one."""
    eos = tokenizer.eos_token_id
    return frozenset(int(id) for id in (eos if isinstance(eos, list) else [eos]) if id is not None)


def stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends an answer, ascending: those of the folder's generation config, and the tokenizer's own."""
    from transformers import GenerationConfig

    try:
        declared = GenerationConfig.from_pretrained(expanded(path)).eos_token_id
    except OSError:  # the file is optional
        declared = None
    ids = {declared} if isinstance(declared, int) else {*(declared or ())}
    return tuple(sorted(eos_ids(tokenizer) | ids))


def text_of(
    tokenizer: Any, without: Collection[int] = (), *, skip_special_tokens: bool = False
) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to their text, special tokens and all, but those of ``without``."""
    decode: Callable[[Sequence[int]], str] = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
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
    said = os.environ.get(NO_ADVICE)
    sys.modules["torch"] = None  # type: ignore[assignment]  # so that it cannot be found
    os.environ[NO_ADVICE] = "1"  # transformers would say that there is no torch, which is meant
    try:
        yield
    finally:
        del sys.modules["torch"]  # or nothing could import it later
        if said is None:
            del os.environ[NO_ADVICE]
        else:
            os.environ[NO_ADVICE] = said


def check_folder(path: str | Path) -> None:
    """Check a path: if it exists it must be a model's folder; otherwise it may be a hub name (``owner/name``)."""
    folder = find_folder(path)
    if folder is not None and not (folder / "config.json").is_file():
        raise without_config(path)


def expanded(path: str | Path) -> str:
    """Return ``path`` with a leading ``~`` expanded; a model's name as it is."""
    return str(Path(path).expanduser()) if str(path).startswith("~") else str(path)


ANCHORS = ("a", "0", "1", ".")
"""Candidates for the text before each token: the first that is a single token is used."""
REPLACEMENT = "\ufffd"


class TokenTexts:
    """Text of token ids, special tokens included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._anchor, self._before = self._find_anchor()
        self._known: dict[int, str] = {}

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens together."""
        # Without the clean-up, which takes spaces between tokens away: pieces would not add up to the text.
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Bytes that are no whole character are spelled, as ``<0xE2>``."""
        known = self._known
        for id in ids:
            if id not in known:
                known[id] = self._piece(id)
        return [known[id] for id in ids]

    def _piece(self, id: int) -> str:
        text = self.text([*self._anchor, id])
        piece = text.removeprefix(self._before) if text.startswith(self._before) else self.text([id])
        if REPLACEMENT not in piece:
            return piece
        return _bytes_spelled(str(self._tokenizer.convert_ids_to_tokens(id) or piece))

    def _find_anchor(self) -> tuple[list[int], str]:
        """Return the token after which others are decoded, and its text; both empty if no token is suitable."""
        vocabulary = self._tokenizer.get_vocab()
        for text in ANCHORS:
            # Twice: a space before it is left out at the beginning, and shows in the second one.
            if (id := vocabulary.get(text)) is not None and self.text([id, id]) == 2 * text:
                return [id], text
        return [], ""


def _bytes_spelled(token: str) -> str:
    """Spell the bytes of a byte-level ``token``, as ``<0xE2><0x82>``, beside the characters that are whole in it.

    A token of another kind is returned as it is: SentencePiece's vocabularies have such names for bytes.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table = {character: byte for byte, character in bytes_to_unicode().items()}
    if not all(character in table for character in token):
        return token
    text, rest = "", bytes(table[character] for character in token)
    while rest:
        try:
            return text + rest.decode("utf-8")
        except UnicodeDecodeError as cause:
            text += rest[: cause.start].decode("utf-8") + "".join(f"<0x{b:02X}>" for b in rest[cause.start : cause.end])
            rest = rest[cause.end :]
    return text
