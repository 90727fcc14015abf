"""Shell scripts, read without being run: assignments, simple conditions, expansions, and the words of commands.

n=4                                    assignments are kept
NODES=${NODES:-2}                      defaults, $((arithmetic)), arrays, quotes, line continuations
python -m main a.b=$n lr=$LR "$@"      ─▶ ["python", "-m", "main", "a.b=4", "lr=$LR"], where $LR is unresolved
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from headway.errors import ConfigError

# From Unicode's private use area: no file has these characters.
_BEGIN, _END = "\ue000", "\ue001"
_MARKED = re.compile(f"{_BEGIN}([^{_END}]*){_END}")


def unresolved(name: str) -> str:
    """Return a placeholder for the unknown value of ``name``, an expression as the file writes it."""
    return f"{_BEGIN}{name.replace(_BEGIN, '').replace(_END, '')}{_END}"


def missing(value: Any) -> list[str]:
    """Return the unresolved parts of a value, list or mapping, in order, as the file writes them."""
    match value:
        case str():
            return _MARKED.findall(value)
        case dict():
            return [name for one in value.values() for name in missing(one)]
        case list() | tuple():
            return [name for one in value for name in missing(one)]
    return []


def written(value: Any) -> str:
    """Return a value as text, with unresolved parts as the file writes them."""
    text = str(value)
    for mark in (_BEGIN, _END):
        text = text.replace(repr(mark)[1:-1], mark)  # as it is escaped within a list or a mapping
    return _MARKED.sub(r"\1", text)


_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_NAME = r"[A-Za-z_]\w*|[@*#?$!0-9-]"
_EXPANSION = rf"\${_NESTED}|\$\{{(?:[^{{}}]|\$?\{{[^{{}}]*\}})*\}}|\$(?:{_NAME})|`[^`\n]*`"
# Atomic groups, (?>…): otherwise an unclosed quote would take exponential time.
_QUOTED = rf'"(?>\\.|{_EXPANSION}|[^"\\])*"'
_PIECE = rf"""\\.|'[^']*'|{_QUOTED}|{_EXPANSION}|\$|[^\s;|&()'"\\`$]+|&(?!&)"""
_PIECES = re.compile(_PIECE, re.DOTALL)
"""Pattern of the parts of a word: text, quotes, expansions."""
_PIECES_IN_QUOTES = re.compile(rf"\\.|{_EXPANSION}|[^\\$`]+|.", re.DOTALL)
_ARRAY = rf"[A-Za-z_]\w*\+?=\((?>\s+(?:\#[^\n]*)?|\\\n|{_PIECE})*\)"
_TOKENS = re.compile(
    rf"(?P<blank>[ \t]+|\\[ \t]*(?:\n|\Z)|\\[ \t]+(?=\#)|\#[^\n]*)|{_ARRAY}|(?:{_PIECE})+|&&|\|\||;;|[;|()\n]",
    re.DOTALL,
)
"""Pattern of blanks, comments, arrays, words and signs. Blanks after a backslash at a line's end are ignored."""
_SIGNS = ("&&", "||", ";;", ";", "|", "(", ")", "\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARES = ("export", "local", "declare", "readonly")
_IGNORED = ("do", "done", "then", "function")
"""Words that are skipped before a statement, so that the body of a loop or a function is executed once."""
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*\n)(?:.*?\n)??[ \t]*\2[ \t]*(?=\n|$)", re.DOTALL)
_SHELL = re.compile(r"(^|/)(ba|z|da|)sh$")
_SILENT = ("@", "*", "#", "?", "!", "$", "-")
"""Shell parameters that are empty when a script is only read."""


def _power(base: Any, exponent: Any) -> Any:
    # 10**10**10 would never end.
    if not 0 <= exponent < 64:
        raise ValueError(f"{base}**{exponent} is too large")
    return base**exponent


OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # a shell divides integers
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
"""Type of an `ast` node → its operator on integers."""


@dataclass(slots=True)
class ShellScript:
    """A script that was read: its variables, arrays and commands, and remarks on guesses."""

    variables: dict[str, str] = field(default_factory=lambda: {"HOME": "$HOME", "PWD": ".", "pwd": "."})
    arrays: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_script(text: str) -> ShellScript:
    """Read a shell script. Raises `ConfigError` for quotes or brackets that do not close."""
    script = ShellScript()
    _Reader(text, script).block(live=True)
    return script


class _Reader:
    """Interpreter of a script's tokens. Statements that are not ``live`` are skipped."""

    def __init__(self, text: str, script: ShellScript) -> None:
        # First: a quote within a here-document would open a word that never ends.
        self._text = _HERE_DOCUMENT.sub(r"\3", text.replace("\r\n", "\n"))
        self._script = script
        self._tokens = list(_tokens(self._text))
        self._at = 0

    def block(self, *ends: str, live: bool) -> tuple[str, bool | None]:
        """Execute statements up to a word of ``ends``. Returns it, and whether the last one succeeds; None: unknown."""
        status: bool | None = True
        joint, last, skipped = "", "", False
        while self._at < len(self._tokens):
            word, start = self._tokens[self._at][0], self._tokens[self._at].start()
            if word in ends:
                self._at += 1
                return word, status
            if word in _SIGNS:
                joint = joint if word == "\n" else word  # a line may end with && or |
                self._at += 1
                continue
            if status is None and live and (joint == "&&" or (joint == "||" and _ASSIGNMENT.match(word))):
                self._remark(last, "is taken to hold")
            skipped = {"&&": status is False, "||": status is not False, "|": skipped}.get(joint, False)
            done = self._statement(live=live and not skipped)
            if not skipped:
                status, last = done, self._text[start : self._tokens[self._at - 1].end()]
            joint = ""
        return "", status

    def _statement(self, *, live: bool) -> bool | None:
        """Execute or skip one statement. Returns whether it succeeds; None if unknown."""
        start, word = self._tokens[self._at].start(), self._take()
        if word == "if":
            self._if(start, live=live)
        elif word == "case":
            self._case(start, live=live)
        elif word == "{":
            self.block("}", live=live)
        elif word not in _IGNORED:
            words = [word]
            while (more := self._peek()) and (more not in _SIGNS or (word == "[[" and words[-1] != "]]")):
                words.append(self._take())
            if self._peek() == "(":  # a function, which is assumed to be called
                self._at += 2
            elif live and word in ("[", "[["):
                return self._holds(words[1:-1])
            elif live and word not in ("for", "while", "until", "select"):
                self._carry_out(words)
        return True

    def _if(self, start: int, *, live: bool) -> None:
        done, end = False, "elif"
        while end == "elif":
            carried_out = len(self._script.commands)
            _, holds = self.block("then", live=live)
            if len(self._script.commands) > carried_out:  # a command, whose exit status is unknown
                holds = None
            condition = self._text[start : self._tokens[self._at - 1].start()]
            if holds is None and live and not done:
                self._remark(condition.strip(" \n;"), "is taken to hold")
            start = self._tokens[self._at - 1].start()
            end, _ = self.block("elif", "else", "fi", live=live and holds is not False and not done)
            done = done or holds is not False
        if end == "else":
            self.block("fi", live=live and not done)

    def _case(self, start: int, *, live: bool) -> None:
        """Pass over ``case … esac``, whose branches would set the same variables to different values."""
        end = self._take()
        while end not in ("esac", ""):
            while (end := self._take()) not in (")", "esac", ""):
                pass
            # Statement by statement: a branch may contain another case.
            end = self.block(";;", "esac", live=False)[0] if end == ")" else end
        if live:
            statement = self._text[start : self._tokens[self._at - 1].end()]
            self._remark(statement, "no branch is taken", ": ")

    def _peek(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        word = self._peek()
        # Not past the end: the last token stays the one before this place.
        self._at = min(self._at + 1, len(self._tokens))
        return word

    def _remark(self, statement: str, what: str, colon: str = " ") -> None:
        self._script.remarks.append(f"`{_short(statement)}`{colon}{what}")

    def _carry_out(self, statement: Sequence[str]) -> None:
        declares = statement[0] in _DECLARES
        assignments = statement[1:] if declares else list(takewhile(_ASSIGNMENT.match, statement))
        if declares or len(assignments) == len(statement):
            for found in filter(None, map(_ASSIGNMENT.match, assignments)):
                self._assign(*found.groups())
        elif words := [word for raw in statement[len(assignments) :] for word in self._words(raw)]:
            shell = next((i for i, word in enumerate(words) if _SHELL.search(word)), len(words))
            match words[shell + 1 :]:
                case [option, inside, *_] if option.startswith("-") and option.endswith("c"):  # bash -lc "…"
                    _Reader(inside, self._script).block(live=True)
                case _:
                    self._script.commands.append(words)

    def _assign(self, name: str, adds: str, value: str) -> None:
        script = self._script
        if value.startswith("("):
            words = [word for token in _tokens(value[1:-1]) for word in self._words(token[0])]
            script.arrays[name] = [*(script.arrays.get(name, []) if adds else []), *words]
        else:
            script.variables[name] = (script.variables.get(name, "") if adds else "") + " ".join(self._words(value))

    def _holds(self, test: Sequence[str]) -> bool | None:
        """Tell whether a condition like ``"$A" = "b"`` holds; None if unknown."""
        words = [word for raw in test for word in self._words(raw)]
        if any(map(missing, words)):
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
            case [left, sign, right] if sign.startswith("-") and left.isdigit() and right.isdigit():
                compare = getattr(operator, sign[1:], None)  # -gt is operator.gt
                return None if compare is None else bool(compare(int(left), int(right)))
        return None

    # -------------------------------------------------------------------------------------- expansions

    def _words(self, raw: str) -> list[str]:
        """Return the words that one word becomes by its expansions: none for ``$@``, several for an array."""
        words: list[str] = []
        for piece in _PIECES.findall(raw):
            # In single quotes nothing is expanded.
            if piece[0] == "'":
                parts = [piece[1:-1]]
            elif piece[0] == '"':
                parts = self._in_quotes(piece[1:-1])
            elif piece[0] in "$`" and piece != "$":
                # Without quotes a value is split into words; an unknown value stays one word.
                values = self._expansion(piece)
                parts = [part for one in values for part in ([one] if missing(one) else one.split())]
            else:
                parts = [piece.removeprefix("\\")]
            _append(words, parts)
        return words

    def _in_quotes(self, text: str) -> list[str]:
        words = [] if text else [""]
        for piece in _PIECES_IN_QUOTES.findall(text):
            if piece[0] in "$`" and len(piece) > 1:
                _append(words, self._expansion(piece))
            else:
                _append(words, ["" if piece == "\\\n" else re.sub(r'^\\(["\\$`])', r"\1", piece)])
        return words

    def _expansion(self, text: str) -> list[str]:
        """Return the words of an expansion, an array's items one by one."""
        # Before $(…), which is a prefix of $((…)).
        if text.startswith("$(("):
            return [self._arithmetic(text)]
        if text.startswith("$("):
            return ["." if text[2:-1].strip() == "pwd" else unresolved(text)]
        if text.startswith("`"):
            return [unresolved(text)]
        return self._parameter(text[2:-1] if text.startswith("${") else text[1:])

    def _parameter(self, inside: str) -> list[str]:
        """Return the words of ``${inside}``: a variable, ``NAME:-default`` or ``NAME[@]``."""
        script, unknown = self._script, [unresolved(f"${{{inside}}}")]
        if not (name := re.match(_NAME, inside)):
            return unknown
        key, rest = name[0], inside[name.end() :]
        if key == "#" and rest:  # a number of items or characters
            counted = script.arrays.get(rest.removesuffix("[@]").removesuffix("[*]"))
            return unknown if counted is None or missing(counted) else [str(len(counted))]
        # No argument: "$@" is empty, since the script was not started.
        if key in _SILENT:
            return []
        if rest in ("[@]", "[*]"):
            return script.arrays.get(key, [])
        known = script.variables.get(key, next(iter(script.arrays.get(key, [])), None))
        if found := re.match(r":?[-=]", rest):
            default = rest[found.end() :]
            return [known or " ".join(self._words(default if '"' in default else f'"{default}"'))]
        if found := re.match(r":?[+?]", rest):
            return [] if "+" in found[0] else [known or unresolved(f"${{{key}}}")]
        if rest.startswith("##*/") and known:
            return [known.rpartition("/")[2]]
        if rest:
            return unknown
        return [unresolved(f"${key}") if known is None else known]

    def _arithmetic(self, text: str) -> str:
        """Return the value of ``$((…))``, an integer expression."""
        expanded = re.sub(r"\$\{?(\w+)\}?", r"\1", text[3:-2]).strip()
        try:
            return str(self._number(ast.parse(expanded, mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError):
            return unresolved(text)

    def _number(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.Name(id=name):
                return int(self._script.variables.get(name, ""))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return int(OPERATORS[type(op)](self._number(left), self._number(right)))
        raise ValueError(ast.unparse(node))


def _tokens(text: str) -> Iterator[re.Match[str]]:
    """Yield the words and operators of a script, as written. Raises `ConfigError` for an unclosed quote."""
    at = 0
    while at < len(text):
        if (token := _TOKENS.match(text, at)) is None:
            raise ConfigError(f"a {text[at]} of the script is never closed; expected a shell script")
        if token["blank"] is None:
            yield token
        at = token.end()


def _append(words: list[str], parts: Sequence[str]) -> None:
    """Append the first of ``parts`` to the last word. The others are new words."""
    if words and parts:
        words[-1] += parts[0]
        parts = parts[1:]
    words += parts


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}…"
