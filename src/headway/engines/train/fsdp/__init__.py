"""The default train engine: FSDP2 on 1..n ranks, any Hugging Face causal LM."""

from headway.engines.train.fsdp.engine import FsdpEngine
from headway.engines.train.fsdp.policy_copies import ReferenceEngine

__all__ = ["FsdpEngine", "ReferenceEngine"]
