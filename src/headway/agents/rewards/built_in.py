"""Built-in rewards, which need no file: each is a function of one response, made from ``reward.params``.

Text within a thought is never scored, and a response whose thought never ended gets 0 (`make_rule`).

`BUILT_IN` names them. A maker's keyword arguments are the parameters; its result is called once for each response.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.agents.rewards.code_reward import code
from headway.agents.rewards.score_request import Response, ScoreRequest
from headway.errors import ConfigError, ScoringFailed
from headway.runtime.user_code import Parameters, did_you_mean

Rule = Callable[[ScoreRequest, Response], float]
"""A function of a request and one of the group's responses that returns the response's value."""
AnswerRule = Callable[[ScoreRequest, str], float]
"""Like `Rule`, but of the text after the response's thought."""


def exact_match() -> AnswerRule:
    """Make the rule: 1 if the response after its thought is the answer's text, surrounding space aside; else 0."""
    return lambda request, response: float(response.strip() == _answer_of(request).strip())


def regex(pattern: str, group: int | str | None = None, answer_pattern: str | None = None) -> Rule:
    """Make the rule: 1 if the last match of ``pattern`` in the response is the answer, space aside; else 0.

    The match may begin in the response's thought, but must end after it.

    ``group`` of the match is compared: a number or a name. Default: 1 if the pattern has groups, else the whole match.
    ``answer_pattern`` finds the ground truth in the answer in the same way, such as GSM8K's after ``####``.
    """
    find = _finder("pattern", pattern, group)
    find_answer = _finder("answer_pattern", answer_pattern, None) if answer_pattern is not None else None

    def rule(request: ScoreRequest, response: Response) -> float:
        answer: str | None = _answer_of(request)
        if answer is not None and find_answer is not None:
            answer = find_answer(answer, 0)
        if answer is None:
            raise ScoringFailed(f"reward.params.answer_pattern finds nothing in the answer {request.answer!r}")
        found = find(response.text, response.begin or 0)
        return float(found is not None and found.strip() == answer.strip())

    return rule


def format_reward(tags: Sequence[str] = ("think", "answer"), pattern: str | None = None) -> Rule:
    """Make the rule: 1 if the response has the form: each of ``tags`` opened and closed once, in order; else 0.

    Only space may stand between the tags: ``<think>…</think> <answer>…</answer>``. With ``pattern``, a regular
    expression, the whole response must match that instead; its ``.`` matches line ends, too. If the prompt opens a
    thought, its tag counts as opened by the response.
    """
    listed = isinstance(tags, Sequence) and not isinstance(tags, str) and len(tags) > 0
    if pattern is None and not (listed and all(isinstance(tag, str) and tag for tag in tags)):
        raise ConfigError(f"reward.params.tags: expected a list of names, such as [think, answer], not {tags!r}")
    form = _compiled("pattern", pattern if pattern is not None else _tagged(tags), re.DOTALL)

    def rule(request: ScoreRequest, response: Response) -> float:
        text = response.text if pattern is not None else response.opened + response.text
        return float(form.fullmatch(text.strip()) is not None)

    return rule


def math_verify(float_rounding: int = 6, strict: bool = True) -> AnswerRule:
    """Make the rule: 1 if response and answer are mathematically equal (`headway.agents.rewards.mathematics`)."""
    from headway.agents.rewards.mathematics import equals  # here, so that only its users pay for importing SymPy

    for name, value, kind in (("float_rounding", float_rounding, int), ("strict", strict, bool)):
        if type(value) is not kind:
            raise ConfigError(f"reward.params.{name}: expected {kind.__name__}, not {value!r}")

    def rule(request: ScoreRequest, response: str) -> float:
        return float(equals(request.answer, response, float_rounding=float_rounding, strict=strict))

    return rule


BUILT_IN: Mapping[str, Callable[..., Callable[..., float]]] = {
    "code": code,
    "exact_match": exact_match,
    "format": format_reward,
    "math_verify": math_verify,
    "regex": regex,
}


WHOLE = ("format", "regex")
"""Names of rules that get the whole response; others get the text after its thought."""


def make_rule(name: str, params: Mapping[str, Any], **surroundings: Any) -> Rule:
    """Return the rule of `BUILT_IN` called ``name``. Raises `ConfigError` for unknown or missing parameters.

    ``surroundings``: arguments by name that are not the user's parameters; a rule gets the ones that it names.
    """
    takes = Parameters.of(maker := BUILT_IN[name])
    known = [param for param in takes.named if param not in surroundings]
    for param in params:
        if param not in known:
            hint = did_you_mean(param, known)
            raise ConfigError(
                f"reward.params: {name} has no parameter {param!r}{hint}; it takes {', '.join(known) or 'none'}"
            )
    if lacking := takes.lacking({**params, **surroundings}):
        raise ConfigError(f"reward.params: {name} needs {lacking[0]!r}; it takes {', '.join(known)}")
    rule = maker(**takes.given({**params, **surroundings}))

    def behind_thought(request: ScoreRequest, response: Response) -> float:
        return 0.0 if response.begin is None else rule(request, response if name in WHOLE else response.answer)

    return behind_thought


def _answer_of(request: ScoreRequest) -> str:
    if request.answer is None:
        raise ScoringFailed("the row has no answer (null) to compare with; leave such rows out, or score without it")
    return str(request.answer)


def _finder(name: str, pattern: str, group: int | str | None) -> Callable[[str, int], str | None]:
    """Make a function that finds ``group`` of the last match of ``pattern`` that ends after a place in a text."""
    compiled = _compiled(name, pattern)
    if group is None:
        group = 1 if compiled.groups else 0
    if isinstance(group, bool) or not isinstance(group, int | str):
        raise ConfigError(f"reward.params.group: expected the number or the name of a group, not {group!r}")
    if group not in {*range(compiled.groups + 1), *compiled.groupindex}:
        raise ConfigError(f"reward.params.group: {pattern!r} has no group {group!r}")

    def find(text: str, behind: int) -> str | None:
        last = None
        for match in compiled.finditer(text):
            # A match may begin in the thought: a search from the thought's end would miss it.
            last = match if match.end() > behind or behind == 0 else last
        return last.group(group) if last is not None else None

    return find


def _compiled(name: str, pattern: Any, flags: int = 0) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise ConfigError(f"reward.params.{name}: expected a regular expression, not {pattern!r}")
    try:
        return re.compile(pattern, flags)
    except (re.error, OverflowError, RecursionError) as cause:  # of a{99999999999}, of endless nesting
        raise ConfigError(f"reward.params.{name}: {pattern!r} is no regular expression: {cause}") from cause


def _tagged(tags: Sequence[str]) -> str:
    """Return the pattern of ``<a>…</a> <b>…</b>``, where no … holds any of these tags. It matches in linear time."""
    names = "|".join(map(re.escape, tags))
    inside = rf"(?:(?!</?(?:{names})>).)*"
    return r"\s*".join(rf"<{re.escape(tag)}>{inside}</{re.escape(tag)}>" for tag in tags)
