"""Checkpoints of model and optimizer, sharded: every rank writes its part, and any number of ranks can read them.

    <path>/  *.distcp, .metadata   model and optimizer   (torch.distributed.checkpoint)
             state.json            optimizer steps, what the driver gave, and the sizes of the other files

Tensors are copied into host memory first (`HostState`); what is written is the copy, on another thread, while training
goes on. A checkpoint is written beside its final path and renamed when every rank is done and every file that
``.metadata`` names is there, so a folder of that name is complete: older checkpoints may go. With ranks on several
machines the path must be on a file system that they share.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map_with_path

from headway.engines.host_copies import host_buffer
from headway.engines.train.fsdp.device_mesh import from_rank_zero
from headway.engines.train.fsdp.shards import Pieces
from headway.engines.train.state_file import REMOVE, STATE_FILE, files_of, is_start, read_state
from headway.errors import ModelError, RunError, said_by
from headway.models.pretrained import replace_folder
from headway.runtime.progress import progress_here

OTHER_MODEL = "the checkpoint does not fit this model and optimizer"
GIVE_ITS_OWN = "Give the model that it is a checkpoint of, or start another run"
PROBE = 2**20
"""Number of bytes that are written to find out whether a disk that has refused a checkpoint is full."""
BEGUN = ".begun"
"""File in the folder of a checkpoint that is being written."""


class HostState:
    """Copy of tensors, such as a checkpoint's, in host memory; the memory is reused for each copy."""

    def __init__(self, *, pinned: bool, whole: bool = False) -> None:
        """``pinned``: the memory is page-locked, for copies from a GPU. ``whole``: all that this rank holds is copied,
        not only what it writes of a checkpoint.
        """
        self._pinned = pinned
        self._whole = whole
        self._buffers: dict[Any, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``tensors`` for `save_checkpoint`, with copies of what this rank writes, or holds if `whole`."""
        copies: dict[str, Any] = self._each(tensors, self._copied)
        return copies

    def restore(self, tensors: Mapping[str, Any]) -> None:
        """Set ``tensors`` to their values at the last `copy`."""
        self._each(tensors, lambda key, tensor: tensor.copy_(self._buffers[key]))

    def views(self) -> list[memoryview]:
        """Return the copy's bytes, tensor by tensor, in an order that ranks of equal parts share. They can be set."""
        return [buffer.reshape(-1).view(torch.uint8).numpy().data for buffer in self._buffers.values()]

    def _each(self, tensors: Mapping[str, Any], do: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
        """Return ``tensors`` with each tensor, or each of its boxes, replaced by ``do(place, tensor)``."""

        def done(path: Any, tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, Pieces):
                return tensor.copied(lambda start, box: do((path, start), box), whole=self._whole)
            return do(path, tensor)

        return tree_map_with_path(done, tensors)

    def _copied(self, key: Any, tensor: torch.Tensor) -> torch.Tensor:
        if key not in self._buffers:
            buffer = host_buffer(tensor.nbytes, pinned=self._pinned)
            self._buffers[key] = buffer.view(tensor.dtype).view(tensor.shape)
        return self._buffers[key].copy_(tensor)  # into the same memory: pinned memory takes long to allocate


def save_checkpoint(tensors: dict[str, Any], path: Path, state: Mapping[str, Any], group: ProcessGroup) -> None:
    """Write a checkpoint to ``path``, ``state`` (JSON values) with it; one that is there is replaced. Collective.

    ``tensors``: `Pieces`, or tensors that are the same on all ranks, in dictionaries. ``group``: all ranks, on Gloo; no
    other thread may use it meanwhile.

    Raises:
        RunError: a rank could not write its part, or wrote it where rank zero does not see it; what was at ``path``
            before is still there.
    """
    # A name that only these ranks know: abandoned ranks that still write find their folder removed.
    temporary = from_rank_zero(lambda: path.with_name(f".{path.name}.{uuid4().hex[:8]}.partial"), group)

    def prepare() -> None:
        for left in path.parent.glob(".*.partial"):  # those of ranks that died while they wrote another one, too
            rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / BEGUN).touch()

    def finish() -> None:
        (temporary / BEGUN).unlink()  # raises if other ranks have removed the folder; torch would have made a new one
        if wrong := incomplete_part(temporary):
            rmtree(temporary, ignore_errors=True)
            raise RunError(
                f"could not write the checkpoint {path}: {wrong} where rank zero looks, though every rank has written "
                "its part. With training ranks on several machines, run.dir must be on a file system that they share"
            )
        written = {**state, "files": files_of(temporary)}  # state.json itself does not exist yet
        with (temporary / STATE_FILE).open("w", encoding="utf-8") as file:
            file.write(json.dumps(written, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())  # like the shards: all must be on disk before the rename
        replace_folder(temporary, path)

    def told(step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            rmtree(temporary, ignore_errors=True)  # where the disk was full, others need the space
            raise RunError(f"could not write the checkpoint {path}: {type(error).__name__}: {error}") from error

    from_rank_zero(partial(told, prepare), group)
    try:
        with progress_here().writing(temporary):
            # In a group of its own: a training step on another thread has its collectives in the others.
            save(tensors, checkpoint_id=temporary, process_group=group)
    except CheckpointException as error:  # raised on every rank: torch gathers who failed

        def give_up() -> str:
            why = _no_room(temporary)
            if why and len(list(path.parent.glob("version_*"))) > 1:
                why += ", or keep fewer checkpoints (trainer.max_actor_ckpt_to_keep)"
            rmtree(temporary, ignore_errors=True)
            return why

        why = from_rank_zero(give_up, group) or _causes(error)
        raise RunError(f"could not write the checkpoint {path}: {why}") from error
    from_rank_zero(partial(told, finish), group)


def _no_room(folder: Path) -> str:
    """Return the message for a full disk, or too large a file, after torch failed to write to ``folder``; else nothing.

    Torch itself says of a full disk no more than "enforce fail … unexpected pos 704 vs 598".
    """
    try:
        with (folder / ".room").open("wb") as file:
            # After the end of the longest file, which a limit on sizes may have cut.
            file.seek(max(other.stat().st_size for other in folder.iterdir()))
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{error.strerror}; make room there"
        if error.errno == errno.EFBIG:
            return f"{error.strerror}; raise the limit on the size of files (ulimit -f)"
    return ""


def incomplete_part(folder: Path) -> str | None:
    """Return a description of the first file named in ``.metadata`` that is missing or too short.

    None if all are complete. Errors of reading a damaged ``.metadata`` pass through.
    """
    needed: dict[str, int] = {}
    for part in (FileSystemReader(folder).read_metadata().storage_data or {}).values():
        # A file has parts of many tensors: it has to reach as far as the last of them.
        needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    for name, size in sorted(needed.items()):
        try:
            there = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if there < size:
            return f"{name} has {there} bytes, and .metadata names {size}"
    return None


def _unfit(folder: Path, tensors: dict[str, Any]) -> str | None:
    """Return a description of the difference between a checkpoint's tensor names and those wanted; None if equal."""
    there = set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    wanted = set(flatten_state_dict(tensors)[0])
    for names, what in ((wanted - there, "it lacks {}"), (there - wanted, "it has {}, which the model lacks")):
        if names:
            return what.format(min(names) + (f" and {len(names) - 1} more" if len(names) > 1 else ""))
    return None


def _causes(error: CheckpointException) -> str:
    """Return the failures and their ranks in one line, without tracebacks and without torch's advice."""
    failures = []
    for rank, (cause, _) in sorted(error.failures.items()):
        first_sentence = re.split(r"\n|\. (?=[A-Z])", str(cause).strip())[0].rstrip(". ")
        failures.append(f"rank {rank}: {type(cause).__name__}: {first_sentence}")
    return "; ".join(failures)


def load_checkpoint(tensors: dict[str, Any], path: Path) -> dict[str, Any]:
    """Restore ``tensors`` in place, on any mesh; returns ``state``. Collective.

    The checkpoint of version 0 has no tensors: those of the initial model stay.

    Raises:
        ModelError: no complete checkpoint at ``path``, one that is damaged, or one of another model.
    """

    def read() -> dict[str, Any]:
        state = read_state(path)
        if is_start(state):
            return state
        try:
            wrong = incomplete_part(path)  # here: `load` logs a traceback of what it finds
        except Exception as cause:  # whatever unpickling raises
            raise ModelError(
                f"{path}: the checkpoint is damaged: .metadata cannot be read: {said_by(cause)}. {REMOVE}"
            ) from cause
        if wrong:
            raise ModelError(f"{path}: the checkpoint is damaged: {wrong}. {REMOVE}")
        if unfit := _unfit(path, tensors):  # torch itself ignores tensors that are not requested
            raise ModelError(f"{path}: {OTHER_MODEL}: {unfit}. {GIVE_ITS_OWN}")
        return state

    state = from_rank_zero(read)
    if is_start(state):
        return state
    try:
        with progress_here().reading(path):
            load(tensors, checkpoint_id=path)
    except CheckpointException as error:
        step = error.args[0]  # what there is has been compared with what is wanted before anything is read
        wrong, remedy = (OTHER_MODEL, GIVE_ITS_OWN) if step == "plan" else ("the checkpoint is damaged", REMOVE)
        raise ModelError(f"{path}: {wrong}: {_causes(error)}. {remedy}") from error
    return state
