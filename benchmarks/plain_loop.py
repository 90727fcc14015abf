"""What a user would write first, written well: a synchronous GRPO loop over ``transformers.generate``.

One generation batch per optimizer step (all prompts of the step, sorted by length so that padding is short), then the
same loss on micro-batches of the same token budget. On-policy with one step per batch, so the PPO ratio is 1 and no
second forward pass is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headway.data.collate import token_budget_batches
from headway.data.types import Prompt

Score = Callable[[str, Prompt], float]


@dataclass(slots=True)
class Timing:
    generate_s: float = 0.0
    train_s: float = 0.0
    samples: int = 0
    tokens: int = 0
    steps: int = 0

    @property
    def total_s(self) -> float:
        return self.generate_s + self.train_s


@dataclass(frozen=True, slots=True)
class PlainSettings:
    n: int
    max_new_tokens: int
    micro_batch_tokens: int
    grad_clip: float


class PlainLoop:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: torch.optim.Optimizer,
        score: Score,
        settings: PlainSettings,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.optimizer = optimizer
        self.score = score
        self.settings = settings
        self.timing = Timing()

    def step(self, prompts: Sequence[Prompt]) -> float:
        """Generate ``n`` answers to each prompt, score them, make one optimizer step. Returns the mean reward."""
        started = time.perf_counter()
        prompts = sorted(prompts, key=lambda p: len(p.token_ids))
        sequences, prompt_lengths = self._generate(prompts)
        rewards = self._score(prompts, sequences, prompt_lengths)
        generated = time.perf_counter()
        std, mean = torch.std_mean(rewards, dim=1, keepdim=True)
        advantages = ((rewards - mean) / (std + 1e-6)).flatten()
        self._train(sequences, prompt_lengths, advantages)
        self.timing.generate_s += generated - started
        self.timing.train_s += time.perf_counter() - generated
        self.timing.samples += len(sequences)
        self.timing.tokens += sum(len(s) - p for s, p in zip(sequences, prompt_lengths, strict=True))
        self.timing.steps += 1
        return float(rewards.mean())

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Prompt]) -> tuple[list[torch.Tensor], list[int]]:
        """Unpadded sequences, n per prompt in order, and their prompts' lengths."""
        self.model.eval()
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        ids = [torch.from_numpy(p.token_ids).long() for p in prompts]
        batch = pad_sequence([i.flip(0) for i in ids], batch_first=True, padding_value=pad).flip(1)
        mask = pad_sequence([torch.ones_like(i) for i in ids], batch_first=True).flip(1)
        out = self.model.generate(
            batch,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=self.settings.n,
            max_new_tokens=self.settings.max_new_tokens,
            pad_token_id=pad,
            eos_token_id=eos,
        )
        width = batch.shape[1]
        sequences, lengths = [], []
        for row, sequence in enumerate(out):
            prompt = ids[row // self.settings.n]
            response = sequence[width:]
            ends = (response == eos).nonzero()
            response = response[: int(ends[0]) + 1] if len(ends) else response
            sequences.append(torch.cat([prompt, response]))
            lengths.append(len(prompt))
        return sequences, lengths

    def _score(self, prompts: Sequence[Prompt], sequences: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
        """[prompts, n] rewards."""
        texts = self.tokenizer.batch_decode(
            [s[p:] for s, p in zip(sequences, lengths, strict=True)], skip_special_tokens=True
        )
        n = self.settings.n
        scores = [self.score(text, prompts[i // n]) for i, text in enumerate(texts)]
        return torch.tensor(scores).view(len(prompts), n)

    def _train(self, sequences: list[torch.Tensor], prompt_lengths: list[int], advantages: torch.Tensor) -> None:
        self.model.train()
        total = sum(len(s) - p for s, p in zip(sequences, prompt_lengths, strict=True))
        for rows in token_budget_batches([len(s) for s in sequences], self.settings.micro_batch_tokens):
            ids = pad_sequence([sequences[r] for r in rows], batch_first=True)
            lengths = torch.tensor([len(sequences[r]) for r in rows])
            prompts = torch.tensor([prompt_lengths[r] for r in rows])
            position = torch.arange(ids.shape[1] - 1)
            valid = (position >= prompts[:, None] - 1) & (position < lengths[:, None] - 1)
            logits = self.model(ids, use_cache=False).logits[:, :-1][valid]
            logprobs = -torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][valid], reduction="none")
            advantage = advantages[rows][:, None].expand_as(valid)[valid]
            loss = -((logprobs - logprobs.detach()).exp() * advantage).sum() / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
