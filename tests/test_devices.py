"""What differs between kinds of devices is asked of `headway.devices`, and stands nowhere else."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

import headway
from headway.config.sections.run_section import ClusterConfig
from headway.devices import (
    ACCELERATORS,
    CPU,
    KINDS,
    Cpu,
    Cuda,
    DeviceKind,
    chosen,
    kind_here,
    kind_of,
    listed_here,
    memory_listed_here,
)
from headway.engines.host_copies import host_buffer, to_device, to_host
from headway.errors import ConfigError

SOURCE = Path(headway.__file__).parent
DOCS = Path(__file__).parents[1] / "docs"
CUDA = kind_of("cuda")
WORDS = {word for kind in ACCELERATORS for word in (kind.name, kind.collectives)}
USERS_WORDS = {
    "config/sections/run_section.py",
    "config/doctor.py",
}
"""Files in which such a word is a value of a setting: ``cluster.device=cuda``."""


def accelerators_named(tree: ast.AST) -> Iterator[str]:
    """Texts of ``tree`` that name an accelerator or its backend: ``cuda``, ``cuda:1``, ``cpu:gloo,cuda:nccl``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and WORDS & {*re.split("[:,]", node.value)}:
            yield node.value


def test_only_the_module_of_devices_names_an_accelerator() -> None:
    naming = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(word in (text := path.read_text(encoding="utf-8")) for word in WORDS)
        and any(accelerators_named(ast.parse(text)))
    }
    assert naming == {"devices.py", *USERS_WORDS}


@pytest.mark.parametrize(
    "code", ["x.type == 'cuda'", "x.startswith('cuda')", "torch.device('cuda:1')", "join('cpu:gloo,cuda:nccl')"]
)
def test_a_named_accelerator_would_be_found(code: str) -> None:
    assert list(accelerators_named(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\n\ntorch.cuda.synchronize()\n",
        "import torch.cuda\n\ntorch.cuda.synchronize()\n",
        "from torch.cuda import synchronize\n\nsynchronize()\n",
        "def ask():\n    import torch\n\n    return torch.cuda.is_available()\n",
        "from torch.distributed import ProcessGroupNCCL\n\nProcessGroupNCCL()\n",
    ],
)
def test_the_linter_finds_torchs_own_modules_of_devices(code: str) -> None:
    ruff = [sys.executable, "-m", "ruff", "check", "-", "--quiet", "--select", "TID251", "--output-format", "concise"]

    def said_of(path: Path) -> str:
        done = subprocess.run(
            [*ruff, "--stdin-filename", str(path)], input=code, text=True, capture_output=True, check=False
        )
        assert not done.stderr
        return done.stdout

    assert "ask headway.devices" in said_of(SOURCE / "pipeline" / "made.py")
    assert said_of(SOURCE / "devices.py") == ""


def test_settings_take_every_kind() -> None:
    assert set(get_args(ClusterConfig.model_fields["device"].annotation)) == {"auto", *KINDS}


# ------------------------------------------------------------------------------------------ which kind


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1)])
def test_a_device_is_of_its_kind_whatever_its_number(device: torch.device | str) -> None:
    assert kind_of(device) is CUDA
    assert kind_of("cpu") is kind_of(torch.device("cpu")) is CPU


def test_a_kind_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cpu and cuda, .*'mps'"):
        kind_of("mps:0")


@pytest.mark.parametrize(("there", "auto"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_the_accelerator_that_torch_sees(there: bool, auto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    assert (chosen("auto"), kind_here().name, chosen("cpu")) == (auto, auto, "cpu")


def test_a_kind_that_is_not_there_is_refused_by_whoever_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^cluster\.device=cuda, but torch sees no GPU"):
        chosen("cuda")
    with pytest.raises(ConfigError, match=r"^cluster\.device=cuda, but Ray sees no GPU; set"):
        chosen("cuda", lambda kind: kind is CPU, "Ray sees no {}")


class Nvml:
    """NVML's library with GPUs of 80, 40, 80 … GiB; ``status`` is what its start returns."""

    def __init__(self, gpus: int, status: int = 0) -> None:
        self._gpus, self._status = gpus, status

    def nvmlInit_v2(self) -> int:
        return self._status

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self._gpus
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, gpu: Any) -> int:
        gpu._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetUUID(self, gpu: Any, name: Any, length: Any) -> int:
        name.value = f"GPU-{gpu.value - 1}aa-bb".encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, gpu: Any, memory: Any) -> int:
        memory._obj.total = (80, 40)[(gpu.value - 1) % 2] * 2**30
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets what a machine has of NVIDIA's: the library, a node; and what is visible."""

    def set_up(*, library: Nvml | None = None, node: str = "", visible: str | None = None) -> None:
        def load(name: str) -> Nvml:
            if library is None:
                raise OSError(name)
            return library

        monkeypatch.setattr("headway.gpu_listing.CDLL", load)
        monkeypatch.setattr(Cuda, "nvidia", (tmp_path,) if node else ())
        monkeypatch.setattr(Cuda, "amd", tmp_path / "kfd")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return set_up


@pytest.mark.parametrize(
    ("installed", "visible", "sizes"),
    [
        *((0, None, []), (0, "0,1", []), (4, None, [80, 40, 80, 40]), (4, "0, 2", [80, 80]), (4, "", [])),
        *((4, "-1", []), (4, "0,-1,1", [80]), (1, "0,1", [80]), (4, "0,0", [80]), (4, "GPU-3,GPU-0aa-bb", [40, 80])),
        (4, "GPU-x", []),
    ],
)
def test_gpus_and_their_memory_are_listed_without_torch_but_for_those_that_are_hidden(
    installed: int, visible: str | None, sizes: list[int], driver: Callable[..., None], tmp_path: Path
) -> None:
    driver(library=Nvml(installed), visible=visible)
    assert listed_here() == len(sizes)
    assert memory_listed_here(on_cpu=False) == min((size * 2**30 for size in sizes), default=None)
    (tmp_path / "kfd").touch()
    assert listed_here() is None


def test_a_driver_that_cannot_be_asked_is_not_taken_for_no_gpu(driver: Callable[..., None]) -> None:
    for library in (None, Nvml(1, status=9)):
        driver(library=library, node="dxg")
        assert listed_here() is None and memory_listed_here(on_cpu=False) is None
    driver()
    assert listed_here() == 0
    driver(library=Nvml(1), visible="MIG-1,MIG-2")
    assert listed_here() == 2 and memory_listed_here(on_cpu=False) is None


def test_the_module_itself_loads_no_torch() -> None:
    code = "import sys; from headway.devices import *; kind_of('cuda:1'), listed_here(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ------------------------------------------------------------------------------------------ what a kind has


def test_process_groups_carry_what_lies_in_host_memory_too() -> None:
    assert (CPU.process_groups, CUDA.process_groups) == ("gloo", "cpu:gloo,cuda:nccl")


def test_torch_is_asked_for_the_device_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def answers(name: str, answer: object = None) -> None:
        def answer_to(device: object) -> object:
            asked.append((name, str(device)))
            return answer

        monkeypatch.setattr(torch.cuda, name, answer_to)

    class Properties:
        total_memory = 80

    answers("get_device_name", "H100")
    answers("get_device_properties", Properties)
    answers("memory_allocated", 3)
    answers("max_memory_allocated", 7)
    answers("memory_reserved", 5)
    answers("mem_get_info", (40, 80))
    for name in ("synchronize", "set_device", "reset_peak_memory_stats"):
        answers(name)
    device = torch.device("cuda", 1)
    assert CUDA.device_name(device) == "H100"
    assert (CUDA.total_memory(device), CUDA.allocated_memory(device), CUDA.peak_memory(device)) == (80, 3, 7)
    CUDA.synchronize(device)
    CUDA.make_current(device)
    CUDA.reset_peak(device)
    assert asked == [
        (name, "cuda:1")
        for name in (
            *("get_device_name", "get_device_properties", "memory_allocated", "max_memory_allocated"),
            *("synchronize", "set_device", "reset_peak_memory_stats"),
        )
    ]
    assert CUDA.free_memory(device) == 42, "what torch has reserved for later tensors is free"


def test_of_a_machine_free_is_what_programs_may_still_take_and_no_more_than_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    monkeypatch.setattr(type(CPU), "memory", said)
    monkeypatch.setattr(type(CPU), "limits", (limit,))
    assert CPU.free_memory("cpu") is None, "a system without the file"
    said.write_text("MemTotal:  16 kB\nMemFree:  2 kB\nMemAvailable:  7 kB\n")
    assert CPU.free_memory("cpu") == 7 * 1024
    limit.write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert CPU.free_memory("cpu") == 2000
    (tmp_path / "memory.stat").write_text("anon 1500\ninactive_file 1400\n")
    assert CPU.free_memory("cpu") == 3400


class Graphs:
    """Stands in for torch.cuda's streams and graphs, and notes what is done in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self._pools = 0
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self._stream(f"own stream of {device}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self._stream("current stream"))
        monkeypatch.setattr(torch.cuda, "device", lambda device: self._within(str(device)))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self._within(stream.name))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self._pool)
        monkeypatch.setattr(
            torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: self.steps.append("replay"))
        )
        monkeypatch.setattr(
            torch.cuda,
            "graph",
            lambda graph, pool, stream, capture_error_mode: self._within(
                f"capture in {pool} on {stream.name}, {capture_error_mode}"
            ),
        )

    def _stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.steps.append(f"{name} waits for {other.name}"))

    def _pool(self) -> str:
        self._pools += 1
        return f"pool {self._pools}"

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        self.steps.append(f"begin {what}")
        yield
        self.steps.append(f"end {what}")


def test_work_is_done_once_before_it_is_recorded_apart_from_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    recorder = CUDA.recorder(torch.device("cuda", 1))
    assert recorder is not None
    recorder.record(lambda: graphs.steps.append("compute"))()
    own, capture = "own stream of cuda:1", "capture in pool 1 on own stream of cuda:1, thread_local"
    assert graphs.steps == [
        *("begin cuda:1", f"{own} waits for current stream", f"begin {own}", "compute", f"end {own}"),
        *(f"current stream waits for {own}", f"begin {capture}", "compute", f"end {capture}", "end cuda:1", "replay"),
    ]
    recorder.reset()
    recorder.record(lambda: None)
    assert "begin capture in pool 2 on own stream of cuda:1, thread_local" in graphs.steps
    assert CPU.recorder("cpu") is None


def test_a_group_of_gpus_has_the_time_limit_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nccl(SimpleNamespace):
        Options = SimpleNamespace

        def __init__(self, store: object, rank: int, size: int, options: SimpleNamespace) -> None:
            super().__init__(given=(store, rank, size, options._timeout))

    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", Nccl, raising=False)
    limit = timedelta(seconds=7)
    group = CUDA.own_group("store", 1, 2, limit)
    assert group is not None and group.given == ("store", 1, 2, limit)
    assert CPU.own_group("store", 1, 2, limit) is None


# ------------------------------------------------------------------------------------------ its protocol


def asked_of_a_kind() -> Iterator[tuple[str, str]]:
    """Members of `DeviceKind`, each with the first paragraph of its docstring."""
    (protocol,) = ast.parse(inspect.getsource(DeviceKind)).body
    assert isinstance(protocol, ast.ClassDef)
    for node, after in zip(protocol.body, [*protocol.body[1:], None], strict=True):
        match node, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                pass
            case ast.FunctionDef(name=name), _:
                text = ast.get_docstring(node) or ""
            case _:
                continue
        yield name, " ".join(text.partition("\n\n")[0].replace("``", "`").split())


def test_the_protocol_says_of_each_member_what_every_kind_of_device_gives() -> None:
    said = dict(asked_of_a_kind())
    assert len(said) > 15
    assert [name for name, text in said.items() if not text.endswith(".")] == []


def test_looking_for_a_gpu_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are forked afterwards could not use a GPU. With this variable torch asks the driver's library."""
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    seen: list[str | None] = []
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: seen.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")) or True
    )
    assert CUDA.is_there()
    assert seen == ["1"]
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")


def test_host_memory_that_cannot_be_page_locked_is_had_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refuses(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refuses)
    buffer = host_buffer(24, pinned=True)
    assert buffer.dtype == torch.uint8
    assert buffer.numel() == 24
    (record,) = caplog.records
    assert "could not be page-locked" in record.getMessage()


def test_page_locking_that_is_refused_leaves_no_error_for_the_next_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps the error of a call that failed; torch reads it, and drops it, behind each launch on that thread."""
    pending: list[int] = []

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            pending[:] = [1]
            return 1

    def launch(*_: Any, device: str) -> None:
        assert device == "cuda"
        if pending:
            pending.clear()
            raise torch.AcceleratorError("CUDA error: invalid argument")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    memory = torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(torch, "ones", launch)
    CUDA.pin(memory)()
    torch.ones(1, device="cuda")  # another's launch
    (record,) = caplog.records
    assert "could not be page-locked" in record.getMessage()


def test_a_failure_in_a_group_of_nccl_for_weights_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog does by default. What was set for torch's other groups is as before when the group is made."""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_BLOCKING_WAIT")
    made: list[list[str | None]] = []

    class Group:
        class Options:
            pass

        def __init__(self, *_: Any) -> None:
            made.append([os.environ.get(name) for name in names])

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.delenv(names[0], raising=False)
    monkeypatch.setenv(names[1], "1")
    CUDA.own_group(None, 0, 1, timedelta(seconds=1))
    assert made == [["0", "0", "1"]]
    assert [os.environ.get(name) for name in names[:2]] == [None, "1"]


@pytest.mark.parametrize("kind", [CPU, Cpu()], ids=["shared", "copied"])
def test_numbers_of_all_kinds_come_to_a_device_and_back_as_they_are(kind: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "cpu", kind)
    numbers = np.random.default_rng(0)
    arrays = [
        numbers.integers(0, 2**62, (3, 5)),
        numbers.random((1, 3)),
        np.zeros((0, 4), np.float32),
        numbers.random((4, 1)).astype(np.float32),
        numbers.random(7) < 0.5,
    ]
    tensors = to_device(arrays, torch.device("cpu"))
    for back, tensor, array in zip(to_host(tensors)(), tensors, arrays, strict=True):
        assert tensor.numpy().dtype == back.dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array, strict=True)
        np.testing.assert_array_equal(back, array, strict=True)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == (len(arrays) if kind is CPU else 1)
    assert to_device([], torch.device("cpu")) == []
