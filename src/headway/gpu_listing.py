"""The GPUs of a machine, found without loading torch: by the driver's management library (NVML)."""

from __future__ import annotations

from ctypes import CDLL, Structure, byref, c_uint, c_ulonglong, c_void_p, create_string_buffer

Gpu = tuple[str, int | None]
"""A GPU's UUID, and its bytes of memory where they are known."""


class _DeviceMemory(Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


def listed_gpus() -> list[Gpu] | None:
    """Return the GPUs of this machine. None without library or driver."""
    try:
        nvml = CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    gpus: list[Gpu] = []
    count, gpu, name, memory = c_uint(), c_void_p(), create_string_buffer(96), _DeviceMemory()
    known = nvml.nvmlDeviceGetCount_v2(byref(count)) == 0
    for i in range(count.value):
        known = known and nvml.nvmlDeviceGetHandleByIndex_v2(c_uint(i), byref(gpu)) == 0
        known = known and nvml.nvmlDeviceGetUUID(gpu, name, c_uint(96)) == 0
        sized = known and nvml.nvmlDeviceGetMemoryInfo(gpu, byref(memory)) == 0
        gpus.append((name.value.decode(), int(memory.total) if sized else None))
    nvml.nvmlShutdown()
    return gpus if known else None


def visible(gpus: list[Gpu], asked: str | None) -> list[Gpu]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves: indices or UUIDs, up to the first wrong one."""
    if asked is None:
        return gpus
    chosen: list[Gpu] = []
    for name in map(str.strip, asked.split(",")):
        if name.startswith("MIG-"):
            found: Gpu | None = (name, None)  # a part of a GPU, whose size is its own
        elif name.isdigit():
            found = gpus[int(name)] if int(name) < len(gpus) else None
        else:
            found = next((gpu for gpu in gpus if name and gpu[0].startswith(name)), None)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return chosen
