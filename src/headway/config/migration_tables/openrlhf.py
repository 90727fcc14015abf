"""OpenRLHF: the options of ``openrlhf.cli.train_ppo_ray``, with their sections or, as they were before, without."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from headway.config.migration_tables.table_rows import (
    LORA,
    PACKED,
    REPLICA_SIZE,
    REWARD_MODEL,
    Given,
    Project,
    TableRow,
    Translated,
    choice,
    differs,
    file_name,
    interval,
    no,
    number,
    off,
    other,
    path,
    same,
    taken,
    trackers,
    whole,
)
from headway.config.migration_tables.table_rows import without as lost

OF_DEEPSPEED = "nothing to do: FSDP2 shards here (docs/training.md)"
ESTIMATORS: Mapping[Any, Any] = {
    "gae": "gae",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}


DEFAULTS: Mapping[str, Any] = {
    "actor.num_gpus_per_node": 8,
    "actor.gradient_checkpointing_enable": False,
    "actor.adam.betas": [0.9, 0.95],
    "actor.lr_scheduler": "cosine_with_min_lr",
    "rollout.name": "vllm",
    "rollout.n_samples_per_prompt": 1,
    "rollout.batch_size": 1024,
    "train.batch_size": 128,
    "train.num_episodes": 1,
    "train.seed": 42,
    "train.async_enable": False,
    "data.input_key": "input",
    "eval.steps": -1,
    "algo.advantage.estimator": "gae",
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "ckpt.save_steps": -1,
    "ckpt.max_num": 3,
}
"""OpenRLHF's defaults where they are not Headway's, or where other values are made of them."""


def _prompts(given: Given) -> int:
    return whole(given["rollout.batch_size"], given)


def _mini(given: Given) -> int:
    return max(1, whole(given["train.batch_size"], given) // whole(given["rollout.n_samples_per_prompt"], given))


def _train_batch(value: Any, given: Given) -> Translated:
    return other({"actor.ppo_mini_batch_size": _mini(given)}, "it counts samples, Headway prompts")


def _rollout_batch(value: Any, given: Given) -> Translated:
    batches = max(1, _prompts(given) // _mini(given))
    note = f"prompts of a step: {batches} mini-batches of {_mini(given)}"
    return other({"async_training.require_batches": batches}, note)


def _engines(value: Any, given: Given) -> Translated:
    size = whole(given.get("vllm.tensor_parallel_size", 1), given)
    values = {"rollout.n_gpus_per_node": whole(value, given) * size}
    return taken(values, "replicas") if size == 1 else other(values, f"devices of {value} engines of {size} each")


def _asynchronous(value: Any, given: Given) -> Translated:
    return other({"mode": "async_stale" if value else "colocate_sync"}, "modes are sets of values here")


def _clip_range(value: Any, given: Given) -> Translated:
    low, high = value if isinstance(value, list) else str(value).split()
    return taken({"actor.clip_ratio_low": float(low), "actor.clip_ratio_high": float(high)})


def _remote(value: Any, given: Given) -> Translated:
    if str(value).endswith(".py"):
        return other({}, "a file with reward_func: reward.function=file.py:function, of another form (docs/rewards.md)")
    return lost("call the server in a reward function (docs/rewards.md)")


def _length(value: Any, given: Given) -> Translated:
    total, answer = whole(value, given), given.get("rollout.max_new_tokens")
    if answer is None:
        halves = {"data.max_prompt_length": total - total // 2, "data.max_response_length": total // 2}
        return other(halves, "prompt and answer together, here in halves: an answer takes what a prompt leaves there")
    length = max(1, total - whole(answer, given))
    return other({"data.max_prompt_length": length}, "prompt and answer together, less the answer")


def _dataset(value: Any, given: Given) -> Translated:
    name = str(value)
    source = path(name, given) if name.endswith((".jsonl", ".parquet")) else {"dataset": path(name, given)}
    return other({"data.train": source}, "rows as they are (docs/data.md)")


def _held_out(value: Any, given: Given) -> Translated:
    return other({"data.val": _dataset(value, given).values["data.train"]}, "rows as they are (docs/data.md)")


def _kl(value: Any, given: Given) -> Translated:
    coefficient = number(value, given)
    if coefficient == 0:
        return taken(note="off, as here")
    if given.get("algo.kl.use_loss"):
        return taken({"actor.use_kl_loss": True, "actor.kl_loss_coef": coefficient})
    return taken({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": coefficient})


def _kl_estimator(value: Any, given: Given) -> Translated:
    return taken({"actor.kl_loss_type" if given.get("algo.kl.use_loss") else "algorithm.kl_penalty": value})


def _two(value: Any, given: Given) -> list[float]:
    first, second = value if isinstance(value, list | tuple) else str(value).split()
    return [float(first), float(second)]


def _scheduler(role: str) -> TableRow:
    here = f"{role}.optim"

    def convert(value: Any, given: Given) -> Translated:
        name = str(value).removesuffix("_with_warmup").removesuffix("_with_min_lr")
        if name not in ("constant", "linear", "cosine"):
            return lost(f"choose {here}.lr_scheduler_type: constant, linear or cosine")
        lowest = {f"{here}.min_lr_ratio": number(given.get(f"{role}.min_lr_ratio", 0.1), given)}
        return other(
            {f"{here}.lr_scheduler_type": name} | (lowest if str(value).endswith("min_lr") else {}),
            f"there its warmup is {given.get(f'{role}.lr_warmup_ratio', 0.03)} of the run's optimizer steps, and none "
            f"here: give {here}.lr_warmup_steps",
        )

    return differs(f"{here}.lr_scheduler_type", "with a warmup", convert)


def _warmup(role: str) -> TableRow:
    return no(f"it needs the run's length in steps: give {role}.optim.lr_warmup_steps in optimizer steps")


def _defaults(given: Given) -> dict[str, Any]:
    """Return the defaults, of the critic where there is one, and of the lengths by the names that the file has."""
    values = dict(DEFAULTS)
    if given.get("algo.advantage.estimator", "gae") == "gae":
        values |= {
            "critic.adam.lr": 9e-6,
            "critic.adam.betas": [0.9, 0.95],
            "critic.lr_scheduler": "cosine_with_min_lr",
        }
    if "eval.dataset" in given:
        values |= {"eval.temperature": 0.6, "eval.n_samples_per_prompt": 4}
    if "data.max_len" in given:
        return values
    if "prompt_max_len" in given or any(key in BEFORE for key in given):
        return values | {"prompt_max_len": 1024, "rollout.max_new_tokens": 1024}
    return values | {"data.max_len": 2048}


def with_new_names(settings: Given) -> dict[str, Any]:
    """Return settings with those whose names have no section under their names with one, too."""
    return {BEFORE[key]: value for key, value in settings.items() if key in BEFORE} | dict(settings)


SECTIONS: Mapping[str, TableRow] = {
    "actor.model_name_or_path": same("model.path", path),
    "actor.num_nodes": same("trainer.nnodes", whole),
    "actor.num_gpus_per_node": same("trainer.n_gpus_per_node", whole),
    "actor.gradient_checkpointing_enable": same("model.enable_gradient_checkpointing"),
    "actor.adam.lr": same("actor.optim.lr", number),
    "actor.adam.betas": same("actor.optim.betas", _two),
    "actor.adam.weight_decay": same("actor.optim.weight_decay", number),
    "actor.adam.eps": no("nothing to do: AdamW's ε is torch's"),
    "actor.lr_scheduler": _scheduler("actor"),
    "actor.lr_warmup_ratio": _warmup("actor"),
    "actor.min_lr_ratio": same("actor.optim.min_lr_ratio", number),
    "actor.max_norm": same("actor.grad_clip", number),
    "actor.aux_loss_coef": off("Headway adds no auxiliary loss for routers"),
    "actor.eps_clip": same("actor.clip_ratio", number),
    "actor.eps_clip_low_high": same("actor.clip_ratio_low", _clip_range),
    "actor.dual_clip": same("algorithm.policy_loss.clip_ratio_c", number),
    "actor.entropy_coef": same("actor.entropy_coeff", lambda value, given: float(value or 0)),
    "actor.policy_loss_type": choice("algorithm.policy_loss.loss_mode", {"ppo": "ppo_clip", "gspo": "gspo"}),
    "ref.num_nodes": same("ref.nnodes", whole),
    "ref.num_gpus_per_node": same("ref.n_gpus_per_node", whole),
    "critic.num_nodes": same("critic.nnodes", whole),
    "critic.num_gpus_per_node": same("critic.n_gpus_per_node", whole),
    "critic.adam.lr": same("critic.optim.lr", number),
    "critic.adam.betas": same("critic.optim.betas", _two),
    "critic.adam.weight_decay": same("critic.optim.weight_decay", number),
    "critic.lr_scheduler": _scheduler("critic"),
    "critic.lr_warmup_ratio": _warmup("critic"),
    "critic.min_lr_ratio": same("critic.optim.min_lr_ratio", number),
    "critic.max_norm": same("critic.grad_clip", number),
    "critic.model_name_or_path": no("nothing to do: the critic begins as a copy of model.path"),
    "critic.value_clip": same("critic.cliprange_value", number),
    "vllm.num_engines": differs("rollout.n_gpus_per_node", "engines", _engines),
    "vllm.tensor_parallel_size": REPLICA_SIZE,
    "vllm.gpu_memory_utilization": same("rollout.engine_kwargs.gpu_memory_utilization", number),
    "vllm.enforce_eager": same("rollout.enforce_eager"),
    "rollout.name": same("rollout.name"),
    "rollout.n_samples_per_prompt": same("rollout.n", whole),
    "rollout.batch_size": differs("async_training.require_batches", "prompts of a step", _rollout_batch),
    "rollout.max_new_tokens": same("data.max_response_length", whole),
    "rollout.temperature": same("rollout.temperature", number),
    "rollout.top_p": same("rollout.top_p", number),
    "rollout.micro_batch_size": no("nothing to do: micro-batches have actor.ppo_max_token_len_per_gpu tokens"),
    "train.batch_size": differs("actor.ppo_mini_batch_size", "samples", _train_batch),
    "train.micro_batch_size": no("nothing to do: micro-batches have actor.ppo_max_token_len_per_gpu tokens"),
    "train.max_tokens_per_gpu": same("actor.ppo_max_token_len_per_gpu", whole),
    "train.max_epochs": same("actor.ppo_epochs", whole),
    "train.num_episodes": same("data.epochs", whole),
    "train.seed": same("run.seed", whole),
    "train.async_enable": differs("mode", "a mode", _asynchronous),
    "train.async_queue_size": differs(
        "async_training.staleness_threshold", "batches that may be queued, in versions ahead", whole
    ),
    "train.partial_rollout_enable": same(
        "async_training.on_update", lambda value, given: "interrupt" if value else taken(note="off, as here")
    ),
    "train.agent_func_path": no("agent.program, environment or client makes episodes (docs/agents.md)"),
    "data.max_len": differs("data.max_prompt_length", "prompt and answer", _length),
    "data.prompt_dataset": differs("data.train", "a source", _dataset),
    "data.input_key": same("data.prompt_key"),
    "data.label_key": same("data.answer_key"),
    "data.apply_chat_template": choice("data.chat_template", {True: "always", False: "auto"}),
    "data.max_samples": off("take split: train[:1000] of a dataset, or a smaller file (docs/data.md)"),
    "eval.dataset": differs("data.val", "a source", _held_out),
    "eval.steps": same("rollout.test_freq", interval),
    "eval.temperature": same("rollout.val_temperature", number),
    "eval.n_samples_per_prompt": same("rollout.val_n", whole),
    "algo.advantage.estimator": choice("algorithm.adv_estimator", ESTIMATORS),
    "algo.advantage.gamma": same("algorithm.gamma", number),
    "algo.advantage.lambd": same("algorithm.lam", number),
    "algo.advantage.is_correction_*": no("choose algorithm.rollout_correction (docs/algorithms/corrections.md)"),
    "algo.kl.init_coef": same("actor.kl_loss_coef", _kl),
    "algo.kl.use_loss": same("actor.use_kl_loss", lambda value, given: taken(note="with its coefficient")),
    "algo.kl.estimator": same("algorithm.kl_penalty", _kl_estimator),
    "algo.kl.target": off("the coefficient is fixed (algorithm.kl_ctrl)"),
    "algo.kl.horizon": no("nothing to do without algo.kl.target"),
    "algo.advantage.no_std_norm": off("advantages of gae and reinforce_plus_plus are divided by their deviation"),
    "algo.dynamic_filtering_enable": same("algorithm.filter_groups.enable"),
    "algo.dynamic_filtering_range": no("nothing to do: groups whose rewards are all equal are filtered"),
    "reward.remote_url": differs("reward.function", "a file or server", _remote),
    "reward.model_name_or_path": no(REWARD_MODEL),
    "reward.overlong_buffer_len": same("reward.overlong_buffer.len", whole),
    "reward.overlong_penalty_factor": same("reward.overlong_buffer.penalty_factor", number),
    "reward.clip_range": no("clip in the reward function, where rewards go beyond it"),
    "reward.normalize_enable": off("rewards are taken as they are; normalise them in the reward function"),
    "ckpt.output_dir": same("run.dir", path),
    "ckpt.save_steps": same("trainer.save_freq", interval),
    "ckpt.max_num": same("trainer.max_actor_ckpt_to_keep", whole),
    "ckpt.load_enable": no("headway train --resume RUN goes on with a run (docs/resume.md)"),
    "logger.wandb.project": same("reports.project"),
    "logger.wandb.run_name": same("run.name", file_name),
    "logger.wandb.*": same("reports.trackers", lambda value, given: trackers("wandb", given)),
    "ds.lora.*": no(LORA),
    "ds.ring_attn_size": same("actor.parallel.cp", whole),
    "ds.tensor_parallel_size": same("actor.parallel.tp", whole),
    "ds.adam_offload": differs("actor.fsdp_config.param_offload", "all of it is moved, or nothing"),
    "ds.packing_samples": choice("model.packing", {True: PACKED, False: "padded"}),
    "ds.*": no(OF_DEEPSPEED),
}

BEFORE: Mapping[str, str] = {
    "pretrain": "actor.model_name_or_path",
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "entropy_loss_coef": "actor.entropy_coef",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "rollout_batch_size": "rollout.batch_size",
    "generate_max_len": "rollout.max_new_tokens",
    "max_new_tokens": "rollout.max_new_tokens",
    "max_len": "data.max_len",
    "param_dtype": "ds.param_dtype",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "partial_rollout": "train.partial_rollout_enable",
    "prompt_data": "data.prompt_dataset",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "apply_chat_template": "data.apply_chat_template",
    "advantage_estimator": "algo.advantage.estimator",
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "kl_estimator": "algo.kl.estimator",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "remote_rm_url": "reward.remote_url",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "max_norm": "actor.max_norm",
    "aux_loss_coef": "actor.aux_loss_coef",
    "policy_loss_type": "actor.policy_loss_type",
    "value_clip": "critic.value_clip",
    "critic_pretrain": "critic.model_name_or_path",
    "enforce_eager": "vllm.enforce_eager",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "seed": "train.seed",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "agent_func_path": "train.agent_func_path",
    "max_samples": "data.max_samples",
    "eval_dataset": "eval.dataset",
    "eval_steps": "eval.steps",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "save_steps": "ckpt.save_steps",
    "max_ckpt_num": "ckpt.max_num",
    "load_checkpoint": "ckpt.load_enable",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "zero_stage": "ds.zero_stage",
    "reward_pretrain": "reward.model_name_or_path",
    "save_path": "ckpt.output_dir",
    "use_wandb": "logger.wandb.key",
    "adam_offload": "ds.adam_offload",
    "packing_samples": "ds.packing_samples",
    "ring_attn_size": "ds.ring_attn_size",
}
"""Names without a section → the same options' names with one."""


def _row(key: str) -> TableRow:
    return SECTIONS.get(key) or next(row for pattern, row in SECTIONS.items() if fnmatchcase(key, pattern))


ROWS: Mapping[str, TableRow] = {
    **SECTIONS,
    **{old: _row(new) for old, new in BEFORE.items()},
    "prompt_max_len": same("data.max_prompt_length", whole),
    "lora_*": no(LORA),
    "bf16": same("model.dtype", lambda value, given: taken({"model.dtype": "bfloat16"} if value else {})),
    **{
        pattern: no("nothing to do: it is about how OpenRLHF runs, not about what is learned")
        for pattern in (
            *("vllm*", "ref.*", "ref_*", "reward.num_*", "reward_num_*", "reward.offload", "critic_num_*"),
            *("colocate_*", "train.colocate_*", "train.dynamic_batch_enable", "train.full_determinism_enable"),
            *("rollout.max_tokens_per_gpu", "rollout.vllm_*", "data.disable_fast_tokenizer", "data.dataloader_*"),
            *("actor.gradient_checkpointing_*", "gradient_checkpointing_*", "ckpt*", "logger*", "logging_steps"),
            *("flash_attn", "attn_implementation", "deepspeed_enable_sleep", "save_hf_ckpt", "disable_*", "zpg"),
            *("enable_prefix_caching", "use_dynamic_batch", "overlap_comm", "grad_accum_dtype", "full_determinism"),
            *("rollout_max_tokens_per_gpu", "use_liger_kernel", "actor_init_on_gpu", "perf"),
        )
    },
}

OPENRLHF = Project(
    "OpenRLHF",
    ROWS,
    _defaults,
    marks=(
        "*n_samples_per_prompt",
        "*rollout_batch_size",
        "rollout.batch_size",
        "*prompt_data*",
        "ds.*",
        "algo.*",
        "pretrain",
    ),
)
