"""What ``headway doctor`` and ``--dry-run`` say of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli import cli, settings_summary
from headway.config.loading import load

RECIPE = """
mode: async_partial
model: {make: {hidden_size: 64}}
data: {task: {name: sort}, max_prompt_length: 40, max_response_length: 40}
reward: {function: task}
rollout: {total_rollout_steps: 768}
actor: {ppo_mini_batch_size: 16}
cluster: {device: cpu}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_the_table_has_eighty_columns_and_a_sum_for_each_kind_of_process(recipe: str) -> None:
    settings = ["trainer.n_gpus_per_node=4", "actor.use_kl_loss=true", "param_update.encoding=delta"]
    lines = list(settings_summary.memory_lines(load(Path(recipe), settings).config))
    table = [line for line in lines if not line.startswith(("note", "  *"))]
    assert max(map(len, table)) <= 80
    assert [line for line in lines if " × " in line] == [
        "trainer rank × 4",
        "replica × 1",
        "machine with replicas × 1",
        "machine with episode workers × 1",
    ]
    assert sum(line.startswith("  at most") for line in lines) == 4
    for name in ("weights, float32", "weights of the reference", "copy of what is sent", "keys and values"):
        assert any(line.startswith(f"  {name}") for line in lines), name


def test_the_doctor_has_the_table_and_a_dry_run_one_line(recipe: str) -> None:
    assert "trainer rank × 1" in CliRunner().invoke(cli, ["doctor", recipe]).output
    (line,) = [
        line
        for line in CliRunner().invoke(cli, ["train", recipe, "--dry-run"]).output.splitlines()
        if line.startswith("# memory: ")
    ]
    assert "at most trainer rank " in line


def test_nothing_is_said_of_a_model_whose_sizes_are_not_known(recipe: str, tmp_path: Path) -> None:
    config = load(Path(recipe), [f"model.path={tmp_path}/nowhere", "model.make=null", "model.warmup=null"]).config
    assert list(settings_summary.memory_lines(config)) == []
    assert settings_summary.memory_in_short(config) is None


def test_what_does_not_fit_the_machine_is_said(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.devices.memory_listed_here", lambda *, on_cpu: 1_000_000)
    *_, note = settings_summary.memory_lines(load(Path(recipe), []).config)
    assert note.startswith("note: all processes together take up to ")
    assert note.endswith("this machine has 1.0 MB")


def seven_billion(tmp_path: Path, *settings: str) -> list[str]:
    """The doctor's lines for a model of 7 B on a machine of eight GPUs of 80 GB, which vLLM shares with the trainer."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, '
        '"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": false}'
    )
    shared = ["cluster.device=cuda", "cluster.placement=shared", "rollout.name=vllm", "mode=on_policy"]
    lengths = ["data.max_prompt_length=2048", "data.max_response_length=8192"]
    model = [f"model.path={tmp_path}", "model.make=null", "model.warmup=null"]
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return list(settings_summary.memory_lines(load(path, [*shared, *lengths, *model, *settings]).config))


def test_the_doctor_says_what_vllm_takes_of_gpus_that_a_trainer_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM starts before the optimizer has its moments, and wakes up when it has them: that is what it gets."""
    monkeypatch.setattr("headway.devices.memory_listed_here", lambda *, on_cpu: 80 * 10**9)
    parameters = 7.615616512e9
    held, prefix = 16 * parameters / 8, "note: vLLM takes "
    (note,) = [line for line in seven_billion(tmp_path, "trainer.n_gpus_per_node=8") if line.startswith(prefix)]
    share = float(note.partition("gpu_memory_utilization=")[2][:4])
    assert share == pytest.approx(0.9 - held / 80e9, abs=0.005)
    offload = ["trainer.n_gpus_per_node=8", "actor.fsdp_config.param_offload=true"]
    (note,) = [line for line in seven_billion(tmp_path, *offload) if line.startswith(prefix)]
    assert "gpu_memory_utilization=0.90" in note


def test_the_doctor_says_where_a_replica_would_not_wake_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.devices.memory_listed_here", lambda *, on_cpu: 80 * 10**9)
    *_, problem = seven_billion(tmp_path, "trainer.n_gpus_per_node=2")
    assert problem.startswith("problem: a replica takes ")
    assert "of which the training rank on it holds 60.9" in problem
    assert "actor.fsdp_config.param_offload=true" in problem


def test_the_doctor_does_not_say_that_there_is_none_below_a_problem(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(Path(recipe), [])
    for lines, said in ((["note: it is large"], True), (["problem: a replica takes more than there is"], False)):
        monkeypatch.setattr(settings_summary, "memory_lines", lambda config, lines=lines: iter(lines))
        settings_summary.print_summary(loaded)
        assert (lines[0] in (output := capsys.readouterr().out), "no problems found" in output) == (True, said)
