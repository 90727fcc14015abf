"""Settings of a process of this run's own."""

from __future__ import annotations

import gc

from headway.cluster.machine.worker_setup import collecting_seldom


def test_garbage_is_collected_seldom_and_afterwards_as_before() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        with collecting_seldom():
            assert gc.get_threshold() == (20_000, 10, 10)
            assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() == (700, 10, 10)
        assert gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*before)
