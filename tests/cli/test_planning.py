"""``headway plan``, ``profile`` and ``report``, as they are typed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

import headway
from headway.cli import cli, plan_command

PROFILE = """\
name: small
devices: 4
batch: {groups_per_version: 8, ppo_mini_batch_size: 2, n: 4}
prompt: {kind: constant, tokens: 20}
response: {kind: lognormal, mean: 200, sigma: 1, max: 2000}
rollout: {slots: 16, decode: [[1, 0.01], [16, 0.02]]}
train: {points: [{devices: 1, step_s: 0.1, token_s: 1.0e-4}]}
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(PROFILE)
    return path


def test_a_plan_names_what_to_choose_and_whether_asynchrony_helps(profile: Path) -> None:
    done = run("plan", str(profile), "--budget", "0.5")
    assert done.exit_code == 0, done.output
    assert "Recommended" in done.output
    assert "synchron" in done.output.split("Recommended")[1]
    assert "trajectories in" in done.output


def test_json_has_every_row_and_html_is_one_page(profile: Path, tmp_path: Path) -> None:
    rows, page = tmp_path / "rows.json", tmp_path / "page.html"
    done = run("plan", str(profile), "--budget", "0.5", "--json", str(rows), "--html", str(page), "--row", "1")
    assert done.exit_code == 0, done.output
    written = json.loads(rows.read_text())["rows"]
    wanted = {"preset", "split", "eta", "trigger", "require_batches", "step_s", "samples_per_s", "lag_mean", "lag_max"}
    assert all(wanted <= set(row) for row in written)
    assert [row["step_s"] for row in written] == sorted(row["step_s"] for row in written)
    assert written[0]["preset"] in page.read_text()
    assert "simulated from a profile" in page.read_text()


def test_a_plan_loads_neither_torch_nor_ray(profile: Path) -> None:
    code = f"""
import sys
from headway.cli import cli
try:
    cli(["plan", {str(profile)!r}, "--budget", "0.2"])
except SystemExit as end:
    assert end.code == 0, end.code
heavy = {{"torch", "transformers", "ray"}} & set(sys.modules)
assert not heavy, heavy
"""
    environment = os.environ | {"PYTHONPATH": str(Path(headway.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rollout: {slots: 16, decode: [[1, -0.01]]}", "rollout.decode"),
        ("rollout: {slots: 16, decode: []}", "rollout.decode"),
        ("rollout: {slots: 16, decode: [[8, 0.1], [1, 0.2]]}", "numbers of active sequences that grow"),
        ("response: {kind: empirical, groups: []}", "response.groups"),
        ("response: {kind: empirical, groups: [[]]}", "response.groups[0]"),
        ("response: {kind: gaussian, mean: 3}", "response"),
        ("train: {points: [{devices: 1, token_s: -1}]}", "train.points[0].token_s"),
        ("train: {points: [{devices: 1, token_s: 1.0e-4}], min_devices: 9}", "at least 9 (train.min_devices)"),
        ("rollout: {devices: 4, decode: [[1, 0.1]]}", "one rollout replica needs 4 (rollout.devices)"),
        ("devices: 0", "devices: got 0"),
        ("batch: {groups_per_version: 9, ppo_mini_batch_size: 2}", "multiple of ppo_mini_batch_size"),
        ("gpus: 4", "gpus: unknown key"),
    ],
)
def test_a_bad_profile_is_refused_with_what_is_wrong(profile: Path, line: str, message: str) -> None:
    key = line.partition(":")[0]
    kept = [other for other in PROFILE.splitlines() if other.partition(":")[0] != key]
    profile.write_text("\n".join([*kept, line]))
    done = run("plan", str(profile), "--budget", "1")
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither is given"),
        (["{profile}", "--from", "{dir}"], "both are given"),
        (["missing.yaml"], "missing.yaml: there is no such file"),
        (["{dir}"], "Is a directory"),
        (["{profile}", "--row", "2"], "--html is not given"),
        (["{profile}", "--json", "{dir}/none/rows.json"], "--json {dir}/none/rows.json cannot be written"),
        (["{profile}", "--html", "/proc/page.html"], "--html /proc/page.html cannot be written"),
        (["--from", "{dir}"], "{dir}"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_simulated(
    profile: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    names = {"profile": profile, "dir": tmp_path}
    done = run("plan", *(argument.format(**names) for argument in arguments))
    assert done.exit_code == 2, done.output
    assert message.format(**names) in done.stderr


def test_devices_that_do_not_suffice_are_counted(profile: Path) -> None:
    done = run("plan", str(profile), "--gpus", "1")
    assert done.exit_code == 2
    assert "devices: got 1" in done.stderr


@pytest.mark.parametrize("command", ["profile", "report"])
def test_what_is_no_run_is_refused(command: str, tmp_path: Path) -> None:
    for given in (tmp_path / "nowhere", tmp_path):
        done = run(command, str(given))
        assert done.exit_code == 2, done.output
        assert str(given) in done.stderr


def test_a_recipe_in_the_place_of_a_profile_is_told_what_comes_first(tmp_path: Path) -> None:
    for name, text in (("own.yaml", "mode: on_policy\nrollout: {n: 2}\n"), ("more.yaml", "defaults: [own.yaml]\n")):
        (tmp_path / name).write_text(text)
        done = run("plan", str(tmp_path / name))
        assert done.exit_code == 2
        assert f"{tmp_path / name} is a recipe, and a plan needs a profile first" in done.stderr
        assert done.stderr.splitlines()[1:] == [
            f"  headway train {tmp_path / name} run.dir=RUN",
            "  headway profile RUN -o profile.yaml",
            "  headway plan profile.yaml",
        ]


def test_a_profile_with_mistakes_is_not_taken_for_a_recipe(profile: Path) -> None:
    profile.write_text(PROFILE.replace("devices: 4", "devices: none"))
    done = run("plan", str(profile))
    assert done.exit_code == 2
    assert "is not a profile yet" in done.stderr
    assert "recipe" not in done.stderr


def test_a_run_in_the_place_of_a_profile_is_told_the_option(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    done = run("plan", str(tmp_path))
    assert done.exit_code == 2
    assert f"plan from its record with: headway plan --from {tmp_path}" in done.stderr


def test_a_profile_that_cannot_be_written_is_refused_before_the_record_is_read(tmp_path: Path) -> None:
    done = run("profile", str(tmp_path / "nowhere"), "-o", "/proc/profile.yaml")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: --output /proc/profile.yaml cannot be written")


def test_nothing_is_written_over_the_profile_or_the_run_that_a_plan_reads(profile: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "run"
    recorded.mkdir()
    for name in ("events.jsonl", "config.yaml"):
        (recorded / name).write_text("kept")
    cases = (
        (profile, ["plan", str(profile), "--json"]),
        (profile, ["plan", str(profile), "--html"]),
        (recorded / "events.jsonl", ["plan", "--from", str(recorded), "--json"]),
        (recorded / "config.yaml", ["profile", str(recorded), "-o"]),
        (recorded / "events.jsonl", ["report", str(recorded), "--html"]),
        (recorded / "config.yaml", ["report", str(recorded), "--trace"]),
    )
    for output, arguments in cases:
        before = output.read_text()
        done = run(*arguments, str(output))
        assert done.exit_code == 2, done.output
        assert f"{output} would overwrite {output}, which belongs to what this command reads" in done.stderr
        assert output.read_text() == before


def test_two_outputs_in_one_file_are_refused_before_any_work(profile: Path, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()  # in which nothing has happened, as reading it would say
    one, same, default = tmp_path / "one", tmp_path / ".." / tmp_path.name / "one", tmp_path / "trace.json"
    cases = (
        (["plan", str(profile), "--json", str(one), "--html", str(same)], f"--json {one} and --html {same}"),
        (["report", str(tmp_path), "--html", str(one), "--trace", str(same)], f"--html {one} and --trace {same}"),
        (["report", str(tmp_path), "--html", str(default)], f"--html {default} and --trace {default}"),
    )
    for arguments, both in cases:
        done = run(*arguments)
        assert (done.exit_code, done.stderr) == (2, f"error: {both} are one file; give two\n")
        assert not one.exists()


def test_a_report_that_cannot_be_written_is_refused_before_the_record_is_read(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    for option in ("--html", "--trace"):
        done = run("report", str(tmp_path), option, str(tmp_path / "none" / "file"))
        assert done.exit_code == 2
        assert done.stderr.startswith(f"error: {option} {tmp_path}/none/file cannot be written (No such file")


def test_a_default_file_of_a_report_that_cannot_be_written_is_named_with_the_option_that_moves_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "trace.json").mkdir()
    done = run("report", str(tmp_path), "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: {tmp_path}/trace.json cannot be written (Is a directory); with --trace, give a file that you may "
        "write to, where there is room\n"
    )


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_disk_that_fills_while_a_plan_is_written_is_one_message_after_the_plan(profile: Path, option: str) -> None:
    done = run("plan", str(profile), "--budget", "0.5", option, "/dev/full")
    assert done.exit_code == 1
    assert "trajectories in" in done.stdout
    assert done.stderr.startswith(f"error: {option} /dev/full cannot be written (No space left on device)")
    assert "This should not happen" not in done.stderr


def test_a_plan_whose_output_is_piped_tells_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = plan_command._progress()
    for left, every_s in (3, 1e9), (2, 0.0), (1, 1e9):
        monkeypatch.setattr(plan_command, "TOLD_EVERY_S", every_s)
        show(SimpleNamespace(setting="on_policy 1+1", step_s=2.0), left)  # type: ignore[arg-type]
    assert capsys.readouterr().err == "simulated on_policy 1+1: 2 s a version; 2 to go\n"
