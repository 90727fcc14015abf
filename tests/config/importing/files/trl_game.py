# Keys and values of huggingface/trl, examples/scripts/openenv/wordle.py at f2cd57710a, in a script of our own.
import argparse

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-1.7B")
parser.add_argument("--learning-rate", type=float, default=1e-6)
parser.add_argument("--gradient-accumulation-steps", type=int, default=64)
parser.add_argument("--num-generations", type=int, default=4)
parser.add_argument("--vllm-mode", choices=("colocate", "server"), default="colocate")
parser.add_argument("--vllm-server-url", default="http://localhost:8000")
args = parser.parse_args()


class WordleEnv:
    def reset(self, **kwargs: object) -> None: ...


def reward_func(environments: list[WordleEnv], **kwargs: object) -> list[float]:
    return [1.0 for _ in environments]


config = GRPOConfig(
    chat_template_kwargs={"enable_thinking": False},
    gradient_accumulation_steps=args.gradient_accumulation_steps,
    learning_rate=args.learning_rate,
    log_completions=True,
    logging_steps=1,
    max_completion_length=1024,
    num_completions_to_print=2,
    num_generations=args.num_generations,
    num_train_epochs=1,
    output_dir="outputs",
    report_to="trackio",
    trackio_space_id="wordle-grpo",
    use_vllm=True,
    vllm_mode=args.vllm_mode,
    vllm_server_base_url=args.vllm_server_url if args.vllm_mode == "server" else None,
)
trainer = GRPOTrainer(
    model=args.model,
    reward_funcs=reward_func,
    train_dataset=Dataset.from_dict({"prompt": ["play"] * 1000}),
    args=config,
    environment_factory=WordleEnv,
)
