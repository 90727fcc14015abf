from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from headway import devices
from headway.data.interfaces.rollout import OnUpdate, SamplingParams
from headway.data.types import TrajectoryId
from headway.engines.rollout.native.sampler import (
    BatchSampling,
    behaviour_logprobs,
    has_kernel,
    inverse_cdf,
    sample,
)
from headway.engines.rollout.scheduler import check_sampling, trajectory_key, uniforms
from headway.errors import DataError
from tests.engines.rollout.support import finish, make_core, make_model, make_request, steps, tokens_of
from tests.engines.rollout.test_turns import episodes, long_core, long_model, play, step
from tests.tiers import mostly_slow, searched

CPU = torch.device("cpu")


def splitmix64(state: int, outputs: int) -> list[int]:
    """The generator as its authors publish it: one state, advanced step by step."""
    mask, result = (1 << 64) - 1, []
    for _ in range(outputs):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        result.append(z ^ (z >> 31))
    return result


def filtered_distribution(
    logits: list[float], params: SamplingParams, seen: tuple[int, ...] = (), written: int = 0
) -> np.ndarray:
    """The behaviour distribution in float64, token by token, in vLLM's order of steps."""
    biased = np.array(logits, np.float64)
    for token, bias in params.logit_bias:
        biased[token] += bias
    for token in params.stop_token_ids if written < params.min_tokens else ():
        biased[token] = -np.inf
    for token in seen:
        biased[token] *= params.repetition_penalty if biased[token] < 0 else 1 / params.repetition_penalty
    scaled = biased / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    probs /= probs.sum()
    order = sorted((i for i in range(len(probs)) if probs[i] > 0), key=lambda i: (-probs[i], i))
    if params.top_k:
        order = order[: params.top_k]
    total, kept, mass = sum(probs[i] for i in order), [], 0.0
    for index in order:
        if params.top_p < 1 and kept and mass / total >= params.top_p:
            break
        kept.append(index)
        mass += probs[index]
    result = np.zeros(len(probs))
    result[kept] = probs[kept] / probs[kept].sum()
    return result


def test_uniforms_are_the_outputs_of_splitmix64_seeded_by_the_trajectory() -> None:
    key = trajectory_key(3, TrajectoryId(0, 17, 1, 5))
    expected = [(z >> 11) * 2.0**-53 for z in splitmix64(key, 50)]
    assert uniforms(np.full(50, key, np.uint64), np.arange(50)).tolist() == expected


def test_keys_differ_in_every_field_and_in_the_seed() -> None:
    ids = [TrajectoryId(e, r, a, k) for e in range(4) for r in range(20) for a in range(3) for k in range(8)]
    assert len({trajectory_key(seed, i) for seed in range(3) for i in ids}) == 3 * len(ids)


def test_uniforms_are_uniform_across_trajectories_and_positions() -> None:
    keys = np.array([trajectory_key(0, TrajectoryId(0, row, 0, k)) for row in range(100) for k in range(8)], np.uint64)
    for position in (0, 1, 99):
        counts = np.histogram(uniforms(keys, np.full(len(keys), position)), bins=20, range=(0, 1))[0]
        assert ((counts - 40) ** 2 / 40).sum() < 45.3  # χ²(19), p = 0.0006


@searched(
    100,
    logits=st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12),
    temperature=st.floats(0.3, 3),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1),
)
def test_log_probs_are_those_of_the_filtered_distribution(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(1, temperature, top_p, top_k)
    expected = filtered_distribution(logits, params)
    sampling = BatchSampling.of([params], len(logits), CPU)
    found = behaviour_logprobs(torch.tensor([logits]), sampling)[0].double().exp().numpy()
    if (found > 0).tolist() != (expected > 0).tolist():
        # Float32 and float64 may disagree about a token exactly at a filter's edge, never about more.
        assert abs(int((found > 0).sum()) - int((expected > 0).sum())) <= 1 + (len(set(logits)) < len(logits))
        return
    np.testing.assert_allclose(found, expected, atol=1e-5)


@searched(
    100,
    logits=st.lists(st.floats(-20, 20, width=32), min_size=4, max_size=12, unique=True),
    temperature=st.floats(0.3, 3),
    min_p=st.floats(0, 1),
    penalty=st.floats(0.5, 2),
    bias=st.floats(-5, 5),
    written=st.integers(0, 2),
)
def test_log_probs_are_those_after_bias_minimum_penalty_and_min_p(
    logits: list[float], temperature: float, min_p: float, penalty: float, bias: float, written: int
) -> None:
    params = SamplingParams(
        max_tokens=4,
        temperature=temperature,
        min_p=min_p,
        repetition_penalty=penalty,
        logit_bias=((1, bias), (2, -bias), (1, 0.25)),
        min_tokens=1,
        stop_token_ids=(0,),
    )
    expected = filtered_distribution(logits, params, seen=(1, 3), written=written)
    seen = torch.zeros(1, len(logits), dtype=torch.bool)
    seen[0, [1, 3]] = True
    sampling = replace(BatchSampling.of([params], len(logits), CPU, np.array([written])), seen=seen)
    found = behaviour_logprobs(torch.tensor([logits]), sampling)[0].double().exp().numpy()
    if (found > 0).tolist() != (expected > 0).tolist():
        assert abs(int((found > 0).sum()) - int((expected > 0).sum())) <= 1
        return
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_rows_with_different_parameters_do_not_touch_each_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 30) * 3
    rows = [
        SamplingParams(1),
        SamplingParams(1, temperature=0.5),
        SamplingParams(1, top_k=3),
        SamplingParams(1, top_p=0.6),
        SamplingParams(1, temperature=0.0, top_k=2, top_p=0.1),
        SamplingParams(1, min_p=0.2),
        SamplingParams(1, repetition_penalty=1.5),
        SamplingParams(1, logit_bias=((3, 2.0),)),
        SamplingParams(2, min_tokens=1, stop_token_ids=(4,)),
    ]
    seen = torch.rand(len(rows), 30) < 0.3
    together = behaviour_logprobs(logits, replace(BatchSampling.of(rows, 30, CPU), seen=seen))
    for row, params in enumerate(rows):
        alone_sampling = replace(BatchSampling.of([params], 30, CPU), seen=seen[row : row + 1])
        alone = behaviour_logprobs(logits[row : row + 1], alone_sampling)
        torch.testing.assert_close(together[row], alone[0])


def test_greedy_takes_the_most_likely_token_and_reports_its_unfiltered_log_prob() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])
    sampling = BatchSampling.of([SamplingParams(1, temperature=0.0, top_k=1)] * 2, 3, CPU)
    tokens, logprobs = sample(logits, sampling, torch.tensor([0.999, 0.999], dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1))


@searched(50, st.integers(0, 2**31), st.integers(2, 5000))
def test_a_token_of_probability_zero_is_never_sampled_not_even_at_the_ends(seed: int, vocabulary: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(6, vocabulary) * 5
    logits[torch.rand(6, vocabulary) < 0.5] = -torch.inf
    logits[:, vocabulary // 2] = 0.0
    edge = float(np.nextafter(1.0, 0.0))
    uniform = torch.tensor([0.0, edge, 0.0, edge, 0.5, 1 - 2**-30], dtype=torch.float64)
    logprobs = torch.log_softmax(logits, -1)
    tokens = inverse_cdf(logprobs, uniform)
    assert torch.isfinite(logprobs.gather(1, tokens.unsqueeze(1))).all()


def test_the_inverse_cdf_maps_intervals_to_tokens() -> None:
    logprobs = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).log().expand(6, -1)
    uniform = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999], dtype=torch.float64)
    assert inverse_cdf(logprobs, uniform).tolist() == [0, 0, 2, 2, 3, 3]


@mostly_slow(
    "sampling",
    [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"temperature": 1.5, "top_k": 12, "top_p": 0.8}],
    quick=[{"temperature": 1.5, "top_k": 12, "top_p": 0.8}],
    ids=str,
)
def test_the_engine_samples_the_exact_distribution(sampling: dict[str, float]) -> None:
    model, draws = make_model(), 4000
    core = make_core(model, slots=500)
    request = make_request(3, n=draws, max_tokens=1, stop_token_ids=(), **sampling)
    core.ask([request], "owner")
    (group,) = finish(core)

    with torch.no_grad():
        logits = model(torch.from_numpy(request.prompt.token_ids.astype(np.int64))[None]).logits[0, -1]
    expected = filtered_distribution(logits.tolist(), request.sampling)
    ids = np.array([response.ids[0] for response in group.tokens])
    logprobs = np.array([response.logprobs[0] for response in group.tokens])
    counts = np.bincount(ids, minlength=len(expected))
    assert not counts[expected == 0].any()
    np.testing.assert_allclose(logprobs, np.log(expected[ids]), atol=1e-4)

    common = expected * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    ideal = np.append(expected[common], expected[~common].sum()) * draws
    observed, ideal = observed[ideal > 0], ideal[ideal > 0]
    degrees = len(ideal) - 1
    chi2 = ((observed - ideal) ** 2 / ideal).sum()
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees) + 4


def test_sampling_does_not_depend_on_who_else_is_in_the_batch() -> None:
    model = make_model()
    alone, crowd = make_core(model), make_core(model)
    alone.ask([make_request(5)], "owner")
    crowd.ask([make_request(i) for i in (2, 5, 3)], "owner")
    assert tokens_of(finish(alone)).items() <= tokens_of(finish(crowd)).items()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 1.5},
        {"min_tokens": 5},
        {"repetition_penalty": 0.0},
    ],
    ids=str,
)
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(DataError, match="sampling needs"):
        check_sampling(SamplingParams(**{"max_tokens": 4, **wrong}), vocabulary=10)


def test_no_stop_token_is_sampled_before_the_minimum() -> None:
    free, held = make_core(make_model()), make_core(make_model())
    free.ask([make_request(i, max_tokens=12) for i in range(3)], "owner")
    held.ask([make_request(i, max_tokens=12, min_tokens=8) for i in range(3)], "owner")
    assert min(map(len, tokens_of(finish(free)).values())) < 8
    lengths = [len(tokens) for tokens in tokens_of(finish(held)).values()]
    assert min(lengths) >= 8


def test_an_answer_ends_with_the_token_that_completes_a_stop_string_and_its_text_has_it() -> None:
    model = make_model()
    plain, stopped = make_core(model), make_core(model)
    plain.ask([make_request(i, stop_token_ids=()) for i in range(6)], "owner")
    texts = {t.id: t.text for group in finish(plain) for t in group.trajectories}
    middle = max(texts.values(), key=len).split()[6:8]
    stop = " ".join(middle)
    stopped.ask([make_request(i, stop_token_ids=(), stop=("never there", stop)) for i in range(6)], "owner")
    ended = {t.id: t for group in finish(stopped) for t in group.trajectories}
    assert any(t.finish_reason == "stop" for t in ended.values())
    for trajectory_id, text in texts.items():
        trajectory = ended[trajectory_id]
        assert text.startswith(trajectory.text)
        assert (trajectory.finish_reason == "stop") == (stop in text)
        assert stop not in trajectory.text.rpartition(" ")[0]


def test_a_repetition_penalty_counts_prompt_and_answer_also_after_an_interrupt() -> None:
    model = make_model()
    straight, cut = make_core(model), make_core(model)
    for core in (straight, cut):
        core.ask([make_request(i, repetition_penalty=1.7, stop_token_ids=()) for i in range(3)], "owner")
    steps(cut, 4)
    cut.pause(OnUpdate.INTERRUPT)
    cut.resume()
    assert tokens_of(finish(cut)) == tokens_of(finish(straight))


def test_a_repetition_penalty_counts_what_an_earlier_turn_has_left() -> None:
    model = long_model()
    core, fresh = long_core(model), long_core(model)
    (episode,) = episodes(1, turns=1)
    play(core, [episode], release=False)
    calls = []
    for one in (core, fresh):
        one.submit("me", [episode.call(sampling=SamplingParams(8, stop_token_ids=(), repetition_penalty=1.7))])
        calls += [call for _ in range(8) for call in step(one)]
    found, alone = calls
    assert found.cached >= 40 and alone.cached == 0
    assert found.tokens.ids.tolist() == alone.tokens.ids.tolist()
    np.testing.assert_allclose(found.tokens.logprobs, alone.tokens.logprobs, atol=1e-5)


def test_a_seed_of_its_own_replaces_the_runs() -> None:
    model = make_model()
    first, second = make_core(model, seed=1), make_core(model, seed=2)
    for core in (first, second):
        core.ask([make_request(i, seed=7) for i in range(3)], "owner")
    assert tokens_of(finish(first)) == tokens_of(finish(second))


KERNEL = "headway.engines.rollout.native.sampling_kernel"


def plain(logits: torch.Tensor, uniform: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel is to give."""
    named = dict(zip(("temperature", "top_k", "top_p", "min_p", "greedy"), options, strict=True))
    logprobs = behaviour_logprobs(logits, BatchSampling(**named))
    tokens = inverse_cdf(logprobs, uniform)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def without(place: int) -> Any:
    """A kernel that looks past one of the options."""
    return lambda logits, uniform, *options: plain(
        logits, uniform, *(None if index == place else option for index, option in enumerate(options))
    )


def missing(*args: Any) -> Any:
    raise ImportError("no kernels here")


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (plain, None),
        (missing, "cannot be had (ImportError: no kernels here)"),
        *((without(place), "what one kernel gives differs by") for place in range(4)),
    ],
    ids=["right", "missing", "temperature", "top_k", "top_p", "min_p"],
)
def test_a_kernel_is_used_where_it_gives_what_many_operations_give_or_else_a_line_says_why_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: Any, said: str | None
) -> None:
    monkeypatch.setitem(sys.modules, KERNEL, SimpleNamespace(sample_rows=kernel))  # type: ignore[arg-type]
    monkeypatch.setattr(type(devices.CPU), "compiles_kernels", True)
    # What `sample` asks, whose device is the same one here.
    monkeypatch.setattr("headway.engines.rollout.native.sampler.has_kernel", lambda device: False)
    with caplog.at_level(logging.WARNING):
        assert has_kernel.__wrapped__(CPU) is (said is None)
    assert [said in message for message in caplog.messages] == ([True] if said else [])
