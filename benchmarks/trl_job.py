"""``python -m benchmarks.trl_job CONFIG [a.b=c …]``: TRL's `GRPOTrainer` on a recipe; prints its figures as JSON.

Runs in the environment that ``make trl-env`` builds. Same model, prompts in the same order, answers, scorer and
optimizer steps as `benchmarks.plain_loop`, and the settings with which somebody who knows TRL would run it on a few CPU
cores; `settings` says why each.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.plain_loop import Job, tell
from headway.config.schema import Config
from headway.data.types import Prompt
from headway.engines.train.fsdp.learner import learning_rate

ROWS = 64
"""Most rows of a micro-batch. 32, 64 and 128 take the same time here. 16, nearest to the recipe, is slower
(TRL pads all rows of a step alike, to about 70 tokens)."""


class Timed(GRPOTrainer):
    """TRL's trainer with a clock around the part of a step that generates and scores."""

    generate_s = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        self.generate_s += time.perf_counter() - started
        return made


class Clock(TrainerCallback):
    """Seconds from the first prompt to the last optimizer step."""

    started = ended = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended = time.perf_counter()


def main(path: Path, overrides: list[str]) -> None:
    job = Job(path, overrides)
    prompts, optim = job.prompts, job.config.actor.optim
    check_tokens(job.tokenizer, prompts)
    done = {"samples": 0, "tokens": 0}

    def reward(completions: list[str], completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
        done["samples"] += len(completions)
        done["tokens"] += sum(map(len, completion_ids))
        return [job.score(text, prompts[r]) for text, r in zip(completions, row, strict=True)]

    clock, optimizer = Clock(), job.optimizer(fused=True)
    with tempfile.TemporaryDirectory(prefix="headway-trl-") as scratch:
        arguments = settings(job.config, scratch)
        # The recipe's warm-up to the step: that of transformers begins with a step of rate zero.
        schedule = LambdaLR(optimizer, lambda step: learning_rate(optim, step, arguments.max_steps) / optim.lr)
        trainer = Timed(
            model=job.model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": p.text, "row": row} for row, p in enumerate(prompts)]),
            processing_class=job.tokenizer,
            callbacks=[clock],
            optimizers=(optimizer, schedule),
        )
        trainer.train()
    wall_s = clock.ended - clock.started
    tell(**done, wall_s=wall_s, generate_s=trainer.generate_s, steps=trainer.state.global_step)


def settings(config: Config, scratch: str) -> GRPOConfig:
    """TRL's settings for a recipe's job: what makes it the same job first, then what makes it quick."""
    actor, rollout = config.actor, config.rollout
    assert rollout.total_rollout_steps is not None
    samples = actor.ppo_mini_batch_size * rollout.n
    rows = next(rows for rows in range(min(ROWS, samples), 0, -1) if samples % rows == 0)
    return GRPOConfig(
        output_dir=scratch,
        # The same job: n answers to each of ppo_mini_batch_size prompts a step, in the order of the data set.
        num_generations=rollout.n,
        max_completion_length=config.data.max_response_length,
        max_steps=rollout.total_rollout_steps // actor.ppo_mini_batch_size,
        shuffle_dataset=False,
        remove_unused_columns=False,  # the scorer reads the prompt's number
        # The same sampling, loss and step: a mean over tokens, advantages in units of the group's deviation, no
        # reference policy.
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        epsilon=actor.clip_ratio_low,
        epsilon_high=actor.clip_ratio_high,
        max_grad_norm=actor.grad_clip,
        seed=config.run.seed,
        # One generation batch per optimizer step, all 128 answers at once. It then is on policy, and TRL leaves out the
        # second forward pass for log-probs of the policy before the step.
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=samples // rows,
        # Static batches of transformers.generate. vLLM has no place beside training on two cores, and transformers'
        # continuous batching took 10 to 25 times as long to generate here.
        use_vllm=False,
        use_transformers_continuous_batching=False,
        # On a CPU: float32, as all contenders, and no activation computed twice (TRL's default saves memory, of which
        # there is plenty).
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        # Nothing on the side.
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def check_tokens(tokenizer: Any, prompts: list[Prompt]) -> None:
    """End the job where TRL, which tokenises the text again, would read other prompts than the other contenders."""
    again = tokenizer(text=[prompt.text for prompt in prompts])["input_ids"]
    for prompt, ids in zip(prompts, again, strict=True):
        if list(prompt.token_ids) != ids:
            sys.exit(f"TRL would read {prompt.text!r} as {ids}, the others as {list(prompt.token_ids)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
