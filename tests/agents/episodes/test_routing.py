"""Which replica gets which call."""

from __future__ import annotations

from headway.agents.episodes.request_dispatcher import Routes

THREE = ["a", "b", "c"]


def routes_to(*names: str, slots: int = 8) -> Routes:
    routes = Routes()
    for name in names:
        routes.add(name, slots)
    routes.open(names)
    return routes


def group(routes: Routes, calls: int = 4) -> list[str]:
    """The replicas of a group's calls."""
    home = routes.home()
    return [routes.choose(home) for _ in range(calls)]


def test_a_wave_is_spread_evenly_in_order():
    routes = routes_to(*THREE, slots=64)
    assert [set(group(routes)) for _ in range(7)] == [{"a"}, {"b"}, {"c"}, {"a"}, {"b"}, {"c"}, {"a"}]


def test_a_group_goes_to_the_replica_with_the_fewest_calls():
    routes = routes_to("a", "b", slots=64)
    assert [set(group(routes, calls)) for calls in (8, 2, 2)] == [{"a"}, {"b"}, {"b"}]
    for _ in range(8):
        routes.finished("a")
    assert set(group(routes)) == {"a"}


def test_calls_without_a_slot_at_home_go_to_a_replica_that_has_one():
    routes = routes_to(*THREE, slots=3)
    assert group(routes, 5) == ["a", "a", "a", "b", "c"]


def test_where_no_replica_has_a_slot_they_wait_at_home():
    routes = routes_to("a", "b", slots=2)
    assert group(routes, 6) == ["a", "a", "b", "b", "a", "a"]


def test_only_the_open_replicas_get_anything():
    routes = routes_to(*THREE, slots=64)
    home = routes.home()
    routes.open(["b"])
    assert [routes.choose(home) for _ in range(3)] == ["b", "b", "b"]
    routes.open([])
    assert not routes.any


def test_a_removed_replica_gets_nothing_and_its_calls_count_no_more():
    routes = routes_to(*THREE, slots=64)
    assert set(group(routes)) == {"a"}
    routes.remove("a")
    assert set(group(routes)) == {"b"}
    routes.finished("a")
    routes.open(THREE)
    assert set(group(routes)) == {"c"}
