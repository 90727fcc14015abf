"""Calls of episodes that go on: what the prefix cache saves, what it may not change, and what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headway.data.interfaces.rollout import Completion, GenerateRequest, OnUpdate, Priority, SamplingParams
from headway.data.types import FinishReason, TrajectoryId
from headway.engines.rollout.native.fused_forward import FusedForward
from headway.engines.rollout.native.model_runner import Prefilled
from headway.engines.rollout.native.native_core import EngineCore
from headway.engines.rollout.native.policy_forward import ModuleForward
from headway.engines.rollout.native.prefix_cache import BLOCK, Found, PrefixCache
from headway.engines.rollout.native.step_admission import KeptContexts, StepAdmission
from headway.engines.rollout.native.step_attention import PrefillContext
from headway.engines.rollout.native.supported_models import Windows
from headway.engines.rollout.scheduler import RequestState, Scheduler
from tests.engines.rollout.support import (
    FAMILIES,
    MIXTURES,
    TOLERANCE,
    VOCABULARY,
    WholeContexts,
    activate,
    logprobs_behind,
    make_core,
    make_model,
)
from tests.engines.rollout.test_graphs import Replays
from tests.tiers import mostly_slow

LONG = 12 * BLOCK
OF_TOKEN = 2 * 2 * 2 * 12 * 4
"""Bytes of one token's keys and values: layers, keys and values, heads, head_dim, float32."""


def long_model(family: str = "qwen3", **changes: Any) -> PreTrainedModel:
    return make_model(family, max_position_embeddings=LONG, **changes)


def long_core(model: PreTrainedModel, *, slots: int = 8, tokens: int | None = None, **changes: Any) -> EngineCore:
    nbytes = None if tokens is None else tokens * OF_TOKEN
    return make_core(model, slots=slots, max_context=LONG, max_batched_tokens=4096, kv_cache_bytes=nbytes, **changes)


@dataclass(eq=False)
class Episode:
    """An episode whose environment answers with random tokens."""

    k: int
    context: NDArray[np.int32]
    turns: int
    words: tuple[int, int] = (3, 12)
    """Least and most tokens of an answer of the environment."""
    answer: int = 8
    calls: list[Completion] = field(default_factory=list)
    contexts: list[NDArray[np.int32]] = field(default_factory=list)
    goes_on: bool = True

    @property
    def id(self) -> TrajectoryId:
        return TrajectoryId(0, 5, 0, self.k)

    @property
    def over(self) -> bool:
        return len(self.calls) == self.turns

    def call(self, **changes: Any) -> GenerateRequest:
        sampling = SamplingParams(self.answer, stop_token_ids=(1,))
        settings = {"input_ids": self.context, "sampling": sampling, "key": len(self.calls), "goes_on": self.goes_on}
        return GenerateRequest(**{"number": self.k, "trajectory": self.id, **settings, **changes})

    def take(self, call: Completion) -> None:
        """The call's tokens, and what the environment says to that."""
        self.contexts.append(self.context)
        self.calls.append(call)
        rng = np.random.default_rng([self.k, len(self.calls)])
        words = rng.integers(2, VOCABULARY, int(rng.integers(*self.words))).astype(np.int32)
        self.context = np.concatenate([self.context, call.tokens.ids, words])

    def bits(self) -> list[tuple[bytes, bytes]]:
        return [(call.tokens.ids.tobytes(), call.tokens.logprobs.tobytes()) for call in self.calls]


def episodes(count: int, *, prompt: int = 40, turns: int = 6, **changes: Any) -> list[Episode]:
    """``count`` episodes of one prompt."""
    ids = np.random.default_rng(0).integers(2, VOCABULARY, prompt).astype(np.int32)
    return [Episode(k, ids, turns, **changes) for k in range(count)]


def step(core: EngineCore) -> list[Completion]:
    with torch.inference_mode():
        return [call for _, call in core.step()]


def play(core: EngineCore, playing: Sequence[Episode], *, at_once: int = 10**6, release: bool = True) -> None:
    """Play the episodes, ``at_once`` at a time; each calls again as soon as it has its answer."""
    waiting, by_number = list(playing), {episode.k: episode for episode in playing}
    while waiting or core.has_work:
        submitted, waiting = waiting[:at_once], waiting[at_once:]
        core.submit("me", [episode.call() for episode in submitted])
        for call in step(core):
            episode = by_number[call.number]
            episode.take(call)
            if not episode.over:
                core.submit("me", [episode.call()])
            elif release:
                core.release([episode.id])


def assert_reference(model: PreTrainedModel, played: Sequence[Episode], first: int = 0) -> None:
    """The log-probs of all calls from the ``first`` on are those of a plain forward over context and continuation."""
    for turn in range(first, max(len(episode.calls) for episode in played)):
        calls = [
            (episode.contexts[turn], episode.calls[turn].tokens) for episode in played if len(episode.calls) > turn
        ]
        expected = logprobs_behind(model, [(context, tokens.ids) for context, tokens in calls])
        for (_, tokens), of in zip(calls, expected, strict=True):
            np.testing.assert_allclose(tokens.logprobs, of, atol=2 * TOLERANCE, rtol=0)


# ------------------------------------------------------------------------------------------ prefills


def prefill(forward: Any, ids: torch.Tensor, cuts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and keys and values of ``ids``, prefilled part by part."""
    past, logits = None, torch.empty(0)
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        logits, (kv,) = forward.step(None, [PrefillContext(ids[start:stop], past)], 16)
        past = kv
    assert past is not None
    return logits[0], past


PACKED = {"hidden_size": 384, "intermediate_size": 400}
"""Its matrices are large enough for a copy in the order of oneDNN."""


@mostly_slow(
    ("family", "kind"),
    product([*FAMILIES, "packed"], [FusedForward, ModuleForward]),
    quick=[("mistral", FusedForward), ("packed", FusedForward), ("llama", ModuleForward)],
)
def test_a_prefill_gives_the_same_bits_however_it_is_cut_and_whoever_is_beside_it(family: str, kind: type) -> None:
    model = long_model("llama", **PACKED) if family == "packed" else long_model(family)
    windows = Windows.of(model.config, LONG)
    if not make_core(model)._runner.invariant:
        pytest.skip("this CPU's matrix products depend on the number of their rows")
    forward = kind(model, LONG, windows)
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (5 * BLOCK + 7,))
    with torch.inference_mode():
        logits, kv = prefill(forward, ids, [])
        for cuts in ([BLOCK], [1], [BLOCK - 1, BLOCK, BLOCK + 1], [70], [5, 3 * BLOCK], [len(ids) - 1]):
            again, kv_again = prefill(forward, ids, cuts)
            assert torch.equal(logits, again) and torch.equal(kv, kv_again), cuts
        others = [PrefillContext(torch.randint(0, VOCABULARY, (n,))) for n in (3, 5 * BLOCK + 9, 5 * BLOCK + 7, LONG)]
        beside, kvs = forward.step(None, [*others, PrefillContext(ids), PrefillContext(ids[70:], kv[:, :, :70])], 16)
        assert torch.equal(beside[4], logits) and torch.equal(kvs[4], kv)
        assert torch.equal(beside[5], logits) and torch.equal(kvs[5], kv)
        _, (kv_longer,) = forward.step(None, [PrefillContext(torch.cat([ids, others[3].tokens[:90]]))], 16)
        assert torch.equal(kv_longer[:, :, : len(ids)], kv)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forwards_agree_on_a_continued_prefill(family: str) -> None:
    model = long_model(family)
    windows = Windows.of(model.config, LONG)
    module, fused = ModuleForward(model, LONG, windows), FusedForward(model, LONG, windows)
    ids = torch.randint(0, VOCABULARY, (3 * BLOCK + 7,))
    with torch.inference_mode():
        results = [prefill(forward, ids, [BLOCK + 5]) for forward in (module, fused)]
        plain = model(input_ids=ids[None]).logits[0, -1]
    torch.testing.assert_close(results[0], results[1], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(results[0][0], plain, atol=TOLERANCE, rtol=0)


@mostly_slow(("family", "fused"), product(FAMILIES, [True, False]), quick=[("mistral", True), ("qwen2", False)])
def test_where_prefills_are_not_cut_into_blocks_they_are_as_right(
    family: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: contexts attend in one call, whatever of them is there already."""
    for module in ("policy_forward", "fused_forward"):
        monkeypatch.setattr(f"headway.engines.rollout.native.{module}.PrefillBlocks", WholeContexts)
    if not fused:
        monkeypatch.setattr("headway.engines.rollout.native.fused_forward.FAMILY", frozenset())
    model = long_model(family)
    core = long_core(model)
    played = episodes(3, turns=3)
    play(core, played)
    assert_reference(model, played)
    assert all(call.cached for episode in played for call in episode.calls[1:])


# ------------------------------------------------------------------------------------------ episodes


@mostly_slow("family", [*FAMILIES, *MIXTURES], quick=["mistral", "qwen3_moe"])
def test_log_probs_over_many_turns_equal_a_plain_forward(family: str) -> None:
    model = long_model(family)
    played = episodes(3)
    core = long_core(model)
    play(core, played)
    assert_reference(model, played)
    assert core.stats().cached_tokens > 0


def test_ten_turns_prefill_little_more_than_what_is_new() -> None:
    core = long_core(long_model())
    (episode,) = played = episodes(1, turns=10, words=(9, 15), answer=10)
    play(core, played)
    stats = core.stats()
    new = len(episode.contexts[-1])
    assert stats.prefilled_tokens <= 1.1 * new + BLOCK * 10
    # Sharper: the prompt, what the environment said, and each answer's last token, which no step has computed.
    grown = np.diff([len(context) for context in episode.contexts])
    said = [by - call.length for by, call in zip(grown, episode.calls, strict=False)]
    assert stats.prefilled_tokens == len(episode.contexts[0]) + sum(said) + 9
    assert stats.cached_tokens == sum(map(len, episode.contexts)) - stats.prefilled_tokens
    assert [call.cached for call in episode.calls][:1] == [0]
    assert sum(call.cached for call in episode.calls) == stats.cached_tokens


def test_slots_order_and_company_change_no_bit_of_an_episode() -> None:
    model = long_model()
    expected: list[Any] = []
    for slots, order, at_once in [(8, 1, 8), (3, 1, 8), (5, -1, 2)]:
        core = long_core(model, slots=slots, tokens=8 * LONG)
        played = episodes(5, turns=3)
        play(core, played[::order], at_once=at_once)
        assert core.stats().unpinned == 0
        expected = expected or [episode.bits() for episode in played]
        assert [episode.bits() for episode in played] == expected, (slots, order, at_once)
    alone = episodes(5, turns=3)[4]
    play(long_core(model), [alone])
    assert alone.bits() == expected[4]


def test_the_episodes_of_a_prompt_have_its_blocks_in_common() -> None:
    core = long_core(long_model(), slots=6)
    played = episodes(6, turns=1, prompt=3 * BLOCK + 5)
    play(core, played, release=False)
    assert len(core._batch.contexts.tree) == 3 + 6
    core.release([episode.id for episode in played[1:]])
    assert len(core._batch.contexts.tree) == 3 + 1
    core.release([played[0].id])
    assert len(core._batch.contexts.tree) == 3


def test_single_answers_leave_nothing_behind() -> None:
    core = long_core(long_model(), slots=3)
    play(core, episodes(8, turns=1, prompt=3 * BLOCK + 5, goes_on=False))
    assert (
        len(core._batch.contexts.tree) == 0 and not core._batch.contexts._waiting and not core._batch.contexts._prefills
    )
    assert core.stats().prefilled_tokens == 3 * BLOCK + 5


def test_a_last_call_that_does_not_go_on_still_finds_what_is_there() -> None:
    core = long_core(long_model())
    (episode,) = episodes(1, turns=2)
    core.submit("me", [episode.call()])
    while not episode.calls:
        for call in step(core):
            episode.take(call)
    core.submit("me", [episode.call(goes_on=False)])
    while len(episode.calls) < 2:
        for call in step(core):
            episode.take(call)
    assert episode.calls[1].cached == 40 + episode.calls[0].length - 1


def test_another_attempt_at_a_turn_finds_its_context_and_samples_by_its_key() -> None:
    core = long_core(long_model())
    (episode,) = episodes(1, turns=1, answer=12)
    play(core, [episode], release=False)
    core.submit("me", [episode.call(input_ids=episode.contexts[0], key=key, number=key) for key in (0, 77)])
    again = {call.number: call for _ in range(12) if core.has_work for call in step(core)}
    assert again[0].tokens.ids.tolist() == episode.calls[0].tokens.ids.tolist()
    assert again[77].tokens.ids.tolist() != episode.calls[0].tokens.ids.tolist()
    assert again[0].cached >= 39


# ------------------------------------------------------------------------------------------ versions


def after_one_turn(core: EngineCore, count: int = 2) -> list[Episode]:
    played = episodes(count, turns=2)
    play(core, [Episode(e.k, e.context, 1) for e in played])
    for episode in played:
        core.submit("me", [episode.call()])
    while not all(episode.calls for episode in played):
        for call in step(core):
            played[call.number].take(call)
    assert len(core._batch.contexts.tree) > 0
    core.stats()
    return played


@mostly_slow("policy", [OnUpdate.DRAIN, OnUpdate.INTERRUPT], quick=[OnUpdate.INTERRUPT])
def test_nothing_of_an_old_version_is_found_under_a_new_one(policy: OnUpdate) -> None:
    old, new = long_model(), long_model(seed=3)
    core = long_core(old)
    played = after_one_turn(core)
    core.pause(policy)
    activate(core, 1, new)
    assert len(core._batch.contexts.tree) == 0
    core.resume()
    play(core, played)
    assert core.stats().prefilled_tokens == sum(len(episode.contexts[1]) for episode in played)
    assert_reference(new, played, first=1)


def test_a_drain_without_an_update_keeps_what_is_there() -> None:
    core = long_core(long_model())
    played = after_one_turn(core)
    core.pause(OnUpdate.DRAIN)
    core.resume()
    play(core, played)
    assert all(episode.calls[1].cached for episode in played)


@mostly_slow("paused", [True, False], quick=[True])
def test_under_keep_open_episodes_go_on_with_what_they_have_and_new_ones_do_not(paused: bool) -> None:
    old, new = long_model(), long_model(seed=3)
    core = long_core(old)
    played = after_one_turn(core)
    if paused:
        core.pause(OnUpdate.KEEP)
    activate(core, 1, new)
    core.resume()
    play(core, played, release=False)
    assert all(episode.calls[1].cached for episode in played)
    assert all(set(episode.calls[1].tokens.versions.tolist()) == {1} for episode in played)
    fresh = Episode(9, played[0].contexts[0], 2)
    play(core, [fresh])
    assert fresh.calls[0].cached == 0
    assert_reference(new, [fresh])


def test_an_interrupt_and_sleep_drop_what_is_there() -> None:
    core = long_core(long_model())
    played = after_one_turn(core)
    core.pause(OnUpdate.INTERRUPT)
    assert len(core._batch.contexts.tree) == 0
    core.resume()
    play(core, played, release=False)
    assert len(core._batch.contexts.tree) > 0
    core.pause(OnUpdate.KEEP)
    core.sleep()
    assert len(core._batch.contexts.tree) == 0 and core._runner.cache.tree.top == 0
    core.wake()
    core.resume()
    again = Episode(0, played[0].contexts[1], 1)
    play(core, [again])
    assert again.calls[0].cached == 0


def test_a_call_that_was_ended_leaves_no_context_behind() -> None:
    core = long_core(long_model())
    (episode,) = episodes(1)
    core.submit("me", [episode.call()])
    step(core)
    core.abort("me", [episode.k])
    assert [call.finish_reason for call in step(core)] == [FinishReason.ABORTED]
    assert len(core._tree) == 0


# ------------------------------------------------------------------------------------------ admission


class OwnBlocks(PrefixCache):
    """Finds a block of an episode's own for each, and nothing for the first."""

    def find(self, ids: NDArray[Any], trajectory: TrajectoryId) -> Found:
        return Found((trajectory.k,), BLOCK, 0) if trajectory.k else Found()


def waiting(count: int) -> list[RequestState]:
    """Calls of so many episodes with one context, none of which has started."""
    scheduler = Scheduler(seed=0, max_context=LONG, vocabulary=VOCABULARY)
    return scheduler.submit("me", [episode.call() for episode in episodes(count)])


def test_calls_of_one_context_share_a_prefill_only_where_they_begin_with_the_same_blocks() -> None:
    for tree, shared in ((PrefixCache(), [3]), (OwnBlocks(), [1, 1, 1])):
        admission = StepAdmission(
            rows=0, positions=0, budget=LONG, fits=lambda *_: True, contexts=KeptContexts(tree, LONG)
        )
        assert all(admission(run) for run in waiting(3))
        assert [len(share.runs) for share in admission.shares.values()] == shared


def test_a_prefill_of_others_is_not_taken_where_an_episodes_own_bits_are_there() -> None:
    contexts, (first, then) = KeptContexts(PrefixCache(), LONG), waiting(2)
    contexts.expect([first, then])
    share = contexts.share(first, first.context, Found())
    share.runs.append(first)
    share.prefilled = Prefilled(torch.zeros(1, 2, len(first.context), 1), torch.zeros(VOCABULARY))
    contexts.start(share)
    for found, taken in ((Found(), True), (Found((0,), BLOCK, BLOCK), True), (Found((0,), BLOCK, BLOCK - 1), False)):
        assert (contexts.share(then, then.context, found).prefilled is not None) == taken


# ------------------------------------------------------------------------------------------ memory


def test_recorded_steps_write_over_no_block() -> None:
    """Rows that fill a recorded step up are written to, too."""
    model, replays = long_model(), Replays()
    core = long_core(model, slots=6, recorder=replays)
    played = episodes(6, turns=5, words=(8, 16), answer=12)
    play(core, played, at_once=2)
    assert_reference(model, played)
    assert replays.replayed > 0


def test_as_many_open_episodes_as_slots_keep_what_they_have() -> None:
    model = long_model()
    core = long_core(model, slots=4)
    played = episodes(4, turns=12, words=(8, 16), answer=12)
    play(core, played)
    assert max(len(episode.context) for episode in played) > 8 * BLOCK
    stats = core.stats()
    assert (stats.unpinned, stats.preempted) == (0, 0)
    assert stats.prefilled_tokens < 1.1 * sum(len(episode.contexts[-1]) for episode in played)


@mostly_slow("tokens", [5 * LONG // 4, 2 * LONG, 3 * LONG], quick=[5 * LONG // 4])
def test_where_memory_is_short_contexts_are_prefilled_again_and_nothing_else_changes(tokens: int) -> None:
    model = long_model()
    core = long_core(model, slots=4, tokens=max(tokens, core_least(model)))
    played = episodes(6, turns=10, words=(8, 16), answer=16)
    play(core, played)
    assert_reference(model, played)
    assert core.stats().unpinned > 0
    assert core.stats().unpinned == 0, "each is told once"
    assert len(core._scheduler) == 0


def core_least(model: PreTrainedModel) -> int:
    return long_core(model, slots=1)._runner._least_rows * LONG


def test_the_youngest_open_episode_loses_its_pins_first() -> None:
    model = long_model()
    least = core_least(model)
    core = long_core(model, slots=4, tokens=least)
    played = episodes(4, turns=1, prompt=LONG // 2)
    play(core, played, at_once=1, release=False)
    core.stats()
    found = [core._batch.contexts.tree.find(episode.context, episode.id).length for episode in played]
    assert found == sorted(found, reverse=True), "the older, the more is left of it"


def test_what_a_client_leaves_behind_is_given_up() -> None:
    core = long_core(long_model())
    after_one_turn(core)
    core.forget("me")
    while core._batch.contexts.tree._evict():
        pass
    assert len(core._batch.contexts.tree) == 0


def test_aborted_calls_leave_their_episode_as_it_was() -> None:
    core = long_core(long_model())
    played = after_one_turn(core)
    blocks = len(core._batch.contexts.tree)
    core.submit("me", [episode.call() for episode in played])
    step(core)
    core.abort("me", [episode.k for episode in played])
    assert {call.finish_reason for _, call in core.take_finished()} == {FinishReason.ABORTED}
    assert len(core._batch.contexts.tree) == blocks
    play(core, played)
    assert all(episode.calls[1].cached for episode in played)


def test_validation_and_training_share_a_prefill_that_starts_in_one_step() -> None:
    core = long_core(long_model())
    training, validation = episodes(2, turns=1, goes_on=False)
    core.submit("me", [training.call(), validation.call(priority=Priority.VALIDATION)])
    step(core)
    stats = core.stats()
    assert (stats.prefilled_tokens, stats.cached_tokens) == (40, 40)
