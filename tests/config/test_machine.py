"""What is said of a run that is too large for the machine."""

from __future__ import annotations

from headway.config.doctor import machine_notes

from .conftest import Load

EIGHT = ("mode=async_partial", "trainer.n_gpus_per_node=6", "rollout.n_gpus_per_node=2")


def notes_on(load: Load, *overrides: str, cores: int = 64, gpus: int | None = 0) -> list[str]:
    return list(machine_notes(load(*overrides).config, cores=cores, gpus=gpus))


def notes(load: Load, *overrides: str, cores: int = 64, gpus: int | None = 0) -> list[str]:
    return notes_on(load, *EIGHT, *overrides, cores=cores, gpus=gpus)


def test_gpus_that_are_wanted_and_not_there_are_told_with_what_computes_instead(minimal: Load) -> None:
    (note,) = notes(minimal)
    assert note.startswith("there is no GPU here") and "all 8 processes (actor 6, rollout 2) compute on the CPU" in note
    assert notes(minimal, gpus=8) == notes(minimal, gpus=None) == notes(minimal, "cluster.device=cpu") == []


def test_gpus_that_are_insisted_on_are_told_to_be_missing_whatever_the_backend(minimal: Load) -> None:
    for backend in ("ray", "inline"):
        (note,) = notes_on(minimal, "cluster.device=cuda", f"cluster.backend={backend}", cores=1)
        assert note.startswith("cluster.device=cuda, and there is no GPU here: a run on this machine is refused")
        assert notes_on(minimal, "cluster.device=cuda", f"cluster.backend={backend}", gpus=8) == []


def test_more_processes_than_cores_are_told_where_they_compute_on_the_cpu(minimal: Load) -> None:
    (note,) = notes(minimal, "cluster.device=cpu", cores=2)
    assert note.startswith("8 worker processes (actor 6, rollout 2) on 2 cores")
    assert len(notes(minimal, cores=7)) == 2
    assert notes(minimal, "cluster.device=cpu", cores=8) == notes(minimal, cores=2, gpus=8) == []


def test_devices_that_both_sides_share_are_one_process_each(minimal: Load) -> None:
    shared = ("mode=colocate_sync", "trainer.n_gpus_per_node=6", "rollout.n_gpus_per_node=6", "cluster.device=cpu")
    assert notes_on(minimal, *shared, cores=6) == []
    assert len(notes_on(minimal, *shared, cores=5)) == 1


def test_machines_that_a_run_without_a_cluster_does_not_have_are_told(minimal: Load) -> None:
    (note,) = notes(minimal, "rollout.nnodes=2", gpus=8)
    assert note.startswith("rollout.nnodes=2 asks for 2 machines, and without cluster.address a run is on this one")
    assert notes(minimal, "rollout.nnodes=2", "cluster.address=auto") == []


def test_nothing_is_said_of_machines_elsewhere_and_of_a_run_in_one_process(minimal: Load) -> None:
    assert notes(minimal, "cluster.address=auto", cores=1) == []
    assert notes_on(minimal, "cluster.backend=inline", cores=1) == []
