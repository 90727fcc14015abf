"""Python scripts, parsed and never run: the arguments of a configuration's class and of a trainer.

config = GRPOConfig(learning_rate=LR, …)      ─▶ {"learning_rate": 1e-6, …}
GRPOTrainer(model="…", reward_funcs=score)    ─▶ {"model": "…", "reward_funcs": "train.py:score"}

Constants, names, command-line options with their defaults, arithmetic and data sets are evaluated. The report names
what a script decides at run time.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.config.migration.shell_scripts import OPERATORS, missing, unresolved
from headway.config.migration_tables.trl import CONFIG, REWARDS
from headway.errors import ConfigError

CONFIGS = ("GRPOConfig", "RLOOConfig", "AsyncGRPOConfig")
"""Classes whose arguments are settings. A class whose name ends in one of them counts, too."""
TRAINERS = ("GRPOTrainer", "RLOOTrainer")
POSITIONS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
"""Positional parameters of a trainer, in order."""
_OPERATORS = {**OPERATORS, ast.Div: operator.truediv}
_AS_IT_IS = (
    *("map", "filter", "select", "shuffle", "rename_column", "rename_columns", "remove_columns", "with_format"),
    *("cast_column", "train_test_split", "take", "skip", "flatten"),
)
"""Methods of a data set whose result counts as the same data set."""
_CASTS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "Path": str}
_MAIN = "__name__ == '__main__'"


def read_code(text: str, path: Path, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read a Python script, called with ``options``. Returns its settings by name, and remarks about it.

    Raises `ConfigError` for invalid Python.
    """
    try:
        tree = ast.parse(text, str(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid Python: {error}") from error
    settings: dict[str, Any] = {}
    remarks: list[str] = []
    names = _Names(tree, path, options)
    configs, trainers = _calls(tree, CONFIGS), _calls(tree, TRAINERS)[-1:]
    if len(configs) > 1:
        remarks.append(f"of {len(configs)} configurations the last one counts, of line {configs[-1].lineno}")
    for call in configs[-1:]:
        # The longest name: AsyncGRPOConfig ends in GRPOConfig, too.
        settings[CONFIG] = max((name for name in CONFIGS if _called(call).endswith(name)), key=len)
        settings |= names.arguments(call, ("output_dir",), remarks)
    given = [one.value for call in trainers for one in call.keywords if one.arg == "args"]
    given += [one for call in trainers for one in call.args[2:3]]
    settings |= names.assigned_later(tree, given)
    for call in trainers:
        settings.setdefault(CONFIG, "RLOOConfig" if "RLOO" in _called(call) else "GRPOConfig")
        arguments = names.arguments(call, POSITIONS, remarks)
        settings |= {key: value for key, value in arguments.items() if key not in ("args", *settings)}
    if missing(settings.get("train_dataset")):
        remarks += [f"it loads {ast.unparse(call)}" for call in _calls(tree, ("load_dataset",))]
    return settings, remarks


def _calls(tree: ast.AST, names: tuple[str, ...]) -> list[ast.Call]:
    """Return calls of functions whose names end in one of ``names``, in the script's order."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node).endswith(names)]
    return sorted(found, key=lambda call: call.lineno)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _conditional(node: ast.AST, under: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the statements below ``node`` in the script's order, each with whether it is conditional."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, under
        decides = isinstance(child, ast.If) and ast.unparse(child.test) != _MAIN
        yield from _conditional(child, under or decides)


class _Names:
    """Names of a script and their assigned values; values and defaults of its command line and its dataclasses."""

    def __init__(self, tree: ast.Module, path: Path, options: Mapping[str, Any]) -> None:
        self._path = path
        self._options = options
        self._assigned: dict[str, list[ast.expr]] = {}
        self._defaults: dict[str, ast.expr] = {}
        self._functions: set[str] = set()
        self._imported: dict[str, str] = {}
        self._configurations = {"training_args"}
        for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
            self._remember(node)

    def _remember(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._assigned.setdefault(name, []).append(value)
                self._defaults[name] = value
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self._functions.add(name)
            case ast.ImportFrom(module=str() as module, names=names):
                self._imported |= {alias.asname or alias.name: module for alias in names}
            case ast.Call(
                func=ast.Attribute(attr="add_argument"), args=[*_, ast.Constant(value=str() as flag)], keywords=given
            ):
                name = flag.lstrip("-").replace("-", "_")
                for one in given:
                    if one.arg == "default":
                        self._defaults[name] = one.value

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target:
            case ast.Name(id=name):
                self._assigned.setdefault(name, []).append(value)
                if isinstance(value, ast.Call) and _called(value).endswith(CONFIGS):
                    self._configurations.add(name)
            case ast.Tuple(elts=parts):
                for i, part in enumerate(parts):
                    self._assign(part, ast.Subscript(value, ast.Constant(i), ast.Load()))

    def assigned_later(self, tree: ast.AST, given: Sequence[ast.expr]) -> dict[str, Any]:
        """Return the values assigned to attributes of a configuration, by name; the last assignment counts.

        ``given``: expressions that trainers get as their configuration.
        """
        found = {}
        configurations = self._configurations | {one.id for one in given if isinstance(one, ast.Name)}
        for statement, conditional in _conditional(tree):
            match statement:
                case (
                    ast.Assign(targets=[ast.Attribute(value=ast.Name(id=owner), attr=name)])
                    | ast.AugAssign(target=ast.Attribute(value=ast.Name(id=owner), attr=name))
                ) if owner in configurations:
                    known = isinstance(statement, ast.Assign) and not conditional
                    found[name] = self.value(statement.value) if known else unresolved(ast.unparse(statement))
        return found

    def arguments(self, call: ast.Call, positions: Sequence[str], remarks: list[str]) -> dict[str, Any]:
        """Return a call's arguments by name."""
        given = {name: self.value(one) for name, one in zip(positions, call.args, strict=False)}
        for one in call.keywords:
            value = self.value(one.value)
            if one.arg:
                given[one.arg] = value
            elif isinstance(value, dict):
                given |= {str(name): part for name, part in value.items()}
            else:
                remarks.append(f"line {call.lineno}: what **{ast.unparse(one.value)} gives is not known")
        return given

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression. Parts that the script does not determine are `unresolved`."""
        try:
            return self._value(node)
        except (TypeError, ValueError, ArithmeticError, RecursionError, LookupError, AttributeError):
            return unresolved(ast.unparse(node))

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return {self.value(k): self.value(v) for k, v in zip(keys, values, strict=True) if k is not None}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._value(left), self._value(right))
            case ast.JoinedStr(values=parts):
                return "".join(
                    str(self.value(part.value if isinstance(part, ast.FormattedValue) else part)) for part in parts
                )
            case ast.Name(id=name):
                return self._named(name)
            case ast.Attribute(attr=name) if name in self._options:
                return self._options[name]
            case ast.Attribute(attr=name):
                return self._value(self._defaults[name])
            case ast.Subscript(ast.Call(func=ast.Attribute(attr="from_pretrained")) as call, ast.Constant(value=0)):
                return self._call(call)  # a call that returns a model and a tokenizer: the model
            case ast.Subscript(value=inner, slice=ast.Constant(value=index)):
                return _part_of(self._value(inner), index)
            case ast.Call():
                return self._call(node)
        raise ValueError("only running the script would tell")

    def _named(self, name: str) -> Any:
        if name in self._functions:
            return f"{self._path}:{name}"
        if self._assigned.get(name):
            # In its own assignment a name has its previous value: data = data.map(…).
            last = self._assigned[name].pop()
            try:
                return self._value(last)
            finally:
                self._assigned[name].append(last)
        if name in REWARDS and self._imported[name].startswith("trl"):
            return name
        file = self._path.parent / f"{self._imported[name].replace('.', '/')}.py"
        return f"{file}:{name}" if file.is_file() else unresolved(name)

    def _call(self, node: ast.Call) -> Any:
        called = _called(node)
        if called in _AS_IT_IS and isinstance(node.func, ast.Attribute):
            found = self._value(node.func.value)
            if called == "train_test_split" and "dataset" in found:
                return found | {"split": found.get("split", "train")}  # its test part is held out of this one
            return found | {"dataset": found["dataset"]}
        if called in _CASTS and len(node.args) == 1:
            return _CASTS[called](self._value(node.args[0]))
        given = self.arguments(node, ("path", "name"), [])
        if called == "dict" and not node.args:
            return given
        if called == "load_dataset":
            parts = {"dataset": given["path"], "subset": given.get("name"), "split": given.get("split")}
            return {key: one for key, one in (parts | {"files": given.get("data_files")}).items() if one}
        if called == "from_pretrained":
            names = ("path", "pretrained_model_name_or_path", "model_name")
            return [given[name] for name in names if name in given][0]  # noqa: RUF015 - no name is a LookupError
        if called == "field":
            return given["default"]
        if called in ("get", "getenv") and "env" in ast.unparse(node.func):
            return self._value(node.args[1])
        raise ValueError("only running the script would tell")


def _part_of(found: Any, index: Any) -> Any:
    """Return an item of a list, or a split of a data set. Raises `LookupError` if it does not exist."""
    if isinstance(found, list):
        return found[index]
    split = found.get("split", index)
    if isinstance(split, list):
        split = split[index]
    elif "dataset" not in found or index not in ("train", split):
        raise LookupError(index)  # the held-out part of train_test_split, for one
    return found | {"split": split}
