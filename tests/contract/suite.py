"""The contract of `RolloutEngine`, as tests: every engine passes it."""

from __future__ import annotations

from tests.contract.caching import Caching
from tests.contract.ending import Ending
from tests.contract.logprobs import LogProbs
from tests.contract.pausing import Pausing
from tests.contract.preempting import Preempting
from tests.contract.reproducing import Reproducing
from tests.contract.sampling import Sampling
from tests.contract.serving import Serving
from tests.contract.updating import Updating


class Contract(LogProbs, Sampling, Reproducing, Pausing, Preempting, Caching, Updating, Serving, Ending):
    """All of it. A binding sets ``harness``."""
