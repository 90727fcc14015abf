"""Trackers: external tools for looking at runs. Each gets metrics that are also in the run's directory.

    rows, samples, summary, model ─▶ Trackers ─▶ TrackerThread ─▶ Tracker: TensorBoard's file, W&B, MLflow, …
                                                   ▲
                                                   └─ metrics.jsonl: rows

Each tracker has a thread of its own. It may be slow or hang: the run's loop never waits for it, and the end of the run
waits for a few seconds.
"""
