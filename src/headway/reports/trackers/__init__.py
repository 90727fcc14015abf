"""Trackers: tools for looking at runs that are not Headway's own. Each gets what the run's directory has, too.

    rows, samples, summary, model ─▶ Trackers ─▶ TrackerThread ─▶ Tracker: TensorBoard's file, W&B, MLflow, …
                                                   ▲
                                                   └─ metrics.jsonl: rows

Each tracker has a thread of its own. It may be slow or hang: the run's loop never waits for it, and the end of the run
waits for a few seconds.
"""
