from fractions import Fraction

import pytest
from hypothesis import strategies as st

from headway.config.schema import Config
from headway.config.sizing.placement import (
    ACTOR,
    ALWAYS_SLOTS,
    CRITIC,
    MOST_SLOTS,
    REF,
    ROLLOUT,
    Placement,
    concurrent,
    resolve_placement,
)
from headway.errors import ConfigError
from tests.tiers import searched

counts = st.integers(1, 6)


def config(*, kl: bool = False, **sections: dict[str, object]) -> Config:
    return Config.model_validate({"actor": {"use_kl_loss": kl}, **sections})


def by_ratios(devices: int, *ratios: object, kl: bool = False, nodes: int = 1) -> Config:
    return config(kl=kl, trainer={"nnodes": nodes, "n_gpus_per_node": devices, "use_nodes_ratios": ratios})


def test_counts_put_training_first_and_generation_after_it() -> None:
    placed = resolve_placement(
        config(trainer={"nnodes": 2, "n_gpus_per_node": 2}, rollout={"nnodes": 1, "n_gpus_per_node": 3})
    )
    assert dict(placed.devices) == {ACTOR: (0, 1, 2, 3), ROLLOUT: (4, 5, 6)}
    assert (placed.total, placed.idle) == (7, ())


@searched(100, st.integers(1, 3), st.integers(1, 12), st.sampled_from([1, 2, 3, 4]))
def test_replicas_have_neighbours_of_one_machine_and_all_devices_or_are_refused(
    nodes: int, each: int, size: int
) -> None:
    rollout = {"nnodes": nodes, "n_gpus_per_node": each, "tensor_model_parallel_size": size}
    if each % size:
        with pytest.raises(ConfigError, match=rf"^rollout\.tensor_model_parallel_size={size}: .* a divisor of {each} "):
            resolve_placement(config(rollout=rollout))
        return
    placed = resolve_placement(config(rollout=rollout))
    assert len(placed.replicas) == nodes * each // size
    assert [device for group in placed.replicas for device in group] == [*placed.devices[ROLLOUT]]
    for group in placed.replicas:
        assert not placed.straddles(group)
        assert group == tuple(range(group[0], group[0] + size))


def test_shares_that_leave_half_a_replica_on_a_machine_are_refused() -> None:
    sections = {"nnodes": 2, "n_gpus_per_node": 4, "use_nodes_ratios": (0.25, 0, 0, 0.75)}
    assert len(resolve_placement(config(trainer=sections, rollout={"tensor_model_parallel_size": 2})).replicas) == 3
    with pytest.raises(ConfigError, match=r"\b2 generate .*divisor of 2\b"):
        resolve_placement(config(trainer=sections, rollout={"tensor_model_parallel_size": 4}))


def test_slots_are_divided_by_replicas_and_not_by_devices() -> None:
    rollout = {"n": 8, "n_gpus_per_node": 4, "kv_cache_gib": 1.0}
    alone, together = (config(rollout=rollout | {"tensor_model_parallel_size": size}) for size in (1, 4))
    assert concurrent(together) == min(MOST_SLOTS, 4 * concurrent(alone))


def test_the_reference_lies_on_the_trainers_devices_unless_it_has_its_own() -> None:
    inside = resolve_placement(config(kl=True, trainer={"n_gpus_per_node": 2}))
    assert inside.devices[REF] == inside.devices[ACTOR] == (0, 1)
    assert inside.shared(REF, ACTOR)
    outside = resolve_placement(config(kl=True, ref={"nnodes": 1, "n_gpus_per_node": 2}))
    assert outside.devices[REF] == (2, 3)
    assert not outside.shared(REF, ACTOR)


def test_there_is_no_reference_without_a_kl_term() -> None:
    assert REF not in resolve_placement(config()).devices
    off = Config.model_validate({"actor": {"use_kl_loss": True, "kl_loss_coef": 0}})
    assert REF not in resolve_placement(off).devices


def test_shares_put_training_at_the_front_and_generation_at_the_back() -> None:
    placed = resolve_placement(by_ratios(8, 0.5, 0, 0, 0.25))
    assert dict(placed.devices) == {ACTOR: (0, 1, 2, 3), ROLLOUT: (6, 7)}
    assert placed.idle == (4, 5)


def test_shares_that_fit_side_by_side_are_disjoint() -> None:
    placed = resolve_placement(by_ratios(4, 0.25, 0, 0.25, 0.5, kl=True))
    assert dict(placed.devices) == {ACTOR: (0,), ROLLOUT: (2, 3), REF: (1,)}


def test_shares_that_do_not_fit_side_by_side_put_the_reference_on_the_trainers_front() -> None:
    placed = resolve_placement(by_ratios(8, 0.5, 0, 0.25, 0.5, kl=True))
    assert dict(placed.devices) == {ACTOR: (0, 1, 2, 3), ROLLOUT: (4, 5, 6, 7), REF: (0, 1)}


@pytest.mark.parametrize("thirds", [("1/3", 0, 0, "2/3"), (Fraction(1, 3), 0, 0, Fraction(2, 3))])
def test_thirds_are_exact(thirds: tuple[object, ...]) -> None:
    assert dict(resolve_placement(by_ratios(3, *thirds)).devices) == {ACTOR: (0,), ROLLOUT: (1, 2)}


def test_a_tenth_is_a_tenth() -> None:
    placed = resolve_placement(by_ratios(10, 0.3, 0, 0, 0.7))
    assert [len(placed.devices[role]) for role in (ACTOR, ROLLOUT)] == [3, 7]


@pytest.mark.parametrize(
    ("ratios", "complaint"),
    [
        ((0.3, 0, 0, 0.5), "train's share 0.3 of 4 devices is 1.2 devices"),
        ((0.75, 0, 0, 0.5), "train and generate together have 5 of 4 devices"),
        ((1, 0, 0, 0), "train has 4 and generate 0 of 4 devices"),
        ((0, 0, 0, 1), "train has 0 and generate 4 of 4 devices"),
        ((0.5, 0.25, 0, 0.25), "logp's share must be 0"),
        ((0.5, 0, 0.25, 0.25), "ref_logp's share must be 0"),
    ],
)
def test_shares_that_cannot_be_placed_are_refused(ratios: tuple[float, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.use_nodes_ratios: ") as refused:
        resolve_placement(by_ratios(4, *ratios))
    assert complaint in str(refused.value)


def test_a_reference_larger_than_the_trainer_it_lies_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 where train has 2"):
        resolve_placement(by_ratios(4, 0.5, 0, 0.75, 0.5, kl=True))


def test_generation_without_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.nnodes: got 0"):
        resolve_placement(config(rollout={"nnodes": 0}))


@searched(100, counts, counts, counts, counts, st.integers(0, 3), counts, st.booleans())
def test_counts_use_every_device_once(tn: int, tg: int, rn: int, rg: int, fn: int, fg: int, kl: bool) -> None:
    placed = resolve_placement(
        config(
            kl=kl,
            trainer={"nnodes": tn, "n_gpus_per_node": tg},
            rollout={"nnodes": rn, "n_gpus_per_node": rg},
            ref={"nnodes": fn, "n_gpus_per_node": fg},
        )
    )
    own_ref = placed.devices.get(REF, ()) if fn else ()
    used = [*placed.devices[ACTOR], *placed.devices[ROLLOUT], *own_ref]
    assert used == list(range(placed.total))
    assert [device for share in placed.shares for device in share.devices] == used
    assert [len(placed.on_nodes(role)) for role in (ACTOR, ROLLOUT)] == [tn, rn]
    assert {len(share.devices) for share in placed.on_nodes(ACTOR)} == {tg}
    assert {len(share.devices) for share in placed.on_nodes(ROLLOUT)} == {rg}
    assert (len(placed.devices[ACTOR]), len(placed.devices[ROLLOUT])) == (tn * tg, rn * rg)
    assert (REF in placed.devices) == kl


@searched(100, st.integers(2, 24), st.data())
def test_whole_shares_give_their_devices_and_roles_overlap_only_where_they_must(
    total: int, data: st.DataObject
) -> None:
    train = data.draw(st.integers(1, total - 1))
    generate = data.draw(st.integers(1, total - train))
    ref = data.draw(st.integers(0, train))
    ratios = [Fraction(n, total) for n in (train, 0, ref, generate)]
    placed = resolve_placement(by_ratios(total, *ratios, kl=True))

    assert placed.devices[ACTOR] == tuple(range(train))
    assert placed.devices[ROLLOUT] == tuple(range(total - generate, total))
    assert len(placed.devices[REF]) == (ref or train)
    assert not placed.shared(ROLLOUT, ACTOR)
    assert not placed.shared(ROLLOUT, REF)
    assert placed.shared(REF, ACTOR) == (ref == 0 or train + ref + generate > total)
    assert set(placed.idle).isdisjoint(device for on in placed.devices.values() for device in on)


def drawn(placed: Placement, role: str) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(share.owner, share.node, share.devices) for share in placed.on_nodes(role)]


def test_by_counts_each_role_has_nodes_of_its_own_numbering_filled_one_after_the_other() -> None:
    placed = resolve_placement(
        config(trainer={"nnodes": 2, "n_gpus_per_node": 4}, rollout={"nnodes": 2, "n_gpus_per_node": 1})
    )
    assert drawn(placed, ACTOR) == [("trainer", 0, (0, 1, 2, 3)), ("trainer", 1, (4, 5, 6, 7))]
    assert drawn(placed, ROLLOUT) == [("rollout", 0, (8,)), ("rollout", 1, (9,))]
    assert placed.groups(ACTOR, 2) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert not any(placed.straddles(group) for group in placed.groups(ACTOR, 4))
    assert [placed.straddles(group) for group in placed.groups(ACTOR, 8)] == [True]
    assert placed.groups(ROLLOUT) == [(8,), (9,)], "a replica is a group of one"


def test_by_shares_the_trainers_nodes_hold_all_but_a_critic_of_its_own() -> None:
    placed = resolve_placement(
        config(
            kl=True,
            trainer={"nnodes": 2, "n_gpus_per_node": 4, "use_nodes_ratios": ("5/8", 0, "1/8", "1/8")},
            algorithm={"adv_estimator": "gae"},
            critic={"nnodes": 1, "n_gpus_per_node": 2},
        )
    )
    assert drawn(placed, ACTOR) == [("trainer", 0, (0, 1, 2, 3)), ("trainer", 1, (4,))]
    assert drawn(placed, REF) == [("trainer", 1, (5,))]
    assert drawn(placed, ROLLOUT) == [("trainer", 1, (7,))]
    assert drawn(placed, CRITIC) == [("critic", 0, (8, 9))]
    assert [placed.straddles(group) for group in placed.groups(ACTOR, 2)] == [False, False, False]


def test_on_shared_devices_replicas_are_on_the_first_devices_of_as_many_of_the_trainers_nodes() -> None:
    shared = {"cluster": {"placement": "shared"}, "trainer": {"nnodes": 3, "n_gpus_per_node": 4}}
    placed = resolve_placement(config(**shared, rollout={"nnodes": 2, "n_gpus_per_node": 2}))
    assert drawn(placed, ROLLOUT) == [("trainer", 0, (0, 1)), ("trainer", 1, (4, 5))]
    for nodes, each in ((4, 1), (1, 5)):
        with pytest.raises(ConfigError, match=r"rollout\.nnodes=\d × .*=3 × .*=4 train, but they are the same ones"):
            resolve_placement(config(**shared, rollout={"nnodes": nodes, "n_gpus_per_node": each}))


def slots(eta: object, replicas: int = 1, context: int = 512, **rollout: object) -> int:
    """Slots of a replica where a version is 2 groups of 20 answers."""
    return concurrent(
        config(
            async_training={"staleness_threshold": eta, "trigger_parameter_sync_step": 1, "require_batches": 1},
            actor={"ppo_mini_batch_size": 2},
            data={"max_prompt_length": context // 2, "max_response_length": context // 2},
            rollout={"n": 20, "n_gpus_per_node": replicas, **rollout},
        )
    )


@pytest.mark.parametrize(("eta", "replicas", "expected"), [(0, 1, 40), ("0.5", 1, 60), ("0.5", 4, 15), (0, 3, 14)])
def test_a_replica_has_as_many_slots_as_it_may_have_answers_in_flight(
    eta: object, replicas: int, expected: int
) -> None:
    assert slots(eta, replicas) == expected


def test_slots_that_are_given_are_taken_as_they_are() -> None:
    assert slots(0, max_concurrent=1000) == 1000


def test_many_short_answers_get_more_slots_than_many_long_ones_unless_memory_is_bounded() -> None:
    assert [slots(49, context=context) for context in (1024, 2048, 4096, 32768)] == [
        MOST_SLOTS,
        128,
        ALWAYS_SLOTS,
        ALWAYS_SLOTS,
    ]
    assert slots(49, context=32768, kv_cache_gib=4) == MOST_SLOTS
    assert slots(0, context=32768, kv_cache_gib=4) == 40
