from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.planner.profiles.job_profile import Profile
from headway.planner.profiles.profile_files import dump_profile, load_profile
from tests.tiers import searched

from .jobs import PLAIN, RICH, profile

GOOD = """\
name: by hand
devices: 4
batch: {groups_per_version: 4, ppo_mini_batch_size: 2}
prompt: {kind: constant, tokens: 3}
response: {kind: lognormal, mean: 10, sigma: 1, max: 40}
rollout:
  decode: [[1, 1e-1], [4, 0.2]]
train: {points: [{devices: 1, token_s: 1e-5}]}
update: {nbytes: 15e9, register: {latency_s: 2, bytes_per_s: 1E+9}}
"""
PROMPT = "{kind: constant, tokens: 3}"
RESPONSE = "{kind: lognormal, mean: 10, sigma: 1, max: 40}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


def problems(file: Path, text: str) -> list[str]:
    """The lines after the first, which names the file."""
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_profile(file)
    heading, *lines = str(refused.value).splitlines()
    assert str(file) in heading
    return [line.strip() for line in lines]


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def test_a_profile_is_read_as_it_is_written(file: Path) -> None:
    file.write_text(GOOD)
    job = load_profile(file)
    assert job.rollout.decode == [(1, 0.1), (4, 0.2)]
    assert job.train.points[0].token_s == 1e-5
    assert (job.update.nbytes, job.update.register_.latency_s, job.update.register_.bytes_per_s) == (15 * 10**9, 2, 1e9)


def test_a_profile_that_says_nothing_of_a_mesh_was_measured_on_a_plain_one(file: Path) -> None:
    file.write_text(GOOD)
    job = load_profile(file)
    assert job.train.parallel.model_dump() == {"replicate": 1, "tp": 1, "cp": 1, "ep": 1}
    assert (job.train.even, job.devices_per_node) == (False, None)


@pytest.mark.parametrize("values", [PLAIN, RICH], ids=["plain", "rich"])
def test_a_dumped_profile_loads_back_to_an_equal_one(values: dict[str, Any], file: Path) -> None:
    file.write_text(dump_profile(profile(values)))
    assert load_profile(file) == profile(values)


def test_what_equals_the_default_is_left_out_lengths_come_last_and_lists_are_on_one_line() -> None:
    assert dump_profile(profile()) == (
        "name: plain\n"
        "devices: 8\n"
        "batch:\n  groups_per_version: 2\n  ppo_mini_batch_size: 2\n  n: 2\n"
        "rollout:\n  slots: 8\n  decode: [[1, 0.01], [4, 0.02]]\n"
        "train:\n  points: [{devices: 1, token_s: 0.001}]\n"
        "prompt:\n  kind: constant\n  tokens: 10\n"
        "response:\n  kind: constant\n  tokens: 100\n"
    )


texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=20)
seconds = st.floats(0, 1e6)


@searched(
    100,
    name=texts,
    assumptions=st.lists(texts, max_size=3),
    groups=st.lists(st.lists(st.integers(1, 10**6), min_size=1, max_size=20), min_size=1, max_size=5),
    latency=seconds,
    bandwidth=st.floats(1e-3, 1e15),
    replay=st.booleans(),
)
def test_whatever_is_in_a_profile_survives_being_written_and_read(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    assumptions: list[str],
    groups: list[list[int]],
    latency: float,
    bandwidth: float,
    replay: bool,
) -> None:
    file = tmp_path_factory.mktemp("profiles") / "job.yaml"
    job = profile(
        name=name,
        assumptions=assumptions,
        response={"kind": "empirical", "groups": groups, "replay": replay},
        update={"register": {"latency_s": latency, "bytes_per_s": bandwidth}},
    )
    file.write_text(dump_profile(job), encoding="utf-8")
    assert load_profile(file) == job


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "token_s: 1e-5",
            "token_s: -1",
            "train.points[0].token_s: got -1, expected a number greater than or equal to 0",
        ),
        ("token_s: 1e-5", "token_s: .inf", "train.points[0].token_s: got inf, expected a finite number"),
        ("token_s: 1e-5", "token_s: fast", "train.points[0].token_s: got 'fast', expected a number"),
        ("devices: 4", "devices: 0", "devices: got 0, expected a number greater than 0"),
        ("devices: 4", "devices: 2.5", "devices: got 2.5, expected a whole number"),
        ("devices: 4\n", "", "devices: got nothing, expected a value"),
        ("[[1, 1e-1], [4, 0.2]]", "[]", "rollout.decode: got [], expected at least 1 value"),
        ("[[1, 1e-1], [4, 0.2]]", "[[1]]", "rollout.decode[0][1]: got nothing, expected a value"),
        ("[[1, 1e-1], [4, 0.2]]", "[[1, 0]]", "rollout.decode[0][1]: got 0, expected a number greater than 0"),
        ("[[1, 1e-1], [4, 0.2]]", "0.1", "rollout.decode: got 0.1, expected a list of values in brackets"),
        ("[{devices: 1, token_s: 1e-5}]", "[3]", "train.points[0]: got 3, expected a section with keys of its own"),
        ("{kind: constant, tokens: 3}", "7", "prompt: got 7, expected a section with keys of its own"),
        (
            "{kind: constant, tokens: 3}",
            "{tokens: 3}",
            "prompt.kind: got nothing, expected 'constant', 'lognormal' or 'empirical'",
        ),
        (
            "{kind: constant, tokens: 3}",
            "{kind: uniform, tokens: 3}",
            "prompt.kind: got 'uniform', expected 'constant', 'lognormal' or 'empirical'",
        ),
        (
            "{kind: constant, tokens: 3}",
            "{kind: empirical, groups: []}",
            "prompt.groups: got [], expected at least 1 value",
        ),
        (
            "{kind: constant, tokens: 3}",
            "{kind: empirical, groups: [[1], []]}",
            "prompt.groups[1]: got [], expected at least 1 value",
        ),
        (
            "{kind: constant, tokens: 3}",
            "{kind: empirical, groups: [[1, -2]]}",
            "prompt.groups[0][1]: got -2, expected a number greater than 0",
        ),
        ("devices: 4", "devices: 4\ndevice: 5", "device: unknown key; did you mean devices?"),
        ("devices: 4", "devices: 4\n7: 5", "7: unknown key"),
        ("devices: 4", "devices: 4\nrollouts: {slots: 3}", "rollouts.slots: unknown key; did you mean rollout.slots?"),
        ("max: 40", "max: 40, maxi: 3", "response.maxi: unknown key; did you mean response.max?"),
        (
            "token_s: 1e-5",
            "token_s: 1e-5, tokens_s: 3",
            "train.points[0].tokens_s: unknown key; did you mean train.points.token_s?",
        ),
        (
            "register: {latency_s: 2, bytes_per_s: 1E+9}",
            "registre: {latency_s: 2}",
            "update.registre.latency_s: unknown key; did you mean update.register.latency_s?",
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_key_with_what_was_expected(
    file: Path, old: str, new: str, expected: str
) -> None:
    assert problems(file, changed(old, new)) == [expected]


@pytest.mark.parametrize(
    ("old", "new", "start"),
    [
        ("[[1, 1e-1], [4, 0.2]]", "[[4, 0.1], [1, 0.2]]", "rollout.decode: got [[4, 0.1], [1, 0.2]], expected"),
        ("[[1, 1e-1], [4, 0.2]]", "[[1, 0.3], [4, 0.2]]", "rollout.decode: got [[1, 0.3], [4, 0.2]], expected"),
        ("groups_per_version: 4", "groups_per_version: 5", "batch: got "),
        (RESPONSE, "{kind: empirical, groups: [[1], [2]], filtered: [2]}", "response.filtered: got [2], expected ind"),
        (
            RESPONSE,
            "{kind: empirical, groups: [[1], [2]], filtered: [1, 0]}",
            "response.filtered: got [1, 0], expected",
        ),
        ("train: {points:", "train: {parallel: {tp: 2}, points:", "train.points: got [{'devices': 1, "),
        ("points: [{devices: 1,", "parallel: {tp: 2, ep: 3}, points: [{devices: 6,", "train.parallel: got {'tp': 2, "),
        (
            "{points: [{devices: 1, token_s: 1e-5}]}",
            "{parallel: {tp: 2}, points: [{devices: 2, token_s: 1e-5}]}\ndevices_per_node: 3",
            "devices_per_node: got 3, expected a multiple of 2, as the cp · tp ranks of an inner mesh",
        ),
        (
            "rollout:\n",
            "devices_per_node: 2\nrollout:\n  devices: 3\n",
            "devices_per_node: got 2, expected at least 3, as a replica (rollout.devices) is on one machine",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(file: Path, old: str, new: str, start: str) -> None:
    (problem,) = problems(file, changed(old, new))
    assert problem.startswith(start)


def test_all_problems_come_in_one_message(file: Path) -> None:
    text = changed("devices: 4", "devices: four\nassumptions: none\nextra: 1")
    assert sorted(problem.split(":")[0] for problem in problems(file, text)) == ["assumptions", "devices", "extra"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- 1\n- 2\n", "expected a mapping of keys to values at the top"),
        ("just words", "expected a mapping of keys to values at the top"),
        ("devices: 4\nname: [\n", "not valid YAML: line 3"),
        ("devices: 4\ndevices: 5\n", "not valid YAML: line 2: devices is given twice"),
        ("batch: {n: 4, n: 5}\n", "not valid YAML: line 1: n is given twice"),
        ("? [1, 2]\n: 3\n", "not valid YAML: line 1: expected a name as a key"),
        ("name: !!python/object:os.system {}\n", "not valid YAML: line 1"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_profile(file)
    assert str(refused.value).startswith(f"{file}: {message}")


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: .*no such file"):
        load_profile(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="a directory"):
        load_profile(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary: .*UTF-8"):
        load_profile(tmp_path / "binary")


@pytest.mark.slow
def test_a_measured_profile_with_thousands_of_groups_is_read_and_written(file: Path) -> None:
    groups = [[1 + (31 * i + 7 * k) % 3000 for k in range(16)] for i in range(4000)]
    job = profile(response={"kind": "empirical", "groups": groups})
    file.write_text(dump_profile(job))
    assert load_profile(file) == job


def test_a_profile_has_no_keys_but_those_of_its_schema() -> None:
    with pytest.raises(ValueError, match="register_"):
        Profile.model_validate({**PLAIN, "update": {"register_": {}}})
