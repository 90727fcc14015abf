"""Shell scripts, read without being run: assignments, simple conditions, expansions; the words of their commands.

n=4                                    assignments are kept
NODES=${NODES:-2}                      defaults, $((arithmetic)), arrays, quotes, line continuations
python -m main a.b=$n lr=$LR "$@"      ─▶ ["python", "-m", "main", "a.b=4", "lr=$LR"], where $LR is unresolved
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from headway.errors import ConfigError

_BEGIN, _END = "\ue000", "\ue001"
_MARKED = re.compile(f"{_BEGIN}([^{_END}]*){_END}")


def unresolved(name: str) -> str:
    """Return the text that stands for what ``name``, as it is written in the file, would give."""
    return f"{_BEGIN}{name.replace(_BEGIN, '').replace(_END, '')}{_END}"


def missing(value: Any) -> list[str]:
    """Return what of a value, a list or a mapping is unresolved, in order, as it is written in the file."""
    match value:
        case str():
            return _MARKED.findall(value)
        case dict():
            return [name for one in value.values() for name in missing(one)]
        case list() | tuple():
            return [name for one in value for name in missing(one)]
    return []


def written(value: Any) -> str:
    """Return a value as text, with what is unresolved as the file has it."""
    text = str(value)
    for mark in (_BEGIN, _END):
        text = text.replace(repr(mark)[1:-1], mark)  # as a list or a mapping shows it
    return _MARKED.sub(r"\1", text)


_ASSIGNMENT = re.compile(
    r"^((?:export\s+|local\s+|declare\s+(?:-\w+\s+)*|readonly\s+)*)([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL
)
_NAME = re.compile(r"[A-Za-z_]\w*|[@*#?$!0-9-]")
_TEST = re.compile(r"^\[\[?\s+(.*?)\s+\]?\]$", re.DOTALL)
_CASE = re.compile(r"^case\s+(.*?)\s+in(?:\s+(.*))?$", re.DOTALL)
_CONTINUES = re.compile(r"\\[ \t]*(\n|$)")
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*\n)(?:.*?\n)??[ \t]*\2[ \t]*(?=\n|$)", re.DOTALL)
_SEPARATOR = re.compile(r"&&|\|\||;;|[\n;|]")
_OPENS = re.compile(r"^(for|while|until|select)\b")
_SHELL = re.compile(r"(^|/)(ba|z|da|)sh$")
_NOTHING = "\ue002"
"""Mark of an expansion between quotes that gives no word, not even an empty one: ``"$@"``."""
_SILENT = ("@", "*", "#", "?", "!", "$", "-")
"""Parameters that stand for nothing where a script is only read."""
_COMPARISONS: Mapping[str, Callable[[int, int], Any]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


def _power(base: Any, exponent: Any) -> Any:
    if not 0 <= exponent < 64:
        raise ValueError(f"{base}**{exponent} is too large")
    return base**exponent


OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
"""Operators of whole numbers by their nodes."""


@dataclass(slots=True)
class ShellScript:
    """A script as far as it was read: its variables, arrays and commands, and remarks on what was guessed."""

    variables: dict[str, str] = field(default_factory=lambda: {"HOME": "$HOME", "PWD": ".", "pwd": "."})
    arrays: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _ShellBlock:
    """An open ``if``, ``case`` or ``{``: whether what stands there now is carried out, or a branch before it was."""

    kind: str
    holds: bool
    done: bool = False
    condition: str = ""
    """The condition of an ``if`` as far as it was read, or the pattern of a ``case``, while that is read."""
    test: bool | None = True
    """Whether the condition holds; None where nobody can tell."""
    subject: str | None = None
    """What the patterns of a ``case`` are compared with; None where nobody can tell."""


@dataclass(slots=True)
class _Reader:
    script: ShellScript
    blocks: list[_ShellBlock] = field(default_factory=list)
    last: str = ""
    """The statement before, which ``&&`` and ``||`` look at."""
    status: bool | None = True
    skipped: bool = False

    def read(self, separator: str, statement: str) -> None:
        """Follow or carry out one statement, which stands behind ``separator``."""
        word, rest = (*statement.split(None, 1), "")[:2]
        block = self.blocks[-1] if self.blocks else None
        if block is not None and self._branch(block, separator, word, rest, statement):
            return
        if word == "if":
            self.blocks.append(_ShellBlock("if", False, condition=statement, test=_holds(rest, self.script)))
        elif found := _CASE.match(statement):
            self._open_case(statement, found[1], found[2] or "")
        elif word in ("do", "then", "else"):
            self._rest(rest)
        elif self._is_skipped(separator, statement):
            if word == "{":
                self.blocks.append(_ShellBlock("{", False))
        elif word == "{" or statement.endswith("{"):  # the latter is a function, which is taken to be called
            self.blocks.append(_ShellBlock("{", True))
            self._rest(rest if word == "{" else "")
        elif self._live():
            self.last, self.status = statement, _holds(statement, self.script) if word in ("[", "[[") else True
            if word not in ("[", "[["):
                _carry_out(statement, self.script)

    def _rest(self, statement: str) -> None:
        if statement:
            self.read("", statement)

    def _live(self) -> bool:
        return all(block.holds for block in self.blocks)

    def _is_skipped(self, separator: str, statement: str) -> bool:
        """Tell whether what stands before ``separator`` keeps a statement from being carried out."""
        unknown = self.status is None and self._live()
        if unknown and (separator == "&&" or (separator == "||" and _ASSIGNMENT.match(statement))):
            self.script.remarks.append(f"`{_short(self.last)}` is taken to hold")
        if separator == "&&":
            self.skipped = self.status is False
        elif separator == "||":
            self.skipped = self.status is not False
        elif separator != "|":
            self.skipped, self.status = False, True
        return self.skipped

    def _branch(self, block: _ShellBlock, separator: str, word: str, rest: str, statement: str) -> bool:
        """Follow the words of the block that is open; tell whether the statement was one of them, with its rest."""
        if word == {"if": "fi", "case": "esac", "{": "}"}[block.kind]:
            self.blocks.pop()
            self.status = True
        elif block.kind == "case" and word == ";;":
            block.done, block.holds, block.condition = block.done or block.holds, False, "|"
        elif block.kind == "case" and block.condition:
            pattern, closes, rest = statement.partition(")")
            block.condition += f"{pattern.strip().removeprefix('(')}|"
            if closes:
                patterns = [one.strip(" '\"") for one in block.condition.strip("|").split("|")]
                matches = block.subject is not None and any(fnmatchcase(block.subject, one) for one in patterns)
                block.holds, block.condition = matches and not block.done, ""
                self._rest(rest.strip())
        elif block.kind == "if" and word == "then":
            block.holds = block.test is not False and not block.done
            if block.holds and block.test is None and self._live():
                self.script.remarks.append(f"`{_short(block.condition)}` is taken to hold")
            block.condition = ""
            self._rest(rest)
        elif block.kind == "if" and word in ("elif", "else"):
            block.done = block.done or block.holds
            block.holds = word == "else" and not block.done
            if word == "else":
                self._rest(rest)
            else:
                block.condition, block.test = statement, _holds(rest, self.script)
        elif block.kind == "if" and block.condition:
            also, before = _holds(statement, self.script), block.test
            decides = separator == "||"  # the value that decides alone
            block.test = decides if decides in (also, before) else None if None in (also, before) else not decides
            block.condition += f" {separator or ';'} {statement}"
        else:
            return False
        return True

    def _open_case(self, statement: str, subject: str, rest: str) -> None:
        words = _words(subject, self.script)
        known = len(words) <= 1 and not any(missing(word) for word in words)
        if not known and self._live() and not re.search(r"\$\{?1\b", subject):  # "$1": a loop over arguments
            self.script.remarks.append(f"`{_short(statement)}`: no branch is taken, as the file does not say which")
        self.blocks.append(_ShellBlock("case", False, condition="|", subject="".join(words) if known else None))
        self._rest(rest)


def read_script(text: str) -> ShellScript:
    """Read a shell script. Raises `ConfigError` for quotes or brackets that do not close."""
    script = ShellScript()
    _read(text, script)
    return script


def _read(text: str, script: ShellScript) -> None:
    reader = _Reader(script)
    for separator, statement in _statements(_HERE_DOCUMENT.sub(r"\3", text)):
        reader.read(separator, statement)


def _carry_out(statement: str, script: ShellScript) -> None:
    if _OPENS.match(statement) or statement in ("done", "}", ";;"):
        return
    if found := _ASSIGNMENT.match(statement):
        declares, name, adds, value = found.groups()
        if value.startswith("("):
            words = _words(value[1:].rstrip().removesuffix(")"), script)
            script.arrays[name] = [*(script.arrays.get(name, []) if adds else []), *words]
            return
        words = _words(value, script)
        if declares or all(_ASSIGNMENT.match(word) for word in words[1:]):
            _assign(name, adds, words[0] if words else "", script)
            for i in range(1, len(words)):  # expanded anew, as B=$A sees the A before it
                if i < len(words := _words(value, script)) and (found := _ASSIGNMENT.match(words[i])):
                    _assign(found[2], found[3], found[4], script)
            return
        statement = " ".join(map(shlex.quote, words[1:]))  # X=1 Y=2 command
    if words := _words(statement, script):
        shell = next((i for i, word in enumerate(words) if _SHELL.search(word)), len(words))
        match words[shell + 1 :]:
            case [option, inside, *_] if option.startswith("-") and option.endswith("c"):  # bash -lc "…"
                _read(inside, script)
            case _:
                script.commands.append(words)


def _assign(name: str, adds: str, value: str, script: ShellScript) -> None:
    script.variables[name] = (script.variables.get(name, "") if adds else "") + value


def _holds(statement: str, script: ShellScript) -> bool | None:
    """Tell whether a condition like ``[ "$A" = "b" ]`` holds; None where that cannot be told."""
    if not (test := _TEST.match(statement)):
        return None
    words = _words(test[1], script)
    if any(missing(word) for word in words):
        return None
    match words:
        case ["-z", *rest] if len(rest) < 2:
            return not "".join(rest)
        case ["-n", *rest] if len(rest) < 2:
            return bool("".join(rest))
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case [left, sign, right] if sign in _COMPARISONS and left.isdigit() and right.isdigit():
            return bool(_COMPARISONS[sign](int(left), int(right)))
    return None


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """Yield the statements of a script, each behind its separator: without comments, with continued lines joined."""
    statement, quote, depth, at, separator = "", "", 0, 0, ""
    text = text.replace("\r\n", "\n")
    while at < len(text):
        sign = text[at]
        if sign == "\\" and quote != "'":
            if ends := _CONTINUES.match(text, at):  # blanks behind the backslash are a slip that is overlooked
                statement += "" if quote else " "
                at = ends.end()
            else:
                statement += text[at : at + 2]
                at += 2
            continue
        if sign in "'\"" and quote in ("", sign):
            quote = "" if quote else sign
        elif not quote and sign == "#" and (not statement or statement[-1].isspace()):
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        elif not quote and sign == "(":
            depth += 1
        elif not quote and sign == ")" and depth:
            depth -= 1
        elif not quote and not depth and (ends := _SEPARATOR.match(text, at)):
            if ends[0] not in ("&&", "||", "|") or statement.count("[[ ") <= statement.count(" ]]"):
                if finished := statement.strip().removesuffix("\\"):  # as in `a.b=c \  # comment`
                    yield separator, finished
                    separator = ""
                if ends[0] == ";;":
                    yield "", ";;"
                if ends[0] != "\n":  # a line may end with && or |
                    separator = ends[0] if ends[0] not in (";", ";;") else ""
                statement, at = "", ends.end()
            else:
                statement, at = statement + ends[0], ends.end()
            continue
        statement += sign
        at += 1
    if quote:
        raise ConfigError(f"a {quote} of the script is never closed; expected a shell script")
    if statement.strip():
        yield separator, statement.strip()


def _words(text: str, script: ShellScript) -> list[str]:
    """Return the words of a text after its expansions."""
    try:
        return shlex.split(_expanded(text, script), comments=False)
    except ValueError as error:
        raise ConfigError(f"{_short(text)!r}: {error}; expected a shell command") from error


def _expanded(text: str, script: ShellScript) -> str:
    """Replace expansions by what they give, quoted as `shlex.split` undoes it."""
    result, quote, at = "", "", 0
    while at < len(text):
        sign = text[at]
        if sign == "\\" and quote != "'":
            result += text[at : at + 2]
            at += 2
        elif sign in "'\"" and quote in ("", sign):
            quote = "" if quote else sign
            result += sign
            at += 1
        elif sign in "$`" and quote != "'":
            values, at = _expansion(text, at, script)
            if quote:
                inside = [re.sub(r'(["\\])', r"\\\1", value) for value in values]
                result += '" "'.join(inside) if values else _NOTHING
            else:
                words = [[value] if missing(value) else value.split() for value in values]
                result += " ".join(shlex.quote(word) for several in words for word in several)
        else:
            result += sign
            at += 1
    return result.replace(f'"{_NOTHING}"', "").replace(_NOTHING, "")


def _expansion(text: str, at: int, script: ShellScript) -> tuple[list[str], int]:
    """Return what the expansion at ``at`` gives, an array's items one by one, and where it ends."""
    if text.startswith("$((", at):
        end = _closing(text, at + 1)
        return [_arithmetic(text[at + 3 : end - 1], script)], end + 1
    if text.startswith("$(", at):
        end = _closing(text, at + 1)
        inside = text[at + 2 : end].strip()
        return ["." if inside == "pwd" else unresolved(f"$({inside})")], end + 1
    if text.startswith("`", at):
        end = text.find("`", at + 1)
        return [unresolved(text[at : end + 1])], (end if end > 0 else len(text)) + 1
    if text.startswith("${", at):
        end = _closing(text, at + 1)
        return _parameter(text[at + 2 : end], script), end + 1
    if name := _NAME.match(text, at + 1):
        return _parameter(name[0], script), name.end()
    return ["\\$"], at + 1


def _closing(text: str, at: int) -> int:
    """Return where the bracket at ``at`` closes, or the text's end."""
    closing, depth = {"(": ")", "{": "}"}[text[at]], 0
    for here in range(at, len(text)):
        depth += (text[here] == text[at]) - (text[here] == closing)
        if depth == 0:
            return here
    return len(text)


def _parameter(inside: str, script: ShellScript) -> list[str]:
    """Return what ``${inside}`` gives: a variable, ``NAME:-default``, ``NAME[@]``."""
    if not (name := _NAME.match(inside)):
        return [unresolved(f"${{{inside}}}")]
    key, rest = name[0], inside[name.end() :]
    if key == "#" and rest:  # how many, or how long
        counted = script.arrays.get(rest.removesuffix("[@]").removesuffix("[*]"))
        return [unresolved(f"${{{inside}}}") if counted is None or missing(counted) else str(len(counted))]
    if key in _SILENT:
        return []
    if rest in ("[@]", "[*]"):
        return script.arrays.get(key, [])
    known = script.variables.get(key, next(iter(script.arrays.get(key, [])), None))
    if found := re.match(r":?[-=]", rest):
        default = rest[found.end() :]
        return [known or " ".join(_words(default if '"' in default else f'"{default}"', script))]
    if found := re.match(r":?[+?]", rest):
        return [] if "+" in found[0] else [known or unresolved(f"${{{key}}}")]
    if rest.startswith(("##*/",)) and known:
        return [known.rpartition("/")[2]]
    if rest or known is None:
        return [unresolved(f"${{{inside}}}" if rest else f"${key}")]
    return [known]


def _arithmetic(text: str, script: ShellScript) -> str:
    """Return the value of an arithmetic expression of whole numbers."""
    expanded = re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip()
    try:
        return str(_number(ast.parse(expanded, mode="eval").body, script))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return unresolved(f"$(({text}))")


def _number(node: ast.expr, script: ShellScript) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return int(script.variables[name]) if name in script.variables else int("")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, script)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return int(OPERATORS[type(op)](_number(left, script), _number(right, script)))
    raise ValueError(ast.unparse(node))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}…"
