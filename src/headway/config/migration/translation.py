"""Translation: settings of another project, by its table, to a recipe that loads, and a report on each setting."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headway.config import recipe_text
from headway.config.aliases import canonical_key
from headway.config.checks import without_effect
from headway.config.doctor import diagnose
from headway.config.layers import flatten, lies_in
from headway.config.loading import LoadedConfig, load, mode_config
from headway.config.migration.settings_files import SettingsFile
from headway.config.migration.shell_scripts import missing, written
from headway.config.migration_tables.prime_rl import SECTIONS
from headway.config.migration_tables.projects import OPENRLHF, PRIME_RL, PROJECTS, TRL, VERL, Project
from headway.config.migration_tables.table_rows import ReportPart, Translated, lost, taken
from headway.config.migration_tables.verl import RENAMED
from headway.config.schema import Config
from headway.config.schema_keys import known_keys, spelled
from headway.errors import ConfigError

WIDTH = 80
"""Maximum width of a report's and a recipe's lines, unless a value is longer."""


def body(values: Mapping[str, Any], comments: Mapping[str, tuple[str, str]]) -> str:
    """Return the YAML of ``values``.

    ``comments``: key → the setting that the value is from, written at the end of its line; and a remark, written above.
    """
    order = {key: i for i, key in enumerate(known_keys())}
    first = {section: i for i, section in reversed(list(enumerate(key.partition(".")[0] for key in order)))}

    def place(key: str) -> tuple[int, int, str]:
        return first.get(key.partition(".")[0], len(first)), order.get(key, len(order)), key

    def commented(key: str, line: str, indent: str) -> list[str]:
        origin, remark = comments.get(key, ("", ""))
        above = textwrap.wrap(remark, WIDTH - len(indent) - 2)
        return [*(f"{indent}# {part}" for part in above), line + (f"  # {origin}" if origin else "")]

    lines = recipe_text.sections({key: values[key] for key in sorted(values, key=place)}, commented)
    return "".join(f"{line}\n" for line in lines) or "{}\n"


_SECRET = re.compile(r"(key|token|password|secret|use_wandb)$", re.IGNORECASE)
UNKNOWN = "unknown to Headway: look for it in docs/configuration.md"
SIMILARITY = 0.88
"""Minimum similarity of a key to a known one, in [0, 1], for the known one to be suggested."""


@dataclass(slots=True)
class TranslationOutcome:
    """Translation outcome of one setting. ``given``: False for a default of the other project."""

    key: str
    value: Any
    answer: Translated
    given: bool = True
    known: bool = True

    def keep(self, keys: Container[str], part: ReportPart | None = None, note: str = "") -> None:
        """Remove the values of all keys but these, and add ``note`` to the remark."""
        kept = {key: value for key, value in self.answer.values.items() if key in keys}
        notes = "; ".join(filter(None, (self.answer.note, note)))
        self.answer = Translated(part or self.answer.part, kept, notes)


class _NotKnown(Exception):
    """Raised when a conversion needs a setting whose value the file does not determine."""


class _Settings(dict[str, Any]):
    """Settings over the project's defaults. Raises `_NotKnown` for one whose value the file does not determine."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if missing(value):
            raise _NotKnown(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]


@dataclass(slots=True)
class Translation:
    """A translated file: the recipe's values, the settings' outcomes, the settings that the file does not determine,
    what the doctor still requires, and the resolved values of all keys."""

    project: Project
    sources: Sequence[SettingsFile]
    values: dict[str, Any] = field(default_factory=dict)
    outcomes: list[TranslationOutcome] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    config: Config = field(default_factory=Config)

    def of(self, part: ReportPart) -> list[TranslationOutcome]:
        """Return the outcomes of one part of the report; of defaults, only those that set a value of the recipe."""
        return [one for one in self.outcomes if one.answer.part is part and (one.given or one.answer.values)]

    def origins(self) -> dict[str, TranslationOutcome]:
        """Return key of the recipe → the first setting that gives its value."""
        last = {key: one for one in self.outcomes for key in one.answer.values if key in self.values}
        return last | {
            key: one
            for one in reversed(self.outcomes)
            for key, value in one.answer.values.items()
            if key in last and value == self.values[key]
        }


def recognise(sources: Sequence[SettingsFile], asked: str | None = None) -> Project:
    """Return the project that the files belong to, by the programs they name and their keys; or ``asked``, if given.

    Raises:
        ConfigError: they belong to no known project, to Headway itself, or to different projects.
    """
    if asked is not None:
        if asked not in PROJECTS:
            raise ConfigError(f"--from {asked}: expected one of {', '.join(PROJECTS)}")
        return PROJECTS[asked]
    found = {source.name: project for source in sources if (project := _project_of(source)) is not None}
    projects = {project.name: project for project in found.values()}
    if len(projects) > 1:
        named = " and ".join(f"{name} is of {project.name}" for name, project in found.items())
        raise ConfigError(f"{named}; expected files of one project: import them one by one, or say --from")
    for source in sources:
        if source.name not in found and not any(_knows(project, source) for project in projects.values()):
            keys = list(source.settings)
            given = f"its settings are {', '.join(keys[:3])}{' …' * (len(keys) > 3)}" if keys else "it has no settings"
            names = ", ".join(project.name for project in PROJECTS.values())
            raise ConfigError(
                f"{source.name}: of no project that Headway knows ({names}): {given}; say --from where it is"
            )
    return next(iter(projects.values()))


def _knows(project: Project, source: SettingsFile) -> int:
    """Return the number of a file's settings that a project's table has."""
    return sum(project.row(_without_index(key)) is not None for key in _canonical(project, source).values())


def _project_of(source: SettingsFile) -> Project | None:
    """Return the project that a file names, or whose unique keys it has; None if unknown."""
    if source.project:
        return next(project for project in PROJECTS.values() if project.name == source.project)
    if "mode" in source.settings and 2 * len({*known_keys()} & source.settings.keys()) > len(source.settings):
        raise ConfigError(f"{source.name}: is a recipe of Headway already; run it: headway train {source.name}")
    best, most = None, (0, 0)
    for project in PROJECTS.values():
        marks = project.marked({*source.settings, *_canonical(project, source).values()})
        known = _knows(project, source)
        if project is PRIME_RL and source.name.endswith(".toml") and known * 2 >= len(source.settings):
            marks += known
        # At least a third of the keys: one common name proves nothing.
        if (marks, known) > most and marks and known * 3 >= len(source.settings):
            best, most = project, (marks, known)
    return best


def translate(project: Project, sources: Sequence[SettingsFile]) -> Translation:
    """Translate the files' settings, later files over earlier ones, to values that load."""
    settings: dict[str, tuple[str, Any]] = {}  # the table's key → the key as written, and its value
    for source in sources:
        for written_key, key in _canonical(project, source).items():
            # Moved to the end: if two settings give one value, the later one wins.
            settings.pop(key, None)
            settings[key] = written_key, source.settings[written_key]
    # Reversed: env[0].n and env[1].n are one key here, and the first one counts.
    given = {
        _without_index(key): value
        for key, (name, value) in reversed(settings.items())
        if not missing(value) and not name.startswith("~")
    }
    unknown = {_without_index(key): value for key, (_, value) in settings.items() if missing(value)}
    given, unknown = ({project.before.get(key, key): one[key] for key in one} | one for one in (given, unknown))
    defaults = {key: value for key, value in project.defaults(given).items() if key not in given | unknown}
    everything = _Settings(defaults | unknown | given)
    result = Translation(project, sources)
    for key, value in defaults.items():
        result.outcomes.append(
            TranslationOutcome(key, value, _answer(project, key, key, value, everything), given=False)
        )
    for key, (name, value) in settings.items():
        row = project.row(_without_index(key))
        answer = _answer(project, name, key, value, everything)
        result.outcomes.append(TranslationOutcome(name, value, answer, known=row is not None or name.startswith("~")))
        if missing(value) and row is not None and row.here:
            result.unknown.append(f"{row.here}: {name}={written(value)}")
    _settle(result)
    chosen = result.values.get("data.train")
    if isinstance(chosen, Mapping) and "data.prompt_key" not in result.values:
        result.unknown.append(
            "data.prompt_key, data.answer_key: the columns of the prompt and the ground truth; default: prompt, answer"
        )
    _make_it_load(result)
    return result


def _canonical(project: Project, source: SettingsFile) -> dict[str, str]:
    """Return key as written → the table's key, without prefixes, indices and Hydra's signs."""
    settings = source.settings
    if project is VERL:
        # A complete configuration has both spellings of the reward, one of them null: non-null values last, to win
        return {key: _plain(key) for key in sorted(settings, key=lambda key: settings[key] is not None)}
    if project is TRL or project is OPENRLHF:
        return {key: key.replace("-", "_") for key in settings}
    plain = {key: key.lstrip("+") for key in settings}
    if project is not PRIME_RL:
        return plain

    def known(section: str) -> int:
        return sum(section + _without_index(key) in PRIME_RL.rows for key in plain.values())

    # A file of one process has keys without their section: take the section that fits most keys.
    section = max(SECTIONS, key=known)
    return {key: section + name for key, name in plain.items()}


def _plain(key: str) -> str:
    key = key.lstrip("+~")
    key = canonical_key(key.partition("@")[2] if "@" in key else key)
    old = next((old for old in RENAMED if key.startswith(old)), "")
    return RENAMED[old] + key.removeprefix(old) if old else key


def _without_index(key: str) -> str:
    return re.sub(r"\[\d+\]", "", key)


def _answer(project: Project, name: str, key: str, value: Any, everything: Mapping[str, Any]) -> Translated:
    row = project.row(_without_index(key))
    if name.startswith("~"):
        return taken(note="taken away there, and not set here")
    if row is None:
        return lost(_unknown(project, key))
    yourself = f"; set {row.here} yourself" if row.here else ""
    if (unknown := missing(value)) and row.here:
        return lost(f"{', '.join(dict.fromkeys(unknown))} is not known from the file{yourself}")
    try:
        return row.answer(value, everything)
    except _NotKnown as error:
        return lost(f"needs {error}, which is not known from the file{yourself}")
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        return lost(f"its value could not be read ({written(error)}){yourself}")


def _unknown(project: Project, key: str) -> str:
    """Return the remark on a key without a row. It names the most similar key of the project, or of Headway."""
    theirs = {name: row.here for name, row in project.rows.items() if row.here and "*" not in name}
    for names in (theirs, {name: name for name in known_keys()}):
        if near := get_close_matches(_without_index(key), names, n=1, cutoff=SIMILARITY):
            here = names[near[0]]
            return f"{UNKNOWN}; the nearest is {near[0]}" + (f", here {here}" if here != near[0] else "")
    return UNKNOWN


def _settle(result: Translation) -> None:
    """Choose one value for each key: the file's settings win over defaults, and later ones over earlier ones."""
    owners: dict[str, TranslationOutcome] = {}
    for one in result.outcomes:
        for key, value in one.answer.values.items():
            before = owners.get(key)
            # The file's setting wins over a default, never the other way round.
            if before is not None and not before.given:
                before.keep(before.answer.values.keys() - {key})
            elif before is not None and result.values[key] != value:
                before.keep(before.answer.values.keys() - {key}, ReportPart.DIFFERS, f"{one.key} replaces {key}")
            result.values[key], owners[key] = value, one


def _make_it_load(result: Translation) -> None:
    """Remove values that the schema refuses, that have no effect, or that are Headway's defaults, until it loads."""
    # Each round removes a value, or is the last.
    for _ in range(len(result.values) + 1):
        try:
            loaded = _load(result)
        except ConfigError as error:
            # No value of the recipe is the cause: another round would be the same.
            if not _drop_refused(result, str(error)):
                raise
            continue
        chosen = loaded.user_keys - loaded.usual_keys
        idle = {key: why for key, why in without_effect(loaded.config).items() if key in chosen}
        if not idle:
            break
        for key, why in idle.items():
            _drop(result, key, f"left out, as it has no effect: {why}")
    usual = dict(flatten(mode_config(loaded.config.mode).model_dump(mode="json")))
    for one in result.outcomes:
        if not one.given:
            for key, value in one.answer.values.items():
                if key != "mode" and key in result.values and usual.get(key, result) == value:
                    del result.values[key]
            one.keep(result.values)
    result.config = (loaded := _load(result)).config
    try:
        diagnose(loaded)
    except ConfigError as error:
        result.open = str(error).splitlines()


def _load(result: Translation) -> LoadedConfig:
    with TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        # Through a file, as the user will load it: YAML's reading of a value counts.
        recipe.write_text(body(result.values, {}), encoding="utf-8")
        return load(recipe)


def _drop_refused(result: Translation, message: str) -> bool:
    """Remove the values that a loading error names at the beginning of its lines. Returns whether there were any."""
    found = False
    for line in message.splitlines():
        for key in list(result.values):
            # The whole key: rollout.n is a prefix of rollout.name.
            if re.search(rf"(^|\s){re.escape(key)}(\.\w+)*(\[\d+\]\S*)?:", line) or line.startswith(f"{key} "):
                reason = re.sub(r" \(in [^)]*\)", "", line.partition(f"{key}")[2].lstrip(": "))
                _drop(result, key, f"set {key} yourself: {reason}")
                found = True
    return found


def _drop(result: Translation, key: str, note: str) -> None:
    """Remove a value. A setting that has lost its first value counts as not taken over."""
    # A copy as a list: the mapping shrinks meanwhile.
    for name in [name for name in result.values if lies_in(name, key)]:
        del result.values[name]
    for one in result.outcomes:
        of_key = [lies_in(name, key) for name in one.answer.values]
        if any(of_key):
            remark = f"{key} is {note}"
            if all(of_key):
                one.answer, remark = Translated(one.answer.part, one.answer.values), note
            others = [name for name in one.answer.values if not lies_in(name, key)]
            one.keep(others, ReportPart.WITHOUT if of_key[0] else None, remark)


def shown_value(one: TranslationOutcome) -> str:
    """Return a setting's value for display, shortened. A value whose name suggests a secret is `…`."""
    text = " ".join(written(_without_secrets(one.key, one.value, one.answer.values)).split())
    return text if len(text) <= 60 else f"{text[:57]}…"


def _without_secrets(key: str, value: Any, here: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_secrets(str(name), part, here) for name, part in value.items()}
    hidden = isinstance(value, str) and _SECRET.search(key) and value not in here.values()  # prompt_key is no secret
    return "…" if hidden else value


NOTHING = "nothing to do"
"""Beginning of remarks on settings that need no replacement."""


def report(found: Translation) -> str:
    """Return the report as text."""
    lines = [f"{', '.join(source.name for source in found.sources)}: {found.project.name}"]
    for source in found.sources:
        lines += _wrapped(source.remarks, "note: ", "      ")
    for part in ReportPart:
        outcomes = sorted(found.of(part), key=_urgency)
        lines += ["", f"{part.value} ({len(outcomes)})"]
        for note, group in groupby(outcomes, key=lambda one: "" if one.answer.values else one.answer.note):
            lines += [line for one in group for line in _setting(one, found.project.name)]
            lines += textwrap.wrap(note, WIDTH, initial_indent="    ", subsequent_indent="    ")
        lines += [] if outcomes else ["  none"]
    if found.open:
        lines += ["", "Before it runs, headway doctor asks for"]
        lines += _wrapped(found.open, "  - ", "    ")
    return "\n".join(lines) + "\n"


def _urgency(one: TranslationOutcome) -> tuple[int, str]:
    """Return the sort key of outcomes: first those with values, then those that need action, the rest by remark."""
    if one.answer.values or not one.answer.note:
        return 0, ""
    return (2 if one.answer.note.startswith(NOTHING) else 1), one.answer.note


def _setting(one: TranslationOutcome, project: str) -> Iterator[str]:
    theirs = f"  {one.key}={shown_value(one)}" + ("" if one.given else f"  ({project}'s default)")
    ours = [f"{key}={spelled(value)}" for key, value in one.answer.values.items()]
    if one.answer.part is ReportPart.TAKEN and len(ours) == 1 and not one.answer.note:
        line = theirs if theirs.strip() == ours[0] else f"{theirs} → {ours[0]}"
        if len(line) <= WIDTH:
            yield line
            return
    yield theirs
    yield from (f"    → {one}" for one in ours)
    if ours and one.answer.note:
        yield from textwrap.wrap(one.answer.note, WIDTH, initial_indent="    ", subsequent_indent="    ")


def _wrapped(lines: list[str], first: str, further: str) -> list[str]:
    return [
        part for line in lines for part in textwrap.wrap(line, WIDTH, initial_indent=first, subsequent_indent=further)
    ]


def recipe(found: Translation, written_to: str | None) -> str:
    """Return the recipe as text, with a comment on each value's origin."""
    names = ", ".join(source.name for source in found.sources)
    head = [f"# From {names} ({found.project.name}), by headway import: behind each value the setting that it is from."]
    head += [f"#   headway train {written_to or 'recipe.yaml'} --dry-run"]
    if found.unknown:
        head += ["#", "# The files do not say these, so set them yourself"]
        head += _wrapped(found.unknown, "#   - ", "#     ")
    if found.open:
        head += ["#", "# Before it runs, headway doctor asks for"]
        head += _wrapped(found.open, "#   - ", "#     ")
    comments = {}
    for key, one in found.origins().items():
        name = one.key if one.given else f"{found.project.name}'s default of {one.key}"
        differs = one.answer.part is ReportPart.DIFFERS
        remark = one.answer.note if differs and key == next(iter(one.answer.values)) else ""
        comments[key] = (f"{name}={shown_value(one)}" if differs else name, remark)
    return "\n".join(head) + "\n" + body(found.values, comments)
