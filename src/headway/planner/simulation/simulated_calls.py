"""The work of a simulated replica: calls on their way, with the least that each has to remember."""

from __future__ import annotations

from dataclasses import dataclass

from headway.data.interfaces.generation import FinishedCall, GenerateRequest, Priority
from headway.data.types import FinishReason


@dataclass(slots=True, eq=False)
class SharedContext:
    """A context that open calls have in common."""

    key: tuple[int, ...]
    calls: int = 0
    """Open calls that have it."""
    computed_by: int | None = None
    """The version whose prefill of it is in the cache; None while there is none."""


class SimulatedCall:
    """One call inside the engine. ``serial`` orders all of a replica's by submission."""

    __slots__ = (
        "cached",
        "call",
        "client",
        "context",
        "found",
        "joined",
        "length",
        "prompt",
        "segment",
        "serial",
        "spans",
        "started",
        "tokens",
        "training",
    )

    def __init__(self, call: GenerateRequest, client: str, serial: int, length: int, prompt: SharedContext) -> None:
        self.call = call
        self.client = client
        self.serial = serial
        self.length = length
        """Tokens that the whole answer will have."""
        self.prompt = prompt
        """The call's context, which other open calls may have in common with it."""
        self.training = call.priority is Priority.TRAINING
        self.tokens = 0
        """Whole tokens when it last stopped decoding."""
        self.context = len(call.input_ids) or 1
        """Call's context and ``tokens``: what it has in the cache when it starts. Nothing decodes from an empty one."""
        self.found = 0
        """Tokens of the call's context that were in the cache when it was prefilled."""
        self.spans: list[list[int]] = []
        self.started: float | None = None
        self.cached = False
        """The run's context is in the KV cache."""
        self.segment = 0
        """Number of the uninterrupted stretch in a slot that the run is in; 0 while it is in none."""
        self.joined = 0.0
        """Service of the replica at which the present stretch in a slot began."""

    def gain(self, tokens: int, version: int) -> None:
        """Add ``tokens`` tokens that were sampled with the weights of ``version``."""
        if tokens:
            spans = self.spans
            if not spans or spans[-1][1] != version:
                spans.append([self.tokens, version])
            self.tokens += tokens
            self.context += tokens

    def finished(self, reason: FinishReason, now: float) -> FinishedCall:
        """The call as it is now."""
        started = now if self.started is None else self.started
        return FinishedCall(self.call.number, self.tokens, self.spans, reason, started, now, cached=self.found)
