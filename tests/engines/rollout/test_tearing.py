"""No token, and no forward pass, sees a mixture of two versions: 200 updates of a model that is decoding all the while.

Every weight of the model is a function of the version, so each forward pass can be checked for its version weight by
weight. Values are zero, so that attention adds nothing, a token's distribution depends on its version and the token
before it alone, and each log-prob can be looked up in a table [version, token before, token], whatever the KV cache.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import OnUpdate
from headway.engines.rollout.native.native_core import EngineCore
from headway.engines.rollout.native.policy_forward import PolicyForward
from tests.engines.rollout.serving import WAIT_S, Source, collect, serving
from tests.engines.rollout.support import VOCABULARY, make_model, make_request, served_tensors
from tests.tiers import mostly_slow

UPDATES = 200
QUICK_UPDATES = 50
"""Updates of each test in `make test`."""
SIZES = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1}


@cache
def model(version: int) -> PreTrainedModel:
    """A version's model, different from the others in every weight but the values' projections, which are zero."""
    made = copy.deepcopy(model(0)) if version > 0 else make_model("qwen3", num_hidden_layers=1, **SIZES)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.zero_() if "v_proj" in name else parameter.add_(noise)
    return made


@cache
def table(version: int) -> NDArray[np.float32]:
    """[token before, token] log-probs of a version, by plain forwards over single tokens."""
    tokens = torch.arange(VOCABULARY)[:, None]
    with torch.no_grad():
        return torch.log_softmax(model(version)(input_ids=tokens).logits[:, 0], -1).numpy()


class Watching:
    """Forward passes, each over weights of one version: the one that its tokens are stamped with."""

    def __init__(self, core: EngineCore, forward: PolicyForward) -> None:
        self._core = core
        self._forward = forward
        self.in_blocks = forward.in_blocks
        self.varlen = forward.varlen
        self.forwards = 0

    def step(self, *args: Any) -> Any:
        return self._checked(self._forward.step, *args)

    def refresh(self) -> None:
        self._forward.refresh()

    def release(self) -> None:
        self._forward.release()

    def _checked(self, forward: Callable[..., Any], *args: Any) -> Any:
        self._assert_whole()
        result = forward(*args)
        self._assert_whole()
        self.forwards += 1
        return result

    def _assert_whole(self) -> None:
        for name, expected in model(self._core.version).named_parameters():
            assert torch.equal(served_tensors(self._core)[name], expected), name


def assert_from_the_table(groups: list[Group]) -> set[int]:
    """The versions that sampled."""
    seen: set[int] = set()
    for group in groups:
        for response in group.tokens:
            before = np.concatenate([group.tokens[0].prompt_ids[-1:], response.ids[:-1]])
            looked_up = zip(response.versions, before, response.ids, strict=True)
            expected = [table(int(version))[token, sampled] for version, token, sampled in looked_up]
            np.testing.assert_allclose(response.logprobs, expected, atol=1e-5, rtol=0)
            assert (np.diff(response.versions) >= 0).all()
            seen |= set(response.versions.tolist())
    return seen


def test_a_wrong_version_would_be_noticed() -> None:
    versions = range(QUICK_UPDATES + 1)
    difference = np.abs(np.diff([table(version) for version in versions], axis=0))
    assert np.median(difference) > 0.05
    for old, new in pairwise(versions):
        pairs = zip(model(old).named_parameters(), model(new).parameters(), strict=True)
        assert all("v_proj" in name or not torch.equal(a, b) for (name, a), b in pairs)


QUICK = [(True, OnUpdate.INTERRUPT, QUICK_UPDATES), (False, OnUpdate.KEEP, QUICK_UPDATES)]


@mostly_slow(("dual_buffer", "policy", "updates"), [*QUICK, *product([True, False], OnUpdate, [UPDATES])], quick=QUICK)
async def test_no_output_mixes_two_versions(policy: OnUpdate, dual_buffer: bool, updates: int) -> None:
    """Up to two hundred updates of a model that decodes meanwhile, and a look at every pass."""
    source = Source(model(0))
    groups: list[Group] = []
    over = False

    async with serving(source, model=model(0), dual_buffer=dual_buffer, slots=3) as engine:
        watching = Watching(engine._core, engine._core._runner._forward)
        engine._core._runner._forward = watching

        async def keep_it_busy(number: int) -> None:
            while not over:
                groups.extend(await collect(engine, [make_request(number, n=2, max_tokens=4, stop_token_ids=())]))

        async def decode_a_little() -> None:
            generated = 0
            while not generated:
                generated = (await engine.stats()).generated_tokens

        async with asyncio.timeout(3 * WAIT_S), asyncio.TaskGroup() as tasks:
            for number in range(2):
                tasks.create_task(keep_it_busy(number))
            for version in range(1, updates + 1):
                await decode_a_little()
                source.model = model(version)
                if dual_buffer:
                    await engine.stage_weights(version)
                # Every third time between two steps of an engine that goes on decoding, where that is possible.
                pausing = not dual_buffer or version % 3
                if pausing:
                    await engine.pause(policy)
                if not dual_buffer:
                    await engine.stage_weights(version)
                await engine.activate(version)
                if pausing:
                    await engine.resume()
            await decode_a_little()
            over = True

    assert watching.forwards > updates
    assert len(assert_from_the_table(groups)) > updates * 0.9
