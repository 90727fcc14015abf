"""Log files of a run: which file a line goes to, and whose it is."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from headway.cluster.role_host import RoleHost
from headway.runtime.logs import DriverLog, first_line


class Role:
    def build(self) -> None:
        raise ValueError("no such folder")

    async def close(self) -> None: ...


def test_a_worker_that_fails_leaves_its_traceback_in_the_drivers_log_under_its_own_name(tmp_path: Path) -> None:
    async def fail() -> None:
        host = RoleHost(Role(), "actor-1")
        with pytest.raises(ValueError, match="no such folder"):
            await host.call("build")
        await host.end()

    log = DriverLog(tmp_path / "logs", "first")
    try:
        asyncio.run(fail())
        logging.getLogger("headway.anywhere").info("said by the driver")
    finally:
        log.close()
    logging.getLogger("headway.anywhere").info("said after it was closed")
    text = (tmp_path / "logs" / "driver.log").read_text()
    assert "ERROR run=first worker=actor-1 headway.cluster.role_host: build failed\nTraceback" in text
    assert f"{Path(__file__).name}" in text and "ValueError: no such folder" in text
    assert text.endswith("INFO run=first worker=driver headway.anywhere: said by the driver\n")


def test_a_log_that_programs_print_to_says_first_whose_it_is(tmp_path: Path) -> None:
    line = first_line(tmp_path / "first" / "logs" / "reward.log", "reward runs f.py:score")
    assert line.endswith("INFO run=first worker=reward headway.runtime.logs: reward runs f.py:score\n")
