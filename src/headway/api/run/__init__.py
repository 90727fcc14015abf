"""Composition root: turns a configuration into a run. Wiring happens here and nowhere else.

begin, resume ─▶ carry_out ─▶ run

preflight ─▶ reports ─▶ model (the user's, or made and warmed up) ─▶ data, reward, workers ─▶ Pipeline ─▶ export
                └──────────────── closed last, after pipeline, workers and reward, whatever happened ◀──────┘

A run that is resumed finds its reports and its model, and loads a checkpoint between workers and Pipeline.
"""

from headway.api.run.new_run import resume, train

__all__ = ["resume", "train"]
