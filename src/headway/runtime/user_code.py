"""User code, named as ``file.py:name`` or ``package.module:name``: rewards, losses, advantages, programs."""

from __future__ import annotations

import difflib
import importlib.util
import pickle
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.errors import UserCodeError, boundary, raised_by, shown


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a hint with the name of ``known`` that is most similar to ``given``; empty if none is similar."""
    close = difflib.get_close_matches(given, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def names_a_file(spec: str) -> bool:
    """Tell whether ``spec`` means a function in a file rather than a registered name."""
    path, colon, _ = spec.rpartition(":")
    return bool(colon) and path.endswith(".py")


def names_a_module(spec: str) -> bool:
    """Tell whether ``spec`` is ``package.module:name``, with a module that can be imported."""
    return not names_a_file(spec) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", spec) is not None


def names_user_code(spec: str) -> bool:
    """Tell whether ``spec`` names the user's code, in a file or a module, rather than a registered name."""
    return names_a_file(spec) or names_a_module(spec)


def names_a_server(spec: str) -> bool:
    """Tell whether ``spec`` is the address of a server."""
    return spec.startswith(("ws://", "wss://", "http://", "https://"))


def resolve_spec(spec: str) -> str:
    """Make a file's path in ``spec`` absolute, so that a process with another working directory finds the same file.

    A ``spec`` without a file is returned unchanged.
    """
    if not names_a_file(spec):
        return spec
    path, _, name = spec.rpartition(":")
    return f"{Path(path).expanduser().resolve()}:{name}"


def load_function(spec: str) -> Callable[..., Any]:
    """Import the file or module of ``spec`` and return its function.

    A file's folder is appended to ``sys.path``, so that the file can import its neighbours.

    Raises:
        UserCodeError: the file or module is missing or does not import, or has no callable of that name.
    """
    function = load_object(spec)
    if not callable(function):
        raise UserCodeError(f"{spec}: {_name(spec)!r} is not a function; name one, as {_form(spec, 'function')}")
    return function  # type: ignore[no-any-return]  # getattr is Any; callable() was checked


def load_object(spec: str) -> Any:
    """Import the file or module of ``spec`` and return the named object: a class, a function, or another object.

    Raises:
        UserCodeError: the file or module is missing or does not import, or has nothing of that name.
    """
    where, found = _load(spec)
    if found is None:
        raise UserCodeError(f"{spec}: {where} has no {_name(spec)!r}; name what it defines, as {_form(spec, 'name')}")
    return found


def _load(spec: str) -> tuple[Path | str, Any]:
    """Return the file or module of ``spec``, and the object with the given name in it; None if it is missing."""
    if names_a_module(spec):
        module = spec.partition(":")[0]
        try:
            return module, getattr(import_module(module), _name(spec), None)
        except (Exception, SystemExit) as cause:
            raise UserCodeError(
                f"{spec}: module {module} cannot be imported: {raised_by(cause)}; install its package on every machine "
                "of the run, or name a file, as file.py:name"
            ) from cause
    path = Path(spec.rpartition(":")[0]).expanduser().resolve()
    with boundary(f"{spec}: the file cannot be read", UserCodeError):
        there = path.is_file()
    if not there:
        raise UserCodeError(f"{spec}: there is no file {path}")
    return path, getattr(_import_file(path), _name(spec), None)


def _form(spec: str, name: str) -> str:
    return f"{'package.module' if names_a_module(spec) else 'file.py'}:{name}"


def _name(spec: str) -> str:
    return spec.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a user's function, which gets only the arguments that it names.

    Example:
        >>> def reset(seed, options=None): ...
        >>> Parameters.of(reset).given({"seed": 7, "row": {}})
        {'seed': 7}
        >>> Parameters.of(reset).lacking(["row"])
        ['seed']
    """

    named: Mapping[str, Parameter]
    """Parameters that can be given by name, except ``self``."""
    takes_all: bool
    """True if the function has ``**kwargs``."""
    order: tuple[str, ...] = ()
    """Names of all parameters except ``self`` and ``**kwargs``, positional-only ones included."""
    readable: bool = True
    """False for a built-in function, whose parameters show only when it is called."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters:
        """Read the parameters of a function, or of a class's constructor."""
        try:
            found = signature(function).parameters
        except (TypeError, ValueError):
            return cls({}, takes_all=False, readable=False)
        by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        named = {name: one for name, one in found.items() if one.kind in by_name and name != "self"}
        rest = [name for name, one in found.items() if one.kind is Parameter.VAR_KEYWORD]
        return cls(named, bool(rest), tuple(name for name in found if name not in ("self", *rest)))

    def given(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``available`` arguments that the function names; all of them if it has ``**kwargs``."""
        return {name: value for name, value in available.items() if self.takes_all or name in self.named}

    def lacking(self, available: Collection[str]) -> list[str]:
        """Return the names of parameters without a default that are not ``available``."""
        return [name for name, one in self.named.items() if one.default is one.empty and name not in available]


def check_call(
    spec: str,
    function: Callable[..., Any],
    positional: Sequence[str],
    named: Sequence[str] = (),
    params: Mapping[str, Any] | None = None,
) -> None:
    """Check that ``function`` can be called with these arguments, and with those of ``named`` that it has as
    parameters.

    ``params``: values that the user sets by name.

    Raises:
        UserCodeError: it cannot; the message names ``spec``, its parameters and the expected ones.
    """
    try:
        own = signature(function)
    except (TypeError, ValueError):  # the parameters of a built-in function show only when it is called
        return
    try:
        own.bind(*positional, **{name: None for name in named if name in own.parameters}, **(params or {}))
    except TypeError as cause:
        given = ", ".join([*positional, *(f"{name}={shown(value)}" for name, value in (params or {}).items())])
        optional = f", and by name those of {', '.join(named)} that it has" if named else ""
        where = ", where values are those of agent.params" if params is not None else ""
        raise UserCodeError(f"{spec}: takes {own}, but is called with ({given}){optional}{where}: {cause}") from None


def _import_file(path: Path) -> ModuleType:
    # With a checksum of the whole path: files of the same name in two folders are two modules.
    module_name = f"headway_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserCodeError(f"{path}: not a Python file that can be imported")
    module = importlib.util.module_from_spec(module_spec)
    if str(path.parent) not in sys.path:
        # At the end: a neighbouring file, such as random.py, must not hide a module of Python's.
        sys.path.append(str(path.parent))
    sys.modules[module_name] = module  # registered before the module runs: dataclasses and pickle look it up by name
    try:
        module_spec.loader.exec_module(module)
    # Removed: otherwise the next import would get half a module.
    except (Exception, SystemExit) as cause:
        del sys.modules[module_name]
        raise UserCodeError(f"{path} does not import: {raised_by(cause)}") from cause
    return module


def pickled_beside(file: str) -> Any:
    """Return the object pickled beside ``file``, under the same name.

    The object's import path is appended to ``sys.path``. The file's own folder is taken out: otherwise the file
    could be taken for the object's module.

    Raises:
        UserCodeError: the pickle is of another version of Python, whose functions this one cannot read.
    """
    path = Path(file).with_suffix(".pkl")
    whole = pickle.loads(path.read_bytes())
    if whole["python"] != (here := list(sys.version_info[:2])):
        there, this = (".".join(map(str, version)) for version in (whole["python"], here))
        raise UserCodeError(
            f"{path.name} was pickled by Python {there}, and this is Python {this}, which cannot read its functions; "
            f"use Python {there}, or give the function anew"
        )
    folder = str(path.parent)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    sys.path.extend(entry for entry in whole["path"] if entry not in (*sys.path, folder))
    return pickle.loads(whole["pickled"])


def by_fault(reasons: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return reasons of failures with their counts, the most frequent first.

    Reasons that differ only by an error's message, which often quotes an answer, are one fault: of one type, raised at
    one line. The most frequent of them stands for all, followed by "and alike".
    """
    faults: dict[str, Counter[str]] = {}
    for reason, times in reasons.items():
        faults.setdefault(_MESSAGE.sub(r"\1\2", reason), Counter())[reason] += times
    found = sorted(faults.values(), key=Counter.total, reverse=True)
    named = (f"{max(one, key=one.__getitem__)}{' and alike' if len(one) > 1 else ''}" for one in found)
    return list(zip(named, map(Counter.total, found), strict=True))


_MESSAGE = re.compile(r"((?:exception:|raised) \w+): .*( \([^()]+:\d+, in \S+\))$", re.DOTALL)
"""Text of an error between its type and the user's line, as `headway.errors.raised_by` writes them."""
