"""An end of all that was started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.support import end_started


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    end_started()
