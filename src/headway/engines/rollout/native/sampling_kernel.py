"""Sampling of a whole batch in one kernel, without sorting; `sampler` takes some twenty operations for it.

    a program for each row ─▶ maximum ─▶ least logit that the filters leave ─▶ its mass in each block ─▶ token, log-prob

Filters keep the first tokens in order of their logits. The kernel searches for the logit of the last kept token, two
bits at a time: the tokens with at least that logit number k, or weigh top-p. Tokens that are as likely as the last one
are kept from the lowest index on, as by a stable sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Number of tokens of the vocabulary that a program holds at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _logits(row, start, SIZE: tl.constexpr, temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scaled logits [BLOCK] from ``start`` on, -inf after the end."""
    at = start + tl.arange(0, BLOCK)
    logits = tl.load(row + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(logits, tl.zeros_like(logits) + temperature)
    return tl.where(scaled == 0, 0.0, scaled)  # -0.0 and 0.0 are equal: use one of them


@triton.jit
def _key(logits):  # type: ignore[no-untyped-def]
    """Map ``logits`` to 32-bit integers in the same order."""
    bits = logits.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(logits, most, least, COUNTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weights: 1 if ``COUNTED``, else relative to the most likely token's; 0 for tokens not allowed."""
    there = (logits >= least) & (logits > float("-inf"))
    if COUNTED:
        return there.to(tl.float32)
    return tl.where(there, tl.exp(logits - most), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(row, SIZE: tl.constexpr, temperature, most, least, key, COUNTED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return two sums of weights: of the tokens above ``key``, and of the tokens at or above it."""
    behind, beside = tl.full((), 0, tl.float64), tl.full((), 0, tl.float64)
    for start in range(0, SIZE, BLOCK):
        logits = _logits(row, start, SIZE, temperature, BLOCK)
        weights, keys = _weights(logits, most, least, COUNTED), _key(logits)
        # Blocks are added up in float64: in float32 the tail of a large vocabulary is lost to rounding.
        behind += tl.sum(tl.where(keys > key, weights, 0.0)).to(tl.float64)
        beside += tl.sum(tl.where(keys >= key, weights, 0.0)).to(tl.float64)
    return behind, beside


@triton.jit  # type: ignore[untyped-decorator]
def _last(row, SIZE: tl.constexpr, temperature, most, least, wanted, COUNTED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest key such that the tokens at or above it weigh at least ``wanted``."""
    key, unit = tl.full((), 0, tl.uint32), tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        first, second, third = tl.full((), 0, tl.float64), tl.full((), 0, tl.float64), tl.full((), 0, tl.float64)
        for start in range(0, SIZE, BLOCK):
            logits = _logits(row, start, SIZE, temperature, BLOCK)
            weights, keys = _weights(logits, most, least, COUNTED), _key(logits)
            first += tl.sum(tl.where(keys >= key + unit, weights, 0.0)).to(tl.float64)
            second += tl.sum(tl.where(keys >= key + 2 * unit, weights, 0.0)).to(tl.float64)
            third += tl.sum(tl.where(keys >= key + 3 * unit, weights, 0.0)).to(tl.float64)
        reached = (first >= wanted).to(tl.uint32) + (second >= wanted).to(tl.uint32) + (third >= wanted).to(tl.uint32)
        key += unit * reached
        unit = unit >> 2
    return key


@triton.jit  # type: ignore[untyped-decorator]
def _sample_rows(  # type: ignore[no-untyped-def]
    all_logits,
    stride,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    greedies,
    uniforms,
    tokens,
    logprobs,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)  # in 32 bits rows · stride overflows beyond 2³¹ logits
    row = all_logits + number * stride
    temperature = tl.full((), 1, tl.float32)
    if temperatures is not None:
        temperature = tl.load(temperatures + number)

    most, likeliest, broken = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, SIZE, BLOCK):
        logits = _logits(row, start, SIZE, temperature, BLOCK)
        largest = tl.max(logits, 0)
        place = tl.min(tl.where(logits == largest, start + tl.arange(0, BLOCK), SIZE), 0)
        likeliest = tl.where(largest > most, place, likeliest)
        most = tl.maximum(most, largest)
        broken += tl.sum(((logits != logits) | (logits == float("inf"))).to(tl.int32))

    # Tokens kept by the filters: all above `key`, and ``equal`` of those at `key`.
    least = tl.full((), float("-inf"), tl.float32)
    if min_ps is not None:
        least = most + tl.log(tl.load(min_ps + number))
    key, equal = tl.full((), 0, tl.uint32), tl.full((), 0, tl.int32) + SIZE
    if top_ks is not None:
        k = tl.load(top_ks + number)
        if k < SIZE:
            key = _last(row, SIZE, temperature, most, least, k.to(tl.float64), True, BLOCK)
            behind, _ = _sum(row, SIZE, temperature, most, least, key, True, BLOCK)
            equal = tl.where(key > 0, (k - behind.to(tl.int64)).to(tl.int32), SIZE)
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    weight = tl.exp(bits.to(tl.float32, bitcast=True) - most).to(tl.float64)
    if top_ps is not None:
        p = tl.load(top_ps + number).to(tl.float64)
        if p < 1:
            behind, beside = _sum(row, SIZE, temperature, most, least, key, False, BLOCK)
            wanted = p * tl.where(key > 0, tl.minimum(beside, behind + equal.to(tl.float64) * weight), beside)
            key = _last(row, SIZE, temperature, most, least, wanted, False, BLOCK)
            behind, _ = _sum(row, SIZE, temperature, most, least, key, False, BLOCK)
            bits = tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF)
            weight = tl.exp(bits.to(tl.float32, bitcast=True) - most).to(tl.float64)
            equal = tl.maximum(tl.ceil((wanted - behind) / weight), 1.0).to(tl.int32)

    index = tl.arange(0, BLOCKS)
    masses, passed, seen = tl.zeros((BLOCKS,), tl.float64), tl.zeros((BLOCKS,), tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, SIZE, BLOCK):
        logits = _logits(row, start, SIZE, temperature, BLOCK)
        weights, keys = _weights(logits, most, least, False), _key(logits)
        here = tl.sum((keys == key).to(tl.int32))
        passed = tl.where(index == start // BLOCK, seen, passed)
        taken = tl.minimum(tl.maximum(equal - seen, 0), here)
        of_equal = tl.where(here > 0, taken.to(tl.float64) * weight, 0.0)
        mass = tl.sum(tl.where(keys > key, weights, 0.0).to(tl.float64)) + of_equal
        masses = tl.where(index == start // BLOCK, mass, masses)
        seen += here

    ends = tl.cumsum(masses, 0)
    total = tl.max(ends, 0)
    threshold = tl.load(uniforms + number) * total
    chosen = tl.sum((ends <= threshold).to(tl.int32), 0)
    before = tl.sum(tl.where(index == chosen - 1, ends, 0.0), 0)
    earlier = tl.sum(tl.where(index == chosen, passed, 0), 0)
    logits = _logits(row, chosen * BLOCK, SIZE, temperature, BLOCK)
    keys, same = _key(logits), (_key(logits) == key).to(tl.int32)
    kept = (keys > key) | ((keys == key) & (earlier + tl.cumsum(same, 0) - same < equal))
    weights = tl.where(kept, _weights(logits, most, least, False), 0.0).to(tl.float64)
    at = chosen * BLOCK + tl.arange(0, BLOCK)
    token = tl.min(tl.where((before + tl.cumsum(weights, 0) > threshold) & (weights > 0), at, SIZE), 0)
    # The two sums may differ in the last bit: if no token is left, use the block's last token of its kind.
    token = tl.where(token < SIZE, token, tl.max(tl.where(weights > 0, at, 0), 0))
    logit = tl.sum(tl.where(at == token, logits, 0.0), 0)
    if greedies is not None:
        greedy = tl.load(greedies + number)
        token, logit = tl.where(greedy, likeliest, token), tl.where(greedy, most, logit)
    logprob = logit - most - tl.log(total).to(tl.float32)
    tl.store(tokens + number, token.to(tl.int64))
    tl.store(logprobs + number, tl.where(broken > 0, float("nan"), logprob))


@torch.library.custom_op("headway::sample_rows", mutates_args=())
def sample_rows(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    greedy: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row of ``logits`` [A, V] in any floating dtype, at ``uniform`` [A] float64.

    The rest are fields of `BatchSampling`. Returns tokens [A] int64 and their log-probs [A] float32, which are NaN
    where a logit is NaN or +inf.
    """
    rows, size = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    blocks = triton.next_power_of_2(triton.cdiv(size, BLOCK) + 1)
    _sample_rows[(rows,)](
        logits, logits.stride(0), temperature, top_k, top_p, min_p, greedy, uniform, tokens, logprobs, size, blocks,
        BLOCK, num_warps=16,
    )  # fmt: skip
    return tokens, logprobs


@sample_rows.register_fake
def _(logits: torch.Tensor, *_: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits), dtype=torch.float32)
