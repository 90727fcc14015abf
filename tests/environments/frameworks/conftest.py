"""Tests with the unmodified agent frameworks of others: only where they are installed (``make test-frameworks``)."""

from __future__ import annotations

from importlib.util import find_spec

THEIRS = ("agents", "inspect_ai", "smolagents")
collect_ignore_glob = [] if all(find_spec(name) for name in THEIRS) else ["test_*.py"]
