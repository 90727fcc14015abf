"""The embedded rollout engine: continuous batching over a Hugging Face causal LM, nothing to install.

engine.py     NativeEngine: asyncio on one side, the decoding thread on the other (`crossing` between them)
core.py       EngineCore: commands and one step, synchronous
batch.py      the calls that decode     admission.py  those that may start
rows.py       tokens of the batch       sampling.py   tokens from logits
runner.py     tensors of a step         cache.py      keys and values
prefixes.py   contexts that go on later, by prefix_cache.py; siblings.py: prefills that calls wait for
forward.py    the module as it is       fused.py      the Llama family, faster
windows.py    layers that see less      invariance.py whether rows are independent of each other

What serves any engine lies beside: `work`, `scheduler`, `calls`, `inboxes`, `randomness`, `activity`; the weights and
their updates in `headway.engines.weights.served`.
"""

from headway.engines.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
