"""Log-probs by chunks of the vocabulary's head: tokens per second of forward and backward pass, and peak memory.

    python -m benchmarks.chunks [--vocabulary 152000] [--hidden 256] [--tokens 1024] [--device cpu]

A process for each size of a chunk, so that each has a peak of its own.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import torch

from benchmarks.runner import call, parser
from headway.devices import kind_of
from headway.models.logprobs import chunked_logprobs, default_chunk_tokens


def main() -> None:
    sizes = {"vocabulary": 152_000, "hidden": 256, "tokens": 1024, "repeats": 2}
    options = parser("chunks", __doc__, **{name: {"type": int, "default": size} for name, size in sizes.items()})
    options.add_argument("--device", default="cpu")
    options.add_argument("--chunk", type=int, help="measure this one, in this process")
    given = options.parse_args()
    if given.chunk is not None:
        measure(given)
        return
    usual = default_chunk_tokens(given.vocabulary, torch.device(given.device))
    for chunk in sorted({usual, 32, 256, given.tokens}):
        print(call(sys.executable, "-m", "benchmarks.chunks", *sys.argv[1:], "--chunk", str(chunk)), end="", flush=True)
    print(f"the default is {usual} tokens")


def measure(given: argparse.Namespace) -> None:
    """Print one chunk size's best of several passes, and the peak of memory beyond what the inputs take."""
    device, generator = torch.device(given.device), torch.Generator().manual_seed(0)
    hidden = torch.randn(given.tokens, given.hidden, generator=generator).to(device).requires_grad_()
    weight = (torch.randn(given.vocabulary, given.hidden, generator=generator) * 0.05).to(device).requires_grad_()
    targets = torch.randint(given.vocabulary, (given.tokens,), generator=generator).to(device)
    before, seconds = peak_mib(device), []
    for _ in range(given.repeats):
        start = time.perf_counter()
        logprobs, _ = chunked_logprobs(hidden, weight, None, targets, chunk_tokens=given.chunk)
        torch.autograd.grad(logprobs.sum(), (hidden, weight))
        kind_of(device).synchronize(device)
        seconds.append(time.perf_counter() - start)
    rate = given.tokens / min(seconds)
    print(f"chunk {given.chunk:5d}: {rate:8.1f} tokens/s, {peak_mib(device) - before:7.0f} MiB", flush=True)


def peak_mib(device: torch.device) -> float:
    """Return the largest memory so far: of the device's allocator, or of this process."""
    if (peak := kind_of(device).peak_memory(device)) is not None:
        return peak / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
