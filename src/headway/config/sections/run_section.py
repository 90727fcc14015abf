"""The sections of the run, its trainer, its cluster and its reports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from headway.config.sections.section import Every, Folder, NonNegative, Positive, Section, Share, on_or_off

LONGEST_NAME = 200
"""Maximum bytes of a run's name: file systems take 255, and the time is appended."""


class RunConfig(Section):
    """The run's name, place and seed."""

    name: str = "headway"
    """Name of the run's directory when ``run.dir`` is not given: a plain file name, not a path."""
    dir: Folder | None = None
    """Directory of everything that the run writes. Default: ``runs/<name>-<time>``."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of model, data order and sampling."""
    journal_sync_s: float | None = Field(1.0, gt=0)
    """Maximum seconds of finished work that the loss of a machine costs: after so long the journal is on its disk
    (docs/resume.md). The death of a process costs none. Null: no journal, and a resumed run makes open groups again."""
    storage: str | None = Field(None, min_length=1)
    """Second place for the run's finished files, beside ``run.dir``: a directory, or an fsspec URL like
    ``s3://bucket/run``, which needs the extra ``storage`` (docs/resume.md). Record and journal are uploaded every 30 s,
    a checkpoint when it is complete."""
    stop_timeout_s: float = Field(60.0, gt=0)
    """Time limit in seconds for a run to end after Ctrl-C or SIGTERM. After three quarters the started version is given
    up; the rest is for writing and for ending workers. A checkpoint that takes longer is waited for."""

    @field_validator("name")
    @classmethod
    def _is_a_plain_file_name(cls, name: str) -> str:
        if not name.strip() or "/" in name or name in (".", "..") or not name.isprintable():
            raise ValueError("expected a plain file name, without /")
        # In bytes, like file systems.
        if len(name.encode()) > LONGEST_NAME:
            raise ValueError(f"expected a file name of at most {LONGEST_NAME} bytes")
        return name


class TrainerConfig(Section):
    """Training ranks and checkpoints."""

    nnodes: Positive = 1
    """Number of different machines of the training role. ``n_gpus_per_node`` is for several devices of one machine."""
    n_gpus_per_node: Positive = 1
    """Number of training ranks per machine (on CPUs: processes)."""
    use_nodes_ratios: tuple[Share, Share, Share, Share] | None = None
    """Shares [train, logp, ref_logp, generate] of all ``nnodes × n_gpus_per_node`` devices, instead of counts. Exact:
    0.25 or 1/3."""
    generate_ahead_steps: Positive | None = None
    """η + 1: another way to set ``async_training.staleness_threshold``, into which loading converts it."""
    threads: NonNegative = 0
    """Number of Torch threads of one training rank; 0 divides a machine's cores among the run's processes there."""
    save_freq: Every = 10
    """Versions between two checkpoints; -1: only at the end, so that a killed run cannot be resumed."""
    max_actor_ckpt_to_keep: Positive | None = 2
    """Number of newest checkpoints to keep, each with the critic's; null: all."""
    snapshot: Literal["memory"] | None = None
    """``memory`` also keeps the state of each training rank in the memory of an episode worker, on another machine if
    there is one. A lost rank is restored from it. On one machine snapshots survive only the end of processes."""
    snapshot_freq: int = Field(1, ge=1)
    """Versions between two snapshots. A snapshot that is due while a checkpoint or snapshot is in progress is
    skipped."""
    max_restarts: NonNegative = 3
    """Maximum number of times in a run that ranks are restarted after one is lost: those of the trainer, critic,
    reference or ``logp``. Trainer and critic repeat the batches since the newest checkpoint or snapshot. With 0 any
    loss ends the run; with ``save_freq: -1`` the loss of a rank of trainer or critic does."""


class ClusterConfig(Section):
    """Ray, devices, and time limits."""

    backend: Literal["ray", "inline"] = "ray"
    """The cluster's backend; ``inline`` runs every role in one process, for debugging, tests and notebooks."""
    address: str | None = None
    """A Ray cluster to join; default: start one here and stop it at the end."""
    placement: Literal["split", "shared"] = "split"
    """Placement of training and generation: on separate devices (``split``), or taking turns on the same
    (``shared``)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the workers; ``auto`` is ``cuda`` if there are GPUs."""
    start_timeout_s: float = Field(120.0, gt=0)
    """Time limit in seconds for Ray and all workers to start. Added are one second for each 50 MB of the model's files,
    two for each process beyond eight, and ten minutes if kernels are compiled (on GPUs, and by vLLM)."""
    max_replica_restarts: NonNegative = 3
    """Maximum number of replicas, and of episode workers, that are restarted in a run because they died or did not
    answer."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """Seconds without any progress after which the run ends, and reports who waits for whom and what each worker does.
    A step may take longer, since ranks count layers and micro-batches; a layer of a micro-batch, or a reward, may not.
    The seconds that the model's size adds to ``param_update.timeout_s`` are added here, too."""


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("expected each tracker once")
    return names


TrackerNames = Annotated[
    tuple[Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus"], ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    AfterValidator(_each_once),
]


class ReportsConfig(Section):
    """The reports that a run shows and writes."""

    live: Annotated[Literal["auto", "on", "off"], BeforeValidator(on_or_off)] = "auto"
    """The live view; ``auto`` shows it on a terminal and prints plain lines elsewhere."""
    trackers: TrackerNames = ("tensorboard",)
    """Trackers that get the run's metrics (docs/trackers.md). All but ``tensorboard`` need the extra of their name."""
    project: str = Field("headway", min_length=1)
    """Project in W&B and trackio, experiment in MLflow."""
    log_model: bool = False
    """Upload the exported model to W&B, MLflow and trackio as an artifact. The run's end waits for the upload."""
    prometheus_host: str = "127.0.0.1"
    """Address at which Prometheus reads the metrics; ``0.0.0.0``: all addresses of this machine."""
    prometheus_port: int = Field(9464, ge=0, le=65535)
    """Port at which Prometheus reads the metrics; 0: any free port."""
    activity_interval_s: float = Field(1.0, gt=0)
    """Seconds between two reports of a replica's activity."""
    samples: NonNegative = 2
    """Number of groups of each version, and of problems of each validation, whose answers are kept in
    ``samples.jsonl``, for ``headway show``; 0: none. Groups are drawn by the seed; the number is an average."""
