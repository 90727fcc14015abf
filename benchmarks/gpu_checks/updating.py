"""Seconds of an update, from a trainer's float32 weights to the served bfloat16 ones, both on this device."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from benchmarks.gpu_checks.models import HALF_BILLION, LIKE_HALF_BILLION, manifest_of, windows
from benchmarks.gpu_checks.setting import Finding, Findings, Setting, require
from benchmarks.gpu_checks.speed import empty
from benchmarks.gpu_checks.transports import LARGE_BUCKET, meeting
from benchmarks.shapes import Shape
from headway.config.transport_facts import WITHIN_PROCESS
from headway.devices import kind_of
from headway.engines.weights.incoming_version import BackBuffer, InPlace
from headway.engines.weights.outgoing_version import Stream
from headway.engines.weights.served_weights import ServedWeights

SEVEN_BILLION = Shape("7b", 152_064, 3584, 28, heads=28, kv_heads=4, intermediate=18_944)
"""The shape of Qwen2.5-7B, its embeddings tied."""
LIMIT_S = 40.0
UPDATES = 2
"""Of each kind; the first takes memory and locks its pages."""


def updating_speed(setting: Setting) -> Findings:
    """Update 0.5 B and 7 B, beside decoding and over the weights, by the transport of one process."""
    small = {"0.5 B": LIKE_HALF_BILLION, "7 B": replace(LIKE_HALF_BILLION, layers=4)}
    for name, shape in (small if setting.small else {"0.5 B": HALF_BILLION, "7 B": SEVEN_BILLION}).items():
        yield from _updated(setting, name, shape)
        empty(setting)


def _updated(setting: Setting, name: str, shape: Shape) -> Findings:
    with torch.device("meta"):
        model = shape.random("qwen2")
    served = model.to(torch.bfloat16).to_empty(device=setting.device)
    served.tie_weights()
    manifest = manifest_of(served)
    noise = torch.Generator(setting.device).manual_seed(0)
    trained = {slot.name: torch.randn(slot.shape, generator=noise, device=setting.device) for slot in manifest.slots}
    target = ServedWeights.of(served, "check").target(manifest)
    bucket = LARGE_BUCKET if setting.on_gpu else 65_536
    ways = {
        "beside decoding": BackBuffer(manifest, pin=kind_of(setting.device).pin),
        "over the weights": InPlace(manifest, target, window=bucket, pinned=setting.on_gpu),
    }
    with meeting(WITHIN_PROCESS, setting, manifest, LIMIT_S) as ends:
        for version in range(1, 1 + UPDATES * len(ways)):
            way, into = list(ways.items())[(version - 1) // UPDATES]
            started = time.perf_counter()
            stream = Stream(manifest, windows(trained, manifest, bucket))
            report = ends.carry(version, stream, into)
            arrived = time.perf_counter()
            if isinstance(into, BackBuffer):
                for offset, data in into.windows(bucket):
                    target.write(offset, data)
                into.loaded()
            setting.wait()
            ended = time.perf_counter()
            figures = {"way": way, "nbytes": manifest.nbytes, "seconds": ended - started, "gather_s": stream.gather_s}
            figures |= {"recv_s": report.recv_s, "register_s": report.register_s, "load_s": ended - arrived}
            if version % UPDATES:
                continue  # the first of its kind
            wrong = [n for n, p in served.named_parameters() if not torch.equal(p, trained[n].to(torch.bfloat16))]
            require(not wrong, f"{name}, {way}: {len(wrong)} tensors have other bits, among them {wrong[:1]}")
            text = f"{way} {ended - started:.2f} s (gather and digests {stream.gather_s:.2f}, loading "
            yield Finding(name, f"{text}{ended - arrived:.2f}), {manifest.nbytes / 1e9:.1f} GB", figures)
