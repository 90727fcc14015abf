"""``python -m benchmarks [NAME …]``: run the named benchmarks, or all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks import main_job

BENCHMARKS: dict[str, Callable[[], None]] = {"main_job": main_job.run}


def main(names: list[str]) -> None:
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        sys.exit(f"unknown benchmark {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    for name in names or BENCHMARKS:
        BENCHMARKS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
