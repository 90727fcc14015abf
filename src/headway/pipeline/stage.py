"""The stage: one box of the pipeline, as a state machine; and the channel between two stages.

    get_input_data ──▶ process_data ──▶ send_output_data
                                                               None from get
    WAITING_INPUT ◀──▶ PROCESSING ◀──▶ WAITING_OUTPUT ··· ─────────────────────▶ DRAINING ──▶ STOPPED
          │ its gate is shut: PAUSED between two items
          └──────────────── an exception, anywhere ───────────────────────────────────────▶ FAILED

A subclass defines only the processing of its input; the loop, states, concurrency, cancellation and the event for each
transition are implemented here. Timelines, idle time and "who waits for whom" derive from those events. Most stages
take from one channel and send to another, and so have only `process_data`:

    class Even(Stage[int, int]):
        async def process_data(self, number: int) -> AsyncGenerator[int, None]:
            if number % 2 == 0:
                yield number

    stage = Even(emit, numbers, even_numbers)

A channel has no capacity limit. Admission (`headway.pipeline.admission.staleness`) bounds the number of groups, and so
the length of every channel; a second bound here could deadlock against the order of consumption.

Also here: `Signal`, which waits for a condition over state shared on one event loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from headway.errors import StageFailed, boundary
from headway.events import Emit, StageChanged
from headway.runtime.task_groups import Tasks, failing_as_one

T = TypeVar("T")
In = TypeVar("In")
Out = TypeVar("Out")
Item_co = TypeVar("Item_co", covariant=True)
Item_contra = TypeVar("Item_contra", contravariant=True)


class Signal:
    """Condition variable: wakes all waiters when its owner's state changed, and each checks its own condition again.

    It needs no lock: everything runs on one event loop.
    """

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def changed(self) -> None:
        # Taken out first: a waiter that is woken may wait again at once, in the new list.
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            # A cancelled waiter is still in the list.
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # again after each wake-up: another waiter may have changed the state
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter


class Channel(Generic[T]):
    """First-in, first-out queue of items. ``get`` returns None once it is closed and empty.

    Example:
        >>> async def hand_over():
        ...     channel = Channel("Generate")
        ...     await channel.send("group 0")
        ...     channel.close()
        ...     return await channel.get(), await channel.get()
        >>> import asyncio
        >>> asyncio.run(hand_over())
        ('group 0', None)
    """

    def __init__(self, name: str) -> None:
        """Open a channel. ``name``: name of its producer, for messages."""
        self.name = name
        self._items: deque[T] = deque()
        self._producer_closed = False
        self._signal = Signal()

    def __len__(self) -> int:
        return len(self._items)

    async def send(self, item: T) -> None:
        if self._producer_closed:
            raise RuntimeError(f"{self.name} sent after it had closed its channel")
        self._items.append(item)
        self._signal.changed()

    async def get(self) -> T | None:
        await self._signal.until(lambda: bool(self._items) or self._producer_closed)
        return self._items.popleft() if self._items else None

    def take_waiting(self) -> list[T]:
        """Take and return all items in the channel, without waiting."""
        items = list(self._items)
        self._items.clear()
        return items

    def close(self) -> None:
        """Close the producer's end: no more items will be sent. Items sent before can still be taken."""
        self._producer_closed = True
        self._signal.changed()


class StageSource(Protocol[Item_co]):
    """Source of a stage's input: a channel, or the queue's train batches."""

    @property
    def name(self) -> str:
        """Name shown to the user when a stage waits for input; a channel has the name of its producer."""

    async def get(self) -> Item_co | None:
        """Return the next item, or None at the end of the input."""


class Sink(Protocol[Item_contra]):
    """Destination of a stage's output: a channel, or the message queue."""

    async def send(self, item: Item_contra, /) -> None:
        """Send an item."""

    def close(self) -> None:
        """Close the producer's end: no more items will be sent."""


WaitingFor = Callable[[str], AbstractContextManager[None]]
"""Function from a description to a context. While this is open, the user is shown that the stage waits for it."""


class State(StrEnum):
    WAITING_INPUT = "waiting_input"
    PROCESSING = "processing"
    WAITING_OUTPUT = "waiting_output"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(eq=False)
class Stage(ABC, Generic[In, Out]):
    """Base class of stages. ``concurrency``: 1 to process one item at a time, None for all at once."""

    concurrency: ClassVar[Literal[1] | None] = 1
    waits_for_input: ClassVar[str | None] = None
    """Text shown to the user while the stage waits for input; None for the name of its input."""
    waits_for_output: ClassVar[str | None] = "its consumer"
    """Text shown to the user while the stage waits to send. None if sending never waits: then the stage never enters
    the state WAITING_OUTPUT."""

    emit: Emit
    input: StageSource[In] | None
    """Source of the stage's items; None for a stage that overrides `get_input_data`."""
    output: Sink[Out] | None
    """Destination of the stage's results; None for a stage without results."""
    gate: asyncio.Event | None = field(default=None, init=False)
    """Event that must be set for an item to begin; items in processing continue. None: items always begin."""
    state: State = field(default=State.WAITING_INPUT, init=False)
    active: int = field(default=0, init=False)
    inner_waits: list[str] = field(default_factory=list, init=False)
    """Descriptions of what `process_data` waits for now, for the message of the stall detector."""
    _input_ended: bool = field(default=False, init=False)
    _holds_item: bool = field(default=False, init=False)
    """True while the stage is paused with an item in hand."""

    @property
    def name(self) -> str:
        return type(self).__name__

    async def get_input_data(self) -> In | None:
        """Return the next input, or None at its end."""
        assert self.input is not None, f"{self.name} was given no input, and does not say where it comes from"
        return await self.input.get()

    @abstractmethod
    def process_data(self, item: In) -> AsyncGenerator[Out, None]:
        """Turn one input into any number of outputs; each is sent as soon as it is yielded."""

    async def send_output_data(self, output: Out) -> None:
        """Send an output."""
        if self.output is not None:
            await self.output.send(output)

    def close_output(self) -> None:
        """Tell the consumer that no more output comes. Called once, when the input ended."""
        if self.output is not None:
            self.output.close()

    async def run(self) -> None:
        """Process items until the input ends. Raises the stage's own failure; leaves no task behind.

        A stage that failed or was cancelled does not close its output: its consumer would take the output so far as
        complete, and train on a batch that is not full. The run ends the consumer instead.
        """
        self._tell()
        try:
            if self.concurrency == 1:
                await self._run_in_order()
            else:
                await failing_as_one(self._take_on)
            self._enter(State.STOPPED)
        except asyncio.CancelledError:
            self._enter(State.STOPPED)
            raise
        except BaseException:
            self._enter(State.FAILED)
            raise
        # Not after a failure: the consumer would take the output so far as complete.
        # A batch that was not full was trained then, and made a version.
        self.close_output()

    @property
    def waiting_for(self) -> str | None:
        match self.state:
            case State.WAITING_INPUT:
                return self.waits_for_input or (None if self.input is None else self.input.name)
            case State.WAITING_OUTPUT:
                return self.waits_for_output
            case State.PAUSED:
                return "resume"
        return None

    async def _run_in_order(self) -> None:
        while (item := await self._get()) is not None:
            await self._work(item)
        self._enter(State.DRAINING)

    async def _take_on(self, tasks: Tasks) -> None:
        """Start a task for each item."""
        while (item := await self._get()) is not None:
            tasks.start(self._work(item))
        self._enter(State.DRAINING)

    async def _get(self) -> In | None:
        if self.active == 0:  # else the items in processing decide the state
            self._enter(State.WAITING_INPUT)
        with self._attributed():
            item = await self.get_input_data()
        self._input_ended = item is None
        if item is not None and self.gate is not None and not self.gate.is_set():
            self._holds_item = True
            self._enter(State.PAUSED)
            while not self.gate.is_set():  # again after each wake-up: it may have been cleared meanwhile
                await self.gate.wait()
            self._holds_item = False
        return item

    async def _work(self, item: In) -> None:
        self.active += 1
        self._enter(State.PROCESSING)
        try:
            with self._attributed():
                # Closed in this task: the garbage collector would run its `finally` late, outside any task.
                async with aclosing(self.process_data(item)) as outputs:
                    async for output in outputs:
                        if self.waits_for_output is not None:
                            self._enter(State.WAITING_OUTPUT)
                        await self.send_output_data(output)
                        if self.waits_for_output is not None:
                            self._enter(State.PROCESSING)
        finally:
            self.active -= 1
        if self.concurrency != 1:
            self._enter(self._state_after_item())

    def _state_after_item(self) -> State:
        """Return the state of a stage that processes several items, one of which has just ended."""
        if self.active:
            return State.PROCESSING
        if self._holds_item:
            return State.PAUSED
        return State.DRAINING if self._input_ended else State.WAITING_INPUT

    @contextmanager
    def _waiting_within(self, whom: str) -> Iterator[None]:
        """Report that `process_data` waits for ``whom``, until the block ends."""
        self.inner_waits.append(whom)
        try:
            yield
        finally:
            self.inner_waits.remove(whom)

    def _attributed(self) -> AbstractContextManager[None]:
        return boundary(f"{self.name} failed", StageFailed)

    def _enter(self, state: State) -> None:
        # PROCESSING is reported again, because the number of active items has changed.
        if state is self.state and state is not State.PROCESSING:
            return
        self.state = state
        self._tell()

    def _tell(self) -> None:
        self.emit(
            StageChanged(
                time=asyncio.get_running_loop().time(),
                stage=self.name,
                state=self.state.value,
                waiting_for=self.waiting_for,
                active=self.active,
            )
        )
