"""The default train engine: FSDP2 on 1..n ranks, any Hugging Face causal LM."""

from headway.engines.train.fsdp.column_engines import ReferenceEngine
from headway.engines.train.fsdp.engine import FsdpEngine

__all__ = ["FsdpEngine", "ReferenceEngine"]
