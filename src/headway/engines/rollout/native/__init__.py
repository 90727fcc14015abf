"""The embedded rollout engine: continuous batching over a Hugging Face causal LM, nothing to install.

engine.py     NativeEngine: asyncio on one side, the decoding thread on the other
core.py       EngineCore: commands and one decode step, synchronous
scheduler.py  who decodes next          work.py     groups and trajectories
rows.py       state of the batch        sampling.py tokens from logits
runner.py     tensors of a step         cache.py    keys and values
forward.py    the module as it is       fused.py    the Llama family, faster
served.py     the model and its weights memory.py   where those are, or are not
update.py     how new ones get there    activity.py busy time, counts
"""

from headway.engines.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
