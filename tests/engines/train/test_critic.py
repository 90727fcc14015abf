"""The critic: values, gradients and steps against the Hugging Face decoder in float64, on one rank and on two."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headway.config.schema import Config
from headway.config.sections.learning import ActorConfig, CriticConfig, OptimConfig, ParallelConfig
from headway.config.sections.model_section import ModelConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.engines.train.fsdp.column_engines import FsdpCritic
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.errors import ModelError
from headway.models.pretrained import load_model
from tests.engines.train.rows import random_rows, with_columns, without_column
from tests.tiers import crossed, mostly_slow

ModelPath = Callable[..., str]
RunRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")
HIDDEN = 32
ONE_MICRO_BATCH, MANY_MICRO_BATCHES = 100_000, 48
CLIP = 0.5


def configured(budget: int = 64, **critic: object) -> Config:
    return Config(
        actor=ActorConfig(ppo_max_token_len_per_gpu=budget),
        critic=CriticConfig.model_validate({"optim": OptimConfig(lr=1e-2), "cliprange_value": CLIP, **critic}),
    )


def build(path: str, config: Config | None = None, *, head: bool = True, steps: int = 10) -> FsdpCritic:
    """With ``head`` its values are far from zero: a head of zeros passes no gradient on to the decoder."""
    critic = FsdpCritic(
        model_path=path,
        config=config or configured(),
        total_optimizer_steps=steps,
        mesh=TrainMesh.make(ParallelConfig(), CPU),
    )
    weight = critic._module.value_head.weight
    assert isinstance(weight, DTensor)
    if head and (local := weight.detach().to_local()).numel():  # its one row is on rank zero
        local.copy_(some_head())
    return critic


def some_head() -> torch.Tensor:
    return torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(3))


def valued_rows(n: int, seed: int = 0) -> list[CollatedRow]:
    """Rows whose ``values`` and ``returns`` are far apart enough for some values to be clipped."""
    rng = np.random.default_rng(seed)
    rows = []
    for row in random_rows(n, seed):
        values, returns = rng.standard_normal((2, len(row.logprobs))).astype(np.float32)
        rows.append(with_columns(row, values=3 * values, returns=1 + 2 * returns))
    return rows


def plain_values(decoder: torch.nn.Module, head: torch.Tensor, row: CollatedRow) -> torch.Tensor:
    """head · hidden at the position before each response token, [T]."""
    ids = torch.from_numpy(row.input_ids.astype(np.int64))[None]
    hidden = decoder(input_ids=ids).last_hidden_state[0, row.prompt_length - 1 : -1]
    return hidden @ head[0]


def plain_loss(
    decoder: torch.nn.Module, head: torch.Tensor, rows: Sequence[CollatedRow], cliprange: float
) -> torch.Tensor:
    """The mean over the tokens that count, token by token."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        for value, old, target, counts in zip(
            plain_values(decoder, head, row),
            row.columns["values"].tolist(),
            row.columns["returns"].tolist(),
            row.loss_mask.tolist(),
            strict=True,
        ):
            if counts:
                near = value.clamp(old - cliprange, old + cliprange)
                total = total + torch.maximum((value - target) ** 2, (near - target) ** 2) / 2
                tokens += 1
    return total / tokens


def numpy_explained_variance(rows: Sequence[CollatedRow]) -> float:
    """1 − variance of what is left / variance of the returns, over the tokens that count."""
    values, returns = (np.concatenate([r.columns[n][r.loss_mask] for r in rows]) for n in ("values", "returns"))
    return float(1 - np.var(values.astype(np.float64) - returns) / np.var(returns.astype(np.float64)))


def gradient(
    path: str, config: Config, shares: list[list[CollatedRow]]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradient and sums of this rank's share, as the critic leaves them."""
    critic = build(path, config)
    metrics = critic.learner._backward(shares[dist.get_rank()], critic._part)
    return {name: p.grad.full_tensor() for name, p in critic._module.named_parameters()}, metrics


def plain_gradient(path: str, rows: Sequence[CollatedRow]) -> tuple[dict[str, torch.Tensor], float]:
    model: PreTrainedModel = load_model(path, dtype=torch.float64)
    head = some_head().double().requires_grad_()
    loss = plain_loss(model.base_model, head, rows, CLIP)
    loss.backward()
    assert head.grad is not None
    grads = {f"decoder.{name}": p.grad for name, p in model.base_model.named_parameters()}
    return {**grads, "value_head.weight": head.grad}, float(loss.detach())


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(actual[name].double(), grad.double(), rtol=1e-4, atol=2e-5, msg=name)


def assert_same(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> None:
    for one, other in zip(left, right, strict=True):
        assert np.array_equal(one, other)


# ---------------------------------------------------------------------------------------------- values


@crossed(("architecture", "tie"), ["qwen3", "qwen2", "llama"], [True, False])
def test_values_are_the_head_times_the_decoders_hidden_state_before_each_token(
    one_rank: None, model_path: ModelPath, architecture: str, tie: bool
) -> None:
    rows = random_rows(7)
    model = load_model(model_path(architecture, tie), dtype=torch.float64)
    actual = build(model_path(architecture, tie)).forward_values(rows)
    for row, values in zip(rows, actual, strict=True):
        assert values.dtype == np.float32
        expected = plain_values(model.base_model, some_head().double(), row)
        np.testing.assert_allclose(values, expected.detach().numpy(), atol=1e-4)
    assert max(np.abs(values).max() for values in actual) > 1


def test_a_value_does_not_see_its_own_token_or_what_comes_after(one_rank: None, model_path: ModelPath) -> None:
    critic = build(model_path())
    [row] = random_rows(1, longest=24)
    length = len(row.logprobs)
    at = length // 2
    other = row.input_ids.copy()
    other[row.prompt_length + at :] = (other[row.prompt_length + at :] + 1) % 18
    changed = CollatedRow(other, row.prompt_length, row.logprobs, row.versions, row.loss_mask)
    before, after = critic.forward_values([row])[0], critic.forward_values([changed])[0]
    np.testing.assert_allclose(after[: at + 1], before[: at + 1], atol=1e-6)
    assert np.abs(after[at + 1 :] - before[at + 1 :]).min() > 1e-6


def test_a_critic_that_was_never_trained_expects_nothing(one_rank: None, model_path: ModelPath) -> None:
    for values in build(model_path(), head=False).forward_values(random_rows(4)):
        assert (values == 0).all()


def test_an_output_layer_of_the_models_own_is_not_read(one_rank: None, model_path: ModelPath, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_path("llama", False), tmp_path / "without"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    rows = random_rows(2)
    whole, without = (build(path).forward_values(rows) for path in (model_path("llama", False), str(folder)))
    for values, expected in zip(without, whole, strict=True):
        np.testing.assert_array_equal(values, expected)


def test_no_rows_give_no_values_and_no_tokens_an_empty_array(one_rank: None, model_path: ModelPath) -> None:
    critic, [full] = build(model_path()), valued_rows(1)
    nothing = np.zeros(0, dtype=np.float32)
    columns = {"values": nothing, "returns": nothing}
    empty = CollatedRow(full.input_ids[:3], 3, nothing, nothing.astype(np.int32), nothing.astype(np.bool_), columns)
    assert critic.forward_values([]) == []
    assert [len(values) for values in critic.forward_values([empty, full])] == [0, len(full.logprobs)]
    assert not critic.train_step([empty, full]).skipped


def test_half_precision_computes_so_but_keeps_a_float32_head(one_rank: None, model_path: ModelPath) -> None:
    rows, config = valued_rows(6), configured().model_copy(update={"model": ModelConfig(dtype="bfloat16")})
    critic = build(model_path(), config)
    model = load_model(model_path(), dtype=torch.float64)
    for row, values in zip(rows, critic.forward_values(rows), strict=True):
        expected = plain_values(model.base_model, some_head().double(), row).detach().numpy()
        np.testing.assert_allclose(values, expected, atol=0.2)
    assert not critic.train_step(rows).skipped
    assert {p.dtype for p in critic._module.parameters()} == {torch.float32}


# ---------------------------------------------------------------------------------------------- steps


@mostly_slow(("architecture", "tie"), [("qwen3", True), ("qwen2", False), ("llama", True)], quick=[("qwen2", False)])
def test_the_gradient_is_that_of_the_loss_written_out_plainly(
    one_rank: None, model_path: ModelPath, architecture: str, tie: bool
) -> None:
    path, rows = model_path(architecture, tie), valued_rows(9)
    expected, loss = plain_gradient(path, rows)
    actual, metrics = gradient(path, configured(MANY_MICRO_BATCHES), [rows])
    assert_close(actual, expected)
    assert metrics["vf_loss"] == metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert 0.1 < metrics["vf_clipfrac"] < 0.9
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.slow
def test_the_gradient_does_not_depend_on_how_the_mini_batch_is_split(
    one_rank: None, run_ranks: RunRanks, model_path: ModelPath
) -> None:
    """Trains on several ranks, whose start takes seconds."""
    path, rows = model_path(), valued_rows(11)
    expected, metrics = gradient(path, configured(ONE_MICRO_BATCH), [rows])
    assert_close(expected, plain_gradient(path, rows)[0])
    splits = {
        (1, MANY_MICRO_BATCHES): [rows],
        (2, ONE_MICRO_BATCH): [rows[:5], rows[5:]],
        (2, MANY_MICRO_BATCHES): [rows[:2], rows[2:]],
        (3, MANY_MICRO_BATCHES): [rows[:1], [], rows[1:]],
    }
    for (world, budget), shares in splits.items():
        config = configured(budget)
        results = [gradient(path, config, shares)] if world == 1 else run_ranks(world, gradient, (path, config, shares))
        for grads, split_metrics in results:
            assert_close(grads, expected)
            assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_three_steps_are_those_of_a_plain_loop(one_rank: None, model_path: ModelPath) -> None:
    optim = OptimConfig(lr=1e-2, lr_scheduler_type="linear", weight_decay=0.1, betas=(0.8, 0.95))
    critic = build(model_path(), configured(optim=optim, grad_clip=0.05), steps=3)
    batches = [valued_rows(5, seed) for seed in range(3)]
    reports = [critic.train_step(rows) for rows in batches]

    model, head = load_model(model_path(), dtype=torch.float64), some_head().double().requires_grad_()
    parameters = [*model.base_model.parameters(), head]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.1, betas=(0.8, 0.95))
    for rows, lr, report in zip(batches, [1e-2, 5e-3, 0.0], reports, strict=True):
        optimizer.zero_grad()
        loss = plain_loss(model.base_model, head, rows, CLIP)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        assert norm > 0.05 and not report.skipped
        assert report.metrics["lr"] == pytest.approx(lr)
        assert report.metrics["vf_loss"] == pytest.approx(float(loss.detach()), rel=1e-3)
        assert report.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-2)
    for row, values in zip(batches[0], critic.forward_values(batches[0]), strict=True):
        expected = plain_values(model.base_model, head, row).detach().numpy()
        np.testing.assert_allclose(values, expected, atol=5e-3)


def test_metrics_are_means_over_the_tokens_that_count(one_rank: None, model_path: ModelPath) -> None:
    critic, rows = build(model_path(), configured(MANY_MICRO_BATCHES)), valued_rows(8)
    predicted = critic.forward_values(rows)
    metrics = critic.train_step(rows).metrics
    returns = np.concatenate([row.columns["returns"][row.loss_mask] for row in rows]).astype(np.float64)
    values = np.concatenate([v[row.loss_mask] for v, row in zip(predicted, rows, strict=True)]).astype(np.float64)
    assert metrics["returns_mean"] == pytest.approx(returns.mean(), rel=1e-6)
    assert metrics["vpred_mean"] == pytest.approx(values.mean(), rel=1e-5)
    assert metrics["vf_explained_var"] == pytest.approx(numpy_explained_variance(rows), rel=1e-6)
    assert "returns_square" not in metrics and "error_square" not in metrics


def test_the_explained_variance_is_one_for_a_critic_that_knows_and_none_for_one_that_says_the_mean(
    one_rank: None, model_path: ModelPath
) -> None:
    critic, rows = build(model_path()), valued_rows(6)
    mean = np.concatenate([row.columns["returns"][row.loss_mask] for row in rows]).mean(dtype=np.float64)
    knows = [with_columns(row, values=row.columns["returns"]) for row in rows]
    says_the_mean = [with_columns(row, values=np.full_like(row.columns["returns"], mean)) for row in rows]
    assert critic.train_step(knows).metrics["vf_explained_var"] == pytest.approx(1.0)
    assert critic.train_step(says_the_mean).metrics["vf_explained_var"] == pytest.approx(0.0, abs=1e-5)


def test_returns_that_are_all_equal_have_no_variance_to_explain(one_rank: None, model_path: ModelPath) -> None:
    """Every answer of a mini-batch got the same reward, which need not be a power of two."""
    critic = build(model_path())
    for level in (0.1, 1 / 3, 123.4, 11 / 7, 22 / 7):
        rows = [with_columns(row, returns=np.full_like(row.columns["returns"], level)) for row in valued_rows(6)]
        assert critic.train_step(rows).metrics["vf_explained_var"] == 0.0, level


def test_returns_far_from_zero_have_the_explained_variance_that_numpy_finds(
    one_rank: None, model_path: ModelPath
) -> None:
    rows = [
        with_columns(row, returns=1000 + 0.1 * row.columns["returns"], values=1000 + 0.1 * row.columns["values"])
        for row in valued_rows(6)
    ]
    expected = numpy_explained_variance(rows)
    assert build(model_path()).train_step(rows).metrics["vf_explained_var"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_a_critic_learns_returns_that_stay_the_same(one_rank: None, model_path: ModelPath) -> None:
    """Each step as a batch of its own: the values are what the critic says before it."""
    critic, rows = build(model_path(), head=False, steps=40), random_rows(6)
    rows = [with_columns(row, returns=row.input_ids[row.prompt_length - 1 : -1].astype(np.float32) / 9) for row in rows]
    losses, explained = [], []
    for _ in range(40):
        values = critic.forward_values(rows)
        metrics = critic.train_step([with_columns(r, values=v) for r, v in zip(rows, values, strict=True)]).metrics
        losses.append(metrics["vf_loss"])
        explained.append(metrics["vf_explained_var"])
    assert explained[0] < 0.1
    assert losses[-1] < 0.05 * losses[0]
    assert explained[-1] > 0.9


def test_a_row_that_lacks_what_a_step_needs_is_an_error(one_rank: None, model_path: ModelPath) -> None:
    critic, rows = build(model_path()), valued_rows(3)
    for column in ("values", "returns"):
        with pytest.raises(ValueError, match=f"has no {column}"):
            critic.train_step([without_column(row, column) for row in rows])


# ---------------------------------------------------------------------------------------------- not finite


def broken(row: CollatedRow, value: float) -> CollatedRow:
    returns = row.columns["returns"].copy()
    returns[np.flatnonzero(row.loss_mask)[0]] = value
    return with_columns(row, returns=returns)


@mostly_slow("value", [np.nan, np.inf], quick=[np.inf])
def test_a_return_that_is_not_finite_leaves_everything_as_it_was(
    one_rank: None, model_path: ModelPath, value: float
) -> None:
    rows = valued_rows(5)
    critic, twin = build(model_path()), build(model_path())
    for each in (critic, twin):
        each.train_step(rows)
    before = critic.forward_values(rows)
    report = critic.train_step([*rows[:-1], broken(rows[-1], value)])
    assert report.skipped
    assert not np.isfinite(report.metrics["vf_loss"])
    assert_same(critic.forward_values(rows), before)
    assert not critic.train_step(rows).skipped
    twin.train_step(rows)
    assert_same(critic.forward_values(rows), twin.forward_values(rows))


def test_a_return_that_is_not_finite_and_does_not_count_changes_nothing(one_rank: None, model_path: ModelPath) -> None:
    rows, reports = valued_rows(6), []
    assert any(not row.loss_mask.all() for row in rows)
    for padding in (0.0, np.nan, -np.inf):
        padded = [
            with_columns(row, **{n: np.where(row.loss_mask, row.columns[n], padding) for n in ("values", "returns")})
            for row in rows
        ]
        reports.append(build(model_path()).train_step(padded))
    assert reports[0] == reports[1] == reports[2]


def skip_on_two_ranks(path: str, rows: list[CollatedRow]) -> dict[str, Any]:
    mine = rows[:2] if dist.get_rank() == 0 else rows[2:]
    critic = build(path)
    first = critic.train_step(mine)
    before = critic.forward_values(mine)
    skipped = critic.train_step([broken(row, np.nan) for row in mine] if dist.get_rank() == 0 else mine)
    assert_same(critic.forward_values(mine), before)
    return {"first": first, "skipped": skipped.skipped, "next": critic.train_step(mine), "values": before}


@pytest.mark.slow
def test_a_return_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    one_rank: None, run_ranks: RunRanks, model_path: ModelPath
) -> None:
    """Trains on several ranks, whose start takes seconds."""
    path, rows = model_path(), valued_rows(7)
    first, second = run_ranks(2, skip_on_two_ranks, (path, rows))
    assert first["skipped"] and second["skipped"]
    assert first["first"] == second["first"] and first["next"] == second["next"]
    alone = build(path)
    assert alone.train_step(rows).metrics == pytest.approx(first["first"].metrics, rel=1e-3, abs=1e-5)
    for mine, theirs in zip(alone.forward_values(rows), first["values"] + second["values"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-3)


# ---------------------------------------------------------------------------------------------- files, company


@pytest.mark.slow
def test_training_resumes_bit_for_bit(one_rank: None, model_path: ModelPath, tmp_path: Path) -> None:
    config = configured(optim=OptimConfig(lr=1e-2, lr_warmup_steps=2, lr_scheduler_type="cosine"))
    batches = [valued_rows(5, seed) for seed in range(5)]
    critic = build(model_path(), config)
    for rows in batches[:2]:
        critic.train_step(rows)
    critic.learner.save(tmp_path / "critic", {})
    saved = critic.forward_values(batches[0])
    expected = [critic.train_step(rows) for rows in batches[2:]]

    resumed = build(model_path(), config, head=False)
    resumed.learner.load(tmp_path / "critic")
    assert_same(resumed.forward_values(batches[0]), saved)
    assert [resumed.train_step(rows) for rows in batches[2:]] == expected
    assert_same(resumed.forward_values(batches[0]), critic.forward_values(batches[0]))


def train_and_save(path: str, checkpoint: Path, rows: list[CollatedRow]) -> Any:
    mine = rows[:2] if dist.get_rank() == 0 else rows[2:]
    critic = build(path)
    critic.train_step(mine)
    critic.learner.save(checkpoint, {})
    return critic.forward_values(mine), critic.train_step(mine).metrics


def test_another_number_of_ranks_can_go_on(
    one_rank: None, run_ranks: RunRanks, model_path: ModelPath, tmp_path: Path
) -> None:
    """The head has one row: a rank has none of it. Over 5 s where it is the first to start the ranks."""
    rows = valued_rows(6)
    (first, metrics), (second, _) = run_ranks(2, train_and_save, (model_path(), tmp_path / "critic", rows))
    alone = build(model_path(), head=False)
    alone.learner.load(tmp_path / "critic")
    for mine, theirs in zip(alone.forward_values(rows), first + second, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert alone.train_step(rows).metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_a_policys_checkpoint_is_not_a_critics(one_rank: None, model_path: ModelPath, tmp_path: Path) -> None:
    policy = FsdpEngine(
        model_path=model_path(),
        config=configured(),
        total_optimizer_steps=1,
        mesh=TrainMesh.make(ParallelConfig(), CPU),
    )
    policy.learner.save(tmp_path / "policy", {})
    with pytest.raises(ModelError, match="does not fit this model"):
        build(model_path()).learner.load(tmp_path / "policy")


def test_policy_and_critic_in_one_process_leave_each_other_alone(one_rank: None, model_path: ModelPath) -> None:
    rows, config = valued_rows(4), configured()
    critic, lone_critic = build(model_path()), build(model_path())
    policy, lone_policy = (
        FsdpEngine(
            model_path=model_path(), config=config, total_optimizer_steps=5, mesh=TrainMesh.make(ParallelConfig(), CPU)
        )
        for _ in range(2)
    )
    for _ in range(2):
        policy.train_step(rows, StepContext())
        critic.train_step(rows)
    lone_reports = [lone_critic.train_step(rows) for _ in range(2)]
    for _ in range(2):
        lone_policy.train_step(rows, StepContext())
    assert critic.train_step(rows) == lone_critic.train_step(rows) != lone_reports[0]
    assert_same(policy.forward_logprobs(rows), lone_policy.forward_logprobs(rows))
