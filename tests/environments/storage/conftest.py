"""Tests against a server of S3, moto's, in a process of its own: only where it is installed (``make test-storage``)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if all(find_spec(name) for name in ("moto", "s3fs")) else ["test_*.py"]
