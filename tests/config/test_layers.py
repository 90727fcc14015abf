from typing import Any

import pytest
from hypothesis import strategies as st

from headway.config.layers import flatten, nest, overlay, read_file, read_overrides
from headway.errors import ConfigError
from tests.tiers import searched

from .conftest import Write

names = st.sampled_from(["a", "b", "c"])
trees = st.recursive(
    st.integers() | st.none() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@searched(100, trees)
def test_a_tree_survives_being_flattened_and_nested_again(tree: dict[str, Any]) -> None:
    assert nest(dict(flatten(tree))) == tree


@searched(100, trees, trees)
def test_overlaying_flat_layers_equals_merging_trees(below: dict[str, Any], above: dict[str, Any]) -> None:
    def merge(one: Any, other: Any) -> Any:
        if not isinstance(one, dict) or not isinstance(other, dict) or not other:
            return other
        return {
            key: merge(one[key], other[key]) if key in one and key in other else (one | other)[key]
            for key in one | other
        }

    assert nest(overlay(dict(flatten(below)), dict(flatten(above)))) == (merge(below, above) if above else below)


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("rollout.n=4", "rollout.n", 4),
        ("actor.optim.lr=1e-4", "actor.optim.lr", 1e-4),
        ("reward.function=my_reward.py:score", "reward.function", "my_reward.py:score"),
        ("data.val=null", "data.val", None),
        ("run.name=a=b", "run.name", "a=b"),
        ("run.name='007'", "run.name", "007"),
        ("actor.optim.betas=[0.9, 0.95]", "actor.optim.betas", [0.9, 0.95]),
        ("data.task={name: sort}", "data.task.name", "sort"),
        ("+rollout.n=4", "rollout.n", 4),
        ("actor_rollout_ref.rollout.n=4", "rollout.n", 4),
        ("+actor_rollout_ref.model.path=/m", "model.path", "/m"),
    ],
)
def test_an_override_is_a_dotted_key_and_a_yaml_value(argument: str, key: str, value: Any) -> None:
    assert dict(read_overrides([argument]).values) == {key: value}


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["rollout.n=4", "run.seed=1", "rollout.n=8"], {"rollout.n": 8, "run.seed": 1}),
        (["rollout.n=4", "+actor_rollout_ref.rollout.n=8"], {"rollout.n": 8}),
        (["data.task={name: sort, size: 3}", "data.task={name: copy}"], {"data.task.name": "copy"}),
        (["data.task={name: sort, size: 3}", "data.task.name=copy"], {"data.task.name": "copy", "data.task.size": 3}),
        (["data.train=a.jsonl", "data.train={dataset: b}"], {"data.train.dataset": "b"}),
    ],
)
def test_of_equal_keys_on_the_command_line_the_last_counts(arguments: list[str], values: dict[str, Any]) -> None:
    assert dict(read_overrides(arguments).values) == values


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ("model.make=null", "model.make.head_dim=8", "model.make.head_dim and model.make cannot both be given"),
        ("model.make.head_dim=8", "model.make=null", "model.make and model.make.head_dim cannot both be given"),
    ],
)
def test_a_value_and_a_key_below_it_are_refused_with_both_values(first: str, second: str, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_overrides([first, second])
    assert str(refused.value) == f"'{first}' and '{second}': {what} on the command line; drop one of them"


def test_an_empty_section_and_keys_in_it_are_no_contradiction() -> None:
    overrides = ["model.make={}", "model.make.head_dim=8"]
    for typed in (overrides, overrides[::-1]):
        assert nest(read_overrides(typed).values) == {"model": {"make": {"head_dim": 8}}}


@pytest.mark.parametrize("argument", ["rollout.n", "=3", "run.name=[1", "run.name={a"])
def test_an_argument_that_is_no_override_is_refused_by_name(argument: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_overrides([argument])
    assert argument in str(refused.value)


def test_defaults_lie_beneath_the_file_in_their_order(write: Write) -> None:
    write("rollout: {n: 1, top_k: 1, temperature: 0.1}\n", "base/one.yaml")
    write("defaults: [one.yaml]\nrollout: {n: 2, top_k: 2}\n", "base/two.yaml")
    layers = read_file(write("defaults: [base/two.yaml]\nrollout: {n: 3}\n"))

    merged: dict[str, Any] = {}
    for layer in layers:
        merged = overlay(merged, layer.values)
    assert merged == {"rollout.n": 3, "rollout.top_k": 2, "rollout.temperature": 0.1}
    assert [layer.origin.rsplit("/")[-1] for layer in layers] == ["one.yaml", "two.yaml", "run.yaml"]


def test_a_file_that_includes_itself_is_refused(write: Write) -> None:
    write("defaults: [run.yaml]\n", "other.yaml")
    with pytest.raises(ConfigError, match="includes itself"):
        read_file(write("defaults: [other.yaml]\n"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rollout: {n: 1}\nrollout: {n: 2}\n", "line 2: .*duplicate key rollout"),
        ("rollout:\n  n: 1\n  n: 2\n", "line 3: .*duplicate key n"),
        ("rollout.n: 1\nrollout: {n: 2}\n", r"rollout\.n and rollout\.n cannot both"),
        ("rollout: 3\nrollout.n: 1\n", r"rollout\.n and rollout cannot both"),
        ("rollout: {n: 1}\nactor_rollout_ref: {rollout: {n: 2}}\n", r"rollout\.n is given twice.* 1 .* 2"),
        ("- rollout\n", "expected a mapping"),
        ("just words\n", "expected a mapping"),
        ("rollout: [1\n", "not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("rollout:\n  n: 010\n", "line 2: 010 is another number"),
        ("rollout: {stop: [a, 1:30]}\n", "line 1: 1:30 is another number"),
        ("defaults: one.yaml\n", "defaults.* list"),
        ("defaults: [nowhere.yaml]\n", r"nowhere\.yaml: .*no such file"),
    ],
)
def test_a_file_that_cannot_be_read_as_settings_is_refused_by_name(write: Write, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        read_file(write(text))
    assert ".yaml: " in str(refused.value)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: .*no such file"):
        read_file(tmp_path / "nowhere.yaml")


def test_a_folder_and_a_binary_file_are_refused(tmp_path) -> None:
    (tmp_path / "weights.yaml").write_bytes(b"\xff\xfe\x00\x80")
    for path in (tmp_path, tmp_path / "weights.yaml"):
        with pytest.raises(ConfigError, match=path.name):
            read_file(path)


def test_a_folder_with_a_configuration_is_refused_with_the_file_to_give_instead(tmp_path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=rf"{tmp_path}: .*give {tmp_path}/config\.yaml$"):
        read_file(tmp_path)


def test_keys_with_an_x_hold_anchors_and_are_no_settings(write: Write) -> None:
    (layer,) = read_file(write("x-base: &base {lr: 1, beta: 2}\na: {<<: *base, lr: 3}\n"))
    assert dict(layer.values) == {"a.lr": 3, "a.beta": 2}


def test_numbers_in_quotes_decimal_numbers_addresses_and_anchors_are_what_they_look_like(write: Write) -> None:
    text = """
run: {name: "010", seed: 10}
a: &a {b: 0.5, c: 0, d: 1e-6, e: "4:30", f: 10.0.0.1:6379, h: -3}
g: *a
"""
    (layer,) = read_file(write(text))
    (run, seed, b, c, d, e, f, h, *again) = layer.values.values()
    assert (run, seed, b, c, d, e, f, h) == ("010", 10, 0.5, 0, 1e-6, "4:30", "10.0.0.1:6379", -3)
    assert again == [b, c, d, e, f, h]


def test_an_empty_file_says_nothing(write: Write) -> None:
    assert dict(read_file(write(""))[0].values) == {}
