"""The examples in docstrings of classes do what they say."""

import ast
import doctest
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"


def examples() -> Iterator[tuple[str, str]]:
    """Yield module and name of each class whose docstring has lines that begin with ``>>>``."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ">>> " in text:
            module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and ">>> " in (ast.get_docstring(node) or ""):
                    yield module, node.name


@pytest.mark.parametrize(("module", "name"), list(examples()))
def test_the_example_of_a_class_does_what_it_says(module: str, name: str) -> None:
    """Imports the module, which may import torch."""
    loaded = import_module(module)
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(loaded, name), name, loaded)
    told: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append)
    assert not result.failed, "".join(told)
    assert result.attempted
