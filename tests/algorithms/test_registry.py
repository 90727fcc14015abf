"""Registries: by name, by file, and what they say when neither fits."""

from __future__ import annotations

from importlib import import_module
from inspect import signature

import pytest

from headway.algorithms.registry import Registry
from headway.errors import ConfigError, UserCodeError
from headway.runtime.user_code import (
    load_function,
    load_object,
    names_a_file,
    names_a_module,
    names_user_code,
    resolve_spec,
)


@pytest.fixture
def colours() -> Registry:
    registry: Registry = Registry("colour", "paint.colour")

    @registry.register("red")
    def red() -> str:
        return "ff0000"

    return registry


def test_a_registered_function_is_found_by_its_name(colours: Registry) -> None:
    assert colours.get("red")() == "ff0000"
    assert colours.names() == ["red"]


def test_an_unknown_name_gets_the_key_a_suggestion_and_the_known_names(colours: Registry) -> None:
    with pytest.raises(ConfigError, match=r"paint\.colour: unknown colour 'rad' .*'red'.*known: red"):
        colours.get("rad")


def test_a_name_is_taken_once(colours: Registry) -> None:
    with pytest.raises(ConfigError, match="already a colour named 'red'"):
        colours.register("red")(lambda: "")


def test_a_function_from_a_file_may_import_its_neighbour_and_define_dataclasses(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend("")  # restores sys.path afterwards
    (tmp_path / "neighbour_of_blue.py").write_text("CODE = '0000ff'\n")
    (tmp_path / "blue.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour_of_blue import CODE\n"
        "@dataclass\nclass Colour:\n    code: str\ndef blue():\n    return Colour(CODE).code\n"
    )
    assert load_function(f"{tmp_path / 'blue.py'}:blue")() == "0000ff"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "f", "there is no file"),
        ("def g(): pass", "f", "has no 'f'"),
        ("f = 3", "f", "is not a function"),
        ("def f(:", "f", "does not import: SyntaxError"),
        ("import sys; sys.exit(3)", "f", "does not import: SystemExit"),
        ("raise KeyError('x')", "f", "does not import: KeyError"),
    ],
)
def test_a_file_that_cannot_be_used_is_the_users_error(tmp_path, content, name, message) -> None:
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserCodeError, match=message):
        load_function(f"{file}:{name}")


def test_a_function_from_a_file_that_calls_exit_ends_nothing_but_its_own_call(tmp_path, colours: Registry) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys\ndef f(inputs, *, k=3):\n    return sys.exit(0) if inputs else {}[k]\n"
    )
    spec = f"{tmp_path}/mine.py:f"
    function = colours.get(spec)
    assert str(signature(function)) == "(inputs, *, k=3)"
    with pytest.raises(UserCodeError) as error:
        function(True)
    assert str(error.value) == f"{spec}: raised SystemExit: 0 (mine.py:3, in f)"
    with pytest.raises(UserCodeError, match=r"raised KeyError: 5 \(mine\.py:3, in f\)"):
        function(False, k=5)


def test_only_a_python_file_with_a_function_names_a_file() -> None:
    assert names_a_file("rewards/my.py:score")
    assert not names_a_file("exact_match")
    assert not names_a_file("my.py")


@pytest.fixture
def package(tmp_path, monkeypatch) -> str:
    """A package on ``sys.path``, as an installed one is."""
    name = f"scores_{tmp_path.name}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "text.py").write_text("MOST = 3\ndef score(response):\n    return 2.0\n")
    (tmp_path / name / "broken.py").write_text("raise KeyError('x')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_function_of_an_importable_module_is_named_by_it(package: str, colours: Registry) -> None:
    spec = f"{package}.text:score"
    assert names_user_code(spec)
    assert not names_a_file(spec)
    assert resolve_spec(spec) == spec
    assert load_function(spec) is import_module(f"{package}.text").score
    assert colours.get(spec)("") == 2.0
    assert load_object(f"{package}.text:MOST") == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("away:score", r"module \S+\.away cannot be imported: ModuleNotFoundError"),
        ("broken:score", r"module \S+\.broken cannot be imported: KeyError"),
        ("text:scare", r"text has no 'scare'"),
        ("text:MOST", r"'MOST' is not a function"),
    ],
)
def test_a_module_that_cannot_be_used_is_the_users_error(package: str, given: str, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        load_function(f"{package}.{given}")


@pytest.mark.parametrize("spec", ["exact_match", "my.py", "http://here:1", "a/b:c", "my.py:score", "data-set:c", ":f"])
def test_other_texts_name_no_module(spec: str) -> None:
    assert not names_a_module(spec)


def test_a_spec_is_made_absolute_for_other_processes(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_spec("my.py:score") == f"{tmp_path}/my.py:score"
