"""Part of the contract: log-probs are those of the model, version by version."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.interfaces.rollout import OnUpdate
from headway.models.logprobs import PROBE_PREFILL, probe_sequences
from tests.engines.contract.harness import (
    CONTEXT,
    VOCABULARY,
    Answer,
    Feature,
    OfEngine,
    Replica,
    collect,
    endless,
    make_calls,
    sampled,
    scenario,
    submit,
    swap,
    update,
)
from tests.engines.contract.reference import across, assert_logprobs, forward_logprobs, log_softmax


class LogProbs(OfEngine):
    @scenario(Feature.TOKENS)
    async def test_log_probs_are_those_of_a_plain_forward(self) -> None:
        async with self.harness.serve() as replica:
            answers = await collect(replica, *(make_calls(row, max_tokens=24) for row in range(5)))
            assert_logprobs(replica, answers, self.harness.tolerance)
            for answer in answers:
                assert set(answer.tokens.versions.tolist()) == {replica.version}

    @scenario(Feature.TOKENS)
    async def test_the_reference_can_tell_two_versions_apart(self) -> None:
        async with self.harness.serve() as replica:
            answers = await collect(replica, make_calls(1, n=1, max_tokens=8))
            (own,), (other,) = (forward_logprobs(replica.model(replica.version + i), answers) for i in (0, 1))
            assert np.abs(own - other).max() > 1000 * self.harness.tolerance

    @scenario(Feature.TOKENS)
    async def test_after_an_interrupt_nothing_of_the_old_versions_cache_is_left(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, *(endless(row) for row in range(4)))
            for _ in range(2):
                await sampled(replica, 10 * self.harness.slots)
                await update(replica, OnUpdate.INTERRUPT)
            answers = await running
            assert _switches(answers) >= self.harness.slots
            assert_logprobs(replica, answers, self.harness.tolerance)

    @scenario(Feature.TOKENS)
    async def test_what_is_kept_goes_on_with_the_old_keys_and_values(self) -> None:
        async with self.harness.serve() as replica:
            running = await submit(replica, *(endless(row, n=2) for row in range(3)))
            for _ in range(2):
                await sampled(replica, 10 * 6)
                await update(replica, OnUpdate.KEEP)
            answers = await running
            assert _switches(answers) >= 3
            for answer in answers:
                expected = across([replica.model(version) for version in answer.versions], answer)
                np.testing.assert_allclose(answer.tokens.logprobs, expected, atol=self.harness.tolerance, rtol=0)

    @scenario(Feature.TOKENS)
    async def test_after_keeping_new_calls_share_nothing_with_the_old_version(self) -> None:
        """Neither the context of calls that go on in place, whose further answers start now, nor an earlier one's."""
        async with self.harness.serve() as replica:
            long = endless(5, length=CONTEXT - 40, n=2)
            await collect(replica, long)
            held = await submit(replica, endless(6, n=self.harness.slots + 4))
            await sampled(replica, 2 * self.harness.slots)
            await update(replica, OnUpdate.KEEP)
            assert_logprobs(replica, await collect(replica, long), self.harness.tolerance)
            late = [answer for answer in await held if answer.versions[0] == replica.version]
            assert late
            assert_logprobs(replica, late, self.harness.tolerance)

    @scenario(Feature.TOKENS)
    async def test_the_probe_tells_what_is_served(self) -> None:
        async with self.harness.serve() as replica:
            for _ in range(2):
                served = await replica.engine.probe()
                np.testing.assert_allclose(served, _probe(replica), atol=self.harness.tolerance, rtol=0)
                await replica.engine.pause(OnUpdate.DRAIN)
                await swap(replica)
                await replica.engine.resume()


def _switches(answers: Sequence[Answer]) -> int:
    """Answers with tokens of two versions or more."""
    return sum(len(answer.versions) > 1 for answer in answers)


def _probe(replica: Replica) -> NDArray[np.float64]:
    ids = torch.from_numpy(probe_sequences(VOCABULARY))
    with torch.no_grad():
        logits = replica.model(replica.version)(input_ids=ids).logits[:, PROBE_PREFILL - 1 : -1]
    logprobs = log_softmax(logits.double().numpy())
    return np.take_along_axis(logprobs, ids[:, PROBE_PREFILL:, None].numpy(), 2).reshape(-1)
