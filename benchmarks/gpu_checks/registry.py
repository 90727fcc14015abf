"""The checks by name, in the order in which they are made: what has to be right first, how fast it is last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Check:
    function: str
    """``module:name`` in this package; imported by the process that makes the check, and by no other."""
    title: str
    limit_s: float
    """Seconds from the start of its process, or what is left of the run's."""
    alone: bool = False
    """It measures time, or the device's free memory: no other check is made beside it."""


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "logprobs": Check("engine:logprobs", "the engine's log-probs are the trainer's", 90),
        "decoding": Check("engine:decoding", "decoding, prefill, CUDA graphs: the same tokens", 90),
        "training": Check("training:training", "gradient and step are the CPU's", 90),
        "packing": Check("packing:gradients", "packed rows, shared prompts: the gradient of single rows", 120),
        "compiled": Check("training:compiled", "compiled layers: the gradient is the CPU's", 120),
        "fsdp": Check("training:fsdp", "FSDP2 on all GPUs", 90),
        "transports": Check("transports:transports", "every transport, onto the device", 60),
        "broadcast": Check("transports:broadcast", "broadcast between two processes", 90),
        "update": Check("serving:update", "updates while a replica decodes", 90),
        "demo": Check("demo:demo", "the demo, on this device", 150),
        "sleep": Check("serving:sleep", "sleep frees memory, waking restores", 60, alone=True),
        "training_speed": Check("speed:training_speed", "training, 0.5 B", 120, alone=True),
        "packing_speed": Check("packing:speed", "training by the layout of rows, 0.5 B", 120, alone=True),
        "decoding_speed": Check("speed:decoding_speed", "decoding, 0.5 B", 150, alone=True),
    }
)
