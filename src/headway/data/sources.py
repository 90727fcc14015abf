"""Sources of prompts: records in a seeded order, tokenised a little ahead, with a cursor that can be saved.

files, datasets or task ─▶ records ─▶ PromptTokenizer ─▶ RowSource ─▶ admission        (training: epoch after epoch)
                                  └─▶ held-out records ─▶ list[Prompt]                 (validation: once, in order)

`check_rows` searches for bad training rows before a run: of similar rows, one is tried.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from headway.data.files import Record
from headway.data.mixing import Mixture
from headway.data.rows import Rows, by_source, read_rows
from headway.data.tokenize import (
    FIRST_ROWS,
    TEMPLATE_KWARGS,
    TOOLS,
    Counts,
    LeftOut,
    LeftOutRows,
    PromptTokenizer,
    Reason,
    Tokenised,
    bad_rows,
    column_value,
)
from headway.data.types import Prompt
from headway.errors import DataError, UserCodeError, writable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headway.config.schema import Config, DataConfig

__all__ = ["Cursor", "DataBundle", "RowSource", "Rows", "build_sources", "read_rows"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in the data: number of draws taken from the order of ``epoch``."""

    epoch: int = 0
    position: int = 0
    left_out: Counts = field(default_factory=dict)
    """Counts of the rows left out so far."""


class RowSource:
    """Prompts made from records, each epoch in an order keyed by (seed, epoch).

    Prompts are tokenised in chunks of ``prefetch``; the cursor counts only the prompts handed out, not those tokenised
    ahead. A row that is repeated in an epoch (`Mixture`) has a different ``Prompt.row`` each time: its number plus a
    multiple of ``stride``. Implements `headway.data.interfaces.episode_groups.PromptSource`.
    """

    def __init__(
        self,
        rows: Rows,
        tokenizer: PromptTokenizer,
        data: DataConfig,
        seed: int,
        *,
        model: str = "",
        prefetch: int = 64,
    ) -> None:
        """Make prompts of the training records of ``rows``. `restore` refuses a state with other digests, unless
        ``data.accept_changes``. ``model``: digest of the model's folder, which must not change.

        Raises:
            DataError: there are no records, or all prompts of a part are longer than the tokenizer's limit, or a part
                has no draw in an epoch; or too many rows are bad.
        """
        if not rows.train:
            raise DataError("there are no training prompts")
        self._records, self._row_numbers = rows.train, rows.train_rows
        self._tokenizer, self._data, self._model = tokenizer, data, model
        self._chunk = max(1, prefetch)
        self._stride = len(rows.train) + len(rows.val)
        """A number above all row numbers of the run."""
        self._mixture = Mixture(rows.parts, seed=seed, shuffle=data.shuffle)
        sources = [[part.name, part.rows, n] for part, n in zip(self._mixture.parts, self._mixture.quotas, strict=True)]
        self._identity = {
            "seed": seed,
            "rows": len(rows.train),
            "shuffle": data.shuffle,
            "sources": sources,
            "prompts": [*rows.digests],
        }
        self.changes: tuple[str, ...] = ()
        """Differences between the present data and the state's that `restore` found."""
        self._left_out = LeftOutRows()
        self._handed_out = Cursor()
        self._ahead = Cursor()
        self._ready: deque[tuple[Prompt, Cursor]] = deque()
        self._order = (0, self._mixture.epoch(0))
        if len(self._mixture.parts) > 1:  # `_refill` checks a single one
            self._check_parts()
        self._refill()
        if not self._ready:  # found now, so that an error ends the run before it starts
            raise self._none_usable(self._left_out, self.rows, "")

    @property
    def rows(self) -> int:
        """Number of draws in one epoch, left-out ones included: as many as there are rows."""
        return len(self._records)

    @property
    def left_out(self) -> LeftOutRows:
        """Distinct left-out rows so far, with an example of each reason that this process has met."""
        return LeftOutRows(self._handed_out.left_out, self._left_out.examples)

    def next(self) -> Prompt | None:
        if not self._ready:
            self._refill()
        if not self._ready:
            self._handed_out = self._ahead  # rows at the very end may have been too long
            return None
        prompt, self._handed_out = self._ready.popleft()
        return prompt

    def again(self, prompt: Prompt) -> Prompt:
        return dataclasses.replace(prompt, attempt=prompt.attempt + 1)

    def state(self) -> dict[str, Any]:
        cursor = self._handed_out
        return {
            **self._identity,
            "model": self._model,
            "epoch": cursor.epoch,
            "position": cursor.position,
            "left_out": {source: dict(reasons) for source, reasons in cursor.left_out.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of ``state``, and note differences in `changes`.

        With another number of rows the order differs; the source continues at the same position.

        Raises:
            DataError: data, mix or seed differ and changes are not accepted, or the model differs.
        """
        if state.get("model", self._model) != self._model:
            raise DataError(
                "the checkpoint's model differs: the files in model.path are another tokenizer, configuration or size "
                "of weights than those that the run began with. Put these back, or start another run"
            )
        here, then = self._identity, {name: state.get(name) for name in self._identity}
        differing = [self._difference(name, then[name], here[name]) for name in here if then[name] != here[name]]
        if differing and not self._data.accept_changes:
            raise DataError(
                f"the checkpoint's data differ: {'; '.join(differing)}. Resume with the same data and seed, or go on "
                "with these: data.accept_changes=true"
            )
        self.changes = tuple(differing)
        # There may be fewer rows now: a position after them would end the epoch without a prompt
        position = min(state["position"], self.rows - 1)
        self._handed_out = self._ahead = Cursor(state["epoch"], position, state["left_out"])
        self._left_out = LeftOutRows(state["left_out"])
        # These were tokenised ahead from the old position
        self._ready.clear()

    def _difference(self, name: str, then: Any, here: Any) -> str:
        if name != "prompts":
            return f"{name} {then} then, {here} now"
        if not isinstance(then, list) or len(then) != len(here):
            return "other prompts"
        changed = [i for i, (one, other) in enumerate(zip(then, here, strict=True)) if one != other]
        length = -(-len(self._records) // len(here))
        last = min((changed[-1] + 1) * length, len(self._records)) - 1
        return (
            f"other prompts in the rows {self._row_numbers[changed[0] * length]} to {self._row_numbers[last]}, counted "
            "from 0"
        )

    def find(self, epoch: int, row: int) -> Prompt | None:
        """Return the prompt of a row that was handed out in ``epoch``; None if the data have no such prompt now."""
        turn, number = divmod(row, self._stride)
        index = self._index_of.get(number)
        if index is None or turn >= self._turns:
            return None
        (found,) = self._tokenised([index])
        return None if isinstance(found, LeftOut) else _prompt(*found, row, epoch)

    @property
    def _turns(self) -> int:
        """Return the maximum number of a part's passes in one epoch, partial ones included."""
        shares = zip(self._mixture.parts, self._mixture.quotas, strict=True)
        # One more than the quota fills if an epoch may begin in the middle of a pass.
        return max(-(-quota // part.rows) + (quota % part.rows > 0) for part, quota in shares)

    @cached_property
    def _index_of(self) -> dict[int, int]:
        """Row number → index of its record."""
        return {number: index for index, number in enumerate(self._row_numbers)}

    def _tokenised(self, indices: Sequence[int]) -> list[tuple[Record, Tokenised] | LeftOut]:
        """Return the records of ``indices`` with their text and ids, or the reason why a record has none."""
        results: dict[int, tuple[Record, Tokenised] | LeftOut] = {}
        records: dict[int, Record] = {}
        for place, index in enumerate(indices):
            try:
                records[place] = self._records[index]
            except (DataError, UserCodeError) as error:  # a task that makes its problems as they are asked for
                results[place] = LeftOut(Reason.TASK, self._mixture.parts[0].name, str(error))
        for (place, record), one in zip(records.items(), self._tokenizer(list(records.values())), strict=True):
            results[place] = one if isinstance(one, LeftOut) else (record, one)
        return [results[place] for place in range(len(results))]

    def _check_parts(self) -> None:
        """Check that every part has a prompt that fits. Usually the first chunk of each part shows one."""
        for name, places in by_source(self._mixture.parts):
            left_out = LeftOutRows()
            for start in range(0, len(places), self._chunk):
                found = self._tokenised(places[start : start + self._chunk])
                bad = [one for one in found if isinstance(one, LeftOut)]
                for one in bad:
                    left_out.add(one)
                if len(bad) < len(found):
                    break
            else:
                raise self._none_usable(left_out, len(places), f" of {name}")

    def _none_usable(self, left_out: LeftOutRows, rows: int, of: str) -> DataError:
        """Return the error for rows of which none can be used."""
        if bad_rows(left_out.counts):
            return left_out.error(f"all {rows} rows{of}")
        return DataError(
            f"all {rows} prompts{of} have more than data.max_prompt_length={self._tokenizer.max_length} tokens; "
            "raise it"
        )

    def _refill(self) -> None:
        """Tokenise chunks until a prompt is ready or all epochs are over.

        Two epochs without a usable row mean that there is none. Some part has at least as many draws as rows, so each
        epoch shows all of its rows; the only good one may be first in an epoch and last in the next.
        """
        scanned = 0
        while not self._ready and scanned < 2 * self.rows and not self._over:
            scanned += self._tokenise_chunk()
            if not self._ready and scanned == bad_rows(self._ahead.left_out) >= FIRST_ROWS:
                raise self._left_out.error(f"the first {scanned} rows")

    @property
    def _over(self) -> bool:
        return self._data.epochs is not None and self._ahead.epoch >= self._data.epochs

    def _tokenise_chunk(self) -> int:
        """Tokenise the next draws, at most up to the epoch's end; returns their number.

        Raises:
            DataError: there are too many bad rows.
        """
        epoch, start = self._ahead.epoch, self._ahead.position
        if self._order[0] != epoch:
            self._order = (epoch, self._mixture.epoch(epoch))
        chunk = slice(start, start + self._chunk)
        draws = list(zip(*(column[chunk].tolist() for column in self._order[1]), strict=True))
        found = self._tokenised([index for index, _, _ in draws])
        for position, ((index, turn, first), one) in enumerate(zip(draws, found, strict=True), start=start + 1):
            if isinstance(one, LeftOut) and first:  # the row is repeated in later passes: it counts once
                self._left_out.add(one)
            at_end = position == self.rows
            # No copy: `add` replaces the counts, so cursors made before keep theirs.
            self._ahead = Cursor(epoch + at_end, 0 if at_end else position, self._left_out.counts)
            if not isinstance(one, LeftOut):
                row = self._row_numbers[index] + turn * self._stride
                self._ready.append((_prompt(*one, row, epoch), self._ahead))
        self._left_out.check(self.rows, self._data.max_bad_rows)
        return len(draws)


@dataclass(frozen=True, slots=True)
class DataBundle:
    """All prompts of a run."""

    train: RowSource
    val: list[Prompt]
    """Held-out prompts. Neither the prompts nor their ``row`` occur in training."""
    val_left_out: LeftOutRows
    notes: tuple[str, ...] = ()
    """Notes on the data, for the user."""


def _model_digest(folder: Path) -> str:
    """Return a digest of the model's folder, which a resumed run must find unchanged; equal for all models of the
    hub.
    """
    digest = xxhash.xxh3_64()
    for pattern in ("config.json", "tokenizer.json", "tokenizer.model", "vocab.*", "merges.txt"):
        for path in sorted(folder.glob(pattern)):
            digest.update(path.read_bytes())
    # Only sizes: reading the weights themselves would take minutes for a large model
    digest.update(repr([path.stat().st_size for path in sorted(folder.glob("*.safetensors"))]).encode())
    return digest.hexdigest()


def build_sources(config: Config, tokenizer: PreTrainedTokenizerBase, rows: Rows | None = None) -> DataBundle:
    """Build the run's sources of prompts, from ``rows`` if they were read before.

    Raises:
        ConfigError, DataError: as `read_rows`; also if prompts cannot be rendered, or all prompts are too long.
    """
    data = config.data
    prompts = prompt_tokenizer(config, tokenizer)
    split = rows if rows is not None else read_rows(config)
    model = "" if config.model.path is None else _model_digest(Path(config.model.path).expanduser())
    train = RowSource(split, prompts, data, config.run.seed, model=model)
    val: list[Prompt] = []
    left_out = LeftOutRows()
    for failure in split.val_failures:
        left_out.add(failure)
    for record, row, tokenised in zip(split.val, split.val_rows, prompts(split.val), strict=True):
        if isinstance(tokenised, LeftOut):
            left_out.add(tokenised)
        else:
            val.append(_prompt(record, tokenised, row, epoch=0))
    left_out.check(len(split.val) + len(split.val_failures), data.max_bad_rows, "held-out rows")
    if split.val and not val:
        raise DataError(
            f"all {len(split.val)} held-out prompts have more than "
            f"data.max_prompt_length={data.max_prompt_length} tokens; raise it"
        )
    return DataBundle(train, val, left_out, tuple(prompts.notes))


def prompt_tokenizer(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptTokenizer:
    """Return the tokenizer of a run's prompts."""
    data = config.data
    return PromptTokenizer(
        tokenizer,
        data.chat_template,
        data.max_prompt_length,
        kwargs=data.chat_template_kwargs,
        with_tools=not config.agent.has_program,
    )


def _prompt(record: Record, tokenised: Tokenised, row: int, epoch: int) -> Prompt:
    text, token_ids = tokenised
    return Prompt(
        epoch=epoch,
        row=row,
        attempt=0,
        source=record.source,
        text=text,
        token_ids=token_ids,
        answer=record.answer,
        extra=record.extra,
        messages=record.prompt if isinstance(record.prompt, list) else None,
        asked=record.prompt if isinstance(record.prompt, str) and record.prompt != text else None,
    )


def check_rows(config: Config, tokenizer: PreTrainedTokenizerBase, rows: Rows) -> list[str]:
    """Search quickly for bad training rows, and return notes on the data.

    Templates refuse chats for their roles and fields, tokenizers refuse lone surrogates. Of rows that are alike in
    these, one is tried; the others are tried only if it is bad. A task's problems are not tried, since they are made on
    demand.

    Raises:
        DataError: there are more than ``data.max_bad_rows`` bad rows, or no row can be rendered.
    """
    bad = LeftOutRows()
    if not isinstance(rows.train, list):
        return []
    prompts = prompt_tokenizer(config, tokenizer)
    alike: dict[Any, bool] = {}
    for record in rows.train:
        columns = (column_value(record.extra.get(name)) for name in (TOOLS, TEMPLATE_KWARGS))
        form = _form([record.prompt, *columns])
        if alike.get(form) is True:
            continue
        (one,) = prompts([record])
        is_bad = isinstance(one, LeftOut) and one.reason != Reason.TOO_LONG
        alike.setdefault(form, not is_bad)  # False stays: each row like a bad one is tried itself
        if isinstance(one, LeftOut) and is_bad:
            bad.add(one)
            bad.check(len(rows.train), config.data.max_bad_rows)
    notes = [] if (note := bad.note()) is None else [note]
    agent = config.agent
    shows_own = agent.program is None and agent.client is None and bool(agent.tools or agent.mcp)
    if shows_own and any(record.extra.get(TOOLS) for record in rows.train):
        notes.append("the column 'tools' is not shown to the model: its tools are agent.tools and agent.mcp")
    return [*notes, *prompts.notes]


def _form(value: Any) -> Any:
    """Return features that templates or tokenizers may refuse: types, field names, roles, empty or non-UTF-8 texts."""
    if isinstance(value, str):
        if not value.strip():
            return "blank" if value else "empty"
        return "text" if value.isascii() or writable(value) == value else "surrogate"
    if isinstance(value, Mapping):
        # A role's own name counts; a tool may also have a parameter of that name.
        # Its schema is a mapping, which cannot be a key: the check of rows failed on such a tool with a TypeError.
        return tuple((k, v if k == "role" and isinstance(v, str) else _form(v)) for k, v in value.items())
    return tuple(map(_form, value)) if isinstance(value, list) else type(value).__name__
