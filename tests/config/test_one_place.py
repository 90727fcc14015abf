"""What a transport or a loss can do is said in its table, so that no other file asks for one by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway
from headway.config.sections.losses import LOSSES
from headway.config.transport_facts import TRANSPORTS, WITHIN_PROCESS, transport_of

SOURCE = Path(headway.__file__).parent


def names_asked_for(tree: ast.AST) -> Iterator[str]:
    """Texts that something is compared with: by an operator, or by ``match``."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                parts = [left, *others]
            case ast.MatchValue(value=value):
                parts = [value]
            case _:
                parts = []
        for part in parts:
            yield from (one.value for one in ast.walk(part) if isinstance(one, ast.Constant) and type(one.value) is str)


def test_no_file_asks_for_a_transport_or_a_loss_by_its_name() -> None:
    names = {*TRANSPORTS, *LOSSES}
    texts = {path.relative_to(SOURCE): path.read_text() for path in SOURCE.rglob("*.py")}
    asked = {
        (path, name)
        for path, text in texts.items()
        if any(f'"{name}"' in text for name in names)  # as the formatter writes it; parsing all takes seconds
        for name in names & set(names_asked_for(ast.parse(text)))
    }
    assert asked == set()


@pytest.mark.parametrize("statement", ["x != 'disk'", "x in ('gpg', 'sapo')", "match x:\n  case 'disk': pass"])
def test_such_a_question_would_be_found(statement: str) -> None:
    assert set(names_asked_for(ast.parse(statement))) & (TRANSPORTS.keys() | LOSSES.keys())


def test_auto_is_within_the_process_where_there_is_one_and_else_a_process_group() -> None:
    def chosen(backend: str, *, shared: bool) -> str:
        return transport_of("auto", backend=backend, shared=shared)

    assert WITHIN_PROCESS == "local"
    assert chosen("ray", shared=False) == "broadcast"
    assert chosen("ray", shared=True) == chosen("inline", shared=True) == chosen("inline", shared=False) == "local"
