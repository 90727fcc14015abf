"""``python -m benchmarks.algorithms``: seconds that each advantage, loss and correction takes for a million tokens.

One thread, 1,024 answers of 1,024 tokens in groups of 8, a tenth of them masked; medians of several calls, a loss with
its gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from benchmarks.table import report
from headway.algorithms.advantages import ADVANTAGES, AdvantageInputs
from headway.algorithms.corrections import CORRECTIONS, CorrectionParams
from headway.algorithms.health import lag_sums
from headway.algorithms.losses import POLICY_LOSSES, LossInputs, PolicyLossParams
from headway.algorithms.values import value_loss
from headway.config.sections.losses import LOSSES

ROWS, WIDTH, GROUP, CALLS = 1024, 1024, 8, 5


def seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def losses_inputs() -> LossInputs:
    torch.manual_seed(0)
    old = -torch.rand(ROWS, WIDTH)
    return LossInputs(
        logprobs=(old + 0.1 * torch.randn(ROWS, WIDTH)).requires_grad_(),
        old_logprobs=old,
        behaviour_logprobs=old + 0.1 * torch.randn(ROWS, WIDTH),
        advantages=torch.randn(ROWS, WIDTH),
        mask=torch.rand(ROWS, WIDTH) < 0.9,
        entropy=torch.rand(ROWS, WIDTH),
        finished=torch.rand(ROWS) < 0.9,
    )


def main() -> None:
    torch.set_num_threads(1)
    inputs = losses_inputs()
    advantages = AdvantageInputs(
        rewards=torch.rand(ROWS),
        groups=torch.arange(ROWS) // GROUP,
        lengths=torch.full((ROWS,), WIDTH),
        mask=inputs.mask,
        values=torch.rand(ROWS, WIDTH),
        baselines=torch.rand(ROWS),
    )
    special = {"off_policy_sequence_mask": CorrectionParams(delta=0.5), "veto": CorrectionParams(lower=1e-4)}

    def backward(name: str) -> None:
        POLICY_LOSSES.get(name)(inputs, PolicyLossParams(LOSSES[name]()))[0].sum().backward()

    calls: dict[str, Callable[[], object]] = {}
    for name in ADVANTAGES.names():
        calls[f"advantage {name}"] = partial(ADVANTAGES.get(name), advantages)
    for name in POLICY_LOSSES.names():
        calls[f"loss {name}, with gradient"] = partial(backward, name)
    for name in CORRECTIONS.names():
        own = special.get(name, CorrectionParams(bound=2.0))
        calls[f"correction {name}"] = partial(CORRECTIONS.get(name), inputs, own)
    values = torch.rand(ROWS, WIDTH, requires_grad=True)
    returns = torch.rand(ROWS, WIDTH)
    calls["critic's loss, with gradient"] = lambda: (
        value_loss(values, returns, returns + 0.1, inputs.mask, cliprange=0.5)[0].sum().backward()
    )
    lags = torch.randint(0, 6, (ROWS, WIDTH))
    detached = inputs.logprobs.detach()
    calls["health by lag"] = lambda: lag_sums(detached, inputs.behaviour_logprobs, inputs.mask, lags)
    rows = [{"function": name, "ms": round(1e3 * seconds(call))} for name, call in calls.items()]
    tokens = ROWS * WIDTH
    report("algorithms", "Algorithms", rows, [f"{tokens:,} tokens, one thread, medians of {CALLS} calls."])


if __name__ == "__main__":
    main()
