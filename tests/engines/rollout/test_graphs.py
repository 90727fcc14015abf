"""Decoding steps that are recorded and replayed, with a recorder that needs no GPU: it runs the function again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.data.interfaces.rollout import OnUpdate
from headway.devices import Compute
from headway.engines.rollout.native import model_runner, policy_forward
from headway.engines.rollout.native.fused_forward import FusedForward
from headway.engines.rollout.native.policy_forward import recorded_rows
from tests.engines.rollout.support import (
    CONTEXT,
    FAMILIES,
    activate,
    assert_logprobs,
    finish,
    make_core,
    make_model,
    make_request,
    steps,
    tokens_of,
)
from tests.tiers import mostly_slow

SPAN = 32
LONG = 2 * SPAN + 16
"""Positions: more than two spans of recorded steps, where these are short."""


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (policy_forward, model_runner):
        monkeypatch.setattr(module, "RECORDED_SPAN_STEP", SPAN)


class Reads(TorchDispatchMode):
    """The storages that operations read and did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []
        self._made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in self._made}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                if storage.cdata not in made:
                    self.storages.append(storage)
        out = func(*args, **(kwargs or {}))
        self._made += [tensor for tensor in tree_leaves(out) if isinstance(tensor, torch.Tensor)]
        return out


class Replays:
    """Records as a CUDA graph does: a replay reads the memory that was read then, which has to be there still."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0
        self.resets = 0

    def record(self, compute: Compute) -> Compute:
        with Reads() as reads:
            compute()
        storages = reads.storages
        del reads
        self.recorded += 1

        def replay() -> None:
            assert not any(storage.expired() for storage in storages), "memory that was read is not there any more"
            self.replayed += 1
            compute()

        return replay

    def reset(self) -> None:
        self.resets += 1


@mostly_slow("family", FAMILIES, quick=["qwen3", "mistral"])
def test_replayed_steps_give_the_tokens_of_steps_that_are_not_recorded(family: str) -> None:
    model = make_model(family)
    requests = [make_request(number, max_tokens=4 + 5 * number) for number in range(4)]
    trajectories = []
    replays = Replays()
    for recorder in (None, replays):
        core = make_core(model, recorder=recorder)
        core.ask(requests, "test")
        groups = finish(core)
        assert_logprobs(groups, {0: model})
        trajectories.append(tokens_of(groups))
    assert trajectories[0] == trajectories[1]
    assert replays.replayed > 3 * replays.recorded > 0


@pytest.mark.usefixtures("short_spans")
def test_a_shape_is_recorded_once_and_longer_answers_are_other_shapes() -> None:
    model = make_model(max_position_embeddings=LONG)
    replays = Replays()
    core = make_core(model, max_context=LONG, recorder=replays)
    core.ask([make_request(0, n=1, length=5, max_tokens=LONG - 5, stop_token_ids=())], "test")
    groups = finish(core)
    assert_logprobs(groups, {0: model})
    assert replays.recorded == math.ceil(LONG / SPAN) == 3, "the cache's rows get longer where the span does"
    assert replays.replayed == LONG - 5 - 1, "one to check each when it is recorded, and one for each later step"


@pytest.mark.usefixtures("short_spans")
def test_what_was_recorded_is_right_when_rows_get_short_again() -> None:
    model = make_model(max_position_embeddings=LONG)
    replays = Replays()
    core = make_core(model, max_context=LONG, recorder=replays)
    recorded = []
    for wave in range(3):
        core.ask([make_request(wave, n=2, length=5, max_tokens=SPAN + 8, stop_token_ids=())], "test")
        assert_logprobs(finish(core), {0: model})
        recorded.append(replays.recorded)
    assert recorded[0] == recorded[1] == recorded[2] > 1, "later waves find the shapes of the first"


@pytest.mark.usefixtures("short_spans")
def test_no_more_shapes_are_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_forward, "MOST_RECORDED", 2)
    model, replays = make_model(max_position_embeddings=LONG), Replays()
    core = make_core(model, max_context=LONG, recorder=replays)
    core.ask([make_request(0, n=3, length=5, max_tokens=LONG - 5, stop_token_ids=())], "test")
    assert_logprobs(finish(core), {0: model})
    assert replays.recorded > 2
    assert core._runner._graphs is not None and len(core._runner._graphs.recorded) == 2


def test_what_is_recorded_decodes_with_the_weights_that_were_written_last() -> None:
    old, new = make_model(), make_model(seed=3)
    replays = Replays()
    core = make_core(old, recorder=replays)
    core.ask([make_request(0, max_tokens=30, stop_token_ids=())], "test")
    steps(core, 10)
    recorded = replays.recorded
    core.pause(OnUpdate.KEEP)
    activate(core, 1, new)
    core.resume()
    (group,) = finish(core)
    response = group.tokens[0]
    assert set(response.versions.tolist()) == {0, 1}
    assert replays.recorded == recorded
    core.ask([make_request(1, max_tokens=8, stop_token_ids=())], "test")
    assert_logprobs(finish(core), {1: new})


def test_sleep_forgets_what_was_recorded_over_memory_that_is_given_back() -> None:
    model = make_model()
    replays = Replays()
    core = make_core(model, recorder=replays)
    core.ask([make_request(0)], "test")
    finish(core)
    recorded = replays.recorded
    core.pause(OnUpdate.INTERRUPT)
    core.sleep(keep_weights=True)
    core.wake()
    core.resume()
    core.ask([make_request(0)], "test")
    assert_logprobs(finish(core), {0: model})
    assert (replays.recorded, replays.resets) == (2 * recorded, 1)


class Fails(Replays):
    """Cannot record."""

    def record(self, compute: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing")


class Forgets(Replays):
    """A replay does nothing."""

    def record(self, compute: Compute) -> Compute:
        super().record(compute)
        return lambda: None


@pytest.mark.parametrize(
    ("recorder", "says"),
    [(Fails(), "8 rows could not be recorded: RuntimeError: operation not permitted"), (Forgets(), "differs from the")],
)
def test_where_recording_does_not_work_steps_run_as_they_are(
    recorder: Replays, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    core = make_core(model, recorder=recorder)
    core.ask([make_request(0), make_request(1)], "test")
    assert_logprobs(finish(core), {0: model})
    (told,) = caplog.messages
    assert says in told
    assert "decoding without CUDA graphs from here on" in told
    assert recorder.recorded <= 1


def test_only_the_forward_that_never_waits_for_the_device_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedForward, "recordable", False)
    replays = Replays()
    core = make_core(make_model(), recorder=replays)
    core.ask([make_request(0)], "test")
    assert finish(core)
    assert replays.recorded == 0


@pytest.mark.parametrize(("rows", "recorded"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (17, 32), (127, 128)])
def test_rows_are_filled_up_to_one_of_a_few_numbers(rows: int, recorded: int) -> None:
    assert recorded_rows(rows) == recorded


def test_no_more_rows_are_filled_up_than_the_cache_has() -> None:
    model, replays = make_model(), Replays()
    core = make_core(model, slots=5, max_context=CONTEXT, recorder=replays)
    core.ask([make_request(0, n=5, max_tokens=9, stop_token_ids=())], "test")
    (group,) = finish(core)
    assert_logprobs([group], {0: model})
    assert np.all([len(response.ids) == 9 for response in group.tokens])
