"""Errors of too little memory, a worker's or its device's: described in the user's words, with what needs less of it.

Such errors have several classes: Python's, torch's on a GPU, and on the CPU a plain `RuntimeError` with a known text.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from headway.errors import HeadwayError, RunError, said_by

SAID = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""Texts of a `RuntimeError` about memory: from torch's CPU allocator, CUDA's runtime (``CUDA error: out of memory``),
and its libraries (``CUBLAS_STATUS_ALLOC_FAILED``)."""
ADVICE = (
    "Training needs less with a lower actor.ppo_max_token_len_per_gpu, generation with a lower rollout.max_concurrent, "
    "both with shorter data.max_response_length or more devices"
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Tell whether ``error`` means that memory could not be allocated."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    torch = sys.modules.get("torch")  # if torch was never imported, none of its errors was raised
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in SAID)


@contextmanager
def memory_errors_told(who: str, doing: str) -> Iterator[None]:
    """Turn a memory error in the block into a `RunError` that says who ran out of it, doing what, and what needs less.

    An error of Headway's own that a memory error has caused keeps its text, to which the advice is added.
    """
    try:
        yield
    except HeadwayError as error:
        if error.__cause__ is None or not ran_out_of_memory(error.__cause__):
            raise
        raise type(error)(f"{str(error).rstrip('.')}. {ADVICE}") from error.__cause__
    except Exception as cause:
        if not ran_out_of_memory(cause):
            raise
        said = said_by(cause).rstrip(".")
        raise RunError(f"worker {who} ran out of memory in {doing!r}: {said}. {ADVICE}") from cause
