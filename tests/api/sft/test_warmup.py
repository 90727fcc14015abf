"""Supervised warm-up: into the window, back from above it, never on held-out problems."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headway.api.sft.sft_data import Example, _solution, solutions
from headway.api.sft.warmup import WarmupEvaluation, WarmupResult, warm_up
from headway.config.schema import Config, TaskConfig
from headway.config.sections.model_section import GiveUpConfig, MakeModelConfig, WarmupConfig
from headway.data.tasks import make_task
from headway.data.tokenize import PromptTokenizer
from headway.errors import ModelError
from headway.models.made_model import make_model
from headway.models.pretrained import load_model
from headway.models.tokenizer import load_tokenizer

TASK = TaskConfig(name="sort", params={"alphabet": "abc", "mean_length": 3, "min_length": 2, "max_length": 4})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return load_tokenizer(folder(tmp_path_factory.mktemp("warm-up")))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder(tmp_path)


def folder(path: Path) -> Path:
    make_model(
        MakeModelConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=32,
            vocabulary="abcdefghijklmnopqrstuvwxyz:=?",
        ),
        0,
        path / "model",
    )
    return path / "model"


def weights(path: Path) -> torch.Tensor:
    return load_file(path / "model.safetensors")["model.embed_tokens.weight"]


class Script:
    """Stands in for the evaluation: accuracies as written, and the weights that it was asked about."""

    def __init__(self, accuracies: list[float]) -> None:
        self._accuracies = iter(accuracies)
        self.weights: list[torch.Tensor] = []

    async def __call__(self, path: Path) -> float:
        self.weights.append(weights(path))
        return next(self._accuracies)


def taught(tokenizer: PreTrainedTokenizerBase, config: WarmupConfig, held_out: set[str]) -> Iterator[Example]:
    prompts = PromptTokenizer(tokenizer, "auto", 32)
    return solutions(tokenizer, prompts, TASK, config, held_out, 0)


def run(
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    accuracies: list[float],
    **settings: Any,
) -> tuple[WarmupResult, Script, list[str]]:
    script, said = Script(accuracies), list[str]()
    warmup = WarmupConfig(batch_size=4, **{"eval_every": 4, "max_steps": 20, **settings})
    config = Config.model_validate({"cluster": {"backend": "inline", "device": "cpu"}, "trainer": {"threads": 1}})
    examples = taught(tokenizer, warmup, set())
    result = asyncio.run(warm_up(model, config, warmup, examples, script, report=said.append))
    return result, script, said


def test_it_stops_at_the_first_accuracy_in_the_window(model, tokenizer) -> None:
    result, _, said = run(model, tokenizer, [0.1, 0.3, 0.45])
    assert result == WarmupResult(0.45, 12)
    assert said[-1] == "12 of at most 20 supervised steps, held-out accuracy 0.450"


def test_a_jump_over_the_window_goes_back_and_on_in_smaller_steps(model, tokenizer) -> None:
    result, script, _ = run(model, tokenizer, [0.3, 0.9, 0.5])
    assert result == WarmupResult(0.5, 4 + 4 + 1)  # a quarter of the steps between evaluations
    below, above, inside = script.weights
    assert torch.linalg.norm(inside - below) < torch.linalg.norm(above - below) / 4


@pytest.mark.slow
def test_the_window_does_not_count_before_min_steps(model, tokenizer) -> None:
    result, _, _ = run(model, tokenizer, [0.5, 0.5, 0.55], min_steps=10)
    assert result == WarmupResult(0.55, 12)


def test_the_last_weights_inside_the_window_count_where_accuracy_leaves_it_for_good(model, tokenizer) -> None:
    result, script, _ = run(model, tokenizer, [0.2, 0.5, 0.3, 0.3, 0.3], min_steps=16)
    assert result == WarmupResult(0.5, 8)
    assert torch.equal(weights(model), script.weights[1])


def test_a_window_that_is_never_reached_is_an_error_that_says_so(model, tokenizer) -> None:
    with pytest.raises(ModelError, match=r"max_steps=20 .*accuracy is 0\.200.*model\.warmup\.target"):
        run(model, tokenizer, [0.2] * 5)


def test_it_is_a_function_of_the_seed(tmp_path, tokenizer) -> None:
    models = [folder(tmp_path / attempt) for attempt in ("a", "b")]
    for model in models:
        run(model, tokenizer, [0.5])
    first, second = (load_file(model / "model.safetensors") for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_held_out_problems_are_never_trained_on(tokenizer) -> None:
    held_out = {make_task(TASK.name, TASK.params, seed=0).problem(index).prompt for index in range(0, 60, 2)}
    examples = islice(taught(tokenizer, WarmupConfig(), held_out), 32)
    trained = {tokenizer.decode(row.prompt_ids) for [row] in examples}
    assert len(trained) > 1
    assert not trained & held_out


def test_a_teacher_gives_up_on_long_answers_alone_at_the_given_rate() -> None:
    give_up, rng = GiveUpConfig(above=3, rate=0.7), random.Random(0)
    assert all(_solution("abc", give_up, rng) == "abc" for _ in range(100))
    given_up = sum(_solution("abcd", give_up, rng) == "?" for _ in range(2000))
    assert given_up == pytest.approx(1400, abs=80)
    assert _solution("abcd", None, rng) == "abcd"


def test_the_evaluation_is_greedy_accuracy_by_the_tasks_own_verifier(model, tokenizer) -> None:
    from headway.data.sources import build_sources

    config = Config.model_validate({"data": {"task": {**TASK.model_dump(), "size": 64, "val_size": 8}}})
    held_out = build_sources(config, tokenizer).val
    asked: list[None] = []
    right = asyncio.run(WarmupEvaluation(tokenizer, TASK, held_out, 0, 8, lambda: asked.append(None))(model))
    lm = load_model(str(model), dtype=torch.float32)
    by_hand = sum(greedy(lm, tokenizer, prompt.text) == prompt.answer for prompt in held_out)
    assert right == by_hand / len(held_out)
    assert len(asked) == len(held_out), "whoever leaves meanwhile waits for one answer, not for all"


def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    out = model.generate(input_ids=inputs["input_ids"], do_sample=False, max_new_tokens=8)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
