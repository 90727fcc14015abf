"""Which node share lies on which node, against all ways there are."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cluster.on_ray.resource_pool import Node, assign_nodes, lacking
from headway.config.sizing.placement import NodeShare, node_shares


def shares(**sizes: tuple[int, int]) -> tuple[NodeShare, ...]:
    """Shares of each owner, so many nodes with so many devices each, numbered one after the other."""
    made: tuple[NodeShare, ...] = ()
    for owner, (nodes, each) in sizes.items():
        used = sum(len(share.devices) for share in made)
        made += node_shares(owner, range(used, used + nodes * each), each)
    return made


def nodes(*free: int) -> list[Node]:
    return [Node("abcdefghijklmnop"[at], count, count) for at, count in enumerate(free)]


def on(found: dict[int, str] | None) -> str | None:
    """The node of each device, in the devices' order."""
    return None if found is None else "".join(found[device] for device in sorted(found))


@pytest.mark.parametrize(
    ("asked", "free", "expected"),
    [
        ({"trainer": (1, 2), "rollout": (1, 2)}, (4,), "aaaa"),
        ({"trainer": (1, 2), "rollout": (1, 2)}, (2, 2), "aabb"),
        ({"trainer": (1, 2), "rollout": (1, 2)}, (2, 4), "bbbb"),
        ({"trainer": (2, 2)}, (4, 4), "aabb"),
        ({"trainer": (2, 2)}, (4,), None),
        ({"trainer": (1, 4)}, (3, 3), None),
        ({"trainer": (2, 2), "rollout": (2, 2)}, (4, 4, 4, 4), "aabbaabb"),
        ({"trainer": (2, 8), "rollout": (3, 8)}, (8, 0, 8, 8, 8, 8), "a" * 8 + "c" * 8 + "d" * 8 + "e" * 8 + "f" * 8),
        ({"trainer": (1, 3), "rollout": (2, 2), "ref": (1, 1)}, (5, 3), "aaaaabbb"),
    ],
)
def test_a_share_is_on_one_node_and_shares_of_one_owner_on_different_ones(
    asked: dict[str, tuple[int, int]], free: tuple[int, ...], expected: str | None
) -> None:
    assert on(assign_nodes(shares(**asked), nodes(*free))) == expected


counts = st.tuples(st.integers(1, 2), st.integers(1, 3))


@given(st.dictionaries(st.sampled_from(["trainer", "rollout", "ref"]), counts), st.lists(st.integers(0, 5), max_size=4))
def test_there_is_an_assignment_where_trying_all_finds_one_on_no_more_nodes(
    asked: dict[str, tuple[int, int]], free: list[int]
) -> None:
    asked_for, there = shares(**asked), nodes(*free)

    def holds(where: tuple[Node, ...]) -> bool:
        load = {node.id: 0 for node in there}
        for share, node in zip(asked_for, where, strict=True):
            load[node.id] += len(share.devices)
        owners = [(share.owner, node.id) for share, node in zip(asked_for, where, strict=True)]
        return len(set(owners)) == len(owners) and all(load[node.id] <= node.free for node in there)

    used = [len({node.id for node in where}) for where in product(there, repeat=len(asked_for)) if holds(where)]
    found = assign_nodes(asked_for, there)
    assert (found is None) == (not used)
    if found is not None:
        by_id = {node.id: node for node in there}
        assert sorted(found) == [device for share in asked_for for device in share.devices]
        assert all(len({found[device] for device in share.devices}) == 1 for share in asked_for)
        assert holds(tuple(by_id[found[share.devices[0]]] for share in asked_for))
        assert len(set(found.values())) == min(used)


def test_a_cluster_of_many_nodes_of_different_sizes_is_decided_on_soon() -> None:
    """Many equal nodes are tried once, and a search that would not end is given up."""
    large = shares(trainer=(64, 8), rollout=(64, 8), critic=(64, 4))
    assert on(assign_nodes(large, nodes(*[20] * 16))) is None
    many = [Node(f"n{at}", 20 + at % 5, 20 + at % 5) for at in range(64)]
    found = assign_nodes(large, many)
    assert found is not None and len(set(found.values())) == 64
    assert assign_nodes(large, [Node(f"n{at}", 12 + at % 2 * 16, 12 + at % 2 * 16) for at in range(64)]) is None


def test_what_is_lacking_names_what_is_asked_for_and_what_there_is() -> None:
    there = [Node("a", 4, 4), Node("b", 4, 1), Node("c", 4, 4)]
    assert lacking(shares(trainer=(2, 4), rollout=(1, 8)), there, on_gpus=True) == (
        "trainer asks for 2 node(s) with 4 GPU(s) (trainer.nnodes=2), rollout asks for 1 node(s) with 8 GPU(s) "
        "(rollout.nnodes=1), and Ray has 2 node(s) with 4 GPU(s) and 1 node(s) with 4 GPU(s), 1 free"
    )
    assert lacking(shares(rollout=(2, 1)), [Node("a", 100, 100)], on_gpus=False) == (
        "rollout asks for 2 node(s) with 1 process(es) (rollout.nnodes=2), and Ray has 1 node(s) with 100 process(es)"
    )
