"""Policy losses per token, before any averaging; see `aggregation` for the averaging.

    LossInputs ─▶ policy loss ─▶ per-token losses [N, T] ─▶ · token_weights [N, T] ─▶ sum over micro-batches and ranks

| file | losses |
|---|---|
| `clipped` | ``ppo_clip`` (with clip-higher; decoupled with a correction), ``dual_clip``, ``t_ppo``, ``sapo`` |
| `clipped` | ``gspo``, ``gmpo`` (of whole answers), ``clip_cov``, ``kl_cov``, and the critic's loss |
| `policy_gradient` | ``gpg``, ``cispo``, ``truncated_is``, ``dppo_tv``, ``dppo_kl`` |
"""

from headway.algorithms.losses.base import (
    MAX_LOG_RATIO,
    POLICY_LOSSES,
    LossInputs,
    PolicyLoss,
    PolicyLossParams,
    anywhere_in_sequence,
    log_ratio,
    sequence_mean,
    sequence_sum,
)
from headway.algorithms.losses.clipped import clip_cov, dual_clip, gmpo, gspo, kl_cov, ppo_clip, sapo, t_ppo
from headway.algorithms.losses.policy_gradient import cispo, dppo_kl, dppo_tv, gpg, truncated_is

__all__ = [
    "MAX_LOG_RATIO",
    "POLICY_LOSSES",
    "LossInputs",
    "PolicyLoss",
    "PolicyLossParams",
    "anywhere_in_sequence",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dual_clip",
    "gmpo",
    "gpg",
    "gspo",
    "kl_cov",
    "log_ratio",
    "ppo_clip",
    "sapo",
    "sequence_mean",
    "sequence_sum",
    "t_ppo",
    "truncated_is",
]
