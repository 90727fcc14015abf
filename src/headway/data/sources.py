"""Where prompts come from: records in a seeded order, tokenised a little ahead, with a cursor that can be saved.

files or task ─▶ records ─▶ PromptTokenizer ─▶ RowSource ─▶ admission        (training: epoch after epoch)
                        └─▶ held-out records ─▶ list[Prompt]                 (validation: once, in order)
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from headway.data.files import Record, read_records
from headway.data.tasks import Problem, split_task
from headway.data.tokenize import PromptTokenizer
from headway.data.types import Prompt
from headway.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headway.config.schema import Config, DataConfig

SHUFFLE_KEY, SPLIT_KEY = 1, 2
"""Keep the streams of random numbers of one seed apart."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """What was handed out: ``position`` rows of ``epoch``'s order, of which ``left_out`` were too long in epoch 0."""

    epoch: int = 0
    position: int = 0
    left_out: int = 0


class RowSource:
    """Records as prompts: every epoch in an order of its own, keyed by (seed, epoch).

    Prompts are tokenised in chunks of ``prefetch``; the cursor is that of the prompts handed out, never of those ahead.
    Implements `interfaces.PromptSource`.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: PromptTokenizer,
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        prefetch: int = 64,
        row_numbers: Sequence[int] | None = None,
    ) -> None:
        """``row_numbers`` are the prompts' ``row``; default: the index in ``records``.

        Raises:
            DataError: there are no records, or all prompts are longer than the tokenizer's limit.
        """
        if not records:
            raise DataError("there are no training prompts")
        self._records = records
        self._tokenizer = tokenizer
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._chunk = max(1, prefetch)
        self._row_numbers = row_numbers if row_numbers is not None else range(len(records))
        self._handed_out = Cursor()
        self._ahead = Cursor()
        self._ready: deque[tuple[Prompt, Cursor]] = deque()
        self._order: tuple[int, NDArray[np.int64]] = (0, self._order_of(0))
        self._refill()
        if not self._ready:  # found now, so that it ends the run before it starts
            raise DataError(
                f"all {self.rows} prompts have more than data.max_prompt_length={tokenizer.max_length} tokens; raise it"
            )

    @property
    def rows(self) -> int:
        """Rows of one epoch, those left out included."""
        return len(self._records)

    @property
    def left_out(self) -> int:
        """Rows met so far whose prompt is too long; each counts once, whatever the number of epochs."""
        return self._handed_out.left_out

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
        return {"seed": self._seed, "rows": self.rows, **dataclasses.asdict(self._handed_out)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises `DataError` where that was over other data or another seed."""
        here = {"seed": self._seed, "rows": self.rows}
        if differing := [f"{name} {state[name]} then, {here[name]} now" for name in here if state[name] != here[name]]:
            raise DataError(f"the checkpoint's data differ: {'; '.join(differing)}. Resume with the same data and seed")
        self._handed_out = self._ahead = Cursor(state["epoch"], state["position"], state["left_out"])
        self._ready.clear()

    def _refill(self) -> None:
        """Tokenise chunks until a prompt is ready or all epochs are over.

        Two epochs of rows without one mean that there is none: the only good row may be an epoch's first and the next
        epoch's last.
        """
        scanned = 0
        while not self._ready and scanned < 2 * self.rows and not self._over:
            scanned += self._tokenise_chunk()

    @property
    def _over(self) -> bool:
        return self._epochs is not None and self._ahead.epoch >= self._epochs

    def _tokenise_chunk(self) -> int:
        """Tokenise the next rows, at most up to the epoch's end; returns how many."""
        epoch, start = self._ahead.epoch, self._ahead.position
        if self._order[0] != epoch:
            self._order = (epoch, self._order_of(epoch))
        indices = self._order[1][start : start + self._chunk].tolist()
        records = [self._records[i] for i in indices]
        for position, (index, record, tokenised) in enumerate(
            zip(indices, records, self._tokenizer(records), strict=True), start=start + 1
        ):
            too_long = self._ahead.left_out + (tokenised is None and epoch == 0)
            at_end = position == self.rows
            self._ahead = Cursor(epoch + at_end, 0 if at_end else position, too_long)
            if tokenised is not None:
                self._ready.append((_prompt(record, self._row_numbers[index], tokenised, epoch), self._ahead))
        return len(indices)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._records))
        return _generator(self._seed, SHUFFLE_KEY, epoch).permutation(len(self._records))


@dataclass(frozen=True, slots=True)
class DataBundle:
    """Everything that a run reads. ``rows`` counts training rows of one epoch."""

    train: RowSource
    val: list[Prompt]
    """Held-out prompts, disjoint from training; their ``row`` is none of training's."""
    rows: int
    val_left_out: int

    @property
    def left_out(self) -> dict[str, int]:
        """Prompts too long for ``data.max_prompt_length``: of training's, those met so far."""
        return {"train": self.train.left_out, "val": self.val_left_out}


@dataclass(frozen=True, slots=True)
class Rows:
    """Records of the two parts, with the row number of each."""

    train: Sequence[Record]
    train_rows: Sequence[int]
    val: Sequence[Record]
    val_rows: Sequence[int]


def read_rows(config: Config) -> Rows:
    """The run's records, from ``data.train`` or ``data.task``, before any tokenizer saw them.

    Held out are: ``data.val``, or ``data.val_size`` rows of ``data.train`` chosen by ``run.seed``, or the task's own.

    Raises:
        ConfigError: neither ``data.train`` nor ``data.task``, or a task that cannot be made.
        DataError: files that cannot be used.
    """
    data, seed = config.data, config.run.seed
    return _task_rows(data, seed) if data.train is None else _file_rows(data, seed)


def build_sources(config: Config, tokenizer: PreTrainedTokenizerBase, rows: Rows | None = None) -> DataBundle:
    """The run's prompts, of ``rows`` where they were read before.

    Raises:
        ConfigError, DataError: as `read_rows`; also prompts that cannot be rendered, or nothing but too long prompts.
    """
    data = config.data
    prompts = PromptTokenizer(tokenizer, data.chat_template, data.max_prompt_length)
    split = rows if rows is not None else read_rows(config)
    train = RowSource(
        split.train,
        prompts,
        seed=config.run.seed,
        shuffle=data.shuffle,
        epochs=data.epochs,
        prefetch=data.prefetch,
        row_numbers=split.train_rows,
    )
    val = [
        _prompt(record, row, tokenised, epoch=0)
        for record, row, tokenised in zip(split.val, split.val_rows, prompts(split.val), strict=True)
        if tokenised is not None
    ]
    if split.val and not val:
        raise DataError(
            f"all {len(split.val)} held-out prompts have more than "
            f"data.max_prompt_length={data.max_prompt_length} tokens; raise it"
        )
    return DataBundle(train=train, val=val, rows=train.rows, val_left_out=len(split.val) - len(val))


def _task_rows(data: DataConfig, seed: int) -> Rows:
    if data.task is None:
        raise ConfigError("there is nothing to train on: give data.train (a file) or data.task (a procedural task)")
    task = data.task
    val_size = task.val_size if data.val is None else 0
    split = split_task(task.name, task.params, seed=seed, size=task.size, val_size=val_size)
    val = _val_file(data) if data.val is not None else [_record(problem, task.name) for problem in split.val]
    return Rows(_TaskRecords(split.train, task.name), range(task.size), val, _rows_after(task.size, val))


def _file_rows(data: DataConfig, seed: int) -> Rows:
    assert data.train is not None
    records = read_records(data.train, prompt_key=data.prompt_key, answer_key=data.answer_key)
    if data.val is not None:
        val = _val_file(data)
        return Rows(records, range(len(records)), val, _rows_after(len(records), val))
    if data.val_size >= len(records):
        raise DataError(
            f"{data.train}: data.val_size={data.val_size} held-out rows leave nothing of {len(records)} rows to train "
            "on; make data.val_size smaller, or give data.val"
        )
    order = _generator(seed, SPLIT_KEY, 0).permutation(len(records))
    val_rows = sorted(order[: data.val_size].tolist())
    train_rows = sorted(order[data.val_size :].tolist())
    return Rows([records[i] for i in train_rows], train_rows, [records[i] for i in val_rows], val_rows)


def _val_file(data: DataConfig) -> list[Record]:
    assert data.val is not None
    return read_records(data.val, prompt_key=data.prompt_key, answer_key=data.answer_key)


def _rows_after(training_rows: int, val: Sequence[Record]) -> range:
    """Row numbers that no training prompt has: rows key the sampling's randomness."""
    return range(training_rows, training_rows + len(val))


class _TaskRecords(Sequence[Record]):
    """A task's training problems as records, made when asked for."""

    def __init__(self, problems: Sequence[Problem], source: str) -> None:
        self._problems = problems
        self._source = source

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [_record(problem, self._source) for problem in self._problems[index]]
        return _record(self._problems[index], self._source)


def _record(problem: Problem, source: str) -> Record:
    return Record(problem.prompt, problem.answer, source, problem.extra)


def _prompt(record: Record, row: int, tokenised: tuple[str, NDArray[np.int32]], epoch: int) -> Prompt:
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
    )


def _generator(seed: int, key: int, epoch: int) -> np.random.Generator:
    """A generator of its own for each use: the order never depends on what else drew random numbers."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(key, epoch)))
