"""The kernel that samples, run by Triton's interpreter, beside a reference that sorts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from headway.data.interfaces.rollout import SamplingParams
from headway.engines.rollout.native.sampler import BatchSampling
from tests.environments.fake_cuda.counting import CUDA, on_fake_cuda

ROWS = 3
UNIFORM = torch.tensor([0.0, 0.437, 1 - 2**-53], dtype=torch.float64)


def drawn(cases: Sequence[tuple[str, dict[str, float], int]]) -> list[tuple[list[int], list[float]]]:
    """What the kernel gives for each of ``cases``, here."""
    from headway.engines.rollout.native import sampling_kernel

    sampling_kernel.BLOCK = 64
    results = []
    for kind, sampling, vocabulary in cases:
        batch = BatchSampling.of([SamplingParams(1, **sampling)] * ROWS, vocabulary, torch.device("cpu"))  # type: ignore[arg-type]
        logits = logits_of(kind, vocabulary)
        tokens, logprobs = sampling_kernel.sample_rows(
            logits, UNIFORM, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.greedy
        )
        results.append((tokens.tolist(), logprobs.tolist()))
    return results


@pytest.fixture(scope="module")
def interpreted() -> dict[str, tuple[list[int], list[float]]]:
    """What the kernel gives for each of `CASES`, in a process whose Triton interprets all that it loads."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.environments.fake_cuda.test_sampling_kernel"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(map(str, CASES), json.loads(done.stdout), strict=True))


def expected(logits: np.ndarray, sampling: SamplingParams, uniform: float) -> tuple[int, float]:
    """The token at ``uniform`` and its log-prob, from a stable sort of all tokens in float64."""
    scaled = (logits.astype(np.float32) / np.float32(sampling.temperature or 1)).astype(np.float64)
    order = np.argsort(-scaled, kind="stable")
    probs = np.exp(scaled[order] - scaled.max())
    if sampling.temperature:
        probs[probs < np.float64(np.float32(sampling.min_p))] = 0
        probs[sampling.top_k or len(probs) :] = 0
        before = np.cumsum(probs) - probs
        probs[before >= np.float64(np.float32(sampling.top_p)) * probs.sum()] = 0
    drawn = np.zeros_like(probs)
    drawn[order] = probs / probs.sum()
    ends = np.cumsum(drawn)
    token = int(np.searchsorted(ends, uniform * ends[-1], side="right")) if sampling.temperature else int(order[0])
    return token, float(np.log(drawn[token]))


def logits_of(kind: str, vocabulary: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(vocabulary)
    match kind:
        case "random":
            return (3 * torch.randn(ROWS, vocabulary, generator=noise)).bfloat16()
        case "ties":
            return torch.randint(-2, 3, (ROWS, vocabulary), generator=noise).float()
        case "flat":
            return torch.zeros(ROWS, vocabulary)
        case _:  # one token has almost all, some are barred, and zeros have both signs
            logits = torch.full((ROWS, vocabulary), -0.0)
            logits[:, ::3], logits[:, 1::5], logits[:, vocabulary // 2] = 0.0, -torch.inf, 12.0
            return logits


SAMPLINGS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.5},
    {"top_k": 7},
    {"top_k": 90, "top_p": 0.25, "min_p": 0.125, "temperature": 2.0},
]
CASES = [
    (kind, sampling, vocabulary)
    for kind in ("random", "ties", "flat", "peaked")
    for sampling in SAMPLINGS
    for vocabulary in (70,)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_log_probs_are_those_of_a_sort(
    case: tuple[str, dict[str, float], int], interpreted: dict[str, tuple[list[int], list[float]]]
) -> None:
    """The first one takes some 10 seconds, minutes on a busy machine: the interpreter runs each operation by NumPy."""
    kind, sampling, vocabulary = case
    logits = logits_of(kind, vocabulary).float().numpy()
    for row, (token, logprob) in enumerate(zip(*interpreted[str(case)], strict=True)):
        wanted, its_logprob = expected(logits[row], SamplingParams(1, **sampling), float(UNIFORM[row]))  # type: ignore[arg-type]
        assert (token, logprob) == (wanted, pytest.approx(its_logprob, abs=2e-5))


@pytest.mark.parametrize("vocabulary", [31, 151_936])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.95}, {"top_k": 5, "min_p": 0.1}], ids=str)
def test_a_batch_is_sampled_by_one_operation_and_nothing_is_sorted(
    rows: int, vocabulary: int, sampling: dict[str, float]
) -> None:
    from headway.engines.rollout.native.sampler import sample

    with on_fake_cuda() as counts, torch.no_grad():
        batch = BatchSampling.of([SamplingParams(1, **sampling)] * rows, vocabulary, CUDA)
        logits = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device=CUDA)
        uniform = torch.empty(rows, dtype=torch.float64, device=CUDA)
        sample(logits, batch, uniform)
        counts.clear()
        sample(logits, batch, uniform)
        assert dict(counts.operations) == {"sample_rows": 1}


if __name__ == "__main__":
    print(json.dumps(drawn(CASES)))
