"""The policy losses' sections: the settings of each loss, with defaults. ``loss_mode`` chooses one.

A loss's function in `headway.algorithms.losses` gets its section as ``params.own``: a parameter is a field here and is
read there. Facts that other settings depend on, such as whether the loss clips, are class variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from headway.config.sections.section import NonNegative, Probability, Section
from headway.runtime.user_code import names_user_code

DEFAULT = "ppo_clip"
OWN = "file.py:function"


class PolicyLossConfig(Section):
    """The policy loss, which ``loss_mode`` chooses."""

    loss_mode: str

    clips: ClassVar[bool] = True
    """True if the loss uses ``actor.clip_ratio``, ``clip_ratio_low`` and ``clip_ratio_high``."""
    weighs_behaviour: ClassVar[bool] = False
    """True if the loss itself weights by π_θ/π_behav: then neither π_prox nor a correction is needed."""
    looks_at_sequences: ClassVar[bool] = False
    """True if the loss uses whole sequences, not only single tokens."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, values: Any) -> Any:
        """Drop keys that are null: a null clears a value of an earlier file."""
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, Mapping) else values


class PpoClip(PolicyLossConfig):
    """PPO, clipped by ``actor.clip_ratio`` (docs/algorithms/ppo.md)."""

    loss_mode: Literal["ppo_clip"] = "ppo_clip"


class DualClip(PolicyLossConfig):
    """PPO with a bound on the loss for negative advantages (docs/algorithms/ppo.md)."""

    loss_mode: Literal["dual_clip"] = "dual_clip"
    clip_ratio_c: float = Field(3.0, gt=0)
    """Largest ratio that counts for negative advantages; above 1 + ``actor.clip_ratio_high``."""


class TPpo(PolicyLossConfig):
    """Truncated PPO: the last tokens of unfinished answers are left out (docs/algorithms/t-ppo.md)."""

    loss_mode: Literal["t_ppo"] = "t_ppo"
    ignore_last: NonNegative = 0
    """Number of last tokens of an unfinished answer that are left out; the doctor requires at least 1."""


class Gspo(PolicyLossConfig):
    """GSPO: the geometric mean of an answer's ratios is clipped, to ranges of about 3e-4 (docs/algorithms/gspo.md)."""

    loss_mode: Literal["gspo"] = "gspo"
    looks_at_sequences: ClassVar[bool] = True


class Gmpo(PolicyLossConfig):
    """GMPO: the geometric mean of an answer's ratios, whose logarithms are clipped (docs/algorithms/gspo.md)."""

    loss_mode: Literal["gmpo"] = "gmpo"
    looks_at_sequences: ClassVar[bool] = True


class Gpg(PolicyLossConfig):
    """The plain policy gradient, without ratio or clip (docs/algorithms/gpg.md)."""

    loss_mode: Literal["gpg"] = "gpg"
    clips: ClassVar[bool] = False


class Cispo(PolicyLossConfig):
    """CISPO: the weight is clipped, and every token keeps a gradient (docs/algorithms/cispo.md)."""

    loss_mode: Literal["cispo"] = "cispo"


class TruncatedIs(PolicyLossConfig):
    """REINFORCE with truncated importance sampling (docs/algorithms/truncated-is.md)."""

    loss_mode: Literal["truncated_is"] = "truncated_is"
    rollout_is_threshold: float = Field(2.0, gt=0)
    """Largest π_θ/π_behav that counts in full."""
    clips: ClassVar[bool] = False
    weighs_behaviour: ClassVar[bool] = True


class DppoTv(PolicyLossConfig):
    """DPPO: ``actor.clip_ratio`` is the largest total variation of a token that counts (docs/algorithms/dppo.md)."""

    loss_mode: Literal["dppo_tv"] = "dppo_tv"
    clip_ratio_c: float = Field(20.0, gt=0)
    """Largest ratio that a token is weighed by."""


class DppoKl(PolicyLossConfig):
    """DPPO with the KL divergence instead of the total variation (docs/algorithms/dppo.md)."""

    loss_mode: Literal["dppo_kl"] = "dppo_kl"
    clip_ratio_c: float = Field(20.0, gt=0)
    """Largest ratio that a token is weighed by."""


class Sapo(PolicyLossConfig):
    """SAPO: a smooth gate instead of clipping (docs/algorithms/sapo.md)."""

    loss_mode: Literal["sapo"] = "sapo"
    tau_pos: float = Field(1.0, gt=0)
    """Temperature of the gate for positive advantages."""
    tau_neg: float = Field(1.05, gt=0)
    """Temperature of the gate for other advantages. With a larger one the gate closes sooner."""
    clips: ClassVar[bool] = False


class ClipCov(PolicyLossConfig):
    """PPO without a gradient at a few tokens of high covariance (docs/algorithms/cov.md)."""

    loss_mode: Literal["clip_cov"] = "clip_cov"
    clip_cov_ratio: Probability = 0.0002
    """Share of the tokens that lose their gradient, at least one token."""
    clip_cov_lb: float = 1.0
    """Tokens lose their gradient only where their covariance is above this."""
    clip_cov_ub: float = 5.0
    """Tokens lose their gradient only where their covariance is below this."""


class KlCov(PolicyLossConfig):
    """A policy gradient with a KL penalty at the tokens of the highest covariance (docs/algorithms/cov.md)."""

    loss_mode: Literal["kl_cov"] = "kl_cov"
    kl_cov_ratio: Probability = 0.0002
    """Share of the tokens that get the penalty: those with the largest covariance, at least one token."""
    ppo_kl_coef: float = Field(1.0, ge=0)
    """Coefficient of the KL penalty."""
    clips: ClassVar[bool] = False


class OwnLoss(PolicyLossConfig):
    """The user's own loss (docs/your-own.md). All further keys are its parameters, as ``params.own.KEY``."""

    model_config = ConfigDict(extra="allow")
    looks_at_sequences: ClassVar[bool] = True

    loss_mode: str = Field(examples=[OWN])
    """The policy loss: a name (docs/algorithms), or ``file.py:function``."""

    @field_validator("loss_mode")
    @classmethod
    def _names_user_code(cls, loss_mode: str) -> str:
        if not names_user_code(loss_mode):
            raise ValueError("expected file.py:function")
        return loss_mode


def _loss_of(value: Any) -> Any:
    """Return the tag that chooses the section of a policy loss, given as a mapping or as a section."""
    # A default is a section, not a mapping.
    if not isinstance(value, Mapping):
        mode = getattr(value, "loss_mode", None)
    elif (mode := value.get("loss_mode")) is None:
        return DEFAULT
    return OWN if isinstance(mode, str) and names_user_code(mode) else mode


# By a function and tags: Field(discriminator="loss_mode") refuses models with a "before" validator, which these have.
ChosenLoss = Annotated[
    Annotated[PpoClip, Tag("ppo_clip")]
    | Annotated[DualClip, Tag("dual_clip")]
    | Annotated[TPpo, Tag("t_ppo")]
    | Annotated[Gspo, Tag("gspo")]
    | Annotated[Gmpo, Tag("gmpo")]
    | Annotated[Gpg, Tag("gpg")]
    | Annotated[Cispo, Tag("cispo")]
    | Annotated[TruncatedIs, Tag("truncated_is")]
    | Annotated[DppoTv, Tag("dppo_tv")]
    | Annotated[DppoKl, Tag("dppo_kl")]
    | Annotated[Sapo, Tag("sapo")]
    | Annotated[ClipCov, Tag("clip_cov")]
    | Annotated[KlCov, Tag("kl_cov")]
    | Annotated[OwnLoss, Tag(OWN)],
    Discriminator(_loss_of),
]
"""Section of the loss that ``loss_mode`` chooses."""


LOSSES: Mapping[str, type[PolicyLossConfig]] = MappingProxyType(
    {tag.tag: section for section, tag in map(get_args, get_args(get_args(ChosenLoss)[0])) if tag.tag != OWN}
)
"""Name of a built-in policy loss → its section."""
