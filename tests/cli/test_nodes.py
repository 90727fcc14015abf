"""Drawing of a run's nodes."""

from __future__ import annotations

from typing import Any

import pytest

from headway.cli.settings_summary import MOST_ROWS, nodes_drawn
from headway.config.schema import Config
from headway.config.sizing.placement import resolve_placement


def drawn(**sections: Any) -> dict[str, str]:
    config = Config.model_validate(sections)
    lines = nodes_drawn(resolve_placement(config), config.actor.parallel)
    assert all(len(f"# {name}: {text}") <= 80 for name, text in lines.items())
    lines.pop("nodes", None)
    return lines


def test_one_node_without_an_inner_mesh_is_not_drawn() -> None:
    assert drawn(trainer={"n_gpus_per_node": 8}, rollout={"n_gpus_per_node": 8}) == {}


KL = {"use_kl_loss": True}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"actor": {"parallel": {"tp": 2}}, "trainer": {"n_gpus_per_node": 4}, "rollout": {"n_gpus_per_node": 4}},
            {"node 0": "actor 0-3 (2 × tp 2), rollout 0-3"},
        ),
        (
            {
                "actor": {**KL, "parallel": {"tp": 2, "cp": 2}},
                "trainer": {"nnodes": 2, "n_gpus_per_node": 8},
                "ref": {"nnodes": 1, "n_gpus_per_node": 4},
                "rollout": {"nnodes": 3, "n_gpus_per_node": 1},
            },
            {
                "node 0": "actor 0-7 (2 × cp 2 · tp 2), rollout 0, ref 0-3 (1 × cp 2 · tp 2)",
                "node 1": "actor 8-15 (2 × cp 2 · tp 2), rollout 1",
                "node 2": "rollout 2",
            },
        ),
        (
            {
                "actor": KL,
                "cluster": {"placement": "shared"},
                "trainer": {"nnodes": 2, "n_gpus_per_node": 4},
                "rollout": {"nnodes": 2, "n_gpus_per_node": 2},
            },
            {"node 0": "actor 0-3 + rollout 0-1 + ref 0-3", "node 1": "actor 4-7 + rollout 2-3 + ref 4-7"},
        ),
        (
            {"trainer": {"nnodes": 2, "n_gpus_per_node": 4, "use_nodes_ratios": ["3/4", 0, 0, "1/4"]}},
            {"node 0": "actor 0-3", "node 1": "actor 4-5, rollout 0-1"},
        ),
        (
            {"rollout": {"nnodes": 2, "n_gpus_per_node": 4, "tensor_model_parallel_size": 2}},
            {"node 0": "actor 0, rollout 0-3 (2 × tp 2)", "node 1": "rollout 4-7 (2 × tp 2)"},
        ),
        (
            {"rollout": {"n_gpus_per_node": 4, "tensor_model_parallel_size": 4}},
            {"node 0": "actor 0, rollout 0-3 (1 × tp 4)"},
        ),
        (
            {"actor": {"parallel": {"ep": 4}}, "trainer": {"nnodes": 2, "n_gpus_per_node": 2}},
            {
                "node 0": "actor 0-1, rollout 0",
                "node 1": "actor 2-3",
                "experts": "ep 4 is larger than a node: tokens travel between machines",
            },
        ),
    ],
)
def test_each_node_shows_its_roles_and_their_ranks(sections: dict[str, Any], expected: dict[str, str]) -> None:
    assert drawn(**sections) == expected


def test_of_many_nodes_the_first_ones_and_the_last_one_are_shown() -> None:
    lines = drawn(trainer={"nnodes": 64, "n_gpus_per_node": 8})
    assert len(lines) == MOST_ROWS
    assert list(lines)[-2:] == ["…", "node 63"] and lines["node 63"] == "actor 504-511"
