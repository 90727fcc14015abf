"""Time limits by size: every watcher is later than what it watches."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from headway.config.schema import Config
from headway.config.sizing import timeouts
from headway.config.sizing.timeouts import FILE_RATE, Timeouts, file_quiet_s, file_stall_s, model_nbytes
from tests.tiers import searched

MB, GB, TB = 10**6, 10**9, 10**12
SIZES = st.integers(MB, TB)
SECONDS = st.floats(1e-3, 1e5)
PAIRS = {
    "transport_s": "mapping_s",
    "mapping_s": "attempt_s",
    "attempt_s": "trainer_quiet_s",
    "load_s": "stall_s",
    "answer_s": "stall_s",
    "probe_s": "stall_s",
    "silence_s": "stall_s",
    "first_silence_s": "stall_s",
    "objects_s": "stall_s",
    "update_timeout_s": "stall_s",
    "unanswered_s": "trainer_quiet_s",
    "trainer_quiet_s": "stall_s",
    "stall_s": "ranks_s",
    "checkpoint_s": "ranks_s",
}
"""Pairs of a limit and the limit of its watcher, by their names in `Timeouts`."""
CONSTANTS = {"RECONNECT_S": "SESSION_S", "MACHINE_ANSWERS_S": "PLACES_S", "STORAGE_S": "STORAGE_AT_END_S"}
"""The same of limits without a size, by their names in the module."""

limits = st.builds(
    lambda start, update, more, **sizes: Timeouts(start, update, update + more, **sizes),
    SECONDS,
    SECONDS,
    SECONDS,
    weights_nbytes=SIZES,
    step_tokens=st.integers(1, 10**6),
    batch_nbytes=SIZES,
    workers=st.integers(1, 4096),
    on_gpu=st.booleans(),
    compiles=st.booleans(),
    first_load_s=st.floats(0, 1e5),
    first_probe_s=st.floats(0, 1e4),
    first_transfer_s=st.floats(0, 1e5),
)


@pytest.mark.parametrize(("watched", "watcher"), PAIRS.items())
@searched(100, made=limits)
def test_a_watcher_is_later_than_what_it_watches_from_a_megabyte_to_a_terabyte(
    made: Timeouts, watched: str, watcher: str
) -> None:
    """The settings are any that the doctor lets pass: the stall limit is above that of an update."""
    assert getattr(made, watched) < getattr(made, watcher)


@pytest.mark.parametrize(("watched", "watcher"), CONSTANTS.items())
def test_a_watcher_is_later_than_what_it_watches_where_neither_has_a_size(watched: str, watcher: str) -> None:
    assert getattr(timeouts, watched) < getattr(timeouts, watcher)


@searched(100, nbytes=st.integers(0, TB))
def test_stuck_work_with_files_is_given_up_by_its_caller_before_the_run_is(nbytes: int) -> None:
    assert file_quiet_s(nbytes) < file_stall_s(nbytes)


@searched(100, made=limits)
def test_a_limit_never_becomes_shorter_by_what_was_measured_or_by_a_larger_model(made: Timeouts) -> None:
    names = {name for pair in PAIRS.items() for name in pair} | {"start_s", "killed_s"}
    before = {name: getattr(made, name) for name in names}
    made.transferred(100.0)
    made.weights_nbytes *= 2
    made.first_load_s += 100
    made.first_probe_s += 1
    assert all(getattr(made, name) >= limit for name, limit in before.items())


def test_the_first_transfer_counts_and_later_ones_do_not() -> None:
    """Else each transfer that used up its limit would make the next limit longer still."""
    made = Timeouts(120, 120, 300, weights_nbytes=16 * GB)
    made.transferred(200.0)
    made.transferred(900.0)
    assert (made.attempt_s, made.stall_s) == (800, 300 + 680)


@pytest.mark.parametrize(
    ("nbytes", "step_tokens", "on_gpu", "silence_s"),
    [(MB, 131_072, False, 120), (GB, 4096, False, 120), (GB, 32_768, False, 328), (140 * GB, 32_768, True, 459)],
)
def test_a_step_may_take_as_long_as_its_prefill_on_the_slowest_device(
    nbytes: int, step_tokens: int, on_gpu: bool, silence_s: float
) -> None:
    made = Timeouts(120, 120, 300, weights_nbytes=nbytes, step_tokens=step_tokens, on_gpu=on_gpu)
    assert made.silence_s == pytest.approx(silence_s, abs=1)
    assert made.first_silence_s == made.silence_s + (600 if on_gpu else 0)


@pytest.mark.parametrize(
    ("nbytes", "attempt_s", "stall_s", "start_s"),
    [(MB, 120, 300, 120), (16 * GB, 440, 620, 440), (140 * GB, 2920, 3100, 2920), (TB, 20_120, 20_300, 20_120)],
)
def test_limits_of_known_sizes(nbytes: int, attempt_s: float, stall_s: float, start_s: float) -> None:
    made = Timeouts(120, 120, 300, weights_nbytes=nbytes)
    assert (made.attempt_s, made.stall_s, made.start_s) == pytest.approx((attempt_s, stall_s, start_s), rel=1e-3)


def test_a_start_has_time_for_a_70b_load_of_a_slow_file_system_with_compilations_and_many_processes() -> None:
    made = Timeouts(120, 120, 300, weights_nbytes=140 * GB, workers=72, compiles=True)
    assert made.start_s == 120 + 2800 + 2 * 64 + 600
    made.first_load_s = 1000.0
    assert made.start_s == 4000, "a replacement may load four times as long as the first did"


def test_limits_follow_the_settings_and_the_files_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    config = Config.model_validate({"param_update": {"timeout_s": 7}, "cluster": {"stall_timeout_s": 9}})
    made = Timeouts.of(config, model_nbytes(str(tmp_path)))
    assert (made.weights_nbytes, made.update_timeout_s, made.stall_timeout_s) == (1000, 7, 9)
    assert model_nbytes("no/such/folder") == model_nbytes("") == 0


def test_a_message_says_what_size_adds_to_the_setting() -> None:
    small, large = Timeouts(120, 120, 300), Timeouts(120, 120, 300, weights_nbytes=16 * GB)
    assert small.update_limit(small.attempt_s) == "param_update.timeout_s = 120 s"
    assert large.update_limit(large.attempt_s).startswith("440 s (param_update.timeout_s = 120 s, ")
    assert large.start_limit().startswith("440 s (cluster.start_timeout_s = 120 s, ")


def test_ranks_wait_in_a_collective_for_longer_than_the_largest_checkpoint_takes_on_the_slowest_disk() -> None:
    made = Timeouts(120, 120, 300, weights_nbytes=TB)
    assert made.checkpoint_s > 4 * 86_400
    assert made.ranks_s == 7 * 86_400 + made.checkpoint_s


def test_a_checkpoint_is_estimated_by_its_bytes_on_the_slowest_disk() -> None:
    made = Timeouts(120, 120, 300, weights_nbytes=16 * GB)
    assert made.checkpoint_s == 120 + 8 * 16 * GB / FILE_RATE


@pytest.mark.parametrize("interval_s", [0.1, 1.0, 600.0])
def test_however_seldom_reports_come_a_silent_replica_is_found_within_its_limit(interval_s: float) -> None:
    made = Timeouts(120, 120, 300, weights_nbytes=16 * GB, on_gpu=True)
    look_s = made.look_s(interval_s)
    assert made.seen_silence_s(interval_s, began=True) + 2 * look_s == made.silence_s
    assert made.seen_silence_s(interval_s, began=False) + 2 * look_s == made.first_silence_s
    assert look_s <= interval_s and made.seen_silence_s(interval_s, began=True) >= made.silence_s / 2
