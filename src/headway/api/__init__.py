"""The interface for Python: training, runs, evaluations and plans, from a script or a notebook (docs/python.md).

train, evaluate ─▶ settings ─▶ functions ─▶ subprocess_client ══▶ serve ─▶ `headway.api.run`, as in the CLI
                               by value         └── pages, the result or the error ◀──┘
"""

from headway.api.evaluation import Evaluation, evaluate
from headway.api.planning import plan
from headway.api.run_handle import Run, load
from headway.api.training import train

__all__ = ["Evaluation", "Run", "evaluate", "load", "plan", "train"]
