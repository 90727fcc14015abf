"""The embedded rollout engine: continuous batching over a Hugging Face causal LM, nothing to install.

engine.py          NativeEngine: asyncio on one side, the decoding thread on the other (`command_queue` between them)
native_core.py     EngineCore: commands and one step, synchronous
decode_batch.py    calls that decode          step_admission.py  calls that may start
decode_rows.py     tokens of the batch        sampler.py         tokens from logits
model_runner.py    tensors of a step          prefix_sharing.py  prefills that several calls wait for
cache/             keys and values, contexts between two calls, sliding windows
model/             the module as it is, or a faster forward pass for the Llama family; recorded steps

Every engine uses `call_run`, `scheduler`, `open_calls`, `inboxes`, `randomness` and `engine_activity`; the weights and
their updates in `headway.engines.weights.served`.
"""

from headway.engines.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
