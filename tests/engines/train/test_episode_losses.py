"""Losses of episodes: the same whichever rows, micro-batches and ranks their tokens are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from headway.config.schema import Config
from headway.config.sections.learning import ActorConfig, AlgorithmConfig, ParallelConfig
from headway.config.sections.losses import LOSSES
from headway.data.interfaces.training import StepContext, StepReport
from headway.data.packing import CollatedRow, Pack, Packing
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.train.fsdp.learner import as_metrics, count, merge
from headway.engines.train.fsdp.objective import Objective, SplitEpisodes
from tests.engines.train.episodes import GROUPS, cut_anywhere, dealt, whole
from tests.pipeline.cases import for_each
from tests.tiers import mostly_slow, searched

CPU = torch.device("cpu")
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
OF_WHOLE_MICRO_BATCHES = {"clip_cov", "kl_cov"}
"""They select tokens of a micro-batch, so that another split selects others; t_ppo is refused with programs."""
LOSS_MODES = sorted(LOSSES.keys() - OF_WHOLE_MICRO_BATCHES - {"t_ppo"})
CORRECTIONS: list[dict[str, Any]] = [
    {},
    {"name": "truncate", "bound": 1.1},
    {"name": "truncate", "level": "sequence", "bound": 1.2, "lower": 0.9},
    {"name": "mask", "level": "geometric", "bound": 1.02, "lower": 0.98},
    {"name": "truncate", "bound": 1.3, "veto": 0.6},
    {"name": "veto", "lower": 0.6},
    {"name": "off_policy_sequence_mask", "delta": 0.02},
    [{"name": "truncate"}, {"name": "reject", "level": "geometric", "bound": 1.02, "lower": 0.9}],
]


def configured(loss: str | dict[str, Any], mode: str, correction: dict[str, Any], **actor: Any) -> Config:
    return Config(
        actor=ActorConfig.model_validate(
            {"loss_agg_mode": mode, "loss_scale_factor": 7.0, "use_kl_loss": True, "entropy_coeff": 0.1} | actor
        ),
        algorithm=AlgorithmConfig.model_validate(
            {"policy_loss": {"loss_mode": loss} if isinstance(loss, str) else loss, "rollout_correction": correction}
        ),
    )


def through_objective(
    config: Config, rows: Sequence[CollatedRow], budget: int, whole_episodes: bool | None = None
) -> tuple[dict[int, float], dict[str, float], list[Pack]]:
    """Gradient in the log-prob of each token that counts, metrics, and the micro-batches, as the engine makes them."""
    objective, totals = Objective(config), count(rows)
    packing, whole = Packing(budget), objective.looks_at_sequences if whole_episodes is None else whole_episodes
    packs = packing(rows, whole_episodes=whole)
    spread = [rows[i] for i in packing.apart(rows, packs)] if whole else []
    apart = SplitEpisodes(spread, [row.columns["now"] for row in spread])
    gradient, parts = {}, []
    for pack in packs:
        own = [rows[i] for i in pack.rows]
        columns = objective.collate(own, totals.lengths, apart)
        logprobs = torch.from_numpy(np.concatenate([row.columns["now"] for row in own])).requires_grad_()
        entropy = torch.from_numpy(np.concatenate([row.columns["entropy"] for row in own]))
        context = StepContext(version=4)
        loss, sums = objective(columns, totals, logprobs, entropy, context)
        loss.backward()
        parts.append(sums)
        assert logprobs.grad is not None
        places = np.concatenate([row.columns["place"] for row in own])
        mask = np.concatenate([row.loss_mask for row in own])
        grads = logprobs.grad.numpy()
        assert (grads[~mask] == 0).all()
        gradient |= {int(place): float(g) for place, g in zip(places[mask], grads[mask], strict=True)}
    return gradient, as_metrics(merge(parts)), packs


ways = st.one_of(
    st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=len(GROUPS), max_size=len(GROUPS)),
    st.lists(st.integers(1, 3), min_size=len(GROUPS), max_size=len(GROUPS)),
)
"""For each episode where its row is cut, or how many rows its turns are dealt to."""


@pytest.mark.parametrize(
    ("loss", "examples"),
    [
        *((loss, 3) for loss in LOSS_MODES),
        *(pytest.param(loss, 20, marks=pytest.mark.slow) for loss in LOSS_MODES),
    ],
)
def test_cutting_an_episodes_row_into_several_changes_no_loss_no_gradient_and_no_metric(
    loss: str, examples: int
) -> None:
    """In one micro-batch, in several that hold most episodes whole, and with a micro-batch for each row."""
    how = (st.integers(0, 30), ways, st.sampled_from(MODES), st.sampled_from(CORRECTIONS))
    drawn = st.tuples(*how, st.sampled_from([10_000, 60, 14, 1]))
    for_each(drawn, examples, lambda one: assert_cut_as_whole(loss, *one))


def assert_cut_as_whole(
    loss: str, seed: int, way: list[Any], mode: str, correction: dict[str, Any], budget: int
) -> None:
    if correction and LOSSES[loss].weighs_behaviour:
        correction = {"name": "off_policy_sequence_mask", "delta": 0.02}
    config = configured(loss, mode, correction, clip_ratio=0.05)
    rows, _ = whole(seed)
    parts = [
        cut_anywhere(row, how) if isinstance(how, list) else dealt(row, how) for row, how in zip(rows, way, strict=True)
    ]
    gradient, metrics, _ = through_objective(config, rows, 10_000)
    cut_gradient, cut_metrics, _ = through_objective(config, [row for own in parts for row in own], budget)
    scale = max(map(abs, gradient.values()))
    assert cut_gradient == pytest.approx(gradient, rel=1e-4, abs=1e-5 * scale)
    assert cut_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


OWN = """
from headway.algorithms.corrections import CORRECTIONS
from headway.algorithms.losses import POLICY_LOSSES

def padded(inputs):
    tokens = (inputs.logprobs, inputs.old_logprobs, inputs.behaviour_logprobs, inputs.advantages, inputs.entropy)
    rows, longest = inputs.mask.shape
    assert all(values.shape == (rows, longest) for values in (*tokens, inputs.ref_logprobs))
    assert inputs.finished.shape == (rows,) and (inputs.episodes is None or inputs.episodes.shape == (rows,))
    return inputs

def loss(inputs, params):
    losses, metrics = POLICY_LOSSES.get(params.own.name)(padded(inputs), params)
    return losses, metrics | {"longest": inputs.mask.new_tensor(inputs.mask.shape[1], dtype=int)}

def truncate(inputs, params):
    return CORRECTIONS.get("truncate")(padded(inputs), params)
"""
"""A loss and a correction of a user's own, which are the built-in ones and look at the form of what they get."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return str(path)


@searched(
    90,
    st.integers(0, 30),
    ways,
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(MODES),
    st.sampled_from([CORRECTIONS[0], CORRECTIONS[2], CORRECTIONS[6]]),
    st.sampled_from([10_000, 60, 14]),
    st.booleans(),
)
def test_functions_of_the_users_own_get_padded_rows_and_give_what_built_in_ones_give(
    own: str, seed: int, way: list[Any], loss: str, mode: str, correction: dict[str, Any], budget: int, cut: bool
) -> None:
    """On uneven rows, whole or cut, with rows beside them that count elsewhere."""
    rows, _ = whole(seed)
    if cut:
        rows = [
            part
            for row, how in zip(rows, way, strict=True)
            for part in (cut_anywhere(row, how) if isinstance(how, list) else dealt(row, how))
        ]
    built_in = configured(loss, mode, correction)
    section = {**built_in.algorithm.policy_loss.model_dump(), "loss_mode": f"{own}:loss", "name": loss}
    if correction.get("name") == "truncate":
        correction = {**correction, "name": f"{own}:truncate"}
    users = configured(section, mode, correction)
    gradient, metrics, _ = through_objective(built_in, rows, budget, whole_episodes=True)
    own_gradient, own_metrics, packs = through_objective(users, rows, budget, whole_episodes=True)
    longest = own_metrics.pop("longest")
    assert len(packs) > 1 or longest == pytest.approx(max(len(row.loss_mask) for row in rows))
    assert own_gradient == pytest.approx(gradient, rel=1e-5, abs=1e-9)
    assert own_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-9)


def test_an_episode_that_is_masked_whole_is_no_sequence_of_the_normaliser() -> None:
    rows, _ = whole(0)
    nothing = replace(rows[2], loss_mask=np.zeros_like(rows[2].loss_mask))
    parts = [*cut_anywhere(rows[0], [2]), *cut_anywhere(nothing, [1, 2]), rows[1]]
    totals = count(parts)
    assert (totals.tokens, totals.sequences) == (float(rows[0].loss_mask.sum() + rows[1].loss_mask.sum()), 2.0)
    assert totals.lengths == {rows[0].episode: int(rows[0].loss_mask.sum()), rows[2].episode: 0}


def test_rows_of_one_episode_share_a_micro_batch_only_where_a_loss_looks_at_sequences() -> None:
    rows, _ = whole(1)
    parts = [part for row in rows for part in dealt(row, 3)]
    assert Objective(configured("gspo", "token-mean", {})).looks_at_sequences
    assert not Objective(configured("ppo_clip", "seq-mean-token-mean", {"name": "truncate"})).looks_at_sequences
    assert Objective(configured("ppo_clip", "token-mean", {"name": "reject", "level": "geometric"})).looks_at_sequences
    assert Objective(configured("ppo_clip", "token-mean", {"name": "truncate", "veto": 0.1})).looks_at_sequences
    also = [{"name": "truncate"}, {"name": "veto", "lower": 0.1}]
    assert Objective(configured("ppo_clip", "token-mean", also)).looks_at_sequences
    for loss, shared in (("gspo", True), ("ppo_clip", False)):
        *_, packs = through_objective(configured(loss, "token-mean", {}), parts, 20)
        assert len(packs) > 2
        assert (not Packing(20).apart(parts, packs)) == shared


# ---------------------------------------------------------------------------------------------- with a model


def gradient_and_step(
    path: str, config: Config, shares: list[list[CollatedRow]]
) -> tuple[dict[str, torch.Tensor], StepReport]:
    """Gradient of this rank's share, as the engine leaves it before its step, and the step's report."""
    engine = FsdpEngine(
        model_path=path, config=config, total_optimizer_steps=1, mesh=TrainMesh.make(ParallelConfig(), CPU)
    )
    found: dict[str, torch.Tensor] = {}
    update = engine.learner._update

    def look(norm: float, lr: float) -> None:
        found.update({name: p.grad.full_tensor().clone() for name, p in engine._policy.lm.named_parameters()})
        update(norm, lr)

    engine.learner._update = look  # type: ignore[method-assign]
    report = engine.train_step(shares[dist.get_rank()], StepContext(version=4))
    return found, report


def of_the_model(path: str, rows: Sequence[CollatedRow], config: Config) -> list[CollatedRow]:
    """The rows, sampled by something near the model's own policy: else ratios are all beyond their bounds."""
    engine = FsdpEngine(
        model_path=path, config=config, total_optimizer_steps=1, mesh=TrainMesh.make(ParallelConfig(), CPU)
    )
    rng = np.random.default_rng(0)
    near = []
    for row, now in zip(rows, engine.forward_logprobs(rows), strict=True):
        columns = {
            name: (now + 0.05 * rng.standard_normal(len(now))).astype(np.float32)
            for name in ("prox_logprobs", "ref_logprobs")
        }
        behaviour = (columns["prox_logprobs"] + 0.05 * rng.standard_normal(len(now))).astype(np.float32)
        near.append(replace(row, logprobs=behaviour, columns={**row.columns, **columns}))
    return near


@mostly_slow(
    "correction",
    [{}, {"name": "off_policy_sequence_mask", "delta": 0.005}],
    quick=[{"name": "off_policy_sequence_mask", "delta": 0.005}],
    ids=["none", "mask"],
)
def test_through_the_engine_an_episode_in_several_micro_batches_has_the_gradient_of_its_one_row(
    one_rank: None,
    run_ranks: Callable[..., list[Any]],
    model_path: Callable[..., str],
    correction: dict[str, Any],
) -> None:
    """The ratio is that of whole episodes, also where no micro-batch holds one: with one rank, and with two.

    Over 5 s: a second rank is a process that imports torch.
    """
    path = model_path()
    sizes = partial(configured, "gspo", "seq-mean-token-mean", correction, clip_ratio=0.01)
    rows = of_the_model(path, whole(2)[0], sizes())
    parts = [cut_anywhere(row, [2, 4]) for row in rows]
    expected, report = gradient_and_step(path, sizes(ppo_max_token_len_per_gpu=10_000), [rows])
    assert 0 < report.metrics["clip_fraction"] < 1
    assert not correction or 0 < report.metrics["correction/rejected"] < 1
    flat = [row for own in parts for row in own]
    tight = sizes(ppo_max_token_len_per_gpu=12)
    shares = [[row for own in parts[k::2] for row in own] for k in range(2)]
    packing = Packing(12)
    assert all(packing.apart(share, packing(share, whole_episodes=True)) for share in shares)
    found = [gradient_and_step(path, tight, [flat]), *run_ranks(2, gradient_and_step, (path, tight, shares))]
    for grads, split_report in found:
        for name, grad in expected.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
        metrics = {name: value for name, value in report.metrics.items() if name not in ("grad_norm", "tokens_saved")}
        assert {n: split_report.metrics[n] for n in metrics} == pytest.approx(metrics, rel=1e-3, abs=1e-6)
