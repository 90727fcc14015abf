"""Trackers: tools for looking at runs that are not Headway's own. Each gets what the run's directory has, too.

    rows, samples, summary, model ─▶ Trackers ─▶ TensorBoardFile                          writes a file, at once
                                             └─▶ TrackerApart ─▶ TrackerQueue ─▶ thread ─▶ its process: W&B, MLflow, …
                                                                   ▲
                                                                   └─ metrics.jsonl: rows

What talks to a network, or brings threads, exit handlers and services of its own, is in a process of its own. The run
hands it what there is and goes on. Such a tracker may be slow, hang or die: the run's loop never waits for it, the end
of the run waits for a few seconds, and nothing of the library is ever in the run's process.
"""
