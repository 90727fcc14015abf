"""What engines are measured against: a plain forward, distributions in float64, and a test of whether they agree.

Shape suffixes: P prompt, T response, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from headway.data.interfaces.rollout import SamplingParams
from tests.engines.contract.harness import Answer, Replica, text_of
from tests.engines.rollout.support import logits_behind

Ids = tuple[int, ...]

# ------------------------------------------------------------------------------------------ forward


def next_logits(model: PreTrainedModel, contexts: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """[contexts, V] logits of what follows contexts of one length."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(contexts, dtype=torch.int64)).logits[:, -1]
    return logits.double().numpy()


def all_logits(model: PreTrainedModel, answers: Sequence[Answer]) -> list[NDArray[np.float64]]:
    """[T, V] logits that each token of an answer was sampled from, of all ``answers``."""
    pairs = [(answer.prompt, answer.tokens.ids) for answer in answers]
    return [logits.double().numpy() for logits in logits_behind(model, pairs)]


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def forward_logprobs(model: PreTrainedModel, answers: Sequence[Answer]) -> list[NDArray[np.float64]]:
    """[T] of each answer, unfiltered at temperature 1."""
    return [
        log_softmax(logits)[np.arange(answer.length), answer.tokens.ids]
        for logits, answer in zip(all_logits(model, answers), answers, strict=True)
    ]


def across(models: Sequence[PreTrainedModel], answer: Answer) -> NDArray[np.float64]:
    """[T] log-probs where each of ``models``, one for each span of versions, went on with the old keys and values."""
    prompt, ids = answer.prompt, answer.tokens.ids
    whole = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))[None]
    # What new weights compute first is the last token that the old ones sampled.
    switches = [start for start, _ in answer.done.version_spans[1:]]
    ends = [len(prompt) + switch - 1 for switch in switches] + [whole.shape[1]]
    cache, start, logits = DynamicCache(), 0, []
    with torch.no_grad():
        for model, end in zip(models, ends, strict=True):
            logits.append(model(input_ids=whole[:, start:end], past_key_values=cache).logits[0])
            start = end
    logprobs = log_softmax(torch.cat(logits)[len(prompt) - 1 : -1].double().numpy())
    return logprobs[np.arange(len(ids)), ids]


def assert_logprobs(replica: Replica, answers: Iterable[Answer], tolerance: float) -> None:
    """Every token's log-prob is that of its version's model over the whole sequence before it."""
    answers = list(answers)
    for answer in answers:
        tokens = answer.tokens
        assert len(tokens.ids) == len(tokens.logprobs) == len(tokens.versions) == answer.length
    for version in {version for answer in answers for version in answer.tokens.versions.tolist()}:
        own = [answer for answer in answers if version in answer.tokens.versions]
        for answer, expected in zip(own, forward_logprobs(replica.model(version), own), strict=True):
            mine = answer.tokens.versions == version
            np.testing.assert_allclose(answer.tokens.logprobs[mine], expected[mine], atol=tolerance, rtol=0)


# ------------------------------------------------------------------------------------------ distributions

ORDER = ("bias", "minimum", "penalty", "temperature", "min_p", "top_k", "top_p")
"""Of what is done to logits: see `SamplingParams`."""


def distribution(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    written: Sequence[int],
    order: Sequence[str] = ORDER,
) -> list[float]:
    """[V] probabilities of the next token, one step of ``order`` after another, in scalar float64."""
    scores = [float(x) for x in logits]
    for step in order:
        scores = _STEPS[step](scores, params, prompt, written)
    return _softmax(scores)


def _softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(x - top) for x in scores]
    total = math.fsum(weights)
    return [w / total for w in weights]


def _bias(scores: list[float], params: SamplingParams, _: Sequence[int], __: Sequence[int]) -> list[float]:
    for token, bias in params.logit_bias:
        scores[token] += bias
    return scores


def _minimum(scores: list[float], params: SamplingParams, _: Sequence[int], written: Sequence[int]) -> list[float]:
    if len(written) < params.min_tokens:
        for token in params.stop_token_ids:
            scores[token] = -math.inf
    return scores


def _penalty(scores: list[float], params: SamplingParams, prompt: Sequence[int], written: Sequence[int]) -> list[float]:
    by = params.repetition_penalty
    for token in {*prompt, *written}:
        scores[token] = scores[token] / by if scores[token] > 0 else scores[token] * by
    return scores


def _temperature(scores: list[float], params: SamplingParams, _: Sequence[int], __: Sequence[int]) -> list[float]:
    return [x / (params.temperature or 1.0) for x in scores]


def _min_p(scores: list[float], params: SamplingParams, _: Sequence[int], __: Sequence[int]) -> list[float]:
    if params.temperature == 0:
        return scores
    probs = _softmax(scores)
    least = params.min_p * max(probs)
    return [x if p >= least else -math.inf for x, p in zip(scores, probs, strict=True)]


def _top_k(scores: list[float], params: SamplingParams, _: Sequence[int], __: Sequence[int]) -> list[float]:
    if params.top_k == 0 or params.temperature == 0:
        return scores
    kept = set(sorted(range(len(scores)), key=lambda i: -scores[i])[: params.top_k])
    return [x if i in kept else -math.inf for i, x in enumerate(scores)]


def _top_p(scores: list[float], params: SamplingParams, _: Sequence[int], __: Sequence[int]) -> list[float]:
    if params.top_p == 1 or params.temperature == 0:
        return scores
    probs = _softmax(scores)
    kept, mass = set(), 0.0
    for i in sorted(range(len(scores)), key=lambda i: -probs[i]):
        if mass >= params.top_p:
            break
        kept.add(i)
        mass += probs[i]
    return [x if i in kept else -math.inf for i, x in enumerate(scores)]


_STEPS = {
    "bias": _bias,
    "minimum": _minimum,
    "penalty": _penalty,
    "temperature": _temperature,
    "min_p": _min_p,
    "top_k": _top_k,
    "top_p": _top_p,
}


def ends_with(ids: Sequence[int], params: SamplingParams) -> bool:
    """Whether the last of ``ids`` ends the answer by itself."""
    if ids[-1] in params.stop_token_ids:
        return True
    text, old = text_of(ids), len(text_of(ids[:-1]))
    completed = any(text.find(stop, max(0, old - len(stop) + 1)) >= 0 for stop in params.stop)
    return completed and len(ids) > params.min_tokens


def answers_of_two(
    model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams, order: Sequence[str] = ORDER
) -> dict[Ids, float]:
    """The probability of every answer of at most two tokens."""
    prompt = [int(i) for i in prompt]
    first = distribution(next_logits(model, [prompt])[0].tolist(), params, prompt, (), order)
    second = next_logits(model, [[*prompt, token] for token in range(len(first))]).tolist()
    answers: dict[Ids, float] = {}
    for token, p in enumerate(first):
        if ends_with((token,), params):
            answers[token,] = p
        elif p > 0:
            for following, q in enumerate(distribution(second[token], params, prompt, (token,), order)):
                answers[token, following] = p * q
    return answers


# ------------------------------------------------------------------------------------------ χ²

ENOUGH = 5.0
"""Answers to be expected in a cell; rarer ones share one (Cochran's rule)."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Pearson's χ² of counts against probabilities."""

    statistic: float
    degrees: int

    @property
    def p(self) -> float:
        """Of a statistic at least this large, if the probabilities are right."""
        halves = torch.tensor([self.degrees / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(halves[0], halves[1]))


def fit(counts: Counter[Ids], probabilities: Mapping[Ids, float]) -> Fit:
    """Infinite where something came that cannot."""
    total = counts.total()
    if any(probabilities.get(cell, 0.0) == 0 for cell in counts):
        return Fit(math.inf, 1)
    cells = [(counts[cell], total * p) for cell, p in probabilities.items() if total * p >= ENOUGH]
    rest = total * math.fsum(p for p in probabilities.values() if total * p < ENOUGH)
    others = total - sum(count for count, _ in cells)
    if rest >= ENOUGH:
        cells.append((others, rest))
    else:  # with the rarest of the others
        cells.sort(key=lambda cell: cell[1])
        cells[0] = (cells[0][0] + others, cells[0][1] + rest)
    return Fit(math.fsum((count - ideal) ** 2 / ideal for count, ideal in cells), max(len(cells) - 1, 1))
