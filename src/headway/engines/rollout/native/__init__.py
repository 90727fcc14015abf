"""The embedded rollout engine: continuous batching over a Hugging Face causal LM. Needs no further package.

engine.py          NativeEngine: asyncio on one side, the decoding thread on the other, commands between them
native_core.py     EngineCore: commands and one step (schedule, run, postprocess), synchronous
step_admission.py  calls that start, and the contexts that they need not prefill
decode_batch.py    calls that decode, each in a row
model_runner.py    tensors of a step
sampler.py         tokens from logits
kv_cache.py        keys and values               prefix_cache.py    which blocks hold which contexts
policy_forward.py  the unchanged module; recorded steps   fused_forward.py  a faster pass for the Llama family
step_attention.py  attention and masks of a step

Every engine uses `engine_base`, `scheduler` and `engine_activity`; the weights and their updates are in
`headway.engines.weights.served_weights`.
"""
