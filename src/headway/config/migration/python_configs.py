"""Python scripts, parsed and never run: what a configuration's class and a trainer are called with.

config = GRPOConfig(learning_rate=LR, …)      ─▶ {"learning_rate": 1e-6, …}
GRPOTrainer(model="…", reward_funcs=score)    ─▶ {"model": "…", "reward_funcs": "train.py:score"}
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.config.migration.shell_scripts import OPERATORS, missing, unresolved
from headway.config.migration_tables.trl import CONFIG, REWARDS
from headway.errors import ConfigError

CONFIGS = ("GRPOConfig", "RLOOConfig", "AsyncGRPOConfig")
"""Classes whose arguments are settings. Names that end in one of them count as it."""
TRAINERS = ("GRPOTrainer", "RLOOTrainer")
POSITIONS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
"""Parameters of a trainer, in order."""
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    **OPERATORS,
    ast.Div: operator.truediv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_AS_IT_IS = (
    *("map", "filter", "select", "shuffle", "rename_column", "rename_columns", "remove_columns", "with_format"),
    *("cast_column", "train_test_split", "take", "skip", "flatten"),
)
"""Methods of a data set after which it is still that data set, for what is asked here."""


Assignment = ast.Assign | ast.AnnAssign | ast.AugAssign


@dataclass(slots=True)
class Code:
    """Settings of a script by name, and remarks about it."""

    settings: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def read_code(text: str, path: Path, options: Mapping[str, Any]) -> Code:
    """Read a Python script, started with ``options``. Raises `ConfigError` for one that is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        problem = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(f"{path}: not valid Python: {line}{problem}") from error
    code, names = Code(), _Names(tree, path, options)
    configs = list(_calls(tree, CONFIGS))
    if len(configs) > 1:
        code.remarks.append(f"of {len(configs)} configurations the last one counts, of line {configs[-1][1].lineno}")
    for name, call in configs[-1:]:
        code.settings[CONFIG] = name
        code.settings |= names.arguments(call, ("output_dir",), code.remarks)
    trainers = list(_calls(tree, TRAINERS))[-1:]
    code.settings |= dict(names.attributes(tree, _configurations(tree, [call for _, call in trainers])))
    for name, call in trainers:
        if CONFIG not in code.settings:
            code.settings[CONFIG] = "RLOOConfig" if name.startswith("RLOO") else "GRPOConfig"
        arguments = names.arguments(call, POSITIONS, code.remarks)
        code.settings |= {key: value for key, value in arguments.items() if key not in ("args", *code.settings)}
    if missing(code.settings.get("train_dataset")):
        loads = [ast.unparse(call) for _, call in _calls(tree, ("load_dataset",))]
        code.remarks += [f"it loads {', '.join(dict.fromkeys(loads))}"] if loads else []
    functions = code.settings.get("reward_funcs")
    if any(str(one).startswith(f"{path}:") for one in (functions if isinstance(functions, list) else [functions])):
        code.remarks += _lacking(tree, path)
    return code


def _lacking(tree: ast.Module, path: Path) -> Iterator[str]:
    """Yield a remark on the modules that a script imports at its top and that are not there for its functions here."""
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    packages = sorted({name.partition(".")[0] for name in names})
    beside = {file.stem for file in path.parent.iterdir()} if path.parent.is_dir() else set()
    if lacking := [name for name in packages if name not in beside and find_spec(name) is None]:
        yield (
            f"the reward is a function of {path}, whose imports run with it, and {', '.join(lacking)} "
            f"{'is' if len(lacking) == 1 else 'are'} not installed here: move it to a file of its own, or install them"
        )


def _calls(tree: ast.AST, names: Sequence[str]) -> Iterator[tuple[str, ast.Call]]:
    """Yield calls of what ends in one of ``names``, in the script's order, with the longest such name."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(found, key=lambda call: call.lineno):
        called = _called(call)
        if fitting := [name for name in names if called.endswith(name)]:
            yield max(fitting, key=len), call


def _configurations(tree: ast.AST, trainers: Sequence[ast.Call]) -> set[str]:
    """Return the names that configurations have: assigned, parsed from the command line, or given to a trainer."""
    given = [one.value for call in trainers for one in call.keywords if one.arg == "args"]
    given += [call.args[2] for call in trainers if len(call.args) > 2]
    found = {one.id for one in given if isinstance(one, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = _called(node.value)
            if called.endswith(CONFIGS) or called.startswith("parse_args_"):
                found |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return found


def _assignments(node: ast.AST, tests: tuple[ast.expr, ...] = ()) -> Iterator[tuple[Assignment, tuple[ast.expr, ...]]]:
    """Yield assignments in the script's order, each with the conditions that it stands under."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield child, tests
        elif isinstance(child, ast.If):
            otherwise = ast.UnaryOp(ast.Not(), child.test)
            yield from _assignments(ast.Module(child.body, []), (*tests, child.test))
            yield from _assignments(ast.Module(child.orelse, []), (*tests, otherwise))
        else:
            yield from _assignments(child, tests)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _part_of(found: Any, index: Any, unknown: str) -> Any:
    """Return an item of a list, a split of a data set, or a part of what is made of a split; else ``unknown``."""
    if isinstance(found, list) and isinstance(index, int):
        return found[index]
    if not isinstance(found, dict) or "dataset" not in found:
        return unknown
    split = found.get("split")
    if isinstance(split, list) and isinstance(index, int):
        return found | {"split": split[index]}
    if split and index == "test" and "test" not in split:
        return unknown  # held out of what is trained on, by train_test_split
    return found if split or not isinstance(index, str) or missing(index) else found | {"split": index}


class _Names:
    """Names of a script and what they are assigned; values and defaults of its command line and its dataclasses."""

    def __init__(self, tree: ast.Module, path: Path, options: Mapping[str, Any]) -> None:
        self._path = path
        self._options = options
        self._assigned: dict[str, list[ast.expr]] = {}
        self._defaults: dict[str, ast.expr] = {}
        self._functions: set[str] = set()
        self._imported: dict[str, str] = {}
        self._open: dict[str, int] = {}
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
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[*options], keywords=keywords):
                flags = [one.value for one in options if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                for keyword in keywords:
                    if keyword.arg == "default" and flags:
                        longest = max(flags, key=len).lstrip("-").replace("-", "_")
                        self._defaults[longest] = keyword.value

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target:
            case ast.Name(id=name):
                self._assigned.setdefault(name, []).append(value)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for i, part in enumerate(parts):
                    self._assign(part, ast.Subscript(value, ast.Constant(i), ast.Load()))

    def attributes(self, tree: ast.AST, owners: Container[str]) -> Iterator[tuple[str, Any]]:
        """Yield what is assigned to attributes of ``owners``, by name, in the script's order."""
        for node, tests in _assignments(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                match target:
                    case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in owners and node.value:
                        holds = [self.value(test) for test in tests]
                        if isinstance(node, ast.AugAssign) or any(missing(one) for one in holds):
                            yield name, unresolved(ast.unparse(node))
                        elif all(holds):
                            yield name, self.value(node.value)

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
        """Return what an expression is, as far as the script says it; the rest is `unresolved`."""
        try:
            return self._value(node)
        except (TypeError, ValueError, ArithmeticError, RecursionError, KeyError, IndexError):
            return unresolved(ast.unparse(node))

    def _known(self, node: ast.expr) -> Any:
        """Return what an expression is. Raises `ValueError` where the script does not say it."""
        if missing(value := self._value(node)):
            raise ValueError("not known")
        return value

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return {self.value(k): self.value(v) for k, v in zip(keys, values, strict=True) if k is not None}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._known(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._value(left), self._value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._known(left), self._known(right))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._value(body if self._known(test) else orelse)
            case ast.BoolOp(op=ast.Or(), values=values):
                found = [self._value(one) for one in values]
                return next((one for one in found if one), found[-1])
            case ast.JoinedStr(values=parts):
                return "".join(self._part(part) for part in parts)
            case ast.Name(id=name):
                return self._named(name)
            case ast.Attribute(attr=name) if name in self._options:
                return self._options[name]
            case ast.Attribute(attr=name) if name in self._defaults:
                return self._value(self._defaults[name])
            case ast.Subscript(value=ast.Call() as call) if _called(call) == "from_pretrained":
                return self._call(call)  # the model of what comes with a tokenizer
            case ast.Subscript(value=inner, slice=index):
                return _part_of(self._value(inner), self._value(index), unresolved(ast.unparse(node)))
            case ast.Call():
                return self._call(node)
        return unresolved(ast.unparse(node))

    def _part(self, part: ast.expr) -> str:
        return str(self.value(part.value if isinstance(part, ast.FormattedValue) else part))

    def _named(self, name: str) -> Any:
        if name == "__name__":
            return "__main__"
        if name in self._functions:
            return f"{self._path}:{name}"
        if name in self._assigned:
            return self._assigned_value(name)
        if name in self._imported:
            module = self._imported[name]
            if name in REWARDS and module.startswith("trl"):
                return name
            file = self._path.parent / f"{module.replace('.', '/')}.py"
            return f"{file}:{name}" if file.is_file() else unresolved(name)
        return unresolved(name)

    def _assigned_value(self, name: str) -> Any:
        """Evaluate what a name is assigned last; within that it is what it was before (``data = data.map(…)``)."""
        assigned, done = self._assigned[name], self._open.get(name, 0)
        if done >= len(assigned):
            raise ValueError(f"{name} is made of itself")
        self._open[name] = done + 1
        try:
            return self._value(assigned[-1 - done])
        finally:
            self._open[name] = done

    def _call(self, node: ast.Call) -> Any:
        called = _called(node)
        if called == "load_dataset" and node.args:
            given = self.arguments(node, ("path", "name", "split_"), [])
            files = given.get("data_files")
            parts = {"dataset": given["path"], "subset": given.get("name"), "split": given.get("split")}
            return {key: one for key, one in parts.items() if one} | ({"files": files} if files else {})
        if called in _AS_IT_IS and isinstance(node.func, ast.Attribute):
            found = self._value(node.func.value)
            if isinstance(found, dict) and "dataset" in found:
                return found
        if called == "from_pretrained":
            given = self.arguments(node, ("name",), [])
            names = ("name", "pretrained_model_name_or_path", "model_name")
            return next((given[name] for name in names if name in given), unresolved(ast.unparse(node)))
        if called in ("get", "getenv") and "environ" in ast.unparse(node) + "environ" * (called == "getenv"):
            return self._value(node.args[1]) if len(node.args) > 1 else unresolved(ast.unparse(node))
        if called in ("int", "float", "str", "Path") and len(node.args) == 1:
            value = self._value(node.args[0])
            return {"int": int, "float": float}.get(called, str)(value) if not missing(value) else value
        if called == "field":
            return next(self._value(one.value) for one in node.keywords if one.arg == "default")
        if called == "dict" and not node.args:
            return self.arguments(node, (), [])
        return unresolved(ast.unparse(node))
