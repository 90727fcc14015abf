import errno
import io
import os
import resource
import select
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

import headway
from headway.cli import cli, common, main
from headway.cli.settings_summary import device_range, summary
from headway.config.loading import LoadedConfig, load
from headway.errors import ConfigError, HeadwayError, WorkerDied
from tests.tiers import mostly_slow

RECIPE = """\
model: {make: {}}
data: {task: {name: sort}, max_prompt_length: 64, max_response_length: 64}
reward: {function: task}
actor: {ppo_mini_batch_size: 16}
rollout: {total_rollout_steps: 640}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds the package where this one did."""
    environment = os.environ | {"PYTHONPATH": str(Path(headway.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


# ------------------------------------------------------------------------------------------- answers at once


def test_help_and_version_load_neither_torch_nor_ray() -> None:
    code = """
import sys
from headway.cli import cli
for arguments in (["--help"], ["train", "--help"], ["doctor", "--help"], ["--version"]):
    try:
        cli(arguments)
    except SystemExit as end:
        assert end.code == 0, end.code
heavy = {"torch", "transformers", "ray", "omegaconf", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_dry_run_and_the_doctor_load_neither_torch_nor_ray(recipe: str) -> None:
    code = f"""
import sys
from headway.cli import cli
for arguments in (["train", {recipe!r}, "--dry-run"], ["doctor", {recipe!r}]):
    try:
        cli(arguments)
    except SystemExit as end:
        assert end.code == 0, end.code
heavy = {{"torch", "transformers", "ray"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tokenizers_without_torch_come_without_advice_on_installing_it() -> None:
    code = (
        "from headway.models.tokenizer import torch_hidden\nwith torch_hidden(): from transformers import AutoTokenizer"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_takes_less_than_half_a_second() -> None:
    def seconds() -> float:
        """Of the processor: the clock on the wall also counts whatever else the machine does."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python("-m", "headway", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


def test_the_version_is_the_packages() -> None:
    assert run("--version").output == f"headway {headway.__version__}\n"


def test_help_names_every_command() -> None:
    output = run("--help").output
    assert "train" in output
    assert "doctor" in output


# ------------------------------------------------------------------------------------------- dry run and doctor


def test_one_process_is_shown_as_one(recipe: str) -> None:
    roles = ("# actor: ", "# rollout: ")
    lines = [line for line in run("train", recipe, "--dry-run").stdout.splitlines() if line.startswith(roles)]
    assert lines == ["# actor: 1 × (device 0)", "# rollout: 1 × (device 1)"]
    inline = run("train", recipe, "cluster.backend=inline", "--dry-run").stdout.splitlines()
    assert [line for line in inline if line.startswith(roles)] == [f"{role}1 × (this process)" for role in roles]


def test_the_number_of_slots_is_shown_also_where_it_follows_from_other_settings(recipe: str) -> None:
    for given, end in (("7", "(rollout.max_concurrent)"), ("null", "(rollout.max_concurrent: null)")):
        (line,) = [
            line
            for line in run("train", recipe, f"rollout.max_concurrent={given}", "--dry-run").stdout.splitlines()
            if line.startswith("# slots: ")
        ]
        number = line.removeprefix("# slots: ").split()[0]
        assert (number == given or (given == "null" and int(number) > 0)) and line.endswith(end)


def test_a_dry_run_prints_a_configuration_that_loads_again_and_does_not_train(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "headway.api.run", None)
    shown = run("train", recipe, "mode=async_stale", "rollout.n=4", "--dry-run")
    assert shown.exit_code == 0
    (tmp_path / "shown.yaml").write_text(shown.output)
    expected = load(Path(recipe), ["mode=async_stale", "rollout.n=4"]).config
    assert load(tmp_path / "shown.yaml").config == expected


def test_the_doctor_shows_what_follows_from_the_settings(recipe: str) -> None:
    lines = [line.split() for line in run("doctor", recipe, "trainer.n_gpus_per_node=2").output.splitlines()]
    said = {words[0]: " ".join(words[1:]) for words in lines if words}
    assert said["B"] == "64 groups per version: train batches 4 × mini-batches 1 × groups 16"
    assert said["η"] == "0.5: at most 96 groups admitted and not trained"
    assert said["lag"] == "at most 2 versions"
    assert said["length"] == "640 groups = 10 versions"
    assert said["actor"] == "2 × (devices 0-1)"
    assert said["rollout"] == "1 × (device 2)"


def test_devices_of_several_nodes_are_shown_as_they_are_numbered() -> None:
    assert [device_range(devices) for devices in ((3,), (0, 1, 2, 3), (0, 1, 4), (0, 4, 5))] == [
        "device 3",
        "devices 0-3",
        "devices 0-1, 4",
        "devices 0, 4-5",
    ]


def test_the_doctor_shows_idle_devices_epochs_and_a_missing_bound(recipe: str) -> None:
    output = run(
        "doctor",
        recipe,
        "trainer.n_gpus_per_node=4",
        "trainer.use_nodes_ratios=[0.25, 0, 0, 0.5]",
        "async_training.order=ready",
        "rollout.total_rollout_steps=null",
        "data.epochs=2",
    ).output
    assert ["idle", "device", "1"] in [line.split() for line in output.splitlines()]
    assert "2 epochs" in output
    assert "no bound (order ready)" in output
    assert "note: async_training.order=ready" in output
    bounded = run("doctor", recipe, "async_training.order=ready", "async_training.max_lag=8").output
    assert "at most 8 versions" in bounded


def test_the_summary_names_every_source_of_data(recipe: str) -> None:
    loaded = load(Path(recipe), ["data.train=[{path: a.jsonl, weight: 3}, {dataset: x/y, weight: 1}]"])
    assert summary(loaded.config)["data"] == "a.jsonl × 3, x/y × 1"


def test_the_summary_counts_replicas_and_says_how_many_devices_each_has(recipe: str) -> None:
    sizes = ["rollout.name=vllm", "rollout.n_gpus_per_node=4", "rollout.tensor_model_parallel_size=2"]
    assert summary(load(Path(recipe), [*sizes, "cluster.backend=ray"]).config)["rollout"] == "2 × tp 2 (devices 1-4)"
    assert (
        summary(load(Path(recipe), [*sizes, "cluster.backend=inline"]).config)["rollout"] == "2 × tp 2 (this process)"
    )


def test_the_doctor_ends_with_2_and_every_problem_on_stderr(recipe: str) -> None:
    done = run("doctor", recipe, "rollout.n=1", "rollout.temperature=0")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 2


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["rollout.n=4"], "expected CONFIG, a YAML file, before the settings"),
        (["RECIPE", "rollout.n"], "'rollout.n': expected a.b=c"),
        (["RECIPE", "rollout.m=4"], "rollout.m: unknown key"),
        (["RECIPE", "rollout.n=0"], "rollout.n: got 0"),
        (["RECIPE", "mode=turbo"], "there is no mode 'turbo'"),
        (["RECIPE", "rollout.n=1"], "grpo compares"),
    ],
)
@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["doctor"]])
def test_what_the_user_got_wrong_is_one_message_without_a_traceback(
    recipe: str, command: list[str], arguments: list[str], message: str
) -> None:
    done = run(*command, *(recipe if word == "RECIPE" else word for word in arguments))
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["doctor"]])
def test_the_doctor_and_a_dry_run_also_try_the_reward_and_the_data(recipe: str, command: list[str]) -> None:
    for override, message in (
        ("reward.function=nowhere.py:score", "there is no file"),
        ("data.task.name=srt", "unknown task 'srt'"),
    ):
        done = run(*command, recipe, override)
        assert done.exit_code == 2
        assert message in done.stderr
        assert "no problems found" not in done.stdout


def test_a_mistake_in_the_data_leaves_no_run_directory(recipe: str, tmp_path: Path) -> None:
    """So that the same command with the mistake corrected finds its ``run.dir`` free."""
    (tmp_path / "train.jsonl").write_text("no JSON\n")
    overrides = [f"data.train={tmp_path / 'train.jsonl'}", f"run.dir={tmp_path / 'run'}"]
    done = run("train", recipe, *overrides)
    assert done.exit_code == 2
    assert "train.jsonl, line 1: not JSON" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_command_without_its_configuration_is_a_usage_error() -> None:
    assert run("train").exit_code == 2


class ScriptedApp:
    """Stands for the composition root: returns or raises what it is told to, and keeps what it was given."""

    def __init__(self, outcome: int | BaseException) -> None:
        self.outcome = outcome
        self.given: list[LoadedConfig] = []

    def train(self, loaded: LoadedConfig) -> int:
        self.given.append(loaded)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def scripted(monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException) -> ScriptedApp:
    app = ScriptedApp(outcome)
    monkeypatch.setitem(sys.modules, "headway.api.run", app)  # type: ignore[arg-type]
    return app


@pytest.mark.parametrize("code", [0, 1, 130])
def test_train_hands_over_the_checked_configuration_and_ends_with_the_runs_code(
    recipe: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    app = scripted(monkeypatch, code)
    assert run("train", recipe, "async_training.order=fifo").exit_code == code
    (loaded,) = app.given
    assert loaded.config.async_training.order == "fifo"
    assert any("async_training.window=B" in note for note in loaded.notes)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (WorkerDied("rollout-0 ended with signal 9"), 1, "error: rollout-0 ended with signal 9"),
        (HeadwayError("no"), 1, "error: no"),
        (
            PermissionError(13, "Permission denied", "a/b"),
            2,
            "error: a/b: Permission denied; give a path that you may use",
        ),
        (ZeroDivisionError("division by zero"), 1, "error: unexpected ZeroDivisionError: division by zero"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_failed_run_ends_with_a_message_and_shows_where_only_when_asked(
    recipe: str, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    scripted(monkeypatch, error)
    quiet = run("train", recipe)
    assert quiet.exit_code == code
    assert quiet.stderr.splitlines()[0] == message
    assert "Traceback" not in quiet.stderr

    if isinstance(error, Exception):
        loud = run("train", recipe, "--debug")
        assert loud.exit_code == code
        assert "Traceback" in loud.stderr
        assert message in loud.stderr


def test_an_unexpected_error_says_how_to_see_more(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, RuntimeError("odd"))
    assert "--debug" in run("train", recipe).stderr
    denied = PermissionError(13, "Permission denied", "a/b")
    denied.add_note("go on with it so")
    scripted(monkeypatch, denied)
    assert run("train", recipe).stderr.splitlines()[1:] == [
        "Run again with --debug to see where it is used.",
        "go on with it so",
    ]


# ------------------------------------------------------------------------------------------- outputs of odd kinds


def test_an_output_without_unicode_gets_question_marks(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", ["headway", "doctor", recipe])
    with pytest.raises(SystemExit) as end:
        main()
    output.flush()
    assert end.value.code == 0
    assert b"1 ? (device 0)" in output.buffer.getvalue()


def test_an_output_that_nobody_reads_any_more_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(typer.Exit), common.errors_as_messages(debug=False):
            print("a line", flush=True)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@mostly_slow(
    ("command", "unbuffered"),
    product([["--version"], ["doctor"]], ["", "1"]),
    quick=[(["--version"], "")],
)
def test_an_output_that_cannot_be_written_is_one_message(recipe: str, command: list[str], unbuffered: str) -> None:
    arguments = [*command, recipe] if command == ["doctor"] else command
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "headway", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr == (
        "error: standard output cannot be written (No space left on device); send it to a place with room\n"
    )


def test_a_file_or_socket_that_refuses_is_not_taken_for_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", (tmp_path / "out").open("w"))
    for refused in (BrokenPipeError(errno.EPIPE, "Broken pipe"), OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(typer.Exit), common.errors_as_messages(debug=False):
            raise refused
        assert refused.strerror in (said := capsys.readouterr().err)
        assert "standard output" not in said


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(1,), (0, 1), (0, 1, 2)])
def test_what_is_closed_of_the_standard_files_is_nowhere(recipe: str, tmp_path: Path, closed: tuple[int, ...]) -> None:
    """For the process that tries the reward, too."""
    (tmp_path / "reward.py").write_text("def score(response): return 1.0\n")
    arguments = ["headway", "doctor", recipe, f"reward.function={tmp_path / 'reward.py'}:score"]
    code = f"""
import os, sys
for number in {closed}:
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", *{arguments!r}])
"""
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_error_keeps_its_exit_code_where_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(common.typer, "echo", refuse)
    with pytest.raises(typer.Exit) as end, common.errors_as_messages(debug=False):
        raise ConfigError("wrong")
    assert end.value.exit_code == ConfigError.exit_code


# ------------------------------------------------------------------------------------------- files to be written


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere/out", "No such file or directory"),
        ("a_file/out", "Not a directory"),
        (".", "Is a directory"),
        ("/proc/out", "No such file or directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_the_users_mistake(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(ConfigError) as refused:
        common.check_writable("--output", tmp_path / name)
    assert str(refused.value).startswith(f"--output {tmp_path / name} cannot be written ({why}); give a file")


def test_an_output_is_no_input_by_whatever_name(tmp_path: Path) -> None:
    folder, file, deep = tmp_path / "folder", tmp_path / "file", tmp_path / "folder" / "deep" / "file"
    deep.parent.mkdir(parents=True)
    (tmp_path / "way").symlink_to(folder)
    for path in (file, deep, tmp_path / "target"):
        path.write_text("kept")
    (tmp_path / "hard").hardlink_to(file)
    (folder / "link").symlink_to(tmp_path / "target")
    inputs = (tmp_path / "not there", Path("x" * 300), file, folder)
    for name in ("file", "hard", "folder/deep/file", "way/deep/file", "folder/link", "target"):
        with pytest.raises(ConfigError, match="would overwrite"):
            common.check_writable("--output", tmp_path / name, inputs)
    for name in ("not there", "new", "folder/new", "folder/deep/new"):
        common.check_writable("--output", tmp_path / name, inputs)
    (tmp_path / "another").touch()
    common.check_writable("--output", tmp_path / "another", inputs)


def test_outputs_that_go_nowhere_may_go_there_together() -> None:
    common.check_outputs({"--json": Path("/dev/null"), "--html": Path("/dev/null"), "--output": None})


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    there, link, pipe = tmp_path / "there", tmp_path / "link", tmp_path / "pipe"
    there.write_text("kept")
    link.symlink_to(tmp_path / "not there")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in (there, link, pipe, tmp_path / "new", Path("/dev/null")):
            common.check_writable("--output", path)
        poll = select.poll()
        poll.register(reader)
        assert poll.poll(0) == [], "the pipe's reader was told that its writer left"
    finally:
        os.close(reader)
    assert there.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "there"]
    assert link.is_symlink()


def test_a_tracker_that_was_given_up_holds_the_exit_no_longer_than_its_limit() -> None:
    """Over 3 s on a busy machine: imports the command line."""
    program = (
        "import atexit, sys, threading, time, headway.cli as cli\n"
        "threading.Thread(target=time.sleep, args=(600,), name='tracker-wandb', daemon=True).start()\n"
        "atexit.register(time.sleep, 600)\n"
        "cli.EXIT_S, cli.cli = 0.1, lambda: sys.exit(3)\n"
        "cli.main()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=240, check=False).returncode == 3
