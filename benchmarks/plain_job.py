"""``python -m benchmarks.plain_job CONFIG [a.b=c …]``: the plain loop on a recipe; prints its figures as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.plain_loop import PlainLoop, PlainSettings
from headway.cluster.hardware import available_cores
from headway.config.loading import load
from headway.data.sources import build_sources
from headway.data.tasks import make_task
from headway.engines.train.fsdp.learner import learning_rate
from headway.models.pretrained import load_model
from headway.models.tokenizer import load_tokenizer


def main(path: Path, overrides: list[str]) -> None:
    config = load(path, overrides).config
    torch.set_num_threads(available_cores())
    torch.manual_seed(config.run.seed)
    model_path, task = config.model.path, config.data.task
    if model_path is None or task is None or config.rollout.total_rollout_steps is None:
        sys.exit("the plain loop needs model.path, data.task and rollout.total_rollout_steps")
    tokenizer, model = load_tokenizer(model_path), load_model(model_path, dtype=torch.float32)
    scorer = make_task(task.name, task.params, seed=config.run.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.actor.optim.lr, betas=config.actor.optim.betas, weight_decay=0.0
    )
    loop = PlainLoop(
        model,
        tokenizer,
        optimizer,
        lambda text, prompt: scorer.score(text, prompt.answer, prompt.extra),
        PlainSettings(
            n=config.rollout.n,
            max_new_tokens=config.data.max_response_length,
            micro_batch_tokens=config.actor.ppo_max_token_len_per_gpu,
            grad_clip=config.actor.grad_clip,
        ),
    )
    source, size = build_sources(config, tokenizer).train, config.actor.ppo_mini_batch_size
    steps = config.rollout.total_rollout_steps // size
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(config.actor.optim, step, steps)
        loop.step([prompt for prompt in (source.next() for _ in range(size)) if prompt is not None])
    timing = loop.timing
    figures = {
        "samples/s": timing.samples / timing.total_s,
        "tokens/s": timing.tokens / timing.total_s,
        "wall s": timing.total_s,
        "train idle": timing.generate_s / timing.total_s,
        "rollout idle": timing.train_s / timing.total_s,
        "samples": timing.samples,
        "optimizer steps": timing.steps,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
