"""Trackers: external tools for looking at runs. Each gets what is also in the run's directory.

    rows, samples, summary, model ─▶ Trackers ─▶ TrackerThread ─▶ Tracker: TensorBoard's file, W&B, MLflow, …
                                                   ▲
                                                   └─ metrics.jsonl: rows

Each tracker has a thread of its own. The run's loop never waits for a tracker that is slow or hangs, and the run's end
waits for a few seconds.
"""
