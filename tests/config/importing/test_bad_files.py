"""What is no file for ``headway import`` ends in one message: what was given, what was expected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli import cli

FILES = Path(__file__).parent / "files"
KINDS = "expected a shell script, a YAML, TOML or Python file, or a command line in quotes"


def message(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["import", *arguments])
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("a.yaml", "a: [1\n", "not valid YAML: "),
        ("a.yaml", "- 1\n", "expected a mapping of keys to values at the top"),
        ("a.yaml", "", "of no project that Headway knows (verl, TRL, AReaL, prime-rl, OpenRLHF): it has no settings"),
        ("a.yaml", "banana: {peel: 3}\n", "its settings are banana.peel; say --from where it is"),
        ("a.toml", "a = \n", "not valid TOML: "),
        ("a.toml", 'name = "x"\n', "of no project that Headway knows"),
        ("a.py", "def f(:\n", "not valid Python: "),
        ("a.py", "print(1)\n", "calls no GRPOConfig and no GRPOTrainer; of Python, files for TRL are read"),
        ("a.sh", "echo 'x\n", "a ' of the script is never closed; expected a shell script"),
        ("a.sh", "echo hello\n", "of no project that Headway knows"),
        (
            "a.sh",
            "accelerate launch --num_processes=4 a.py --config b.yaml\n",
            "its settings are in b.yaml; expected that",
        ),
        ("a.sh", "uv run rl @ rl.toml\n", "its settings are in rl.toml; expected that file itself"),
        ("a.ipynb", "{}", f"a .ipynb file; {KINDS}"),
        ("a.yaml", "mode: on_policy\nrollout: {n: 4}\n", "is a recipe of Headway already; run it: headway train "),
        (
            "config.yaml",
            "mode: on_policy\nrollout: {n: 4}\ndata: {task: {name: sort, params: {max_length: 3}}}\n",
            "is a recipe of Headway already; run it: headway train ",
        ),
    ],
)
def test_a_file_that_is_none_of_these_is_refused(name: str, text: str, answer: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    said = message(str(file))
    assert said.startswith(f"error: {file}: ")
    assert answer in said


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert message(str(tmp_path / "no.sh")) == f"error: {tmp_path / 'no.sh'}: there is no such file; {KINDS}"
    assert message(str(tmp_path)) == f"error: {tmp_path}: a directory; {KINDS}"
    (tmp_path / "bytes.sh").write_bytes(b"\xff\xfe\x00")
    assert message(str(tmp_path / "bytes.sh")) == f"error: {tmp_path / 'bytes.sh'}: not a text file in UTF-8; {KINDS}"


def test_files_of_two_projects_are_refused_with_whose_each_is() -> None:
    one, two = str(FILES / "verl_grpo.sh"), str(FILES / "areal_grpo.yaml")
    assert message(one, two).startswith(f"error: {one} is of verl and {two} is of AReaL; expected files of one project")


def test_an_unknown_project_is_refused_with_those_there_are() -> None:
    assert message(str(FILES / "verl_grpo.sh"), "--from", "nemo") == (
        "error: --from nemo: expected one of verl, trl, areal, prime-rl, openrlhf"
    )


def test_the_recipe_may_not_be_what_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text((FILES / "areal_grpo.yaml").read_text())
    assert "would overwrite" in message(str(file), "-o", str(file))


def test_a_command_line_and_standard_input_are_files_too() -> None:
    command = "python -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16"
    typed = CliRunner().invoke(cli, ["import", command])
    piped = CliRunner().invoke(cli, ["import", "-"], input=command)
    assert "require_batches: 4  # data.train_batch_size=64" in typed.stdout
    assert typed.stdout.splitlines()[2:] == piped.stdout.splitlines()[2:]


def test_the_recipe_is_written_and_the_report_printed(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    done = CliRunner().invoke(cli, ["import", str(FILES / "trl_async.py"), "-o", str(recipe)])
    assert done.exit_code == 0
    parts = ("Taken over", "Means something else here", "No counterpart, and what to do")
    places = [done.stdout.index(part) for part in parts]
    assert places == sorted(places)
    assert done.stdout.endswith(f"\nrecipe: {recipe}\nnow: headway doctor {recipe}\n")
    assert "ppo_mini_batch_size: 4  # per_device_train_batch_size=16" in recipe.read_text()


def test_what_hydra_writes_before_keys_is_understood() -> None:
    command = "python -m verl.trainer.main_ppo +actor_rollout_ref.rollout.n=4 ++data.seed=3 ~data.shuffle a@b.c=d"
    done = CliRunner().invoke(cli, ["import", command])
    assert "  n: 4  # +actor_rollout_ref.rollout.n\n" in done.stdout
    assert "  seed: 3  # ++data.seed\n" in done.stdout
    assert "shuffle" not in done.stdout and "  ~data.shuffle=None\n    taken away there" in done.stderr
    assert "  a@b.c=d\n    unknown to Headway" in done.stderr


def test_an_unknown_setting_is_said_to_be_unknown() -> None:
    done = CliRunner().invoke(cli, ["import", "python -m verl.trainer.main_ppo my.thing=3 data.train_batch_size=64"])
    assert "  my.thing=3\n    unknown to Headway: look for it in docs/configuration.md" in done.stderr


def test_what_the_recipe_asks_for_and_is_not_installed_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("vllm", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    done = CliRunner().invoke(cli, ["import", str(FILES / "verl_grpo.sh")])
    said = " ".join(done.stderr.partition("Before it runs, headway doctor asks for")[2].split())
    assert "wandb is not installed here" in said and "vLLM is not installed here" in said
    assert "out of reports.trackers" in said


def test_of_several_commands_the_last_that_trains_counts() -> None:
    train = "python -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size="
    others = "python prepare.py a.b=c\n", f"\npython -m verl.trainer.main_eval data.path={'x' * 300}"
    script = f"{others[0]}{train}16 data.seed=3\n{train}32{others[1]}"
    done = CliRunner().invoke(cli, ["import", script])
    assert "require_batches: 2  # data.train_batch_size=64" in done.stdout and "seed" not in done.stdout
    assert "of 4 commands with settings the last one that trains counts" in done.stderr
    two = "python sft.py --learning_rate 1e-5\ntorchrun --nnodes=2 grpo.py --learning_rate 2e-6 --num_generations 4"
    said = CliRunner().invoke(cli, ["import", two]).stderr
    assert "learning_rate=2e-06" in said and "of 2 commands the last one counts" in said


def test_neither_secrets_nor_this_machines_environment_get_into_report_and_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_MODEL", "model-of-here")
    file = tmp_path / "a.yaml"
    file.write_text(
        "my: '${oc.env:MY_MODEL}'\nactor: {path: '${my}', eps_clip: '${oc.env:EPS,0.3}'}\ngconfig: {n_samples: 4}\n"
        "experiment_name: ${oc.env:USER_OF_RUN,me}/run\nstats_logger: {wandb: {api_key: hidden-value}}\n"
    )
    done = CliRunner().invoke(cli, ["import", str(file)])
    assert "  path: ${oc.env:MY_MODEL}  # actor.path\n" in done.stdout
    assert "  name: ${oc.env:USER_OF_RUN,me}-run" in done.stdout and "clip_ratio: 0.3 " in done.stdout
    script = "python -m openrlhf.cli.train_ppo_ray --use_wandb hidden-value --input_key question --pretrain m"
    typed = CliRunner().invoke(cli, ["import", script])
    assert "  use_wandb=…" in typed.stderr and "  input_key=question" in typed.stderr
    assert not any(one in done.output + typed.output for one in ("hidden-value", "model-of-here"))
