"""Which replica gets which group."""

from __future__ import annotations

from headway.interfaces import GenerateRequest, SamplingParams
from headway.pipeline.router import Router
from tests.pipeline.fakes import prompt


def request(number: int, n: int = 4) -> GenerateRequest:
    return GenerateRequest(number, prompt(0, number), n, SamplingParams(max_tokens=8))


def router(replicas: int) -> Router:
    return Router([object()] * replicas)  # type: ignore[list-item]


def numbers(shares: list[tuple[int, list[GenerateRequest]]]) -> dict[int, list[int]]:
    return {index: [request.number for request in share] for index, share in shares}


def test_a_wave_is_spread_evenly_in_order():
    assert numbers(router(3).assign([request(i) for i in range(7)])) == {0: [0, 3, 6], 1: [1, 4], 2: [2, 5]}


def test_a_group_goes_to_the_replica_with_the_fewest_trajectories_in_flight():
    r = router(2)
    assert numbers(r.assign([request(0, n=8), request(1, n=2), request(2, n=2)])) == {0: [0], 1: [1, 2]}
    r.finished(0, 8)
    assert numbers(r.assign([request(3)])) == {0: [3]}


def test_ties_go_to_the_replica_that_comes_first():
    r = router(3)
    assert [numbers(r.assign([request(i)])) for i in range(4)] == [{0: [0]}, {1: [1]}, {2: [2]}, {0: [3]}]


def test_a_replica_that_gets_nothing_is_not_called():
    assert numbers(router(4).assign([request(0)])) == {0: [0]}
    assert router(4).assign([]) == []
