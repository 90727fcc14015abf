"""The loss of one micro-batch, as a sum that adds up over micro-batches and ranks, and the sums its metrics come from.

    Σ weight · (w · policy loss + kl_loss_coef · KL(π_θ‖π_ref) − entropy_coeff · entropy),  w = corrected π_prox/π_behav

The weights carry the whole mini-batch's normaliser, so neither the loss nor its gradient depends on how it was split.

Shape suffixes: N rows, T padded length of the responses, M response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headway.algorithms import health
from headway.algorithms.aggregation import token_weights
from headway.algorithms.corrections import Correction, CorrectionParams, build_correction
from headway.algorithms.kl import kl_penalty
from headway.algorithms.losses import POLICY_LOSSES, LossInputs, PolicyLossParams, log_ratio
from headway.config.schema import ActorConfig, Config, RolloutCorrectionConfig
from headway.data.collate import Row
from headway.engines.train.fsdp.batch import MicroBatch, response_aligned

Sums = dict[str, Tensor]
"""Named float64 scalars. Names in `MAXIMA` reduce by maximum, all others by sum."""

DEFAULT_BOUND = 2.0
"""Of a correction without bounds of its own."""
HEALTH = "health/"
MAXIMA = frozenset(HEALTH + name for name in health.MAX_REDUCED)


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the whole mini-batch, over all ranks."""

    tokens: float
    """Tokens that the loss counts."""
    sequences: float
    """Sequences with at least one of them."""


@dataclass(frozen=True, slots=True)
class LossColumns:
    """What the loss reads beside the policy's outputs. [N, T] float32, zero-padded."""

    logprobs: Float[Tensor, "N T"]
    """log π_behav."""
    prox_logprobs: Float[Tensor, "N T"]
    """log π_prox; π_behav's where no others were computed."""
    advantages: Float[Tensor, "N T"]
    mask: Bool[Tensor, "N T"]
    ref_logprobs: Float[Tensor, "N T"] | None


def count(rows: Sequence[Row]) -> Totals:
    """This rank's share of the totals."""
    tokens = [int(row.loss_mask.sum()) for row in rows]
    return Totals(tokens=float(sum(tokens)), sequences=float(sum(n > 0 for n in tokens)))


def collate_columns(rows: Sequence[Row], device: torch.device, *, with_ref: bool) -> LossColumns:
    """The loss's tensors for ``rows``, whose advantages are set, and ``ref_logprobs`` too where ``with_ref``."""

    def floats(name: str, fallback: str | None = None) -> Tensor:
        return response_aligned(rows, lambda row: _column(row, name, fallback), np.float32, device)

    return LossColumns(
        logprobs=floats("logprobs"),
        prox_logprobs=floats("prox_logprobs", fallback="logprobs"),
        advantages=floats("advantages"),
        mask=response_aligned(rows, lambda row: row.loss_mask, np.bool_, device),
        ref_logprobs=floats("ref_logprobs") if with_ref else None,
    )


def _column(row: Row, name: str, fallback: str | None) -> np.ndarray:
    value = row.columns[name] if name in row.columns else getattr(row, fallback or name, None)
    if value is None:
        raise ValueError(f"a row of {len(row.logprobs)} response tokens has no {name}, which this training step needs")
    return value


class Objective:
    """The configured loss. Knows tensors and coefficients, no ranks and no micro-batch's place among others."""

    def __init__(self, config: Config) -> None:
        actor: ActorConfig = config.actor
        self._loss = POLICY_LOSSES.get(config.algorithm.policy_loss.loss_mode)
        self._params = PolicyLossParams(
            clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
            clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
            **config.algorithm.policy_loss.given,
        )
        self._actor = actor
        self._correct, self._correction_params = _correction(config.algorithm.rollout_correction)

    @property
    def needs_ref(self) -> bool:
        return self._actor.use_kl_loss

    def __call__(
        self, batch: MicroBatch, columns: LossColumns, totals: Totals, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Float[Tensor, ""], Sums]:
        """The micro-batch's part of the loss, and of the sums. ``logprobs`` and ``entropy`` [M] are the policy's."""
        mask_NT = columns.mask
        entropy_NT = batch.unflatten(entropy)
        inputs = LossInputs(
            logprobs=batch.unflatten(logprobs),
            old_logprobs=columns.prox_logprobs,
            behaviour_logprobs=columns.logprobs,
            advantages=columns.advantages,
            mask=mask_NT,
            ref_logprobs=columns.ref_logprobs,
            entropy=entropy_NT,
        )
        weights_NT = token_weights(
            mask_NT,
            self._actor.loss_agg_mode,
            total_tokens=totals.tokens,
            total_sequences=totals.sequences,
            loss_scale_factor=self._actor.loss_scale_factor,
        )
        policy_NT, per_token = self._loss(inputs, self._params)
        if self._correct is not None:
            w_NT, corrected = self._correct(inputs, self._correction_params)
            policy_NT, per_token = w_NT * policy_NT, per_token | corrected
        terms = {"policy_loss": (weights_NT * policy_NT).sum()}
        loss = terms["policy_loss"]
        if inputs.ref_logprobs is not None:
            kl_NT = kl_penalty(inputs.logprobs, inputs.ref_logprobs, self._actor.kl_loss_type, mask_NT)
            terms["kl_loss"] = (weights_NT * kl_NT).sum()
            loss = loss + self._actor.kl_loss_coef * terms["kl_loss"]
        if self._actor.entropy_coeff > 0:
            loss = loss - self._actor.entropy_coeff * (weights_NT * entropy_NT).sum()
        return loss, self._sums(loss, terms, per_token, inputs, totals)

    @torch.no_grad()
    def _sums(
        self, loss: Tensor, terms: Mapping[str, Tensor], per_token: Mapping[str, Tensor], inputs: LossInputs, of: Totals
    ) -> Sums:
        mask_NT = inputs.mask
        behaviour_ratio_NT = log_ratio(inputs.logprobs, inputs.behaviour_logprobs, mask_NT).exp()
        outside_NT = (behaviour_ratio_NT < 1 - self._params.clip_low) | (
            behaviour_ratio_NT > 1 + self._params.clip_high
        )
        means = {**per_token, "entropy": inputs.entropy, "offpolicy/clip_fraction": outside_NT}
        sums = {"loss": loss, **terms}
        for name, values_NT in means.items():
            if values_NT is not None:
                sums[name] = values_NT.double().masked_fill(~mask_NT, 0.0).sum() / max(of.tokens, 1.0)
        for name, value in health.ratio_sums(inputs.logprobs, inputs.behaviour_logprobs, mask_NT).items():
            sums[HEALTH + name] = value
        return {name: value.detach().double() for name, value in sums.items()}


def _correction(config: RolloutCorrectionConfig) -> tuple[Correction | None, CorrectionParams]:
    """Raises `ConfigError` for parameters that make no sense for the correction that is named."""
    bounded = config.bound is not None or config.lower is not None or config.name == "off_policy_sequence_mask"
    params = CorrectionParams(
        bound=config.bound if bounded else DEFAULT_BOUND,
        lower=config.lower,
        level=config.level,
        veto=config.veto,
        delta=config.delta,
    )
    return (build_correction(config.name, params) if config.name is not None else None), params


def merge(parts: Sequence[Sums]) -> Sums:
    """The sums of several micro-batches as one."""
    return {
        name: torch.stack([part[name] for part in parts]).amax(0)
        if name in MAXIMA
        else torch.stack([part[name] for part in parts]).sum(0)
        for name in parts[0]
    }


def as_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """What is reported of reduced sums."""
    metrics = {name: value for name, value in sums.items() if not name.startswith(HEALTH)}
    return metrics | health.health({n.removeprefix(HEALTH): v for n, v in sums.items() if n.startswith(HEALTH)})
