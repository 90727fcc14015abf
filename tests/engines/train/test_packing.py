"""Packed rows through the engines: log-probs, values and gradients are those of padded rows, and of rows one by one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.distributed.tensor import DTensor
from transformers import BloomConfig, BloomForCausalLM

from headway.config.schema import Config, RolloutConfig
from headway.config.sections.learning import ActorConfig, AlgorithmConfig, CriticConfig, ParallelConfig
from headway.config.sections.losses import LOSSES
from headway.config.sections.model_section import ModelConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow, Packing
from headway.data.types import TrajectoryId
from headway.engines.train.fsdp import sharded_module
from headway.engines.train.fsdp.column_engines import FsdpCritic, LogProbCopy
from headway.engines.train.fsdp.device_mesh import TrainMesh
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.train.fsdp.micro_batches import filler_row
from headway.engines.train.fsdp.objective import NOTHING_APART, Objective
from headway.engines.train.fsdp.sharded_module import forward_sharded, frozen_policy
from headway.engines.weights.weight_layout import build_manifest
from headway.models import logprobs
from headway.models.attention import packed_layout
from headway.models.attention.packed_attention import NAME
from headway.models.pretrained import load_model
from tests.engines.train.rows import VOCABULARY, plain_loss, response_logprobs
from tests.tiers import mostly_slow

ModelPath = Callable[..., str]
RunRanks = Callable[..., list[Any]]
Gradient = dict[str, torch.Tensor]
CPU = torch.device("cpu")
TEMPERATURE = 0.8
EVERYTHING = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}
ROOMY = 100_000
BUDGETS = (ROOMY, 70, 30, 1)
"""All in one micro-batch; several groups in one; groups that are cut; rows by themselves."""
WAYS = [("packed", ROOMY), ("packed", 50), ("shared", 30), ("shared", ROOMY), ("shared", 70), ("shared", 1)]


def fetch(seed: int, groups: int = 3) -> list[CollatedRow]:
    """Groups of one to four episodes; some of several rows, that fork or go on where the one before has ended."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> NDArray[np.int32]:
        return rng.integers(2, VOCABULARY, int(rng.integers(low, high))).astype(np.int32)

    rows = []
    for group in range(groups):
        prompt = tokens(1, 20)
        for k in range(int(rng.integers(1, 5))):
            begins = prompt
            for _ in range(int(rng.integers(1, 4))):
                ids = np.concatenate([begins, tokens(1, 16)])
                rows.append(_row(rng, ids, len(begins), TrajectoryId(0, group, 0, k)))
                begins = (prompt, ids, ids[: max(len(prompt), len(ids) - 3)])[int(rng.integers(3))]
    return rows


def _row(rng: np.random.Generator, ids: NDArray[np.int32], prompt: int, episode: TrajectoryId) -> CollatedRow:
    n = len(ids) - prompt
    behaviour = (-np.log(VOCABULARY) + 0.3 * rng.standard_normal(n)).astype(np.float32)
    near = {
        name: (behaviour + 0.1 * rng.standard_normal(n)).astype(np.float32)
        for name in ("ref_logprobs", "prox_logprobs")
    }
    free = {name: rng.standard_normal(n).astype(np.float32) for name in ("advantages", "values", "returns")}
    return CollatedRow(
        input_ids=ids,
        prompt_length=prompt,
        logprobs=behaviour,
        versions=np.full(n, 2, np.int32),
        loss_mask=rng.random(n) < 0.9,
        columns={**near, **free},
        episode=episode,
    )


def configured(packing: str, budget: int = ROOMY, *, loss: str = "ppo_clip", **model: Any) -> Config:
    return Config(
        actor=ActorConfig.model_validate({**EVERYTHING, "ppo_max_token_len_per_gpu": budget}),
        rollout=RolloutConfig(temperature=TEMPERATURE),
        model=ModelConfig.model_validate({"packing": packing, **model}),
        algorithm=AlgorithmConfig.model_validate({"policy_loss": {"loss_mode": loss}}),
        critic=CriticConfig(cliprange_value=0.5),
    )


def built(path: str, config: Config) -> FsdpEngine:
    return FsdpEngine(
        model_path=path, config=config, total_optimizer_steps=1, mesh=TrainMesh.make(ParallelConfig(), CPU)
    )


def gradient_of(engine: FsdpEngine, rows: Sequence[CollatedRow]) -> tuple[Gradient, dict[str, float]]:
    """Gradient and metrics of this rank's rows, as `FsdpEngine.train_step` has them before its step."""
    whole = engine._objective.looks_at_sequences
    part = partial(engine._part, StepContext(version=3), apart=engine._apart(rows) if whole else NOTHING_APART)
    metrics = engine.learner._backward(rows, part, whole_episodes=whole)
    del metrics["tokens_saved"]  # which is what packings differ in
    grads = {}
    for name, parameter in engine._policy.lm.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        grads[name] = parameter.grad.full_tensor().clone()
    engine.learner._forget_grads()
    return grads, metrics


def look(path: str, config: Config, shares: list[list[CollatedRow]]) -> tuple[Gradient, dict[str, float], list[Any]]:
    engine, rows = built(path, config), shares[dist.get_rank()]
    return (*gradient_of(engine, rows), engine.forward_logprobs(rows))


def assert_close(actual: Gradient, expected: Gradient, tolerance: float = 1e-5) -> None:
    """Compare norms of differences with norms, or with a hundredth of the whole gradient's for what is nearly zero."""
    whole = float(torch.stack([grad.double().norm() for grad in expected.values()]).norm())
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        error = float((actual[name].double() - grad.double()).norm())
        assert error <= tolerance * max(float(grad.double().norm()), 0.01 * whole), name


def assert_same_numbers(actual: Sequence[NDArray[Any]], expected: Sequence[NDArray[Any]]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------- the policy


def test_the_batches_of_these_tests_fork_and_are_cut() -> None:
    rows = fetch(0)
    one_line, cut = Packing(ROOMY)(rows), Packing(30)(rows)
    tokens = sum(len(row.input_ids) for row in rows)
    assert sum(pack.tokens for pack in one_line) < 0.8 * tokens
    assert any(sum(tree.segments.parents >= 1) for pack in one_line for tree in pack.trees)
    assert len(cut) > 3
    assert Packing(30).apart(rows, Packing(30)(rows, whole_episodes=True))


@mostly_slow(
    ("architecture", "seed", "ways"),
    [*product(["qwen3", "llama"], range(3), [WAYS]), ("qwen3", 0, WAYS[1:4])],
    quick=[("qwen3", 0, WAYS[1:4])],
)
def test_packed_rows_have_the_gradient_of_padded_ones_and_of_the_loss_written_out(
    one_rank: None, model_path: ModelPath, architecture: str, seed: int, ways: list[tuple[str, int]]
) -> None:
    """Takes seconds: gradients of a batch in float64, once for each packing and budget."""
    path, rows = model_path(architecture, seed > 0), fetch(seed)
    model, config = load_model(path, dtype=torch.float64), configured("padded")
    loss = plain_loss(model, [_without_prox(row) for row in rows], config)
    loss.backward()
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected, metrics, logprobs = look(path, config, [[_without_prox(row) for row in rows]])
    assert_close(expected, plain)
    for row, values in zip(rows, logprobs, strict=True):
        single = response_logprobs(model, row, TEMPERATURE)[0].detach().numpy()
        np.testing.assert_allclose(values, single, atol=1e-5)
    for packing, budget in ways:
        grads, found, own = look(path, configured(packing, budget), [[_without_prox(row) for row in rows]])
        assert_close(grads, expected)
        assert_same_numbers(own, logprobs)
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def _without_prox(row: CollatedRow) -> CollatedRow:
    return replace(row, columns={name: values for name, values in row.columns.items() if name != "prox_logprobs"})


def test_packed_rows_have_the_same_gradient_on_any_number_of_ranks_with_layers_recomputed(
    one_rank: None, run_ranks: RunRanks, model_path: ModelPath
) -> None:
    """Groups are on one rank, or on several; one rank has more micro-batches than the others, and one has no rows.

    Over 5 s where it is the first to start the ranks: they are processes that import torch.
    """
    path, rows = model_path(), fetch(4, groups=4)
    expected, metrics, logprobs = look(path, configured("padded"), [rows])
    recompute = partial(configured, "shared", enable_gradient_checkpointing=True)
    assert_close(look(path, recompute(30), [rows])[0], expected)
    cases: list[tuple[list[list[CollatedRow]], int]] = [
        ([rows[::2], rows[1::2]], 40),
        ([rows[:1], [], rows[1:]], 60),
    ]
    for shares, budget in cases:
        results = run_ranks(len(shares), look, (path, recompute(budget), shares))
        for share, (grads, found, own) in zip(shares, results, strict=True):
            assert_close(grads, expected)
            assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)
            places = [next(i for i, row in enumerate(rows) if row is mine) for mine in share]
            assert_same_numbers(own, [logprobs[i] for i in places])


@pytest.mark.slow
def test_every_policy_loss_has_the_gradient_of_padded_rows(one_rank: None, model_path: ModelPath) -> None:
    """By two engines that each loss is given to: to open a model takes longer than a gradient."""
    engines = [built(model_path(), configured(packing)) for packing in ("padded", "shared")]
    for loss in sorted(LOSSES):
        rows = fetch(5)
        if loss == "t_ppo":  # it takes no episodes of several rows
            rows = [replace(row, episode=replace_k(row.episode, i)) for i, row in enumerate(rows)]
        for engine in engines:
            engine._objective = Objective(configured("shared", loss=loss))
        (expected, metrics), (grads, found) = (gradient_of(engine, rows) for engine in engines)
        assert max(float(grad.abs().max()) for grad in expected.values()) > 1e-4, loss
        assert_close(grads, expected, 2e-5)
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6), loss


def replace_k(episode: TrajectoryId | None, k: int) -> TrajectoryId:
    assert episode is not None
    return TrajectoryId(*episode[:-1], k)


@mostly_slow("budget", [25, 1], quick=[25])
def test_a_sequence_whose_episode_is_in_several_packed_micro_batches_has_the_ratio_of_the_whole(
    one_rank: None, model_path: ModelPath, budget: int
) -> None:
    path, rows = model_path(), fetch(6)
    assert Packing(budget).apart(rows, Packing(budget)(rows, whole_episodes=True))
    expected, metrics, _ = look(path, configured("padded", loss="gspo"), [rows])
    grads, found, _ = look(path, configured("shared", budget, loss="gspo"), [rows])
    assert_close(grads, expected)
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_half_precision_has_about_the_gradient_of_padded_rows(one_rank: None, model_path: ModelPath) -> None:
    rows = fetch(7)
    expected, _, logprobs = look(model_path(), configured("padded"), [rows])
    grads, _, own = look(model_path(), configured("shared", 60, dtype="bfloat16"), [rows])
    for one, other in zip(own, logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05)
    assert_close(grads, expected, 0.1)


def test_all_layers_attend_by_the_same_parts(
    one_rank: None, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 copies what it knows how to look into among a layer's arguments, and each copy would make its own."""
    made: list[int] = []
    items = packed_layout._items
    monkeypatch.setattr(packed_layout, "_items", lambda *of: made.append(1) or items(*of))
    engine, rows = built(model_path(), configured("shared")), fetch(3)
    made.clear()  # opening the model tries its attention
    engine.forward_logprobs(rows)
    assert len(made) == len(engine._policy.packing(rows)) < len(engine._policy.decoder_layers)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled yet, chunks of log-probs are short, and graphs run as they are, without other kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(logprobs, "default_chunk_tokens", lambda *_: 7)
    logprobs._compiled.cache_clear()
    torch._dynamo.reset()
    clear_compilation_metrics()


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_parts_have_the_gradient_of_rows_one_by_one(
    one_rank: None, model_path: ModelPath, compiling: None, recompute: bool
) -> None:
    """Slow, as torch's compiler is imported and traces: half a minute."""
    rows = fetch(8)
    _, metrics, expected = look(model_path(), configured("shared", 60), [rows])
    config = configured("shared", 60, compile=True, enable_gradient_checkpointing=recompute)
    grads, found, own = look(model_path(), config, [rows])
    model = load_model(model_path(), dtype=torch.float64)
    plain_loss(model, rows, config).backward()
    assert_close(grads, {name: parameter.grad for name, parameter in model.named_parameters()}, 1e-4)
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert_same_numbers(own, expected)


@pytest.mark.slow
def test_steps_of_all_kinds_are_compiled_in_few_variants(
    one_rank: None, model_path: ModelPath, compiling: None
) -> None:
    """Slow, as torch's compiler is imported and traces: half a minute.

    Rows of many lengths, packed and with shared prompts, kept and recomputed activations, with a gradient and without:
    one variant more of each of a layer's four graphs, which attention divides it into, and none of the log-probs'.
    """
    for packing, recompute in (("shared", False), ("packed", False), ("shared", True)):
        config = configured(packing, 60, compile=True, enable_gradient_checkpointing=recompute, dtype="bfloat16")
        engine = built(model_path(), config)
        for seed in range(3):
            rows = fetch(seed, groups=1 + 2 * seed)
            engine.forward_logprobs(rows)
            gradient_of(engine, rows)
        engine.forward_logprobs([filler_row()])
    compiled = get_compilation_metrics()
    again = [f"{of.co_name}: {of.recompile_reason}" for of in compiled if of.recompile_reason]
    assert {"_logprobs", "_chunk_gradient"} < {of.co_name for of in compiled}
    assert all(of.graph_op_count for of in compiled), "something was compiled that computes nothing"
    assert len(again) <= 4, again


# ---------------------------------------------------------------------------------------------- the other roles


@mostly_slow("budget", BUDGETS, quick=[30])
def test_the_critic_has_the_values_and_the_gradient_of_padded_rows(
    one_rank: None, model_path: ModelPath, budget: int
) -> None:
    rows = fetch(8)
    found = []
    for config in (configured("padded"), configured("shared", budget)):
        critic = FsdpCritic(
            model_path=model_path(), config=config, total_optimizer_steps=1, mesh=TrainMesh.make(ParallelConfig(), CPU)
        )
        head = critic._module.value_head.weight
        assert isinstance(head, DTensor)
        head.detach().to_local().copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(3)))
        values = critic.forward_values(rows)
        metrics = critic.learner._backward(rows, critic._part)
        del metrics["tokens_saved"]
        found.append((values, {n: p.grad.full_tensor() for n, p in critic._module.named_parameters()}, metrics))
    (expected, grads, metrics), (values, own, own_metrics) = found
    assert_same_numbers(values, expected)
    assert_close(own, grads)
    assert own_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@mostly_slow("budget", BUDGETS, quick=[30])
def test_reference_and_copy_of_the_policy_have_the_log_probs_of_rows_one_by_one(
    one_rank: None, model_path: ModelPath, budget: int
) -> None:
    path, rows = model_path("qwen2", False), fetch(9)
    model = load_model(path, dtype=torch.float64)
    expected = [response_logprobs(model, row, TEMPERATURE)[0].detach().numpy() for row in rows]
    reference = frozen_policy(path, configured("shared", budget), TrainMesh.make(ParallelConfig(), CPU))
    assert_same_numbers(forward_sharded(reference, rows), expected)
    held = load_model(path, dtype=torch.float32)
    copy = LogProbCopy(
        model_path=path,
        config=configured("shared", budget),
        mesh=TrainMesh.make(ParallelConfig(), CPU),
        name="copy",
        manifest=build_manifest((name, tuple(p.shape), p.dtype) for name, p in held.named_parameters()),
        receive=lambda *_: None,
    )
    assert copy._policy.padded is None
    assert_same_numbers(copy.proximal_logprobs(rows, 0), expected)
    copy.close()


# ---------------------------------------------------------------------------------------------- models that are refused


def dynamic(folder: Path, path: str) -> str:
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def bloom(folder: Path, _: str) -> str:
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2)
    BloomForCausalLM(config).save_pretrained(folder)
    return str(folder)


@mostly_slow(
    ("made", "reason"),
    [(dynamic, "depends on the longest"), (bloom, "attention is its own")],
    quick=[(bloom, "attention is its own")],
    ids=["rope", "bloom"],
)
def test_a_model_that_cannot_be_packed_is_trained_with_padded_rows(
    one_rank: None, model_path: ModelPath, tmp_path: Path, made: Callable[[Path, str], str], reason: str
) -> None:
    path, rows = made(tmp_path / "model", model_path("llama")), fetch(10)
    rows = [_without_prox(row) for row in rows]
    engine = built(path, configured("shared", 70))
    assert reason in (engine.padded or "")
    grads, _ = gradient_of(engine, rows)
    model = load_model(path, dtype=torch.float64)
    plain_loss(model, rows, configured("padded")).backward()
    assert_close(grads, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, 2e-5)
    before, _ = gradient_of(built(path, configured("padded", 70)), rows)
    assert all(torch.equal(grads[name], grad) for name, grad in before.items())


@pytest.mark.slow
def test_a_refused_model_is_padded_on_every_rank(
    one_rank: None, run_ranks: RunRanks, model_path: ModelPath, tmp_path: Path
) -> None:
    path, rows = bloom(tmp_path / "model", ""), fetch(11)
    expected, *_ = look(path, configured("padded"), [rows])
    for grads, *_ in run_ranks(2, look, (path, configured("shared", 60), [rows[:3], rows[3:]])):
        assert_close(grads, expected)


@pytest.mark.parametrize(("rank", "set_to"), [(0, ["sdpa"]), (1, [])])
def test_where_another_rank_cannot_pack_one_that_could_attends_as_before(
    rank: int, set_to: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_module, "on_all_ranks", lambda try_out: (None, "no kernel"))
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    told: list[str] = []
    lm: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"), set_attn_implementation=told.append)
    assert sharded_module._agreed(lm, lambda: None) == "no kernel"
    assert told == set_to


def test_a_packed_model_is_exported_with_its_own_attention(
    one_rank: None, model_path: ModelPath, tmp_path: Path
) -> None:
    engine = built(model_path(), configured("shared"))
    assert engine.padded is None
    engine.export(tmp_path / "exported")
    assert NAME not in (tmp_path / "exported" / "config.json").read_text()


def test_the_share_of_tokens_that_are_not_computed_is_a_metric(one_rank: None, model_path: Callable[..., str]) -> None:
    """Eight rows of 4 tokens behind a prompt of 6; padded to the longest, or each whole, there is nothing to save."""
    rows = [
        CollatedRow(
            input_ids=np.array([3, 4, 5, 6, 7, 8, k, 9, 10, 11], np.int32),
            prompt_length=6,
            logprobs=np.full(4, -2.0, np.float32),
            versions=np.zeros(4, np.int32),
            loss_mask=np.ones(4, np.bool_),
            columns={"advantages": np.ones(4, np.float32)},
            episode=TrajectoryId(0, 0, 0, k),
        )
        for k in range(8)
    ]
    saved = {}
    for packing in ("shared", "packed", "padded"):
        config = Config.model_validate({"model": {"packing": packing}})
        engine = FsdpEngine(
            model_path=model_path(), config=config, total_optimizer_steps=1, mesh=TrainMesh.make(ParallelConfig(), CPU)
        )
        saved[packing] = engine.train_step(rows, StepContext(0)).metrics["tokens_saved"]
    assert saved == pytest.approx({"shared": 1 - 38 / 80, "packed": 0.0, "padded": 0.0})
