"""What is sampled depends on seed, trajectory, position and weights alone: not on slots, order or company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headway.engines.rollout.native.model_runner import ALONE, MOST, TOGETHER, least_invariant_rows
from headway.engines.rollout.native.step_attention import Decoding, PrefillContext
from tests.engines.rollout.support import FAMILIES, MIXTURES, AskedCore, make_core, make_model, make_request
from tests.tiers import mostly_slow

NUMBERS = range(6)


def drawn(core: AskedCore, order: list[int], at_once: int) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Every trajectory's ids and log-probs, bit for bit; ``at_once`` groups arrive between two steps."""
    results: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    left = list(order)
    with torch.inference_mode():
        while left or core.has_work:
            core.ask([make_request(number, n=3, max_tokens=8) for number in left[:at_once]], "owner")
            left = left[at_once:]
            for group in core.groups(core.step()):
                for k, response in enumerate(group.tokens):
                    results[group.number, k] = (response.ids.tobytes(), response.logprobs.tobytes())
    return results


PACKED = {"hidden_size": 384, "intermediate_size": 400}
"""Its matrices are large enough for a copy in the order of oneDNN."""


@mostly_slow(
    ("family", "sizes"),
    [*((family, {}) for family in (*FAMILIES, *MIXTURES)), ("llama", PACKED)],
    quick=[("mistral", {}), ("qwen3_moe", {})],
    ids=[*FAMILIES, *MIXTURES, "packed"],
)
def test_slots_order_and_company_change_no_bit(family: str, sizes: dict[str, int]) -> None:
    """Decodes the same requests in many arrangements."""
    model = make_model(family, **sizes)
    reference = make_core(model, slots=64)
    if not reference._runner.invariant:
        pytest.skip("this CPU's matrix products depend on the number of their rows")
    expected = drawn(reference, list(NUMBERS), at_once=12)
    shuffled = random.Random(1).sample(NUMBERS, len(NUMBERS))
    for slots, order, at_once, budget in [
        (1, list(NUMBERS), 12, 4096),
        (5, shuffled, 1, 24),
        (17, list(reversed(NUMBERS)), 2, 40),
        (40, shuffled, 12, 4096),
    ]:
        core = make_core(model, slots=slots, max_batched_tokens=budget)
        assert drawn(core, order, at_once) == expected, (slots, at_once)


def varying(bad: set[int]) -> list[int]:
    """Rows at which `least_invariant_rows` looks when calls of ``bad`` sizes differ; what it finds is last."""
    asked: list[int] = []

    def decode(rows: int) -> torch.Tensor:
        asked.append(rows)
        return torch.arange(rows, dtype=torch.float32)[:, None] + (1e-7 if rows in bad else 0.0)

    found = least_invariant_rows(decode)
    return [*asked, -1 if found is None else found]


def test_the_least_number_of_rows_is_that_from_which_on_all_calls_agree() -> None:
    assert varying(set())[-1] == 1
    assert varying({1})[-1] == 2
    assert varying({1, 2, 3})[-1] == 4
    assert varying({3})[-1] == 4
    assert varying({17})[-1] == -1, f"more than {MOST} rows are not filled up"
    assert varying({33})[-1] == -1
    assert varying(set())[:-1] == [TOGETHER, *reversed(ALONE)]


def test_a_mixture_promises_nothing_where_one_row_is_not_as_good_as_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Filling up a step gives no row to an expert that got one token."""
    monkeypatch.setattr("headway.engines.rollout.native.model_runner.least_invariant_rows", lambda decode: 4)
    assert make_core(make_model())._runner.invariant
    core = make_core(make_model("qwen3_moe"))
    assert not core._runner.invariant and not core.reproducible
    assert core._runner._least_rows == 1
    assert "an expert has as many as the router gives it" in caplog.text


def test_where_no_number_of_rows_is_enough_every_step_has_as_many_as_there_are_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headway.engines.rollout.native.model_runner.least_invariant_rows", lambda decode: None)
    model = make_model()
    core = make_core(model, slots=9)
    assert not core._runner.invariant
    assert "filled up to 9 rows" in caplog.text
    rows = []
    inner = core._runner._forward.step

    def watched(decoding: Decoding | None, contexts: Sequence[PrefillContext], least_rows: int) -> Any:
        if decoding is not None:
            rows.append(len(decoding.tokens) + sum(len(context.tokens) for context in contexts))
        return inner(decoding, contexts, least_rows)

    monkeypatch.setattr(core._runner._forward, "step", watched)
    some = drawn(core, list(NUMBERS), at_once=2)
    assert set(rows) == {9}
    assert len(some) == 3 * len(NUMBERS)
