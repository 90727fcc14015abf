from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from headway.engines.weights.incoming_version import BackBuffer
from headway.engines.weights.outgoing_version import Staged, Stream, Window
from headway.engines.weights.protocols import EndContext, Link
from headway.engines.weights.transports.disk import DiskSender, write_files
from headway.engines.weights.weight_layout import Manifest, build_manifest
from headway.errors import UpdateFailed
from tests.engines.weights.ends import Site
from tests.engines.weights.versions import BUCKET, MANIFEST, GivesUp, assert_same, contents, stream, weights, windows
from tests.full_disk import files_of_at_most

Fault = Callable[[Path, pytest.MonkeyPatch], None]


def folder(site: Site, manifest: Manifest = MANIFEST) -> Path:
    """Where the files of these weights are."""
    return site.directory / "-".join(sorted({slot.dtype for slot in manifest.slots}))


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.rglob("*") if not file.is_dir())


def test_a_version_is_a_safetensors_file_with_the_same_tensors(site: Site) -> None:
    site.meet("disk", "a").sender.send(7, stream(7))
    path = folder(site) / "version_7.safetensors"
    assert_same(load_file(path), weights(7))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "version": "7"}
        for name, tensor in weights(7).items():
            assert torch.equal(file.get_tensor(name), tensor)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.int32, torch.bool],
)
def test_every_dtype_has_its_name_in_the_file(site: Site, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0, 2.0]).to(dtype)
    manifest = build_manifest([("w", (3,), dtype)])
    staged = Staged(manifest, BUCKET, with_delta=False)
    staged.gather(1, [(0, tensor.view(torch.uint8))])
    site.meet("disk", "a", manifest=manifest).sender.send(1, staged.outgoing(1, to=None))
    (loaded,) = load_file(folder(site, manifest) / "version_1.safetensors").values()
    assert loaded.dtype == dtype and torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_a_dtype_that_such_files_do_not_have_is_named_and_nothing_is_left(site: Site) -> None:
    manifest = build_manifest([("w", (3,), torch.complex128)])
    ends = site.meet("disk", "a", manifest=manifest)
    with pytest.raises(UpdateFailed, match="'w' has dtype complex128"):
        ends.sender.send(1, stream(1))
    assert names(site.directory) == []


def test_the_newest_two_versions_stay_also_over_a_new_sender(site: Site) -> None:
    for version in (1, 2, 3):
        ends = site.meet("disk", "a")
        ends.sender.send(version, stream(version))
        ends.close()
    assert names(site.directory) == ["version_2.safetensors", "version_3.safetensors"]
    site.meet("disk", "a").sender.send(3, stream(3))
    assert names(site.directory) == ["version_2.safetensors", "version_3.safetensors"]
    (site.directory / "notes.txt").touch()
    site.meet("disk", "a").sender.send(12, stream(12))
    assert names(site.directory) == ["notes.txt", "version_12.safetensors", "version_3.safetensors"]


def test_the_version_before_can_still_be_received_and_older_ones_are_told_to_be_gone(site: Site) -> None:
    ends = site.meet("disk", "a")
    stored_versions = [ends.sender.send(version, stream(version)) for version in (1, 2, 3)]
    back = BackBuffer(MANIFEST)
    ends.fill("a", 2, back, stored_versions[1]).result(60)
    assert_same(contents(back), weights(2))
    with pytest.raises(
        UpdateFailed, match=r"version 1: a cannot read .*version_1\.safetensors \(set param_update.*No such file"
    ):
        ends.fill("a", 1, back, stored_versions[0]).result(60)


def test_weights_in_another_dtype_lie_beside_the_others(site: Site) -> None:
    half = build_manifest([("w", (3,), torch.bfloat16)])
    tensors = {"w": torch.ones(3).bfloat16()}
    ends, others = site.meet("disk", "a"), site.meet("disk", "b", manifest=half)
    back, other = BackBuffer(MANIFEST), BackBuffer(half)
    stored = ends.sender.send(1, stream(1))
    assert not others.update(1, Stream(half, windows(tensors, half)), {"b": other}).errors
    ends.fill("a", 1, back, stored).result(60)
    assert_same(contents(back), weights(1))
    assert_same(contents(other), tensors)


def test_what_a_killed_sender_left_unfinished_is_removed_by_the_next_one(site: Site) -> None:
    folder(site).mkdir()
    (folder(site) / "version_4.partial").write_bytes(b"half")
    site.meet("disk", "a")
    assert names(site.directory) == []


def test_a_sender_that_was_given_up_in_the_middle_of_a_version_spoils_nothing_of_its_successors(site: Site) -> None:
    directory = folder(site)

    def sender(name: str) -> DiskSender:
        return DiskSender(Link("disk", MANIFEST, ("a",), 1.0, sender=name, directory=directory.parent), EndContext())

    def meanwhile() -> Iterator[Window]:
        first, *others = windows(weights(9))
        yield first
        sender("actor-0+1").send(1, stream(1))
        yield from others

    with pytest.raises(UpdateFailed, match="version 1 cannot be written"):
        sender("actor-0").send(1, Stream(MANIFEST, meanwhile()))
    assert names(site.directory) == ["version_1.safetensors"]
    assert_same(load_file(directory / "version_1.safetensors"), weights(1))


def _fsync_fails(directory: Path, patch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "fsync", full)


def _device_is_full(directory: Path, patch: pytest.MonkeyPatch) -> None:
    (directory / "version_2.trainer.partial").symlink_to("/dev/full")


@pytest.mark.parametrize("fault", [_fsync_fails, _device_is_full])
def test_when_the_disk_is_full_no_part_of_the_version_stays_and_the_one_before_does(
    site: Site, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    ends = site.meet("disk", "a")
    back = BackBuffer(MANIFEST)
    assert not ends.update(1, stream(1), {"a": back}).errors
    with monkeypatch.context() as patch:
        fault(folder(site), patch)
        outcome = ends.update(2, stream(2), {"a": back})
    with pytest.raises(
        UpdateFailed, match=r"version 2 cannot be written to .*free space there.*No space left on device"
    ):
        raise outcome.sent or AssertionError
    assert back.version == 1
    assert names(site.directory) == ["version_1.safetensors"]
    assert not ends.update(2, stream(2), {"a": back}).errors
    assert_same(contents(back), weights(2))


def test_when_the_file_may_not_grow_any_more_the_send_fails_in_the_middle_and_the_next_one_works(site: Site) -> None:
    tensors = {"w": torch.randn(100_000, generator=torch.Generator().manual_seed(0))}
    manifest = build_manifest([("w", (100_000,), torch.float32)])
    staged = Staged(manifest, 64 * 1024, with_delta=False)
    staged.gather(1, windows(tensors, manifest, 64 * 1024))
    ends = site.meet("disk", "a", manifest=manifest)
    with files_of_at_most(200_000), pytest.raises(UpdateFailed, match=r"version 1 cannot be written .*File too large"):
        ends.sender.send(1, staged.outgoing(1, to=None))
    assert names(site.directory) == []
    back = BackBuffer(manifest)
    assert not ends.update(1, staged.outgoing(1, to=None), {"a": back}).errors
    assert_same(contents(back), tensors)


def test_a_directory_that_cannot_be_written_is_named(site: Site) -> None:
    (site.directory / "file").touch()
    site.directory = site.directory / "file" / "below"
    with pytest.raises(UpdateFailed, match=r"version 1 cannot be written .*below.*param_update\.directory"):
        site.meet("disk", "a").sender.send(1, stream(1))


def test_a_directory_that_does_not_exist_yet_is_made(site: Site) -> None:
    site.directory = site.directory / "run" / "weights"
    site.meet("disk", "a").sender.send(1, stream(1))
    assert names(site.directory) == ["version_1.safetensors"]


@pytest.mark.parametrize("error", [ValueError("no memory"), OSError("a rank's pipe broke"), KeyboardInterrupt()])
def test_an_error_of_the_weights_passes_through_as_it_is_and_leaves_no_partial_file(
    site: Site, error: BaseException
) -> None:
    with pytest.raises(type(error)) as raised:
        site.meet("disk", "a").sender.send(1, GivesUp(stream(1), error))
    assert raised.value is error
    assert names(site.directory) == []


@pytest.mark.parametrize("kept", [0, 5, 600])
def test_a_file_that_was_cut_short_is_told(site: Site, kept: int) -> None:
    ends = site.meet("disk", "a")
    stored = ends.sender.send(1, stream(1))
    os.truncate(folder(site) / "version_1.safetensors", kept)
    with pytest.raises(UpdateFailed, match=r"version_1\.safetensors ends within bucket \d|not those that the trainer"):
        ends.fill("a", 1, BackBuffer(MANIFEST), stored).result(60)


def test_deltas_are_not_written(site: Site) -> None:
    staged = Staged(MANIFEST, BUCKET, with_delta=True)
    for version in (1, 2):
        staged.gather(version, windows(weights(version)))
    with pytest.raises(UpdateFailed, match="whole versions, not deltas"):
        site.meet("disk", "a").sender.send(2, staged.outgoing(2, to=1))
    assert names(site.directory) == []


@pytest.mark.parametrize("size", [8, 24, 48, 96])
def test_shards_of_a_folder_have_their_own_tensors_however_windows_are_cut(size: int, tmp_path: Path) -> None:
    layout = build_manifest([(f"t{k}", (6,), torch.float32) for k in range(4)])
    flat = torch.arange(layout.nbytes, dtype=torch.uint8)
    write_files(tmp_path, layout, ((at, flat[at : at + size]) for at in range(0, layout.nbytes, size)), most=48)
    files = [load_file(file) for file in sorted(tmp_path.glob("*.safetensors"))]
    assert [list(file) for file in files] == [["t0", "t1"], ["t2", "t3"]]
    for slot in layout.slots:
        (values,) = (file[slot.name] for file in files if slot.name in file)
        assert values.view(torch.uint8).tolist() == flat[slot.offset : slot.end].tolist()
