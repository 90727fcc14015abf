"""``python -m benchmarks.plain_loop CONFIG [a.b=c …]``: a plain loop on a recipe; prints its figures as JSON.

What a user would write first, written well: a synchronous GRPO loop over ``transformers.generate``. One generation
batch per optimizer step (all prompts of the step, sorted by length so that padding is short), then the same loss on
micro-batches of the same token budget. On-policy with one step per batch, so the PPO ratio is 1 and no second forward
pass is needed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.shapes import random_row
from benchmarks.train_sides import next_token_logprobs
from headway.cluster.machine.worker_setup import available_cores
from headway.config.loading import load
from headway.data.packing import CollatedRow, token_budget_batches
from headway.data.sources import build_sources
from headway.data.tasks import make_task
from headway.data.types import Prompt
from headway.engines.train.fsdp.learner import learning_rate
from headway.models.pretrained import load_model
from headway.models.tokenizer import load_tokenizer


class Job:
    """A recipe's model, prompts and scorer: what every contender starts from."""

    def __init__(self, path: Path, overrides: list[str]) -> None:
        self.config = config = load(path, overrides).config
        torch.set_num_threads(available_cores())
        torch.manual_seed(config.run.seed)
        model_path, task, groups = config.model.path, config.data.task, config.rollout.total_rollout_steps
        if model_path is None or task is None or groups is None:
            sys.exit("a contender needs model.path, data.task and rollout.total_rollout_steps")
        self.tokenizer, self.model = load_tokenizer(model_path), load_model(model_path, dtype=torch.float32)
        self._scorer = make_task(task.name, task.params, seed=config.run.seed)
        source = build_sources(config, self.tokenizer).train
        self.prompts = [prompt for prompt in (source.next() for _ in range(groups)) if prompt is not None]
        self.steps = groups // config.actor.ppo_mini_batch_size

    def score(self, text: str, prompt: Prompt) -> float:
        return self._scorer.score(text, prompt.answer, prompt.extra)

    def optimizer(self, **options: Any) -> torch.optim.Optimizer:
        optim = self.config.actor.optim
        return torch.optim.AdamW(self.model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=0.0, **options)


def tell(*, samples: int, tokens: int, wall_s: float, generate_s: float, steps: int) -> None:
    """Print a contender's figures, for `benchmarks.main_job`."""
    figures = {
        "samples/s": samples / wall_s,
        "tokens/s": tokens / wall_s,
        "wall s": wall_s,
        "train idle": generate_s / wall_s,
        "rollout idle": 1 - generate_s / wall_s,
        "samples": samples,
        "optimizer steps": steps,
    }
    print(json.dumps(figures))


class PlainLoop:
    def __init__(self, job: Job) -> None:
        self.job, self.model, self.tokenizer, self.n = job, job.model, job.tokenizer, job.config.rollout.n
        self.optimizer = job.optimizer()
        self.generate_s = self.train_s = 0.0
        self.samples = self.tokens = 0

    def step(self, prompts: Sequence[Prompt]) -> None:
        """Generate ``n`` answers to each prompt, score them, make one optimizer step."""
        started = time.perf_counter()
        prompts = sorted(prompts, key=lambda p: len(p.token_ids))
        answers = self._generate(prompts)
        of = [prompts[row // self.n] for row in range(len(answers))]
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        rewards = torch.tensor([self.job.score(text, prompt) for text, prompt in zip(texts, of, strict=True)])
        std, mean = torch.std_mean(rewards.view(-1, self.n), dim=1, keepdim=True)
        advantages = ((rewards.view(-1, self.n) - mean) / (std + 1e-6)).flatten().tolist()
        generated = time.perf_counter()
        given = zip(of, answers, advantages, strict=True)
        self._train([random_row(p.token_ids, answer.numpy(), advantage) for p, answer, advantage in given])
        self.generate_s += generated - started
        self.train_s += time.perf_counter() - generated
        self.samples += len(answers)
        self.tokens += sum(map(len, answers))

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        """Answers up to and with the end of sequence, n per prompt in order."""
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
            num_return_sequences=self.n,
            max_new_tokens=self.job.config.data.max_response_length,
            pad_token_id=pad,
            eos_token_id=eos,
        )
        answers = []
        for response in out[:, batch.shape[1] :]:
            ends = (response == eos).nonzero()
            answers.append(response[: int(ends[0]) + 1] if len(ends) else response)
        return answers

    def _train(self, rows: Sequence[CollatedRow]) -> None:
        self.model.train()
        actor, total = self.job.config.actor, sum(len(row.logprobs) for row in rows)
        for batch in token_budget_batches([len(row.input_ids) for row in rows], actor.ppo_max_token_len_per_gpu):
            logprobs = next_token_logprobs(self.model, [rows[i] for i in batch])
            advantages = torch.cat([torch.from_numpy(rows[i].columns["advantages"]) for i in batch])
            (-((logprobs - logprobs.detach()).exp() * advantages).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), actor.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main(path: Path, overrides: list[str]) -> None:
    job = Job(path, overrides)
    loop, optim, size = PlainLoop(job), job.config.actor.optim, job.config.actor.ppo_mini_batch_size
    for step in range(job.steps):
        loop.optimizer.param_groups[0]["lr"] = learning_rate(optim, step, job.steps)
        loop.step(job.prompts[step * size : (step + 1) * size])
    wall_s = loop.generate_s + loop.train_s
    tell(samples=loop.samples, tokens=loop.tokens, wall_s=wall_s, generate_s=loop.generate_s, steps=job.steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
