"""The loss of one micro-batch, as a sum that adds up over micro-batches and ranks, and the sums its metrics come from.

    Σ weight · (w · policy loss + kl_loss_coef · KL(π_θ‖π_ref) − entropy_coeff · entropy),  w = corrected π_prox/π_behav

The weights carry the whole mini-batch's normaliser, so neither the loss nor its gradient depends on how it was split.

Losses and corrections that use sequences see whole episodes: `SplitEpisodes` has the rows missing in a micro-batch.

The built-in functions get each response token as a row of its own, [M, 1], and the label of its sequence: rows of
different lengths cost nothing. Functions of the user's own get padded rows [N, T].

Shape suffixes: N rows, T padded length of the responses, M response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from headway.algorithms import health
from headway.algorithms.aggregation import token_weights
from headway.algorithms.corrections import Correction, CorrectionParams, build_correction, log_linear_prox, product
from headway.algorithms.kl import kl_penalty
from headway.algorithms.losses import POLICY_LOSSES, LossInputs, PolicyLossParams, log_ratio
from headway.config.schema import Config
from headway.config.sections.learning import ActorConfig, CorrectionConfig
from headway.data.interfaces.training import StepContext
from headway.data.packing import CollatedRow, by_episode
from headway.data.types import ColumnName, TrajectoryId
from headway.engines.train.fsdp.learner import HEALTH, BatchTotals, Sums
from headway.runtime.user_code import names_user_code


@dataclass(frozen=True, slots=True)
class SplitEpisodes:
    """Rows of episodes that no micro-batch holds whole, for losses and corrections that look at sequences.

        rows of such episodes ─▶ a pass without gradient ─▶ log-probs ─▶ beside each micro-batch with some of the rows

    Such a loss needs one number per sequence, without gradient, such as a mean of log-ratios. So rows of other
    micro-batches only contribute their log-probs to this number; they are not in the loss or in a metric.
    """

    rows: Sequence[CollatedRow] = ()
    logprobs: Sequence[NDArray[np.float32]] = ()
    """Their log-probs [T] (nats) under the policy as it is in this step."""

    def beside(self, rows: Sequence[CollatedRow]) -> SplitEpisodes:
        """Return the rows of the same episodes that are not among a micro-batch's ``rows``, with their log-probs."""
        if not self.rows:
            return self
        here, episodes = {id(row) for row in rows}, {row.episode for row in rows}
        places = [i for i, row in enumerate(self.rows) if row.episode in episodes and id(row) not in here]
        return SplitEpisodes([self.rows[i] for i in places], [self.logprobs[i] for i in places])


NOTHING_APART = SplitEpisodes()


P = TypeVar("P")

BY_LAG = ("correction/rejected", "correction/truncated", "correction/weight")
"""Metrics of losses and corrections that are reported by lag, too."""
DEFAULT_BOUND = 2.0
"""Upper bound on π_prox/π_behav for a correction that is configured without bounds."""


@dataclass(frozen=True, slots=True)
class LossColumns:
    """The columns that the loss reads beside the policy's outputs, [M, 1] float32."""

    logprobs: Float[Tensor, "M 1"]
    """Log-probs (nats) under π_behav, the policy that sampled the tokens."""
    prox_logprobs: Float[Tensor, "M 1"]
    """Log-probs (nats) under π_prox, or under π_behav where no others were computed."""
    advantages: Float[Tensor, "M 1"]
    mask: Bool[Tensor, "M 1"]
    versions: Int[Tensor, "M 1"]
    """The version that sampled each token."""
    ref_logprobs: Float[Tensor, "M 1"] | None
    row: Int[Tensor, " M"]
    """Index of each token's row."""
    finished: Bool[Tensor, " N"]
    """Flag of each row's episode, False where it was cut off."""
    episodes: Int[Tensor, " N"] | None
    """Label of each row's episode; None where each row is one."""
    lengths: Int[Tensor, " N"]
    """Number of tokens of each row's whole episode that the loss counts."""
    beside: Float[Tensor, " B"] | None
    """Log-probs of the last rows' tokens, which other micro-batches compute and count; None if there are none."""
    counted: Int[Tensor, " K"] | None
    """Indices of the tokens that count here; None where all do."""
    newest: int
    """Newest version of the tokens that count here; -1 if there is none."""
    places: Int[Tensor, " M"]
    """Index of each token in the flattened [N, T], for functions that get padded rows."""
    width: int
    """T, the number of tokens of the longest response."""


def response_aligned(
    rows: Sequence[CollatedRow], get: Callable[[CollatedRow], NDArray[np.generic]], dtype: type[np.generic]
) -> Shaped[Tensor, "M 1"]:
    """Join ``get(row)``, one value per response token, of all rows, without padding, in host memory."""
    return torch.from_numpy(np.concatenate([get(row) for row in rows]).astype(dtype, copy=False))[:, None]


def required_column(row: CollatedRow, name: str) -> NDArray[np.float32]:
    """Column ``name`` [T] of ``row``. Raises `ValueError` for a row without it."""
    if name not in row.columns:
        raise ValueError(f"a row of {len(row.loss_mask)} response tokens has no {name}, which this step needs")
    return row.columns[name]


class Objective:
    """The configured loss of one micro-batch. It knows no ranks, and no micro-batch's place among others."""

    def __init__(self, config: Config) -> None:
        actor: ActorConfig = config.actor
        self._loss = POLICY_LOSSES.get(config.algorithm.policy_loss.loss_mode)
        self._params = PolicyLossParams(config.algorithm.policy_loss, *actor.clip_range)
        self._actor = actor
        own = config.async_training.use_rollout_log_probs
        self._log_linear = actor.prox_logp_method == "loglinear" and not own
        self.needs_prox = actor.prox_logp_method == "recompute" and not own
        """True where log π_prox is recomputed, and comes with each row."""
        self.needs_ref = actor.use_kl_loss or config.algorithm.use_kl_in_reward
        """True where the reference's log-probs come with each row."""
        self._corrections = _corrections(config.algorithm.corrections)
        self._own_loss = names_user_code(config.algorithm.policy_loss.loss_mode)
        self._own_correction = any(names_user_code(str(one.name)) for one in config.algorithm.corrections)
        self.looks_at_sequences = config.algorithm.looks_at_sequences
        """True where the loss, or a correction, looks at sequences: it then needs whole episodes."""

    def collate(
        self,
        rows: Sequence[CollatedRow],
        lengths: Mapping[TrajectoryId, int] = MappingProxyType({}),
        apart: SplitEpisodes = NOTHING_APART,
    ) -> LossColumns:
        """Collate the loss's tensors for a micro-batch's ``rows``: the columns that it reads.

        They are in host memory. ``lengths``: see `learner.BatchTotals`; without any, each row is an episode.
        ``apart``: rows from other micro-batches; those of episodes in this one are appended and do not count here.

        Raises `ValueError` for a row that lacks a column.
        """
        own_tokens = sum(len(row.loss_mask) for row in rows)
        others = apart.beside(rows)
        rows = [*rows, *others.rows]
        labels = np.empty(len(rows), np.int64)  # without `lengths` these are never read
        tokens = np.array([row.loss_mask.sum() for row in rows])
        for label, own in enumerate(by_episode(rows) if lengths else ()):
            episode = rows[own[0]].episode
            labels[own] = label
            if episode is not None and episode in lengths:
                tokens[own] = lengths[episode]

        def floats(get: Callable[[CollatedRow], NDArray[np.float32]]) -> Tensor:
            return response_aligned(rows, get, np.float32)

        prox = ColumnName.PROX_LOGPROBS
        mask = response_aligned(rows, lambda row: row.loss_mask, np.bool_)
        versions = response_aligned(rows, lambda row: row.versions, np.int64)
        counted = np.flatnonzero(mask.numpy()[:own_tokens])
        tokens_N = np.array([len(row.loss_mask) for row in rows])
        width, row_M = int(tokens_N.max()), np.repeat(np.arange(len(rows)), tokens_N)
        places = row_M * width + np.arange(len(row_M)) - np.repeat(np.cumsum(tokens_N) - tokens_N, tokens_N)

        return LossColumns(
            logprobs=floats(lambda row: row.logprobs),
            prox_logprobs=floats(
                lambda row: required_column(row, prox) if self.needs_prox else row.columns.get(prox, row.logprobs)
            ),
            advantages=floats(lambda row: required_column(row, ColumnName.ADVANTAGES)),
            mask=mask,
            versions=versions,
            ref_logprobs=floats(lambda row: required_column(row, ColumnName.REF_LOGPROBS)) if self.needs_ref else None,
            row=torch.from_numpy(row_M),
            finished=torch.tensor([row.finished for row in rows]),
            episodes=torch.from_numpy(labels) if lengths else None,
            lengths=torch.from_numpy(tokens),
            beside=torch.from_numpy(np.concatenate(others.logprobs)) if others.rows else None,
            counted=None if len(counted) == len(row_M) else torch.from_numpy(counted),
            newest=int(versions.numpy()[counted].max(initial=-1)),
            places=torch.from_numpy(places),
            width=width,
        )

    def __call__(
        self, columns: LossColumns, totals: BatchTotals, logprobs: Tensor, entropy: Tensor, context: StepContext
    ) -> tuple[Float[Tensor, ""], Sums]:
        """Compute the micro-batch's part of loss and sums. ``logprobs`` and ``entropy`` [M] are the policy's.

        Raises:
            ValueError: a token that counts was sampled by a version newer than the trainer's.
        """
        if columns.newest > context.version:
            lag = context.version - columns.newest
            raise ValueError(f"a token's lag is {lag}: its version is newer than the trainer's, {context.version}")
        mask_M1 = columns.mask
        if (beside := columns.beside) is not None:
            # A copy: corrections still look at the tokens of the other rows, by `columns.mask`.
            mask_M1 = mask_M1.clone()
            mask_M1[len(logprobs) :] = False
            # Behind the micro-batch's own, as in `columns`, and without a gradient.
            logprobs = torch.cat([logprobs, beside.to(logprobs.dtype)])
            entropy = torch.cat([entropy, entropy.new_zeros(len(beside))])
        logprobs_M1, entropy_M1 = logprobs[:, None], entropy[:, None]
        params = self._params
        if context.clip_scale != 1.0:
            scale = context.clip_scale
            params = replace(params, clip_low=params.clip_low * scale, clip_high=params.clip_high * scale)
        inputs = LossInputs(
            logprobs=logprobs_M1,
            old_logprobs=self._proximal(columns, logprobs_M1, context),
            behaviour_logprobs=columns.logprobs,
            advantages=columns.advantages,
            mask=columns.mask,
            ref_logprobs=columns.ref_logprobs,
            entropy=entropy_M1,
            finished=columns.finished[columns.row],
            episodes=columns.row if columns.episodes is None else columns.episodes[columns.row],
        )
        weights_M1 = token_weights(
            mask_M1,
            self._actor.loss_agg_mode,
            total_tokens=totals.tokens,
            total_sequences=totals.sequences,
            loss_scale_factor=self._actor.loss_scale_factor,
            lengths=columns.lengths[columns.row],
        )
        # Padded rows for the user's own functions alone, as documented; ours read one number per token.
        policy_M1, per_token = _called(self._loss, inputs, params, columns if self._own_loss else None)
        if self._corrections is not None:
            correct, correction_params = self._corrections
            w_M1, corrected = _called(correct, inputs, correction_params, columns if self._own_correction else None)
            policy_M1, per_token = w_M1 * policy_M1, per_token | corrected
        terms = {"policy_loss": (weights_M1 * policy_M1).sum()}
        loss = terms["policy_loss"]
        if inputs.ref_logprobs is not None and self._actor.use_kl_loss:
            behaviour = inputs.behaviour_logprobs if self._actor.use_bias_correction_kl else None
            kl_M1 = kl_penalty(inputs.logprobs, inputs.ref_logprobs, self._actor.kl_loss_type, mask_M1, behaviour)
            terms["kl_loss"] = (weights_M1 * kl_M1).sum()
            loss = loss + self._actor.kl_loss_coef * terms["kl_loss"]
        if self._actor.entropy_coeff > 0:  # an entropy that is not used costs no backward pass
            loss = loss - self._actor.entropy_coeff * (weights_M1 * entropy_M1).sum()
        sums = {name: value.detach().double() for name, value in {"loss": loss, **terms}.items()}
        return loss, sums | self._sums(per_token, inputs, mask_M1, columns, totals, context)

    def _proximal(self, columns: LossColumns, logprobs_M1: Tensor, context: StepContext) -> Float[Tensor, "M 1"]:
        if not self._log_linear:
            return columns.prox_logprobs
        return log_linear_prox(
            columns.logprobs,
            logprobs_M1,
            columns.versions,
            columns.mask,
            prox_version=context.version,
            version=context.version + context.progress,
        )

    @torch.no_grad()
    def _sums(
        self,
        per_token: Mapping[str, Tensor],
        inputs: LossInputs,
        mask_M1: Bool[Tensor, "M 1"],
        columns: LossColumns,
        of: BatchTotals,
        context: StepContext,
    ) -> Sums:
        """The sums that metrics come from: means over tokens, and health over all tokens and by lag."""
        current, behaviour = inputs.logprobs, inputs.behaviour_logprobs
        ratio_M1 = log_ratio(current, behaviour, mask_M1).exp()
        outside_M1 = (ratio_M1 < 1 - self._params.clip_low) | (ratio_M1 > 1 + self._params.clip_high)
        assert inputs.entropy is not None
        means = {**per_token, "entropy": inputs.entropy, "offpolicy/clip_fraction": outside_M1}
        if inputs.ref_logprobs is not None:
            means["ref_kl"] = kl_penalty(current, inputs.ref_logprobs, "k3", mask_M1)
        # Filled, not multiplied by the mask: a hole's number may be infinite, and 0 · inf is NaN.
        sums = {
            name: values_M1.double().masked_fill(~mask_M1, 0.0).sum() / max(of.tokens, 1.0)
            for name, values_M1 in means.items()
        }
        by_lag = {"clip_fraction": outside_M1, "entropy": inputs.entropy}
        by_lag |= {name: values for name, values in per_token.items() if name in BY_LAG}

        def counted(values_M1: Tensor) -> Tensor:
            values = values_M1.squeeze(1)
            return values if columns.counted is None else values.index_select(0, columns.counted)

        lags = context.version - counted(columns.versions)
        of_tokens = {name: counted(values) for name, values in by_lag.items()}
        parts = health.ratio_sums(current, behaviour, mask_M1)
        parts |= health.lag_sums(counted(current), counted(behaviour), lags, of_tokens)
        return sums | {HEALTH + name: value for name, value in parts.items()}


def _called(
    function: Callable[[LossInputs, P], tuple[Tensor, dict[str, Tensor]]],
    inputs: LossInputs,
    params: P,
    columns: LossColumns | None,
) -> tuple[Float[Tensor, "M 1"], dict[str, Tensor]]:
    """Call a loss or correction; with ``columns`` one of the user's own, with padded rows: it may look along them."""
    if columns is None:
        return function(inputs, params)
    shape, places = (len(columns.finished), columns.width), columns.places
    padded = {
        field.name: value.new_zeros(shape).flatten().index_copy(0, places, value.squeeze(1)).view(shape)
        for field in fields(inputs)
        if (value := getattr(inputs, field.name)) is not None and value.ndim == 2
    }
    rows = LossInputs(**padded, finished=columns.finished, episodes=columns.episodes)

    def flat(values: Tensor) -> Float[Tensor, "M 1"]:
        return values.expand(shape).flatten().index_select(0, places)[:, None]

    values, per_token = function(rows, params)
    return flat(values), {name: flat(of) for name, of in per_token.items()}


def _corrections(configs: Sequence[CorrectionConfig]) -> tuple[Correction, CorrectionParams] | None:
    """Combine all configured corrections; None for none. Raises `ConfigError` for parameters that make no sense."""
    built = [_correction(one) for one in configs]
    if len(built) < 2:
        return built[0] if built else None
    return product(built), built[0][1]  # a product has the parameters of each in it


def _correction(config: CorrectionConfig) -> tuple[Correction, CorrectionParams]:
    assert config.name is not None
    params = CorrectionParams(**config.model_dump(exclude={"name"}))
    if params.bound is None and params.lower is None and config.name != "off_policy_sequence_mask":
        params = replace(params, bound=DEFAULT_BOUND)
    return build_correction(config.name, params), params
