"""Time limits for work with files, by its progress: checkpoints that are saved or loaded, a model that is exported.

The limit follows bytes and not the clock: work may take as long as it likes while bytes move. Nothing may stand still
for longer than two minutes plus the time that a disk of 20 MB/s takes for the bytes so far (`file_quiet_s`), which may
all have to leave the system's cache before the next one moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from headway.config.sizing.timeouts import FILE_QUIET_S, FILE_RATE, file_quiet_s
from headway.errors import StallError
from headway.pipeline.admission.pipeline_state import now
from headway.pipeline.recovery.liveness import SHORTEST_S, Answers, ask
from headway.runtime.progress import Living
from headway.runtime.task_groups import failure_ignored

T = TypeVar("T")


async def while_bytes_move(work: Coroutine[Any, Any, T], ranks: Sequence[Living], what: str) -> T:
    """Return the result of ``work``, which ``ranks`` do with files. ``what``: the work in words, with the path.

    Raises:
        StallError: no rank made progress for as long as work with files may stand still. The ranks are not stopped.
    """

    def stuck(answers: Answers) -> str:
        return (
            f"{what} is stuck: nothing was read or written for longer than {FILE_QUIET_S:g} s and 1 s for "
            f"each {FILE_RATE / 1e6:g} MB of it ({answers}). Look at the disk, or the file system of the "
            "path, and at whether it answers on the worker's machine"
        )

    return await while_ranks_move(work, ranks, FILE_QUIET_S, file_quiet_s, stuck)


async def while_ranks_move(
    work: Coroutine[Any, Any, T],
    ranks: Sequence[Living],
    quiet_s: float,
    with_files_s: Callable[[int], float],
    stuck: Callable[[Answers], str],
) -> T:
    """Return the result of ``work``, which ``ranks`` do. They may stand still as `Answers.deadline` says.

    Raises `StallError`, with what ``stuck`` says of the ranks' answers, where they do so for longer. They go on.
    """
    task = failure_ignored(asyncio.ensure_future(work))
    deadline = now() + quiet_s
    try:
        while not task.done():
            await asyncio.wait([task], timeout=max(SHORTEST_S, deadline - now()))
            if not task.done() and now() >= deadline:
                answers = await ask(ranks)
                deadline = answers.deadline(quiet_s, with_files_s)
                if not task.done() and now() >= deadline:
                    raise StallError(stuck(answers))
        return task.result()
    finally:
        task.cancel()
