"""Sources of data in the configuration: every way to write them, and what is said about those that make no sense."""

from __future__ import annotations

from fractions import Fraction

import pytest

from headway.config.doctor import diagnose
from headway.config.loading import LoadedConfig, dump, load
from headway.config.schema import SourceConfig
from headway.errors import ConfigError
from tests.config.conftest import Load, Write

OWN = """\
model: {path: /m}
data: {max_prompt_length: 64, max_response_length: 64}
actor: {ppo_mini_batch_size: 16}
rollout: {total_rollout_steps: 640}
"""


@pytest.fixture
def own(write: Write) -> Load:
    """Loads a configuration with a model of its own and no data, with overrides."""
    path = write(OWN, "own.yaml")
    return lambda *overrides: load(path, overrides)


def sources(loaded: LoadedConfig) -> list[tuple[str | None, str | None, Fraction | None]]:
    return [(one.path, one.dataset, one.weight) for one in loaded.config.data.train_sources]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("data.train=a.jsonl",), [("a.jsonl", None, None)]),
        (("data.train=[a.jsonl, b.parquet]",), [("a.jsonl", None, None), ("b.parquet", None, None)]),
        (("data.train={dataset: openai/gsm8k, subset: main}",), [(None, "openai/gsm8k", None)]),
        (("data.train.dataset=openai/gsm8k", "data.train.subset=main"), [(None, "openai/gsm8k", None)]),
        (
            ("data.train=[{path: a.jsonl, weight: 0.1}, {dataset: x/y, weight: 2/3}]",),
            [("a.jsonl", None, Fraction(1, 10)), (None, "x/y", Fraction(2, 3))],
        ),
        (("data.train=[a.jsonl, {dataset: x/y, split: test}]",), [("a.jsonl", None, None), (None, "x/y", None)]),
    ],
)
def test_training_data_may_be_written_in_these_ways(own: Load, given, expected) -> None:
    loaded = own(*given)
    assert sources(loaded) == expected
    assert diagnose(loaded) == []


def test_a_resolved_configuration_with_sources_loads_back_to_itself(own: Load, write: Write) -> None:
    loaded = own(
        "data.train=[{path: a.jsonl, weight: 1/3, name: mine}, {dataset: x/y, weight: 0.5, answer_key: solution}]",
        "data.val=[v.jsonl, {dataset: x/y, split: validation}]",
    )
    text = dump(loaded.config)
    assert load(write(text, "again.yaml")).config == loaded.config
    assert "null" not in text
    assert "{path: a.jsonl, name: mine, weight: 1/3}" in text


def test_a_resolved_configuration_without_sources_does_not_name_them(own: Load) -> None:
    assert "sources" not in dump(own("data.train=a.jsonl").config)


def test_a_list_of_sources_replaces_a_recipes_task_as_a_path_does(minimal: Load) -> None:
    loaded = minimal("data.train=[a.jsonl, b.jsonl]")
    assert loaded.config.data.task is None
    assert loaded.notes == ["reward.function is exact_match: data.train replaced the task whose verifier it was"]


def test_a_later_layers_path_replaces_a_list(write: Write) -> None:
    path = write(OWN.replace("data: {", "data: {train: [a.jsonl, b.jsonl], "))
    assert sources(load(path, ["data.train=c.jsonl"])) == [("c.jsonl", None, None)]
    assert sources(load(path, ["data.train.dataset=x/y"])) == [(None, "x/y", None)]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("data.train=[{path: a.jsonl, dataset: x/y}]", "data.train[0]: got {'path': 'a.jsonl', 'dataset': 'x/y'}"),
        ("data.train=[{weight: 1}]", "expected exactly one of path (a file) and dataset (of Hugging Face)"),
        ("data.train=[{path: a.jsonl, split: test}]", "expected subset, split and revision beside a dataset alone"),
        ("data.train=[{path: a.jsonl, weight: 0}]", "data.train[0].weight: got 0"),
        (
            "data.train=[{path: a.jsonl, weight: much}]",
            "(on the command line), expected a number, like 1, 0.3 or 3/10",
        ),
        (
            "data.train=[{path: a.jsonl, wieght: 1}]",
            "unknown key (on the command line); did you mean data.train.w",
        ),
        ("data.train=[3]", "data.train[0]: got 3 (on the command line), expected a section"),
        ("data.train=[{path: a.jsonl, weight: 1}, b.jsonl]", "data.train: b.jsonl has no weight, and others have"),
        ("data.train=[{path: a.jsonl, weight: 1}]", "weight has no effect: a.jsonl is the only source; drop it"),
        ("data.val=[{path: a.jsonl, weight: 1}]", "data.val: weight has no effect"),
        ("data.train=[]", "data: give data.train"),
    ],
)
def test_sources_that_make_no_sense_are_refused_with_the_reason(own: Load, given: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        diagnose(own(*(() if given.startswith("data.train") else ("data.train=a.jsonl",)), given))
    assert complaint in str(refused.value)


def test_a_list_of_sources_and_a_task_are_one_too_many(minimal: Load, own: Load) -> None:
    with pytest.raises(ConfigError, match=r"data\.train replaces data\.task"):
        own("data.train=[a.jsonl]", "data.task.name=sort")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.train=[a.jsonl]", "data.val=[b.jsonl]", "data.val_size=9"), "data.val_size has no effect: held-out"),
        (("data.train=[{path: a, prompt_key: q}]", "data.prompt_key=p"), "data.prompt_key has no effect: every source"),
        (("data.train=[{path: a, answer_key: q}]", "data.answer_key=p"), "data.answer_key has no effect: every source"),
    ],
)
def test_a_setting_that_sources_make_idle_is_refused(own: Load, overrides, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        diagnose(own(*overrides))


def test_the_shared_keys_count_while_one_source_has_none_of_its_own(own: Load) -> None:
    train = "data.train=[{path: a.jsonl, prompt_key: q, answer_key: s}, b.jsonl]"
    assert diagnose(own(train, "data.prompt_key=p", "data.answer_key=t")) == []


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ("data.train=a.jsonl", "a.jsonl"),
        ("data.train=[a.jsonl, {dataset: x/y}]", "a.jsonl, x/y"),
        ("data.train=[{path: a.jsonl, weight: 3}, {dataset: x/y, weight: 0.5}]", "a.jsonl × 3, x/y × 0.5"),
        ("data.task.name=reverse", "reverse"),
        ("data.train=null", ""),
    ],
)
def test_what_is_trained_on_has_a_short_name(own: Load, given: str, label: str) -> None:
    assert own(given).config.data.label == label


def test_held_out_files_in_a_list_are_held_out_files(own: Load) -> None:
    loaded = own("data.train=a.jsonl", "data.val=[v.jsonl]", "rollout.test_freq=2")
    assert loaded.config.data.held_out_sources == (SourceConfig(path="v.jsonl"),)
    assert diagnose(loaded) == []
