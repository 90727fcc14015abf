"""The default train engine: FSDP2 on 1..n ranks, any Hugging Face causal LM."""
