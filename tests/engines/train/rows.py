"""Random rows, and a mini-batch's loss written out plainly: one row at a time, no padding, no chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from headway.config.schema import Config
from headway.data.packing import CollatedRow

VOCABULARY = 18


def random_rows(
    n: int, seed: int = 0, with_ref: bool = False, with_prox: bool = False, longest: int = 24
) -> list[CollatedRow]:
    """Rows of very different lengths, some with masked tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, longest))
        logprobs = (-np.log(VOCABULARY) + 0.3 * rng.standard_normal(response)).astype(np.float32)
        columns = {}
        if with_ref:
            columns["ref_logprobs"] = (logprobs + 0.1 * rng.standard_normal(response)).astype(np.float32)
        if with_prox:
            columns["prox_logprobs"] = (logprobs + 0.1 * rng.standard_normal(response)).astype(np.float32)
        rows.append(
            CollatedRow(
                input_ids=rng.integers(2, VOCABULARY, prompt + response).astype(np.int32),
                prompt_length=prompt,
                logprobs=logprobs,
                versions=np.zeros(response, dtype=np.int32),
                loss_mask=rng.random(response) < 0.9,
                columns={"advantages": rng.standard_normal(response).astype(np.float32), **columns},
            )
        )
    return rows


def with_columns(row: CollatedRow, **columns: np.ndarray) -> CollatedRow:
    return replace(row, columns={**row.columns, **columns})


def without_column(row: CollatedRow, name: str) -> CollatedRow:
    return replace(row, columns={key: value for key, value in row.columns.items() if key != name})


def response_logprobs(
    model: PreTrainedModel, row: CollatedRow, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [T] of a row, from the model's own logits, in the model's dtype."""
    logits = model(torch.from_numpy(row.input_ids.astype(np.int64))[None]).logits[0, row.prompt_length - 1 : -1]
    logp = (logits / temperature).log_softmax(-1)
    targets = torch.from_numpy(row.input_ids[row.prompt_length :].astype(np.int64))
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(-1)


def plain_loss(model: PreTrainedModel, rows: Sequence[CollatedRow], config: Config) -> torch.Tensor:
    """The mini-batch's loss by its definition."""
    actor = config.actor
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    sequences = sum(bool(row.loss_mask.any()) for row in rows)
    loss = torch.zeros((), dtype=model.dtype)
    for row in rows:
        logp, entropy = response_logprobs(model, row, config.rollout.temperature)
        mask = torch.from_numpy(row.loss_mask)
        old = torch.from_numpy(row.columns.get("prox_logprobs", row.logprobs))
        ratio = (logp - old).exp()
        advantages = torch.from_numpy(row.columns["advantages"])
        per_token = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        if config.algorithm.rollout_correction.name == "truncate":
            away = (old - torch.from_numpy(row.logprobs)).exp()
            per_token = away.clamp(max=config.algorithm.rollout_correction.bound) * per_token
        if actor.use_kl_loss:
            back = torch.from_numpy(row.columns["ref_logprobs"]) - logp
            per_token = per_token + actor.kl_loss_coef * (back.exp() - 1 - back)
        per_token = (per_token - actor.entropy_coeff * entropy)[mask]
        if len(per_token):
            mean = actor.loss_agg_mode == "seq-mean-token-mean"
            loss = loss + (per_token.mean() / sequences if mean else per_token.sum() / tokens)
    return loss
