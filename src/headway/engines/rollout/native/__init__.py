"""The embedded rollout engine: continuous batching over a Hugging Face causal LM, nothing to install.

engine.py          NativeEngine: asyncio on one side, the decoding thread on the other, commands between them
native_core.py     EngineCore: commands and one step (schedule, run, postprocess), synchronous
step_admission.py  calls that start, and what they find computed
decode_batch.py    calls that decode, each in a row
model_runner.py    tensors of a step
sampler.py         tokens from logits
kv_cache.py        keys and values               prefix_cache.py    which contexts are kept where
policy_forward.py  the module as it is; recorded steps    fused_forward.py  a faster pass for the Llama family
step_attention.py  a step, and who attends to what in it

Every engine uses `engine_base`, `scheduler` and `engine_activity`; the weights and their updates are in
`headway.engines.weights.served_weights`.
"""
