"""Export of a model as an ordinary Hugging Face folder, all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headway.models.pretrained import without_progress_bars
from headway.runtime.progress import progress_here


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
) -> None:
    """Write config, generation config, weights and tokenizer to ``path``; a folder that is there is replaced."""
    with replaced_when_complete(path) as folder, progress_here().writing(folder), without_progress_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def replaced_when_complete(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path`` that takes its place when the block ends well, and is removed when it fails.

    Between the two renames a reader may find no folder at ``path``, but never half of one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        replace_folder(temporary, path)
    except BaseException:
        rmtree(temporary, ignore_errors=True)
        raise


def replace_folder(temporary: Path, path: Path) -> None:
    """Rename ``temporary`` to ``path`` in its parent; what was there before is moved aside first, then removed."""
    old = path.with_name(f".{path.name}.old")
    rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    rmtree(old, ignore_errors=True)
