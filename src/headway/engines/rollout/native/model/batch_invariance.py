"""A test of whether a row's logits depend on the rows beside it: found out when the engine starts, on its own model.

    decode 34 rows together ─┐
    decode the first 1, 2, 3, … of them ─▶ the same bits? ─▶ the least number of rows from which on they always are

A matrix product of few rows may be summed in another order than one of many, so that the last bit of a logit tells
with how many others a sequence was decoded. With MKL told to be strict about it (``MKL_CBWR``, see
`headway.cluster.machine.worker_setup`), a few rows are as good as any number: four on one CPU that was tried, one on
another. Calls of fewer rows are filled up. Then sampled tokens are a function of (seed, trajectory, position, weights)
alone: slots, order of arrival and replicas do not matter.

Products of a mixture's experts have as few rows as the router gives them, which nobody fills up: there one row has to
be as good as many.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

TOGETHER = 34
ALONE = (1, 2, 3, 4, 5, 8, 16, 17, 33)
MOST = 16
"""More rows than that are not worth filling up."""


def least_invariant_rows(decode: Callable[[int], torch.Tensor]) -> int | None:
    """The least number of rows from which on a call's result does not depend on their number; None: there is none.

    ``decode(rows)`` gives the logits [rows, V] of the first ``rows`` sequences of a batch of `TOGETHER`.
    """
    together = decode(TOGETHER)
    least = None
    for rows in reversed(ALONE):
        if not torch.equal(decode(rows), together[:rows]):
            break
        least = rows
    return least if least is not None and least <= MOST else None
