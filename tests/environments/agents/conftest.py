"""Tests with the unmodified packages of others: only where they are installed (``make test-agents``)."""

from __future__ import annotations

from importlib.util import find_spec

THEIRS = ("gem", "gymnasium", "openenv", "skyrl_gym", "trl")
collect_ignore_glob = [] if all(find_spec(name) for name in THEIRS) else ["test_*.py"]
