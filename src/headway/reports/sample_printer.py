"""Output of ``headway show``: tables of samples, and one group in detail, down to its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from headway.reports import human
from headway.reports.sample_query import Sample, Summary, of_episode
from headway.reports.samples.token_view import (
    QUIET,
    Color,
    Scale,
    common_scale,
    figures,
    legend,
    print_token_table,
    token_text,
)
from headway.reports.terminal import print_fitting, visible

LINE = 60
"""Most characters of a prompt in a table."""
SOURCE = 20
"""Most characters of a source's name in a table of prompts."""
CONTEXT = 400
"""Number of characters that are shown of the end of a context other than the group's prompt, at most."""


def print_table(lines: Sequence[Summary], console: Console, *, left_out: int = 0) -> None:
    """Print a line for each sample. ``left_out``: number of earlier samples that are not among ``lines``."""
    validation = any("validation" in line for line in lines)
    names = ("validation", "problem") if validation else ("group", "version")
    sources = len({line["source"] for line in lines}) > 1
    turns = any((line["turns"] or 1) > 1 for line in lines)
    numbers = [*names, *(() if validation else ("fate", "lag")), "reward", "tokens", *(("turns",) if turns else ())]
    columns = [Column(name, justify="left" if name == "fate" else "right", no_wrap=True) for name in numbers]
    columns += [Column("source", no_wrap=True, overflow="ellipsis", max_width=SOURCE)] if sources else []
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    table.add_column("prompt", no_wrap=True, overflow="ellipsis")
    for line in lines:
        cells = [str(line[name]) for name in names]
        if not validation:
            cells += [line["fate"], human.UNKNOWN if line["lag"] is None else str(line["lag"])]
        cells += [human.score(line["reward"]), _range(line["lengths"])]
        cells += [str(line["turns"] or human.UNKNOWN)] if turns else []
        cells += [line["source"]] if sources else []
        table.add_row(*(Text(visible(cell)) for cell in cells), Text(_one_line(line["question"])))
    console.print(table)
    if left_out:
        console.print(Text(f"{human.count(left_out)} earlier ones are not shown; --last N shows more", style=QUIET))


def print_group(
    sample: Sample, console: Console, *, color: Color = Color.GAP, tokens: bool = False, episode: int | None = None
) -> None:
    """Print one group: its prompt, answers, rewards, and what was trained of them.

    ``tokens``: a table of tokens for each answer. ``episode``: print that episode alone. Raises `ConfigError` where the
    group lacks it.
    """
    episodes = of_episode(sample, episode)["episodes"]
    _print_head(sample, console)
    if "why" in sample:  # it was not drawn, and is known by the record
        _print_episodes(episodes, console)
        for one in episodes:
            _print_notes(f"episode {one['k']}: ", one["notes"], console)
        console.print(Text(visible(sample["why"])), soft_wrap=True)
        return
    _print_episodes(sample["episodes"], console)
    scale = common_scale(color, episodes)
    if scale is not None and not tokens:
        console.print()
        console.print(legend(scale, colors=_has_colors(console)))
    for one in episodes:
        _print_episode(one, sample, console, color, scale, tokens=tokens)


def print_validations(samples: Sequence[Sample], console: Console) -> None:
    """Print the answers to one held-out problem, by version."""
    first = samples[0]
    _print_asked(first, f"problem {first['problem']}, from {first['source']}", console)
    for sample in samples:
        for one in sample["episodes"]:
            title = f"\nversion {sample['validation']}, answer {one['k']}: {_reward(one)}{_ended(one)}"
            console.print(Text(visible(title), "bold"))
            _print_words(one, console)


def _print_head(sample: Sample, console: Console) -> None:
    trained = sample["fate"] == "trained"
    title = f"group {sample['group']}: {_fate(sample['fate'], sample['reason'])} at version {sample['version']}"
    lag = f", lag {sample['lag']}" if trained else ""
    _print_asked(sample, f"{title}{lag}, from {sample['source']}", console)
    times = sample["times"]
    started = min((one["started"] for one in sample["episodes"]), default=None)
    moments = {"admitted": times["admitted"], "started": started, **{n: times[n] for n in _AFTER}}
    lines = {"times": _times(moments, sample["fate"])}
    if sample["baseline"] is not None:
        lines["baseline"] = human.number(sample["baseline"])
    if sample.get("rewards"):
        parts = {"rewards": sample["rewards"], **{f"  {name}": values for name, values in sample["parts"].items()}}
        lines |= {name: ", ".join(map(human.number, values)) for name, values in parts.items()}
    _print_pairs(lines, console)
    console.print()


_AFTER = ("generated", "rewarded", "settled")
_WAITS = {
    "started": "waited for an engine",
    "generated": "generated",
    "rewarded": "scored",
    "settled": "until its fate was settled",
}


def _times(moments: Mapping[str, float | None], fate: str | None) -> str:
    """Say how long each part of a group's way took: its moments are in order, and some may be missing."""
    waits = _WAITS | ({"settled": "waited for training and trained"} if fate == "trained" else {})
    parts, before = [], None
    for name, at in moments.items():
        if at is None:
            continue
        if before is not None:
            parts.append(f"{human.duration(at - before)} {waits[name]}")
        before = at
    return ", ".join(parts) or human.UNKNOWN


def _print_asked(sample: Sample, title: str, console: Console) -> None:
    console.print(Text(visible(title), style="bold"))
    if sample["prompt"] is not None:
        console.print(Padding(Text(visible(sample["prompt"])), (0, 0, 0, 2), expand=False))
    if sample["answer"] is not None:
        console.print(Text.assemble(("answer: ", QUIET), visible(str(sample["answer"]))))


def _print_episodes(episodes: Sequence[Mapping[str, Any]], console: Console) -> None:
    names = list(dict.fromkeys(name for one in episodes for name in one["parts"]))
    parts = names if len(names) > 1 else []
    programs = any(one["turns"] > 1 or one["worked_s"] or one["waited_s"] for one in episodes)
    columns = ["episode", "reward", *parts, "tokens", *(["turns", "worked", "waited"] if programs else [])]
    columns += ["versions", "took", "replica", "end"]
    lines: list[list[Text]] = []
    for one in episodes:
        cells = [str(one["k"]), human.score(one["reward"]), *(human.number(one["parts"].get(name)) for name in parts)]
        cells.append(human.count(one["length"]))
        if programs:
            cells += [str(one["turns"]), human.duration(one["worked_s"]), human.duration(one["waited_s"])]
        # No rows where it is known by the record; no versions where it failed before its first token.
        versions = one.get("versions") or sorted({v for row in one.get("rows", ()) for v in row["versions"] if v >= 0})
        cells += [", ".join(map(str, versions)) or human.UNKNOWN, human.duration(one["finished"] - one["started"])]
        lines.append([Text(visible(cell)) for cell in (*cells, one["replica"], _end_of(one))])

    print_fitting(console, _columns(*columns), lines)


def _print_episode(
    one: Mapping[str, Any], sample: Sample, console: Console, color: Color, scale: Scale | None, *, tokens: bool
) -> None:
    console.print(Text(visible(f"\nepisode {one['k']}: {_reward(one)}{_ended(one)}"), "bold"))
    _print_notes("", one.get("notes", {}), console)
    if one["turn_rewards"]:
        rewards = ", ".join(human.number(reward) for reward in one["turn_rewards"])
        console.print(Text(f"rewards of its turns: {rewards}", style=QUIET))
    rows = one["rows"]
    if scale is None or not rows:
        _print_words(one, console)
        large = sample.get("shortened") and sample["fate"] == "trained"
        why = "for the sample was too large for its file" if large else "since it was not trained"
        console.print(Text(f"no tokens are kept of it, {why}", style=QUIET))
        return
    for place, row in enumerate(rows):
        if len(rows) > 1 or row["context"] not in (None, sample["prompt"]):
            name = f"row {place + 1} of {len(rows)}, " if len(rows) > 1 else ""
            console.print(Text(f"{name}behind {human.count(row['prompt_length'])} tokens that end with", style=QUIET))
            context = visible(sample["prompt"] if row["context"] is None else row["context"])
            shown = f"…{context[-CONTEXT:]}" if len(context) > CONTEXT else context
            console.print(Padding(Text(shown, style=QUIET), (0, 0, 0, 2), expand=False))
        console.print(Text(figures(row), style=QUIET))
        if tokens:
            print_token_table(row, console)
        else:
            console.print(token_text(row, color, scale, colors=_has_colors(console)))


def _print_words(one: Mapping[str, Any], console: Console) -> None:
    """Print a conversation, or an answer, as it was said."""
    told = one["conversation"]
    if told is None:
        console.print(Padding(Text(visible(one["text"])), (0, 0, 0, 2), expand=False))
        return
    for message in [*told["prompt"], *told["completion"]]:
        console.print(Text(visible(f"{message.get('role', human.UNKNOWN)}:"), style=QUIET))
        console.print(Padding(Text(visible(_content(message))), (0, 0, 0, 2), expand=False))


def _print_notes(who: str, notes: Mapping[str, str], console: Console) -> None:
    """Print what an agent asked the endpoint for and did not get."""
    for kind, reason in notes.items():
        console.print(Text(visible(f"{who}{kind.replace('_', ' ')}: {reason}"), style=QUIET), soft_wrap=True)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else str(content)
    calls = [str(call.get("function", call)) for call in message.get("tool_calls") or []]
    return "\n".join([*([text] if text else []), *calls])


def _reward(one: Mapping[str, Any]) -> str:
    parts = [f"{name} {human.number(value)}" for name, value in one["parts"].items()] if len(one["parts"]) > 1 else []
    reward = "no reward" if one["reward"] is None else f"reward {human.number(one['reward'])}"
    return f"{reward} ({', '.join(parts)})" if parts else reward


def _ended(one: Mapping[str, Any]) -> str:
    end = "cut off" if _end_of(one) == "length" else _end_of(one)
    return f", {human.count(one['length'])} tokens, {end}"


def _end_of(one: Mapping[str, Any]) -> str:
    if one.get("failure") is not None:
        return visible(f"failed: {one['failure']}")
    return f"limit: {one['limit']}" if one.get("limit") else str(one["finish"])


def _fate(fate: str, reason: str | None) -> str:
    words = fate.replace("_", " ")
    return visible(f"{words} ({reason})" if reason else words)


def _range(lengths: Sequence[int] | None) -> str:
    if lengths is None:
        return human.UNKNOWN
    low, high = lengths
    return human.count(low) if low == high else f"{human.count(low)}-{human.count(high)}"


def _one_line(text: str) -> str:
    words = " ".join(visible(text).split())
    return words if len(words) <= LINE else f"{words[: LINE - 1]}…"


def _columns(*names: str) -> list[Column]:
    left, wrapped = ("replica", "end", "finish", "versions"), ("end", "finish", "versions")
    return [
        Column(visible(name), justify="left" if name in left else "right", no_wrap=name not in wrapped)
        for name in names
    ]


def _print_pairs(lines: Mapping[str, str], console: Console) -> None:
    for name, value in lines.items():
        console.print(Text.assemble((f"{visible(name)}: ", QUIET), visible(value)), soft_wrap=True)


def _has_colors(console: Console) -> bool:
    return console.color_system is not None and not console.no_color
