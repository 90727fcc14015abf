"""A model on four ranks in every kind of mesh, against the same model on one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headway.config.schema import Config
from headway.config.sections.learning import ActorConfig, OptimConfig, ParallelConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow
from headway.data.types import ColumnName
from headway.engines.train.fsdp import sharded_module as modules
from headway.engines.train.fsdp.column_engines import FsdpCritic, LogProbCopy
from headway.engines.train.fsdp.device_mesh import TrainMesh, on_all_ranks
from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.train.fsdp.sharded_module import forward_sharded, frozen_policy
from headway.engines.train.fsdp.shards import gather, given_parts
from headway.engines.weights.outgoing_version import Stream
from headway.engines.weights.protocols import IncomingWeights
from headway.engines.weights.transports.disk import INDEX, write_files
from headway.engines.weights.weight_layout import Manifest
from headway.errors import ModelError
from headway.models.pretrained import load_model
from tests.engines.train.families import FAMILIES, make_family
from tests.engines.train.rows import random_rows, with_columns

OnMesh = Callable[..., list[Any]]
CPU = torch.device("cpu")
RANKS = 4
PLAIN = ParallelConfig()
DENSE = [{"tp": 2, "cp": 2}, {"cp": 4}, {"replicate": 2, "tp": 2}]
EXPERTS = [{"tp": 2, "cp": 2, "ep": 4}, {"replicate": 2, "cp": 2, "ep": 2}, {"tp": 2}, {"ep": 4}]
ALL = [*DENSE, *EXPERTS, {"cp": 2}, {"replicate": 2}, {"ep": 2}, {"tp": 2, "ep": 4}]
MESHES = {
    "qwen3-moe": ALL,
    "qwen3-moe-odd": [{"tp": 2, "cp": 2}, {"tp": 2, "ep": 2}],
    "mixtral": EXPERTS,
    "glm4-moe": EXPERTS,
    "gpt2": [{"cp": 4}, {"replicate": 2}],  # transformers cannot divide it over tp
    "bloom": [{"replicate": 2}],  # nor this, whose attention is its own
}
QUICK = [("qwen3-moe", {"tp": 2, "cp": 2, "ep": 4})]
Case = tuple[str, dict[str, int]]


@dataclass
class Found:
    """What one rank sees of a mini-batch."""

    metrics: dict[str, float]
    gradient: NDArray[np.float32]
    """All of it, in the layout of the weights."""
    weights: NDArray[np.float32]
    share: tuple[int, bytes]
    """Bytes of the weights that this rank would send as one of three, and their offset."""
    logprobs: list[NDArray[np.float32]]
    """Of the rows of its data rank."""
    values: list[NDArray[np.float32]]
    reference: list[NDArray[np.float32]]


def configured(parallel: ParallelConfig) -> Config:
    return Config(
        actor=ActorConfig(ppo_max_token_len_per_gpu=64 // parallel.cp, parallel=parallel, optim=OptimConfig(lr=1e-2))
    )


def mesh_of(parallel: ParallelConfig) -> TrainMesh:
    return TrainMesh.make(parallel, CPU)


def engine(path: str, parallel: ParallelConfig, mesh: TrainMesh | None = None) -> FsdpEngine:
    return FsdpEngine(
        model_path=path, config=configured(parallel), total_optimizer_steps=10, mesh=mesh or mesh_of(parallel)
    )


def share(rows: Sequence[CollatedRow], parallel: ParallelConfig) -> list[CollatedRow]:
    """Rows of this data rank: the last one has most."""
    ranks, rank = dist.get_world_size() // parallel.inner, dist.get_rank() // parallel.inner
    return [row for i, row in enumerate(rows) if min(i, ranks - 1) == rank]


def flat(of: FsdpEngine, tensors: dict[str, torch.Tensor] | None = None) -> NDArray[np.float32]:
    layout = of.manifest(torch.float32)
    if tensors is None:
        windows = of.gather(layout, 1024, everywhere=True)
    else:
        windows = gather(given_parts(tensors, of._files), layout, 1024, of._mesh, everywhere=True)
    return np.frombuffer(b"".join(bytes(window.numpy()) for _, window in windows), np.float32)


def sent_share(of: FsdpEngine) -> tuple[int, bytes]:
    windows = [(at, bytes(data.numpy())) for at, data in of.gather(of.manifest(torch.float32, most_senders=3), 1024)]
    return (windows[0][0] if windows else 0), b"".join(data for _, data in windows)


def look(path: str, parallel: ParallelConfig, rows: Sequence[CollatedRow], beside: bool) -> Found:
    mesh, mine = mesh_of(parallel), share(rows, parallel)
    policy = engine(path, parallel, mesh)
    logprobs = policy.forward_logprobs(mine)
    metrics = policy.learner._backward(mine, partial(policy._part, StepContext()))
    grads = {name: parameter.grad for name, parameter in policy._policy.lm.named_parameters()}
    values, reference = [], []
    if beside:
        config = configured(parallel)
        critic = FsdpCritic(model_path=path, config=config, total_optimizer_steps=9, mesh=mesh)
        critic.train_step([with_columns(row, **critics_columns(row)) for row in mine])
        values = critic.forward_values(mine)
        reference = forward_sharded(frozen_policy(path, config, mesh), mine)
    return Found(metrics, flat(policy, grads), flat(policy), sent_share(policy), logprobs, values, reference)


def critics_columns(row: CollatedRow) -> dict[str, NDArray[np.float32]]:
    of = row.columns["advantages"]
    return {ColumnName.RETURNS: of, ColumnName.VALUES: np.zeros_like(of)}


def look_at_all(cases: Sequence[tuple[str, ParallelConfig]], rows: Sequence[CollatedRow], beside: bool) -> list[Found]:
    return [look(path, parallel, rows, beside) for path, parallel in cases]


def check(on_mesh: OnMesh, root: Path, cases: Sequence[Case], beside: bool = False) -> None:
    rows = random_rows(6)
    paths = {name: make_family(name, root / name) for name in {name for name, _ in cases}}
    alone = {name: look(path, PLAIN, rows, beside) for name, path in paths.items()}
    meshes = [(paths[name], ParallelConfig.model_validate(sizes)) for name, sizes in cases]
    of_ranks = on_mesh(look_at_all, (meshes, rows, beside))
    for number, ((name, sizes), (_, parallel)) in enumerate(zip(cases, meshes, strict=True)):
        expected, which = alone[name], f"{name} {sizes}"
        senders = [of[number].share for of in of_ranks[: RANKS // parallel.replicate][:3]]
        assert all(not data for _, data in (of[number].share for of in of_ranks[len(senders) :])), which
        assert b"".join(data for _, data in senders) == expected.weights.tobytes(), which
        assert [at for at, _ in senders] == [sum(len(of) for _, of in senders[:k]) for k in range(len(senders))], which
        for rank, found in enumerate(of[number] for of in of_ranks):
            assert found.metrics.keys() == expected.metrics.keys()
            for key, value in expected.metrics.items():
                if key != "tokens_saved":  # how lines are padded
                    assert found.metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-5), (which, key)
            np.testing.assert_array_equal(found.weights, expected.weights, which)
            largest = float(np.abs(expected.gradient).max())
            np.testing.assert_allclose(found.gradient, expected.gradient, atol=1e-5 * largest, rtol=1e-5, err_msg=which)
            ranks, own = RANKS // parallel.inner, rank // parallel.inner
            mine = [i for i in range(len(rows)) if min(i, ranks - 1) == own]
            for ours, whole in ((found.logprobs, expected.logprobs), (found.values, expected.values)):
                for place, values in zip(mine, ours, strict=False):
                    np.testing.assert_allclose(values, whole[place], atol=1e-5, err_msg=which)
            assert len(found.logprobs) == len(mine)
            for place, values in zip(mine, found.reference, strict=False):
                np.testing.assert_allclose(values, found.logprobs[mine.index(place)], atol=1e-5, err_msg=which)


def test_loss_gradient_and_norm_on_four_ranks_are_those_of_one(one_rank: None, on_mesh: OnMesh, tmp_path: Path) -> None:
    """Takes some seconds: four ranks on two cores, each of which makes process groups for every mesh."""
    check(on_mesh, tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_on_every_mesh_what_it_does_on_one_rank(
    one_rank: None, on_mesh: OnMesh, tmp_path: Path, name: str
) -> None:
    """Takes up to half a minute: of one family all meshes, with a critic and a reference beside the policy."""
    meshes = MESHES.get(name, DENSE)
    check(on_mesh, tmp_path, [(name, sizes) for sizes in meshes], beside=meshes is ALL)


def test_experts_of_a_width_that_no_grouped_product_takes_are_computed(one_rank: None, tmp_path: Path) -> None:
    path, [row] = make_family("qwen3-moe-odd", tmp_path / "odd"), random_rows(1)
    policy = engine(path, PLAIN)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    np.testing.assert_allclose(policy.forward_logprobs([row])[0], logprobs_of(plain, row), atol=1e-5)
    assert policy.train_step([row], StepContext()).metrics["grad_norm"] > 0


@pytest.mark.parametrize("width", [16, 10])
def test_experts_are_computed_together_wherever_their_own_width_permits(width: int, tmp_path: Path) -> None:
    """A convolution's weights have three dimensions, too, and say nothing of experts."""
    config = AutoConfig.for_model(
        "qwen3_next",
        vocab_size=24,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=width,
        shared_expert_intermediate_size=16,
        intermediate_size=32,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32)
    assert model.config._experts_implementation == ("eager" if width % 8 else "grouped_mm")


def look_in_short_chunks(path: str, parallel: ParallelConfig, rows: Sequence[CollatedRow]) -> Found:
    with patch.object(modules, "default_chunk_tokens", lambda vocabulary, device: 100 // vocabulary):
        return look(path, parallel, rows, beside=False)


@pytest.mark.slow
def test_ranks_with_unequal_parts_of_the_vocabulary_meet_in_each_chunk(
    one_rank: None, on_mesh: OnMesh, tmp_path: Path
) -> None:
    """Takes some seconds: four ranks. Of 19 tokens one has 10 and another 9."""
    path, rows = make_family("llama-odd", tmp_path / "odd"), random_rows(4)
    alone = look(path, PLAIN, rows, beside=False)
    for found in on_mesh(look_in_short_chunks, (path, ParallelConfig(tp=2), rows)):
        assert found.metrics["grad_norm"] == pytest.approx(alone.metrics["grad_norm"], rel=1e-5)


# ------------------------------------------------------------------------------------------ files


def logprobs_of(model: PreTrainedModel, row: CollatedRow) -> NDArray[np.float32]:
    ids = torch.from_numpy(row.input_ids.astype(np.int64))[None]
    logp = model(ids).logits[0, row.prompt_length - 1 : -1].log_softmax(-1)
    found: NDArray[np.float32] = logp[torch.arange(len(logp)), ids[0, row.prompt_length :]].detach().numpy()
    return found


def train_and_write(
    path: str, parallel: ParallelConfig, rows: Sequence[CollatedRow], folder: Path
) -> NDArray[np.float32]:
    policy = engine(path, parallel)
    policy.train_step(share(rows, parallel), StepContext())
    policy.learner.save(folder / "checkpoint", {"version": 1})
    policy.export(folder / "model")
    return flat(policy)


def go_on(
    path: str, parallels: Sequence[ParallelConfig], rows: Sequence[CollatedRow], checkpoint: Path
) -> list[tuple[NDArray[np.float32], dict[str, float], NDArray[np.float32]]]:
    found = []
    for parallel in parallels:
        policy = engine(path, parallel)
        assert policy.learner.load(checkpoint) == {"version": 1}
        before = flat(policy)
        metrics = policy.train_step(share(rows, parallel), StepContext()).metrics
        found.append((before, metrics, flat(policy)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "phi3"])
def test_a_checkpoint_of_one_mesh_is_restored_on_others_with_the_optimizers_state(
    one_rank: None, on_mesh: OnMesh, tmp_path: Path, name: str
) -> None:
    """phi3 has fused matrices, of which each rank holds two stretches."""
    path, rows = make_family(name, tmp_path / name), random_rows(5)
    experts = {"ep": 4} if name == "qwen3-moe" else {}
    parallel = ParallelConfig(tp=2, cp=2, **experts)
    saved, *others = on_mesh(train_and_write, (path, parallel, rows, tmp_path))
    assert all(np.array_equal(saved, other) for other in others)
    meshes = [ParallelConfig(tp=2, replicate=2), ParallelConfig(cp=4)]
    results = on_mesh(go_on, (path, meshes, rows, tmp_path / "checkpoint"))[0]
    results += go_on(path, [PLAIN], rows, tmp_path / "checkpoint")
    for before, metrics, after in results:
        np.testing.assert_array_equal(before, saved)
        assert metrics["grad_norm"] == pytest.approx(results[-1][1]["grad_norm"], rel=1e-4)
        # A second step of AdamW: with the first one's moments it is smooth, without them each weight moves by lr.
        np.testing.assert_allclose(after, results[-1][2], atol=2e-4)


def test_a_checkpoint_of_another_models_sizes_is_refused(one_rank: None, tmp_path: Path) -> None:
    """Its names are the same."""
    engine(make_family("llama", tmp_path / "llama"), PLAIN).learner.save(tmp_path / "checkpoint", {})
    with pytest.raises(ModelError, match=r"does not fit .*rank 0: .*[Ss]ize"):
        engine(make_family("llama-odd", tmp_path / "odd"), PLAIN).learner.load(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("other", "how"), [("qwen3-moe", "it lacks .*experts"), ("llama", "it has .*_norm.*, which the model lacks")]
)
def test_a_checkpoint_with_tensors_of_another_model_is_refused(
    one_rank: None, tmp_path: Path, other: str, how: str
) -> None:
    """One that has more than the model, too: it would be restored in part."""
    engine(make_family("qwen3", tmp_path / "qwen3"), PLAIN).learner.save(tmp_path / "checkpoint", {})
    with pytest.raises(ModelError, match=how):
        engine(make_family(other, tmp_path / other), PLAIN).learner.load(tmp_path / "checkpoint")


def test_an_export_of_a_mesh_is_a_folder_with_the_files_names_that_transformers_opens(
    one_rank: None, on_mesh: OnMesh, tmp_path: Path
) -> None:
    """Each rank opens a model and writes its part."""
    path, rows = make_family("qwen3-moe", tmp_path / "of"), random_rows(5)
    saved = on_mesh(train_and_write, (path, ParallelConfig(tp=2, cp=2, ep=4), rows, tmp_path))[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    reopened = engine(str(tmp_path / "model"), PLAIN)
    np.testing.assert_array_equal(flat(reopened), saved)
    names = {slot.name for slot in reopened.manifest(torch.float32).slots}
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert {name for name, _ in model.named_parameters()} != names
    np.testing.assert_allclose(reopened.forward_logprobs(rows[:1])[0], logprobs_of(model, rows[0]), atol=1e-5)


def test_an_export_has_what_files_hold_beside_parameters(one_rank: None, tmp_path: Path) -> None:
    path = make_family("glm4-moe", tmp_path / "of")
    engine(path, PLAIN).export(tmp_path / "model")
    was, exported = (load_file(tmp_path / folder / "model.safetensors") for folder in ("of", "model"))
    assert was.keys() == exported.keys() and any(name.endswith("e_score_correction_bias") for name in was)
    assert all(torch.equal(was[name], exported[name]) for name in was)


def test_files_are_cut_between_tensors_and_the_index_names_them(one_rank: None, tmp_path: Path) -> None:
    path = make_family("qwen3-moe", tmp_path / "of")
    policy = engine(path, PLAIN)
    layout, folder = policy.manifest(torch.bfloat16), tmp_path / "sharded"
    folder.mkdir()
    write_files(folder, layout, policy.gather(layout, 1024), most=layout.nbytes // 3)
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) >= 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(index["weight_map"]) == sorted(slot.name for slot in layout.slots)
    assert index["metadata"]["total_size"] == layout.nbytes
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tmp_path / "of" / name).read_bytes())
    opened = dict(load_model(folder, dtype=torch.bfloat16).named_parameters())
    for name, parameter in load_model(path, dtype=torch.bfloat16).named_parameters():
        assert torch.equal(parameter, opened[name]), name


# ------------------------------------------------------------------------------------------ updates


def update_a_copy(
    path: str, parallels: Sequence[ParallelConfig], rows: Sequence[CollatedRow]
) -> list[tuple[float, float]]:
    """Largest differences of a copy's log-probs from the trainer's, before and after an update that it has got."""
    found = []
    for parallel in parallels:
        mesh, mine = mesh_of(parallel), share(rows, parallel)
        policy = engine(path, parallel, mesh)
        layout = policy.manifest(torch.float32)

        def receive(
            version: int, incoming: IncomingWeights, policy: FsdpEngine = policy, layout: Manifest = layout
        ) -> None:
            (sink,) = incoming.expect([incoming.manifest])
            stream = Stream(layout, policy.gather(layout, 1024, everywhere=True))
            for chunk in stream:
                sink.room(chunk.header).copy_(chunk.payload)
                sink.filled(chunk.header)
            sink.ended(stream.digests)

        copy = LogProbCopy(
            model_path=path, config=configured(parallel), mesh=mesh, name="logp", manifest=layout, receive=receive
        )
        policy.train_step(mine, StepContext())
        stale = _apart(copy.proximal_logprobs(mine, 0), policy.forward_logprobs(mine))
        asyncio.run(copy.stage_weights(1))
        copy.activate(1)
        found.append((stale, _apart(copy.proximal_logprobs(mine, 1), policy.forward_logprobs(mine))))
        copy.close()
    return found


def _apart(ours: Sequence[NDArray[np.float32]], theirs: Sequence[NDArray[np.float32]]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max((float(np.abs(a - b).max(initial=0.0)) for a, b in pairs), default=0.0)


@pytest.mark.slow
def test_a_copy_for_log_probs_keeps_its_part_of_an_update(on_mesh: OnMesh, tmp_path: Path) -> None:
    """Takes some seconds: a trainer and a copy on four ranks, in two meshes."""
    meshes = [ParallelConfig(tp=2, cp=2, ep=4), ParallelConfig(replicate=2, tp=2)]
    path = make_family("qwen3-moe", tmp_path / "moe")
    for of_rank in on_mesh(update_a_copy, (path, meshes, random_rows(6))):
        for stale, fresh in of_rank:
            assert stale > 1e-3 and fresh <= 1e-6


# ------------------------------------------------------------------------------------------ refusals


def refused(path: str, parallel: ParallelConfig) -> str:
    with pytest.raises(ModelError) as caught:
        engine(path, parallel)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("llama", {"ep": 2}, "actor.parallel.ep=2, and transformers has no plan for dividing a 'llama' model so"),
        pytest.param(
            *("gpt2", {"tp": 2}, "actor.parallel.tp=2, and transformers has no plan for dividing a 'gpt2' model so"),
            marks=pytest.mark.slow,
        ),
        ("bloom", {"cp": 2}, "actor.parallel.cp=2 divides packed lines of tokens, and this model's rows have to be"),
    ],
)
def test_a_mesh_that_the_model_cannot_have_is_refused_on_every_rank(
    on_mesh: OnMesh, tmp_path: Path, name: str, sizes: dict[str, int], said: str
) -> None:
    path = make_family(name, tmp_path / name)
    for message in on_mesh(refused, (path, ParallelConfig.model_validate(sizes))):
        assert said in message and path in message


@pytest.mark.parametrize(
    ("name", "sizes", "says", "said"),
    [
        ("qwen3-moe", {"tp": 2, "ep": 4}, {"num_hidden_layers": 3}, "the weights lack model.layers.2."),
        pytest.param(
            *("llama", {"tp": 2}, {"vocab_size": 20}, "their sizes are not those of config.json: "),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_weights_of_another_model_are_refused_on_every_rank_though_only_some_may_miss_them(
    on_mesh: OnMesh, tmp_path: Path, name: str, sizes: dict[str, int], says: dict[str, int], said: str
) -> None:
    path = make_family(name, tmp_path / name)
    file = tmp_path / name / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | says))
    for message in on_mesh(refused, (path, ParallelConfig.model_validate(sizes))):
        assert said in message and path in message


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_raises_is_raised_on_all_and_else_each_has_the_results_of_all(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Any] = [("its result", None)]

    def gathered(outcomes: list[Any], own: Any) -> None:
        outcomes[:] = [own, *others] if rank == 0 else [*others, own]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gathered)
    assert on_all_ranks(lambda: "mine") == (("mine", "its result") if rank == 0 else ("its result", "mine"))
    others[:] = [(None, ModelError("no such model"))]
    with pytest.raises(ModelError, match="no such model"):
        on_all_ranks(lambda: "mine")
