"""Tests with the packages of the trackers: only where they are installed (``make test-trackers``)."""

from __future__ import annotations

from importlib.util import find_spec

THEIRS = ("mlflow", "prometheus_client", "trackio", "wandb")
collect_ignore_glob = [] if all(find_spec(name) for name in THEIRS) else ["test_*.py"]
