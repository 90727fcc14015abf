"""Episodes that no micro-batch holds whole, for losses and corrections that look at sequences.

    rows of such episodes ─▶ a pass without gradient ─▶ log-probs ─▶ beside each micro-batch with some of the rows

What such a loss takes from a sequence is a number without gradient, such as a mean of log-ratios. So rows of other
micro-batches take part with their log-probs alone: in sums, and neither in the loss nor in a metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.data.collate import CollatedRow


@dataclass(frozen=True, slots=True)
class Apart:
    """Rows of episodes that are spread over micro-batches."""

    rows: Sequence[CollatedRow] = ()
    logprobs: Sequence[NDArray[np.float32]] = ()
    """Their log-probs [T] (nats) under the policy as it is in this step."""

    def beside(self, rows: Sequence[CollatedRow]) -> Apart:
        """The rows, with their log-probs, that the episodes of a micro-batch's ``rows`` have in other micro-batches."""
        if not self.rows:
            return self
        here, episodes = {id(row) for row in rows}, {row.episode for row in rows}
        places = [i for i, row in enumerate(self.rows) if row.episode in episodes and id(row) not in here]
        return Apart([self.rows[i] for i in places], [self.logprobs[i] for i in places])


NOTHING_APART = Apart()
