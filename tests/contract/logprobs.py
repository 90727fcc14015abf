"""Part of the contract: log-probs are those of the model, version by version."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headway.interfaces import FinishedGroup, OnUpdate
from headway.models.probe import PROBE_PREFILL, probe_sequences
from tests.contract.harness import (
    CONTEXT,
    VOCABULARY,
    Feature,
    OfEngine,
    Replica,
    collect,
    endless,
    make_request,
    responses,
    sampled,
    scenario,
    submit,
    swap,
    update,
)
from tests.contract.reference import across, assert_logprobs, forward_logprobs, log_softmax


class LogProbs(OfEngine):
    @scenario(Feature.TOKENS)
    async def test_log_probs_are_those_of_a_plain_forward(self) -> None:
        async with self.harness.serve() as replica:
            groups = await collect(replica, [make_request(number, max_tokens=24) for number in range(5)])
            assert_logprobs(replica, groups, self.harness.tolerance)
            for response in responses(groups):
                assert response.loss_mask.all()
                assert set(response.versions.tolist()) == {replica.version}

    @scenario(Feature.TOKENS)
    async def test_the_reference_can_tell_two_versions_apart(self) -> None:
        async with self.harness.serve() as replica:
            groups = await collect(replica, [make_request(1, n=1, max_tokens=8)])
            own, other = (forward_logprobs(replica.model(replica.version + i), groups[0], 0) for i in (0, 1))
            assert np.abs(own - other).max() > 1000 * self.harness.tolerance

    @scenario(Feature.TOKENS)
    async def test_after_an_interrupt_nothing_of_the_old_versions_cache_is_left(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, *(endless(number) for number in range(4)))
            for _ in range(2):
                await sampled(replica, 10 * self.harness.slots)
                await update(replica, OnUpdate.INTERRUPT)
            groups = await running
            assert _switches(groups) >= self.harness.slots
            assert_logprobs(replica, groups, self.harness.tolerance)

    @scenario(Feature.TOKENS)
    async def test_what_is_kept_goes_on_with_the_old_keys_and_values(self) -> None:
        async with self.harness.serve() as replica:
            running = submit(replica, *(endless(number, n=2) for number in range(3)))
            for _ in range(2):
                await sampled(replica, 10 * 6)
                await update(replica, OnUpdate.KEEP)
            groups = await running
            assert _switches(groups) >= 3
            for group in groups:
                for k, (trajectory, response) in enumerate(
                    zip(group.trajectories, group.tokens.responses, strict=True)
                ):
                    starts = [start for start, _ in trajectory.version_spans[1:]]
                    models = [replica.model(version) for _, version in trajectory.version_spans]
                    expected = across(models, starts, group, k)
                    np.testing.assert_allclose(response.logprobs, expected, atol=self.harness.tolerance, rtol=0)

    @scenario(Feature.TOKENS)
    async def test_after_keeping_new_requests_share_nothing_with_the_old_version(self) -> None:
        """Neither a kept prompt of the same group, whose later answers start now, nor a cache of prefixes."""
        async with self.harness.serve() as replica:
            long = endless(5, length=CONTEXT - 40, n=2)
            await collect(replica, [long])
            held = submit(replica, endless(6, n=self.harness.slots + 4))
            await sampled(replica, 2 * self.harness.slots)
            await update(replica, OnUpdate.KEEP)
            assert_logprobs(replica, await collect(replica, [long]), self.harness.tolerance)
            (group,) = await held
            late = [k for k, t in enumerate(group.trajectories) if t.oldest_version == replica.version]
            assert late
            for k in late:
                expected = forward_logprobs(replica.model(replica.version), group, k)
                np.testing.assert_allclose(
                    group.tokens.responses[k].logprobs, expected, atol=self.harness.tolerance, rtol=0
                )

    @scenario(Feature.TOKENS)
    async def test_the_probe_tells_what_is_served(self) -> None:
        async with self.harness.serve() as replica:
            for _ in range(2):
                served = await replica.engine.probe()
                np.testing.assert_allclose(served, _probe(replica), atol=self.harness.tolerance, rtol=0)
                await replica.engine.pause(OnUpdate.DRAIN)
                await swap(replica)
                await replica.engine.resume()


def _switches(groups: Sequence[FinishedGroup]) -> int:
    """Trajectories with tokens of two versions or more."""
    return sum(len(t.version_spans) > 1 for group in groups for t in group.trajectories)


def _probe(replica: Replica) -> NDArray[np.float64]:
    ids = torch.from_numpy(probe_sequences(VOCABULARY))
    with torch.no_grad():
        logits = replica.model(replica.version)(input_ids=ids).logits[:, PROBE_PREFILL - 1 : -1]
    logprobs = log_softmax(logits.double().numpy())
    return np.take_along_axis(logprobs, ids[:, PROBE_PREFILL:, None].numpy(), 2).reshape(-1)
