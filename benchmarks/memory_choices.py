"""``python -m benchmarks.memory_choices``: the table of docs/training.md, what to choose for a model, by arithmetic.

For each model, number of devices and length of answers, the first setting that fits, in the order of what it costs
(`headway.config.sizing.process_memory`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from headway.config.sizing.model_shape import ModelShape
from headway.config.sizing.process_memory import PER_MACHINE, SIZES, Fit, Split, fits, room

DEVICE = 80_000_000_000
ROOM = room(DEVICE)
PROMPT = 1024
ANSWERS = (4096, 32_768)
DEVICES = (1, 8, 64)
_QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256}


def _config(family: dict[str, Any], layers: int, hidden: int, heads: int, width: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**family, **sizes, "intermediate_size": width, "tie_word_embeddings": False, **more}


EXPERTS = {"model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
MODELS = {
    "1 B": _config(_LLAMA, 16, 2048, 32, 8192, head_dim=64, tie_word_embeddings=True),
    "8 B": _config(_QWEN3, 36, 4096, 32, 12_288),
    "32 B": _config(_QWEN3, 64, 5120, 64, 25_600),
    "70 B": _config(_LLAMA, 80, 8192, 64, 28_672),
    "30 B-A3B": _config({**_QWEN3, **EXPERTS}, 48, 2048, 32, 6144, moe_intermediate_size=768),
}
"""Sizes of Llama 3.2 1B, Qwen3 8B and 32B, Llama 3.3 70B and Qwen3 30B-A3B."""


def table() -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield (
        "| model | devices | answers | placement | trains on | `actor.parallel` | saving "
        "| `ppo_max_token_len_per_gpu` | trainer GB | host GB "
        "| devices of a replica | whole answers at once |"
    )
    yield "| --- | ---: | ---: | --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for (name, config), devices, answer in product(MODELS.items(), DEVICES, ANSWERS):
        shape = ModelShape.of(config)
        assert shape is not None
        cells = [name, str(devices), f"{answer // 1024}k", *_cells(choose(shape, devices, PROMPT + answer))]
        yield f"| {' | '.join(cells)} |"


def choose(shape: ModelShape, devices: int, context: int) -> Fit | None:
    """Return the first setting that fits; None where no rank can train the model on so many devices."""
    apart = [Split(devices // 2, devices - devices // 2, SIZES)] if devices > 1 else []
    return next(fits(shape, [*apart, Split(devices, 0)], context, DEVICE), None)


def _cells(choice: Fit | None) -> list[str]:
    if choice is None:
        return ["does not fit", *[""] * 8]
    step, parallel = choice.step, choice.step.mesh.parallel
    sizes = {name: size for name, size in parallel.model_dump().items() if size > 1}
    ranks = step.mesh.ranks
    return [
        "shared" if choice.shared else "split",
        str(ranks),
        ", ".join(f"{name} {size}" for name, size in sizes.items()),
        ", ".join(["recompute"] * step.recompute + ["offload"] * step.offload),
        str(step.tokens),
        f"{choice.memory.device / 1e9:.0f}",
        f"{choice.memory.host * min(ranks, PER_MACHINE) / 1e9:.0f}",
        str(choice.replica) if choice.replica > 1 else "",
        str(choice.answers) if choice.answers else "none",
    ]


if __name__ == "__main__":
    print("\n".join(table()))
