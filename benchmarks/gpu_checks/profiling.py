"""Where time goes, by torch's profiler, and which attention was computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_checks.setting import Setting

LINES = 10
ATTENTION = re.compile(r"attention|attn|flash|fmha|sdpa|flex|triton_tem", re.IGNORECASE)
NOT_A_KERNEL = re.compile(r"aten::scaled_dot_product_attention|backward|^_Flash|^## ", re.IGNORECASE)
"""Names of what only calls another: torch's front door and its nodes of gradients; and the way back."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """What the profiler has seen of a step."""

    device_seconds: float
    """Of all kernels on a GPU; of all operations on a CPU."""
    launched: float
    """Kernels, or operations on a CPU."""
    lines: list[str]
    """Those that take longest: their share, how often, and their name."""
    attention: str
    """Operations and kernels that compute attention, and how often."""


def profiled(setting: Setting, work: Callable[[], object], steps: int = 1) -> Profiled:
    """Run ``work``, which is so many ``steps``, under the profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    setting.wait()
    with profile(activities=activities) as recorded:
        work()
        setting.wait()
    events = list(recorded.key_averages())
    # An operation's time on the device is its kernels', which are events of their own. So are ranges with a name.
    counted = [
        event
        for event in events
        if (event.device_type == DeviceType.CUDA) == setting.on_gpu
        and not (setting.on_gpu and event.is_user_annotation)
    ]
    total = sum(_microseconds(event, setting) for event in counted)
    longest = sorted(counted, key=lambda event: -_microseconds(event, setting))[:LINES]
    lines = [
        f"{_microseconds(event, setting) / max(total, 1):6.1%} {event.count / steps:6g} × {event.key[:90]}"
        for event in longest
    ]
    attends = [event for event in events if ATTENTION.search(event.key) and not NOT_A_KERNEL.search(event.key)]
    names = [f"{e.count / steps:g} × {e.key.removeprefix('aten::_').partition('<')[0][:60]}" for e in attends]
    launched = sum(event.count for event in counted) / steps
    return Profiled(total / steps / 1e6, launched, lines, ", ".join(sorted(names)) or "no attention found")


def _microseconds(event: Any, setting: Setting) -> float:
    return float(event.self_device_time_total if setting.on_gpu else event.self_cpu_time_total)
