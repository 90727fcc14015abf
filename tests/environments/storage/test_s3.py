"""Whole runs whose storage is a bucket of a real S3 server, which fails in mid-upload."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.api.storage.storage_client import StorageClient
from headway.api.storage.stored_run import complete_versions
from tests.environments.storage.s3_server import Fault, Proxy, s3_server
from tests.integration.support import finish, make_job, start, summary, wait_for
from tests.integration.test_on_policy import weights

pytestmark = pytest.mark.timeout(400)
REACHED = '"kind": "version.reached", '
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    way = Proxy(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{way.port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield way
    way.close()


@pytest.fixture
def url(proxy: Proxy) -> str:
    """A run's place in a bucket of its own."""
    import s3fs

    bucket = f"bucket{next(NUMBERS)}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/run"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("storage"))


def settings(url: str, run_dir: Path, *others: str) -> tuple[str, ...]:
    own = (f"run.storage={url}", f"run.dir={run_dir}", "trainer.save_freq=1")
    return (*own, "cluster.backend=inline", *others)


def train(recipe: Path, url: str, run_dir: Path, *others: str) -> tuple[int, str]:
    return finish(start("-m", "headway", "train", str(recipe), *settings(url, run_dir, *others)))


def wait_until(what: Callable[[], Any], limit_s: float = 120) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"not so within {limit_s} s"
        time.sleep(0.05)
    return found


def test_a_run_whose_machine_is_lost_goes_on_elsewhere_with_the_same_weights(
    recipe: Path, url: str, tmp_path: Path
) -> None:
    """Three runs, in processes of their own."""
    run_dir, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    job = ("rollout.total_rollout_steps=64",)
    plain = (f"run.dir={undisturbed}", "cluster.backend=inline", *job)
    code, output = finish(start("-m", "headway", "train", str(recipe), *plain))
    assert code == 0, output

    process = start("-m", "headway", "train", str(recipe), *settings(url, run_dir, *job))
    store = StorageClient(url)
    wait_for(REACHED, process, run_dir, times=3)
    wait_until(lambda: complete_versions(store.sizes()))
    process.kill()
    process.communicate()
    saved = complete_versions(store.sizes())
    shutil.rmtree(run_dir)

    code, output = finish(start("-m", "headway", "train", "--resume", str(run_dir)))
    assert code == 2 and "which does not exist" in output and "give that, as --resume URL" in output
    code, output = finish(start("-m", "headway", "train", "--resume", url, f"run.dir={tmp_path / 'elsewhere'}"))
    assert code == 0, output
    assert f"bringing version {saved[-1]} back from {url} into {tmp_path / 'elsewhere'}" in output
    assert weights(tmp_path / "elsewhere/model") == weights(undisturbed / "model")
    told, expected = summary(tmp_path / "elsewhere"), summary(undisturbed)
    assert (told["resumed"], told["balanced"], told["groups"]) == (1, True, expected["groups"])
    assert told["storage"] == {"version": 16, "outages": 0, "missing": None}
    assert complete_versions(store.sizes()) == [15, 16]
    assert store.sizes()["model/headway.json"] == (tmp_path / "elsewhere/model/headway.json").stat().st_size


def stopped(proxy: Proxy, url: str) -> Fault:
    """The server goes away in the middle of a checkpoint's upload."""

    def fault(method: str, path: str) -> str | None:
        return "drop" if method == "PUT" and "distcp" in path else None

    return fault


def busy(proxy: Proxy, url: str) -> Fault:
    """The server is overloaded for a while."""
    return lambda method, path: 503 if proxy.failed < 60 else None


def denied(proxy: Proxy, url: str) -> Fault:
    return lambda method, path: 403 if method in ("PUT", "POST") else None


def cut_off(proxy: Proxy, url: str) -> Fault:
    """Objects end in their middle."""
    return lambda method, path: "cut" if method == "PUT" and "distcp" in path and proxy.failed < 3 else None


@pytest.mark.parametrize("fault", [stopped, busy, denied, cut_off])
def test_a_storage_that_fails_in_mid_run_ends_nothing_and_has_everything_once_it_is_back(
    recipe: Path, url: str, proxy: Proxy, tmp_path: Path, fault: Callable[[Proxy, str], Fault]
) -> None:
    """A run in a process of its own, which waits for its storage at the end."""
    run_dir = tmp_path / "run"
    job = ("rollout.total_rollout_steps=64",)
    process = start("-m", "headway", "train", str(recipe), *settings(url, run_dir, *job))
    wait_for(REACHED, process, run_dir, times=2)
    proxy.fault = fault(proxy, url)
    wait_until(lambda: proxy.failed)
    if fault is stopped:
        proxy.close()
    wait_for('"kind": "run.finished"', process, run_dir, times=1)
    if fault is stopped:
        proxy.open()
    proxy.fault = lambda method, path: None
    code, output = finish(process)
    assert code == 0, output
    told = summary(run_dir)
    assert (told["storage"]["version"], told["storage"]["missing"]) == (16, None)
    store = StorageClient(url)
    assert complete_versions(store.sizes()) == [15, 16]
    shutil.rmtree(run_dir)
    code, output = finish(start("-m", "headway", "train", "--resume", url, "rollout.total_rollout_steps=68"))
    assert code == 0, output
    assert "bringing version 16 back" in output


def test_a_storage_that_stays_away_is_told_of_at_the_end_and_the_run_is_whole_in_its_directory(
    recipe: Path, url: str, proxy: Proxy, tmp_path: Path
) -> None:
    """A run in a process of its own."""
    run_dir = tmp_path / "run"
    leaves_soon = (
        "from headway.api.storage import uploader; uploader.STORAGE_AT_END_S = 3.0; from headway.cli import cli; cli()"
    )
    process = start("-c", leaves_soon, "train", str(recipe), *settings(url, run_dir))
    wait_for(REACHED, process, run_dir, times=2)
    proxy.fault = denied(proxy, url)
    code, output = finish(process)
    assert code == 0, output
    assert f"run.storage={url} lacks what was closed last" in output
    assert f"{url} lacks the end of the run's record" in output
    assert summary(run_dir)["storage"]["missing"].startswith("not everything is there")
    assert (run_dir / "model/config.json").is_file()


def test_a_bucket_that_is_not_there_or_may_not_be_written_is_refused_before_the_start(
    recipe: Path, url: str, proxy: Proxy, tmp_path: Path
) -> None:
    """Two starts, in processes of their own."""
    code, output = train(recipe, "s3://absent-bucket/run", tmp_path / "run")
    assert code == 2 and "run.storage=s3://absent-bucket/run: its bucket does not exist" in output, output
    proxy.fault = denied(proxy, url)
    code, output = train(recipe, url, tmp_path / "run")
    assert code == 2 and "it cannot be written: PermissionError" in output, output
    assert not (tmp_path / "run").exists()


def test_an_upload_of_many_parts_that_breaks_off_leaves_nothing_and_is_repeated(
    url: str, proxy: Proxy, tmp_path: Path
) -> None:
    """120 MB are sent in three parts."""
    file = tmp_path / "large"
    file.write_bytes(os.urandom(2**20) * 120)
    store = StorageClient(url)
    proxy.fault = lambda method, path: "drop" if "partNumber=2" in path else None
    with pytest.raises(Exception, match=r"."):
        store.send(file, "checkpoints/version_1/large")
    assert proxy.failed and not store.sizes()
    proxy.fault = lambda method, path: None
    store.send(file, "checkpoints/version_1/large")
    assert store.sizes() == {"checkpoints/version_1/large": 120 * 2**20}
    store.fetch("checkpoints/version_1/large", tmp_path / "back", 120 * 2**20)
    assert (tmp_path / "back").read_bytes() == file.read_bytes()


def test_what_was_cut_off_later_is_refused_by_its_name(recipe: Path, url: str, tmp_path: Path) -> None:
    """A run in a process of its own, and a resume."""
    run_dir = tmp_path / "run"
    code, output = train(recipe, url, run_dir)
    assert code == 0, output
    shutil.rmtree(run_dir)
    store = StorageClient(url)
    for version in (3, 4):
        store.put(f"checkpoints/version_{version}/__0_0.distcp", b"half")
    code, output = finish(start("-m", "headway", "train", "--resume", url))
    assert code == 2, output
    for version in (3, 4):
        assert f"checkpoints/version_{version}/__0_0.distcp has 4 bytes, and was written with" in output
    assert f"neither in {url}" in output and f"nor in {run_dir}/checkpoints" in output
    assert not run_dir.exists()
