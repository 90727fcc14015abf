"""Which replica gets which group."""

from __future__ import annotations

from headway.interfaces import FinishedGroup, GenerateRequest, SamplingParams
from headway.pipeline.router import Router
from tests.pipeline.fakes import prompt

THREE = ["a", "b", "c"]


def router_of(*names: str, split_groups: bool = False) -> Router:
    router = Router(split_groups=split_groups)
    for name in names:
        router.add(name)
    return router


def request(number: int, n: int = 4) -> GenerateRequest:
    return GenerateRequest(number, prompt(0, number), n, SamplingParams(max_tokens=8))


def finished(number: int, n: int) -> FinishedGroup:
    return FinishedGroup(number, (None,) * n, tokens=None)  # type: ignore[arg-type]


def numbers(shares: list[tuple[str, list[GenerateRequest]]]) -> dict[str, list[int]]:
    return {name: [request.number for request in share] for name, share in shares}


def test_a_wave_is_spread_evenly_in_order():
    shares = router_of(*THREE).assign([request(i) for i in range(7)], THREE)
    assert numbers(shares) == {"a": [0, 3, 6], "b": [1, 4], "c": [2, 5]}


def test_a_group_goes_to_the_replica_with_the_fewest_trajectories_in_flight():
    router = router_of(*THREE)
    shares = router.assign([request(0, n=8), request(1, n=2), request(2, n=2)], ["a", "b"])
    assert numbers(shares) == {"a": [0], "b": [1, 2]}
    router.finished("a", finished(0, 8))
    assert numbers(router.assign([request(3)], ["a", "b"])) == {"a": [3]}


def test_a_second_request_of_a_group_goes_where_the_first_is_while_that_is_under_way():
    router = router_of(*THREE)
    router.assign([request(0, n=8)], THREE)
    assert numbers(router.assign([request(0, n=1), request(1)], THREE)) == {"a": [0], "b": [1]}
    router.finished("a", finished(0, 8))
    router.finished("a", finished(0, 1))
    assert numbers(router.assign([request(2, n=1), request(0, n=1)], THREE)) == {"a": [2], "c": [0]}
    assert numbers(router.assign([request(0, n=1)], ["a", "b"])) == {"a": [0]}, "its replica takes nothing now"


def test_ties_go_to_the_replica_that_comes_first():
    router = router_of(*THREE)
    shares = [numbers(router.assign([request(i)], THREE)) for i in range(4)]
    assert shares == [{"a": [0]}, {"b": [1]}, {"c": [2]}, {"a": [3]}]


def test_a_replica_that_gets_nothing_is_not_called():
    assert numbers(router_of(*THREE).assign([request(0)], THREE)) == {"a": [0]}
    assert router_of(*THREE).assign([], THREE) == []


def test_only_the_replicas_named_get_anything():
    router = router_of(*THREE)
    router.assign([request(0)], THREE)
    assert numbers(router.assign([request(1), request(2)], ["a"])) == {"a": [1, 2]}


def test_a_split_group_is_spread_as_evenly_as_can_be_and_every_trajectory_is_in_one_part():
    shares = router_of(*THREE, split_groups=True).assign([request(0, n=8)], THREE)
    assert [(name, [(part.first, part.n) for part in parts]) for name, parts in shares] == [
        ("a", [(0, 3)]),
        ("b", [(3, 3)]),
        ("c", [(6, 2)]),
    ]


def test_a_group_smaller_than_the_fleet_is_split_into_single_trajectories():
    shares = router_of(*THREE, split_groups=True).assign([request(0, n=2)], THREE)
    assert [(name, [(part.first, part.n) for part in parts]) for name, parts in shares] == [
        ("a", [(0, 1)]),
        ("b", [(1, 1)]),
    ]


def test_a_forgotten_replica_names_the_groups_that_it_had_not_finished():
    router = router_of(*THREE)
    router.assign([request(i) for i in range(4)], ["a", "b"])
    router.finished("a", finished(0, 4))
    assert router.forget("a") == [2]
    assert router.forget("a") == []
    router.finished("a", finished(2, 4))
    assert numbers(router.assign([request(9)], ["b", "c"])) == {"c": [9]}
