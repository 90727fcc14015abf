"""docs/metrics.md has every figure that a run can report, and none that it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from headway.algorithms.corrections import Action, CorrectionParams, build_correction
from headway.algorithms.losses import POLICY_LOSSES, LossInputs, PolicyLossParams
from headway.config.schema import AsyncTrainingConfig, Config
from headway.config.sections.learning import ActorConfig, AlgorithmConfig, CorrectionConfig, ParallelConfig
from headway.config.sections.losses import LOSSES
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.train.fsdp.column_engines import FsdpCritic
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.events import (
    CriticStepped,
    Event,
    GroupAdmitted,
    GroupRewarded,
    OptimizerStepped,
    TrajectoryFinished,
    UpdateFinished,
    UpdatePhase,
    ValidationFinished,
)
from headway.reports.metrics.run_metrics import RunMetrics
from headway.reports.metrics.summary import summary
from headway.reports.metrics.version_row import ENDPOINT
from tests.engines.train.rows import random_rows, with_columns
from tests.reports.scripted_run import ScriptedRun

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
ROWS, SUMMARY = PAGE.split("## summary.json")
CPU = torch.device("cpu")
SOURCES = ("SOURCE", "another")
VERSION = 5


def documented(page: str) -> list[str]:
    """Names in the first column of its tables."""
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_page_has_every_metric_of_a_row_and_no_other(
    one_rank: None, model_path: Callable[..., str], tmp_path: Path
) -> None:
    actor = trained(model_path()) | of_losses() | of_corrections()
    rows = replay(actor, critic_trained(model_path()))
    reported = {placeholders(name) for row in rows for name in row}
    assert reported == set(documented(ROWS))


def test_no_metric_is_on_the_page_twice() -> None:
    names = documented(ROWS)
    assert sorted(names) == sorted(set(names))


def test_the_page_has_every_key_of_the_summary() -> None:
    metrics = RunMetrics()
    for event in ScriptedRun().build():
        metrics.on_event(event)
    assert sorted(documented(SUMMARY)) == sorted(summary(metrics))


class Rows:
    """A row sink that keeps them."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def on_row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def close(self) -> None:
        """Nothing is open."""


def placeholders(name: str) -> str:
    name = re.sub(r"^episodes/limit/.*", "episodes/limit/LIMIT", name)
    name = re.sub(r"/lag_(\d|4_up)$", "/LAG", name)
    return re.sub(r"/source/another\b", "/source/SOURCE", name)


def replay(actor: Mapping[str, float], critic: Mapping[str, float]) -> list[Mapping[str, Any]]:
    """Rows of a scripted run with several rewards and sources, a critic, deltas, a probe, and episodes of a program."""
    sink = Rows()
    metrics = RunMetrics([sink])
    for event in with_everything(ScriptedRun().build(), actor, critic):
        metrics.on_event(event)
    metrics.close()
    return sink.rows


def with_everything(
    events: Iterable[Event], actor: Mapping[str, float], critic: Mapping[str, float]
) -> Iterable[Event]:
    for event in events:
        match event:
            case GroupAdmitted():
                yield replace(event, source=SOURCES[event.number % 2])
            case TrajectoryFinished():
                yield of_a_program(event)
            case GroupRewarded():
                yield replace(event, parts={"NAME": list(event.rewards)})
            case OptimizerStepped():
                yield replace(event, metrics=dict(actor), rows=event.trajectories)
                yield CriticStepped(
                    time=event.time,
                    step=event.step,
                    fetch=event.fetch,
                    version=event.version,
                    skipped=False,
                    span=(event.time, event.time),
                    metrics=dict(critic),
                )
            case UpdatePhase(phase="load"):
                yield replace(event, probe_difference=1e-6)
            case UpdateFinished():
                yield replace(event, full_nbytes=1000, changed=0.1)
            case ValidationFinished():
                yield replace(event, by_source=dict.fromkeys(SOURCES, 0.5), parts={"NAME": 0.5})
            case _:
                yield event


def of_a_program(event: TrajectoryFinished) -> TrajectoryFinished:
    """An episode of two turns, of an agent that did not get all that it asked for; some have failed at a limit."""
    failed = "too slow" if event.k == 1 else None
    numbers = {"environment_s": 1.0, "NAME": 1.0, **dict.fromkeys(ENDPOINT, 1.0)}
    steps = [(event.started, event.finished)]
    return replace(event, turns=2, steps=steps, failure=failed, limit=failed and "step", metrics=numbers)


def trained(path: str) -> dict[str, float]:
    """What a step reports with KL in the loss, an entropy bonus and two corrections."""
    corrections = (
        CorrectionConfig(name="truncate", bound=1.1, veto=1e-3),
        CorrectionConfig(name="reject", bound=2.0, level="geometric"),
    )
    config = Config(
        actor=ActorConfig(use_kl_loss=True, entropy_coeff=0.01),
        async_training=AsyncTrainingConfig(use_rollout_log_probs=False),
        algorithm=AlgorithmConfig(rollout_correction=corrections),
    )
    engine = FsdpEngine(
        model_path=path, config=config, total_optimizer_steps=5, mesh=TrainMesh.make(ParallelConfig(), CPU)
    )
    rows = of_all_lags(random_rows(8, with_ref=True, with_prox=True))
    return dict(engine.train_step(rows, StepContext(version=VERSION)).metrics)


def of_all_lags(rows: Sequence[CollatedRow]) -> list[CollatedRow]:
    return [replace(row, versions=(np.arange(len(row.versions)) % (VERSION + 1)).astype(np.int32)) for row in rows]


def critic_trained(path: str) -> dict[str, float]:
    critic = FsdpCritic(
        model_path=path, config=Config(), total_optimizer_steps=5, mesh=TrainMesh.make(ParallelConfig(), CPU)
    )
    rows = [
        with_columns(row, values=np.zeros_like(row.logprobs), returns=np.ones_like(row.logprobs))
        for row in random_rows(4)
    ]
    return dict(critic.train_step(rows).metrics)


def of_losses() -> dict[str, float]:
    """By every registered loss; the metrics' values are of no interest here."""
    names: set[str] = set()
    for name in POLICY_LOSSES.names():
        _, per_token = POLICY_LOSSES.get(name)(inputs(), PolicyLossParams(LOSSES[name]()))
        names |= per_token.keys()
    return dict.fromkeys(names, 0.0)


def of_corrections() -> dict[str, float]:
    names: set[str] = set()
    for name in get_args(Action):
        params = CorrectionParams(bound=None, lower=0.5) if name == "veto" else CorrectionParams(bound=2.0)
        names |= build_correction(name, params)(inputs(), params)[1].keys()
    return dict.fromkeys(names, 0.0)


def inputs() -> LossInputs:
    """Two answers of three tokens."""
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=torch.full((2, 3), -1.1),
        behaviour_logprobs=torch.full((2, 3), -1.2),
        advantages=torch.tensor([[1.0] * 3, [-1.0] * 3]),
        mask=torch.ones(2, 3, dtype=torch.bool),
        entropy=torch.ones(2, 3),
        finished=torch.tensor([True, False]),
    )


@pytest.mark.parametrize("name", ["actor/clip_fraction", "offpolicy/ess/LAG", "lag/max", "trainer/idle_ratio"])
def test_a_name_is_read_from_the_page(name: str) -> None:
    assert name in documented(ROWS)
