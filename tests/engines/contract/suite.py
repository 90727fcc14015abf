"""The contract of `RolloutEngine`, as tests: every engine passes it."""

from __future__ import annotations

from tests.engines.contract.caching import Caching
from tests.engines.contract.ending import Ending
from tests.engines.contract.logprobs import LogProbs
from tests.engines.contract.pausing import Pausing
from tests.engines.contract.preempting import Preempting
from tests.engines.contract.reproducing import Reproducing
from tests.engines.contract.sampling import Sampling
from tests.engines.contract.serving import Serving
from tests.engines.contract.updating import Updating


class Contract(LogProbs, Sampling, Reproducing, Pausing, Preempting, Caching, Updating, Serving, Ending):
    """All of it. A binding sets ``harness``."""
