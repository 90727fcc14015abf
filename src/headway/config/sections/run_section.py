"""Schema of how a run goes: its place, its trainer, its cluster and its reports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from headway.config.sections.section import Every, Folder, NonNegative, Positive, Section, Share, on_or_off

LONGEST_NAME = 200
"""Most bytes of a run's name: file systems take 255, and the time comes after it."""


class RunConfig(Section):
    """The run's name, place and seed."""

    name: str = "headway"
    """Name of the run's directory when ``run.dir`` is not given: a plain file name, not a path."""
    dir: Folder | None = None
    """Directory of everything that the run writes. Default: ``runs/<name>-<time>``."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of model, data order and sampling."""
    journal_sync_s: float | None = Field(1.0, gt=0)
    """Most seconds of finished work that the loss of a machine costs: the journal is on its disk by then
    (docs/resume.md). The death of a process costs none. Null: no journal, and a resumed run makes groups that were open
    again."""
    storage: str | None = Field(None, min_length=1)
    """Place that keeps what the run has closed, apart from ``run.dir``: a directory, or a URL of fsspec's, like
    ``s3://bucket/run``, which needs the extra ``storage`` (docs/resume.md). Record and journal are uploaded every 30 s,
    a checkpoint when it is complete."""
    stop_timeout_s: float = Field(60.0, gt=0)
    """Seconds within which a run ends after Ctrl-C or SIGTERM. Three quarters of them are for the version that was
    begun, which is given up then; the rest is for writing and for the workers' end. A checkpoint that needs longer is
    waited for."""

    @field_validator("name")
    @classmethod
    def _is_a_plain_file_name(cls, name: str) -> str:
        if not name.strip() or "/" in name or name in (".", "..") or not name.isprintable():
            raise ValueError("expected a plain file name, without /")
        # In bytes, as file systems count.
        if len(name.encode()) > LONGEST_NAME:
            raise ValueError(f"expected a file name of at most {LONGEST_NAME} bytes")
        return name


class TrainerConfig(Section):
    """Training ranks and checkpoints."""

    nnodes: Positive = 1
    """Number of machines of the training role, each another one. More devices of one machine are
    ``n_gpus_per_node``."""
    n_gpus_per_node: Positive = 1
    """Number of training ranks per machine (on CPUs: processes)."""
    use_nodes_ratios: tuple[Share, Share, Share, Share] | None = None
    """Shares [train, logp, ref_logp, generate]: fractions of all ``nnodes × n_gpus_per_node`` devices, instead of
    counts. Exact: 0.25 or 1/3."""
    generate_ahead_steps: Positive | None = None
    """η + 1, another way to set ``async_training.staleness_threshold``, which loading sets instead."""
    threads: NonNegative = 0
    """Number of Torch threads of one training rank; 0 divides the cores of the machine that it is on among the run's
    processes there."""
    save_freq: Every = 10
    """Versions between two checkpoints; -1: only at the end, and a run that is killed before cannot be resumed."""
    max_actor_ckpt_to_keep: Positive | None = 2
    """Checkpoints that are kept, the newest ones, each with its critic's; null: all."""
    snapshot: Literal["memory"] | None = None
    """``memory`` keeps the state of each training rank in the memory of an episode worker as well, of another machine
    where there is one: what a lost rank goes back to. On one machine that survives the end of processes alone."""
    snapshot_freq: int = Field(1, ge=1)
    """Versions between two snapshots. One that falls due while a checkpoint or a snapshot is on its way is left out."""
    max_restarts: NonNegative = 3
    """Most times that ranks are started again in the course of a run, where one is lost: those of a critic, a
    reference, ``logp``, or the trainer, which are trained again on the batches since the newest checkpoint, or
    snapshot. With 0 a loss ends the run; with ``save_freq: -1`` that of a rank of trainer or critic does."""


class ClusterConfig(Section):
    """Ray, devices, and limits of waiting."""

    backend: Literal["ray", "inline"] = "ray"
    """The cluster's backend; ``inline`` runs every role in one process: debugging, tests, notebooks."""
    address: str | None = None
    """A Ray cluster to join; default: start one here and stop it at the end."""
    placement: Literal["split", "shared"] = "split"
    """Training and generation on devices of their own (``split``), or taking turns on the same ones (``shared``)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the workers; ``auto`` is ``cuda`` where there are GPUs."""
    start_timeout_s: float = Field(120.0, gt=0)
    """Most seconds that Ray and all workers may take to come up. Added are one for each 50 MB of the model's files, two
    for each process beyond eight, and ten minutes where kernels are compiled (on GPUs, and by vLLM)."""
    max_replica_restarts: NonNegative = 3
    """Most replicas, and most episode workers, that are started again in the course of a run, in the place of ones that
    died or did not answer."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """Seconds without any movement after which the run ends, and says who waits for whom and what each worker does. A
    step may take longer, for ranks count layers and micro-batches; a layer of a micro-batch, and a reward, may not.
    Whatever size adds to ``param_update.timeout_s`` is added here, too."""


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
    """Tools for looking at runs that get this one, too (docs/trackers.md). All but ``tensorboard`` need the extra of
    their name."""
    project: str = Field("headway", min_length=1)
    """Project of W&B and trackio, experiment of MLflow."""
    log_model: bool = False
    """Give the exported model to W&B, MLflow and trackio as an artifact. The end of the run waits for its upload."""
    prometheus_host: str = "127.0.0.1"
    """Address at which the figures are there for Prometheus; ``0.0.0.0`` for all of this machine's."""
    prometheus_port: int = Field(9464, ge=0, le=65535)
    """Port at which the figures are there for Prometheus; 0 takes a free one."""
    activity_interval_s: float = Field(1.0, gt=0)
    """Seconds between two reports of what a replica was doing."""
    samples: NonNegative = 2
    """Number of groups of each version, and of problems of each validation, that leave what they said in
    ``samples.jsonl``, for ``headway show``; 0 keeps nothing. Groups are drawn by the seed, so many on average."""
