"""Time limits of a run, from its settings, the size of its model and measurements at the start.

A watcher's limit is longer than that of what it watches, for any size. A test checks each pair.

    transport < mapping < attempt ┐
    a load, an answer, a probe    │
    silence with work open        ┼ < stall detector < a rank in a collective
    files without movement        ┘

Limits that do not depend on size are constants, each with its reason. Those of the run itself are below; those of user
code, agents, reports, checks, commands and ``runtime/`` are beside their code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from headway.config.schema import Config

# ----------------------------------------------------------------------------------------- rates, which bytes divide by

SLOWEST_BYTES_PER_S = 50e6
"""Bytes per second of the slowest load or transfer of weights."""
SLACK = 4.0
"""Factor by which later loads, probes or transfers may be slower than the first one."""
SLOWEST_PER_S, SLOWEST_GPU_PER_S = 1e11, 1e13
"""Tokens × bytes of weights per second of the slowest CPU and the slowest GPU. A token costs two operations per 16-bit
weight: one per byte. The longest step is a prefill."""
FILE_RATE = 20e6
"""Bytes per second of the slowest disk. The next byte may have to wait until the system's cache is written."""
UPLOAD_BYTES_PER_S = 5e6
"""Bytes per second of the slowest upload of a model to a tracker."""
RELEASED_BYTES_PER_S = 500e6
"""Bytes per second at which a system frees the memory of a killed process, page-locked memory included."""
STATE_PER_WEIGHT = 8
"""Bytes of float32 weights, gradients and moments per byte of 16-bit weights: the most that a process holds."""
STORAGE_BYTES_PER_S = 2**20
"""Bytes per second of a run's slowest storage."""
TOKEN_BYTES = 32
"""Bytes of a sampled token with its log-prob, version and columns."""

# ------------------------------------------------------------------------------------------ files, and weights

FILE_QUIET_S = 120.0
"""Seconds that work with files may stand still, for any size: a network file system may be failing over."""
LATER_S = 60.0
"""Seconds that the stall detector waits beyond the caller of stuck work with files, which can name that work."""
SNAPSHOT_S = 30.0
"""Limit in seconds for a megabyte of a snapshot to reach its episode worker, whose event loop has other work."""
SETTLE_S = 5.0
"""Limit in seconds for receivers to notice that another one is gone, and to stop receiving."""
RANKS_S = 7 * 86_400.0
"""Seconds that a rank waits in a collective beyond the longest other limit. Only ranks without a driver wait so long:
the driver ends all others."""

# ------------------------------------------------------------------------------------------ workers

WORKERS_AT_ONCE = 8
"""Number of processes for which ``cluster.start_timeout_s`` is enough on any machine."""
WORKER_S = 2.0
"""Seconds for each further process of a run to start: importing torch takes one core."""
COMPILE_S = 600.0
"""Seconds to compile kernels and to capture graphs. It depends on their number, not on the size of the layers."""
HEARTBEAT_S = 30.0
"""Limit in seconds for a worker to answer a heartbeat: its event loop is free, but its machine may be busy."""
LOOKS = 4
"""Minimum number of checks of a replica's progress within its silence limit."""
ASLEEP_S = 10.0
"""Minimum seconds of silence after which a sleeping process is given up."""
END_KNOWN_S = 2.0
"""Limit in seconds from a failed call until the end of the worker's process is known."""
GREETING_S = 30.0
"""Limit in seconds to connect to a worker and send it the key: a few bytes, for any size of the run."""
RECONNECT_S = 10.0
"""Seconds that a caller tries to reopen a broken connection to a worker, in several attempts. The driver's watch of
machines detects a silent machine in 20 s."""
SESSION_S = 1.5 * RECONNECT_S
"""Seconds that a worker keeps the calls of a caller whose connection broke: longer than the caller tries."""
ORDERLY_S = 5.0
"""Seconds for a Ray process to end by itself, before SIGTERM."""
TERMINATED_S = 2.0
"""Seconds from SIGTERM to SIGKILL of a Ray process. The system frees its memory after either."""
KILLED_S = 10.0
"""Seconds for the kernel to end a killed process and for Ray to report it, without the release of its memory."""
CLOSE_S = 60.0
"""Seconds for an engine's processes to shut down together, in addition to the current step."""
WARM_LEFT_S = 3.0
"""Seconds for a warm-up to end once its run is left."""

# ------------------------------------------------------------------------------------------ machines, and Ray

MACHINE_ANSWERS_S = 3.0
"""Limit in seconds for a machine to accept a connection."""
MACHINE_AGAIN_S = 2.0
"""Seconds between two attempts to connect."""
MACHINE_ATTEMPTS = 4
"""Number of successive failures until a machine is given up: after 8 s if it refuses, after 20 s if it is silent."""
PLACES_S = 10.0
"""Limit in seconds for checking which machines answer and have room."""
ROOM_SHARE = 0.25
"""Share of a start's limit that lost ranks wait for a machine with room, before others go on without them."""
NODES_JOIN_S = 20.0
"""Seconds to wait for further nodes to join a cluster that is too small for a run."""
RESERVE_S = 5
"""Limit in seconds for Ray to reserve devices that were free. An integer, as Ray requires."""
TOKENS_REMOVED_S = 30.0
"""Limit in seconds for a machine to start the process that removes a run's tokens there."""

# ------------------------------------------------------------------------------------------ storage, and profiles

STORAGE_S = 60.0
"""Limit in seconds of an operation of a run's storage, without the time for its bytes."""
STORAGE_AT_END_S = 120.0
"""Seconds that the end of a run waits for its storage, without the time for the bytes."""
STORAGE_LEFT_S = 2.0
"""Seconds that a run that is left at once waits for its storage."""
PROFILE_BEGINS_S = 60.0
"""Limit in seconds for a process to begin to record: the first use of a GPU's counters is slow."""
PROFILE_ENDS_S = 300.0
"""Limit in seconds for a process to end a recording: torch processes everything recorded in the window."""
PROFILE_TAKEN_S = 600.0
"""Limit in seconds for a process to write and send its trace, which has a window's operations, and no weights."""
PROFILE_AT_END_S = 120.0
"""Seconds that an orderly end of a run waits until the traces of an open window are written."""
PROFILE_LEFT_S = 10.0
"""Seconds that a run that is left at once, or has failed, waits for the traces."""


def model_nbytes(model_path: str) -> int:
    """Return the bytes of the weights' files in the folder ``model_path``; 0 if there is no such folder."""
    return sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors")) if model_path else 0


@dataclass(slots=True)
class Timeouts:
    """Time limits of one run, in seconds, each from the beginning of the limited work."""

    start_timeout_s: float
    """``cluster.start_timeout_s``"""
    update_timeout_s: float
    """``param_update.timeout_s``"""
    stall_timeout_s: float
    """``cluster.stall_timeout_s``, which is longer than ``update_timeout_s``."""
    weights_nbytes: int = 0
    """Bytes of a version of the weights, in the widest dtype of any worker."""
    step_tokens: int = 0
    """Maximum number of tokens that an engine reads in one step."""
    batch_nbytes: int = 0
    """Maximum bytes of the tokens of one train batch."""
    workers: int = 0
    """Number of processes of the run."""
    on_gpu: bool = False
    """True if the workers compute on GPUs, for which kernels are compiled."""
    compiles: bool = False
    """True if the engine compiles kernels on any device."""
    first_load_s: float = 0.0
    """Seconds that the models took to load at the start; 0 before."""
    first_probe_s: float = 0.0
    """Seconds that the receivers' first probe took; 0 before."""
    first_transfer_s: float = 0.0
    """Seconds that the first version took from the trainer to its receivers; 0 before."""

    @classmethod
    def of(cls, config: Config, weights_nbytes: int = 0, *, workers: int = 0, on_gpu: bool = False) -> Timeouts:
        """Return the limits for a configuration. ``weights_nbytes``: bytes of its model; ``workers``: number of
        them.
        """
        context = config.data.max_prompt_length + config.data.max_response_length
        return cls(
            config.cluster.start_timeout_s,
            config.param_update.timeout_s,
            config.cluster.stall_timeout_s,
            weights_nbytes,
            step_tokens=max(config.rollout.max_batched_tokens, context),
            batch_nbytes=config.groups_per_batch * config.rollout.n * context * TOKEN_BYTES,
            workers=workers,
            on_gpu=on_gpu,
            compiles=config.rollout.name == "vllm",
        )

    def transferred(self, seconds: float) -> None:
        """Record how long a version took to reach its receivers. Only the first version counts, and it never shortens
        limits. Open connections keep their limits.
        """
        self.first_transfer_s = self.first_transfer_s or seconds

    # ---------------------------------------------------------------------------------- the start, and the end

    @property
    def start_s(self) -> float:
        """Limit for all workers to be up and to hold the model; also for one that replaces another."""
        processes = WORKER_S * max(0, self.workers - WORKERS_AT_ONCE)
        start_s = self.start_timeout_s + processes + self._moving_s + self._compiling_s
        return max(start_s, SLACK * self.first_load_s)

    @property
    def killed_s(self) -> float:
        """Limit for a killed process to end, and for its memory to be free."""
        return KILLED_S + STATE_PER_WEIGHT * self.weights_nbytes / RELEASED_BYTES_PER_S

    @property
    def checkpoint_s(self) -> float:
        """Seconds to write a checkpoint to the slowest disk, for messages; the limit is `file_quiet_s`."""
        return FILE_QUIET_S + STATE_PER_WEIGHT * self.weights_nbytes / FILE_RATE

    # ---------------------------------------------------------------------------------- an update of the weights

    @property
    def transport_s(self) -> float:
        """Limit for one end of a transport to wait for the other: half an attempt, so that the failed end can be
        named.
        """
        return self.attempt_s / 2

    @property
    def mapping_s(self) -> float:
        """Limit for a worker to wait for its machine's receiver: below an attempt, so that the receiver is blamed."""
        return 0.9 * self.attempt_s

    @property
    def attempt_s(self) -> float:
        """Limit of an attempt to send a version. A receiver that has not answered by then is fenced off."""
        return max(self.update_timeout_s + self._moving_s, SLACK * self.first_transfer_s)

    # ---------------------------------------------------------------------------------- engines

    @property
    def load_s(self) -> float:
        """Limit for a receiver to load a version that it received."""
        return self.update_timeout_s + self._moving_s

    @property
    def answer_s(self) -> float:
        """Limit for an engine to answer, pause or resume, which it does between two steps of up to `step_tokens`."""
        rate = SLOWEST_GPU_PER_S if self.on_gpu else SLOWEST_PER_S
        return max(self.update_timeout_s, self.step_tokens * self.weights_nbytes / rate)

    @property
    def probe_s(self) -> float:
        """Limit for a receiver to compute the probe."""
        return max(self.answer_s + self._compiling_s, SLACK * self.first_probe_s)

    @property
    def silence_s(self) -> float:
        """Limit for a replica with open calls to make a step."""
        return self.answer_s

    @property
    def first_silence_s(self) -> float:
        """Limit for a replica with open calls to make its first step, for which it may compile kernels."""
        return self.silence_s + self._compiling_s

    def look_s(self, interval_s: float) -> float:
        """Return the seconds between two checks of a replica's progress, at most ``interval_s``."""
        return min(interval_s, self.silence_s / LOOKS)

    def seen_silence_s(self, interval_s: float, *, began: bool) -> float:
        """Return the observed silence after which a replica is fenced off: two checks less than `silence_s`, or than
        `first_silence_s` before its first token, since a silence begins before the check that finds it.
        """
        return (self.silence_s if began else self.first_silence_s) - 2 * self.look_s(interval_s)

    @property
    def objects_s(self) -> float:
        """Limit for the tokens of a batch to come from other machines."""
        return self.update_timeout_s / 2 + self.batch_nbytes / SLOWEST_BYTES_PER_S

    # ---------------------------------------------------------------------------------- the watch over all

    @property
    def stall_s(self) -> float:
        """Limit for the run to stand still: ``stall_timeout_s``, plus what size adds to the longest wait within it."""
        longest = max(self.attempt_s, self.load_s, self.probe_s, self.first_silence_s, self.objects_s)
        # Only what size adds: update_timeout_s is already less than stall_timeout_s.
        return self.stall_timeout_s + longest - self.update_timeout_s

    @property
    def trainer_quiet_s(self) -> float:
        """Limit for the trainer's ranks to stand still in a call before they are restarted; above a receiver's."""
        return self.stall_s - (self.stall_timeout_s - self.update_timeout_s) / 2

    @property
    def unanswered_s(self) -> float:
        """Limit for a worker to answer a heartbeat, also in a step of an engine."""
        # Before `trainer_quiet_s`: a hanging rank is named before all ranks are given up together.
        return min(max(2 * HEARTBEAT_S, self.answer_s), 0.75 * self.trainer_quiet_s)

    @property
    def ranks_s(self) -> float:
        """Limit for a rank to wait for the others in a collective. Runs end earlier: a peer whose process ended breaks
        the connection, the driver ends the others, and heartbeats detect a rank that stands still.
        """
        return RANKS_S + max(self.stall_s, self.checkpoint_s)

    @property
    def _moving_s(self) -> float:
        return self.weights_nbytes / SLOWEST_BYTES_PER_S

    @property
    def _compiling_s(self) -> float:
        return COMPILE_S if self.on_gpu or self.compiles else 0.0

    def update_limit(self, seconds: float) -> str:
        """Describe a limit of ``seconds`` that follows ``param_update.timeout_s``, for messages."""
        return self._said("param_update.timeout_s", self.update_timeout_s, seconds)

    def start_limit(self) -> str:
        """Describe `start_s`, for messages."""
        return self._said("cluster.start_timeout_s", self.start_timeout_s, self.start_s)

    def _said(self, setting: str, base: float, seconds: float) -> str:
        if math.isclose(seconds, base, rel_tol=0.01):
            return f"{setting} = {base:g} s"
        return f"{seconds:.0f} s ({setting} = {base:g} s, the rest for the size of the model and the run)"


def close_s(weights_nbytes: int) -> float:
    """Return the limit in seconds for an engine to end. Its last step reads all weights once."""
    return CLOSE_S + weights_nbytes / SLOWEST_BYTES_PER_S


def file_quiet_s(nbytes: int) -> float:
    """Return the seconds that work with files may stand still. ``nbytes``: bytes so far."""
    return FILE_QUIET_S + nbytes / FILE_RATE


def file_stall_s(nbytes: int) -> float:
    """Return the seconds that such work may stand still before the run counts as stalled: beyond its caller's limit."""
    return file_quiet_s(nbytes) + LATER_S


def storage_s(nbytes: int) -> float:
    """Return the limit in seconds of a storage operation of ``nbytes``."""
    return STORAGE_S + nbytes / STORAGE_BYTES_PER_S


def upload_s(nbytes: int) -> float:
    """Return the seconds that the end of a run gives its trackers to upload a model of ``nbytes``."""
    return nbytes / UPLOAD_BYTES_PER_S
