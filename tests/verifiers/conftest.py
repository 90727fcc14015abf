"""Tests with the real `verifiers`: only where it is installed (``make test-verifiers``)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verifiers") else ["test_*.py"]
