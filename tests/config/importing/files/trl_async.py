# Keys and values of huggingface/trl, examples/scripts/async_grpo.py at f2cd57710a, in a script of our own.
from datasets import load_dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.rewards import accuracy_reward

rows = load_dataset("openai/gsm8k", "main", split="train")
rows = rows.map(lambda row: {"prompt": row["question"]}, remove_columns=rows.column_names)
NAME = "async-grpo-gsm8k"
AsyncGRPOTrainer(
    "Qwen/Qwen3-0.6B",
    reward_funcs=accuracy_reward,
    train_dataset=rows,
    args=AsyncGRPOConfig(
        chat_template_kwargs={"enable_thinking": False},
        gradient_accumulation_steps=2,
        learning_rate=1e-5,
        log_completions=True,
        max_completion_length=2**10,
        max_steps=200,
        output_dir="async_grpo_gsm8k",
        per_device_train_batch_size=16,
        project=NAME,
        report_to="trackio",
        save_strategy="no",
        trackio_space_id=f"{NAME}",
    ),
).train()
