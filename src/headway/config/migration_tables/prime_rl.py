"""prime-rl: ``rl.toml``, or the files of its trainer, orchestrator and inference server, without their sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.config.migration_tables.table_rows import (
    LORA,
    REPLICA_SIZE,
    Given,
    Project,
    TableRow,
    Translated,
    always,
    differs,
    file_name,
    groups,
    no,
    number,
    off,
    other,
    path,
    same,
    several,
    taken,
    whole,
)
from headway.config.migration_tables.table_rows import without as lost

GROUP_SIZES = (
    *("orchestrator.group_size", "orchestrator.rollouts_per_example"),
    *("orchestrator.train.source.group_size", "orchestrator.train.env.group_size"),
)
"""Settings that say how many answers a problem gets; the first one that is given counts."""
LOSSES: Mapping[Any, str] = {"default": "dppo_tv", "dppo": "dppo_tv", "gspo": "gspo", "cispo": "cispo"}
ENGINE = "the inference server"
"""Name of the setting that says which engine answers: prime-rl has vLLM alone."""


def n(given: Given) -> int:
    for key in GROUP_SIZES:
        if key in given:
            return whole(given[key], given)
    return 1


def mini(given: Given) -> int:
    return max(1, whole(given["orchestrator.batch_size"], given) // n(given))


def batch(value: Any, given: Given) -> Translated:
    size = mini(given)
    return other(
        {"actor.ppo_mini_batch_size": size}, f"{value} rollouts / {n(given)} of a problem = {size} prompts a step"
    )


def steps(value: Any, given: Given) -> Translated:
    size = mini(given)
    return groups(whole(value, given) * size, size, f"{value} steps of {size} prompts, in prompts")


def total_length(given: Given) -> int:
    """Return the tokens of prompt and answer together: the orchestrator's bound, within the engine's context."""
    own = given.get("orchestrator.seq_len") or given.get("seq_len") or given.get("trainer.model.seq_len")
    contexts = [whole(given[key], given) for key in given if key.endswith("max_model_len") and given[key]]
    return min([whole(own or given.get("model.seq_len") or min(contexts, default=2048), given), *contexts])


def micro_batch(given: Given) -> int:
    """Return the tokens of a micro-batch: the trainer's length, no shorter than an episode."""
    own = given.get("trainer.model.seq_len") or given.get("model.seq_len") or given.get("seq_len")
    return max(whole(own or 2048, given), total_length(given))


def trained_length(value: Any, given: Given) -> Translated:
    if any(given.get(key) for key in ("orchestrator.seq_len", "seq_len")):
        return other({"actor.ppo_max_token_len_per_gpu": micro_batch(given)}, "tokens of a micro-batch there, too")
    return length(value, given)


def context(value: Any, given: Given) -> Translated:
    if value is None:
        return taken(note="not given, here either")
    if any(given.get(key) for key in ("orchestrator.seq_len", "seq_len", "trainer.model.seq_len", "model.seq_len")):
        return other({}, f"in the lengths of prompt and answer, together {total_length(given)}")
    return length(value, given)


def length(value: Any, given: Given) -> Translated:
    """Divide the length of a sequence between prompt and answer."""
    total, answer = total_length(given), given.get("orchestrator.train.sampling.max_completion_tokens")
    answer = (
        answer
        or given.get("orchestrator.sampling.max_tokens")
        or given.get("orchestrator.sampling.max_completion_tokens")
    )
    values = {"actor.ppo_max_token_len_per_gpu": micro_batch(given)}
    if answer is not None and whole(answer, given) < total:
        prompt = total - whole(answer, given)
        return other(
            values | {"data.max_prompt_length": prompt}, "the tokens of a micro-batch, and of prompt and answer"
        )
    response = total - min(512, total // 2)
    values |= {"data.max_prompt_length": total - response, "data.max_response_length": response}
    return other(values, "the tokens of a micro-batch, and of prompt and answer, divided by guess")


def answer(value: Any, given: Given) -> Translated:
    total, length = total_length(given), whole(value, given)
    if length >= total:
        return other({}, f"no shorter than seq_len={total}, which bounds prompt and answer together: that holds")
    return taken({"data.max_response_length": length}, "tokens of a turn; of several turns together here")


def off_policy(value: Any, given: Given) -> Translated:
    lag = whole(value, given)
    ahead = next((whole(given[key], given) for key in given if key.endswith("async_level")), min(lag, 1))
    if lag == 0 or ahead == 0:
        return other({"mode": "on_policy"}, "modes are sets of values here; nothing runs ahead")
    return other(
        {
            "mode": "async_partial",
            "async_training.trigger_parameter_sync_step": 1,
            "async_training.staleness_threshold": ahead,
            "async_training.order": "ready",
            "async_training.max_lag": lag,
            "async_training.on_overdue": "drop",
        },
        "older groups are dropped; how far generation runs ahead is η: max_async_level, or one version without it",
    )


def async_level(value: Any, given: Given) -> Translated:
    eta, lag = whole(value, given), given.get("orchestrator.max_off_policy_steps")
    if eta == 0 or lag == 0:
        return other({"mode": "on_policy"}, "modes are sets of values here; nothing runs ahead")
    if lag is not None:
        return taken({"async_training.staleness_threshold": eta}, "steps that inference may be behind")
    return other(
        {"mode": "async_partial", "async_training.trigger_parameter_sync_step": 1}
        | {"async_training.staleness_threshold": eta},
        "steps that inference may be behind, in versions that generation may run ahead (docs/staleness.md)",
    )


def algorithm(value: Any, given: Given) -> Translated:
    if value in ("grpo", "max_rl"):
        name = {"grpo": "dr_grpo", "max_rl": "maxrl"}[value]
        return other({"algorithm.adv_estimator": name}, "its advantage is the reward less the group's mean")
    return lost(f"Headway has no {value}: neither teachers, nor losses on what an environment says")


def loss(value: Any, given: Given) -> Translated:
    if value in LOSSES:
        mode = {"algorithm.policy_loss.loss_mode": LOSSES[value]}
        tau = number(given.get("trainer.loss.kl_tau", 1e-3), given)
        lost_term = f"; its KL to the policy that sampled, kl_tau={tau:g}, is not there" if tau else ""
        return taken(mode) if value == LOSSES[value] else other(mode, f"it masks tokens by probability{lost_term}")
    return lost(f"there is no loss {value}; choose one (docs/algorithms), or write it (docs/your-own.md)")


def optimizer(value: Any, given: Given) -> Translated:
    if value in ("adamw", "adam"):
        return taken(note="always so here: AdamW over float32 master weights")
    return lost(f"there is AdamW alone; its learning rate is another than that of {value}")


def checkpointing(value: Any, given: Given) -> Translated:
    return taken({"model.enable_gradient_checkpointing": value is not None})


def every(here: str) -> TableRow:
    return same(here, lambda value, given: taken() if value is None else taken({here: whole(value, given)}, "versions"))


def wandb(value: Any, given: Given) -> Translated:
    return taken({"reports.trackers": ["wandb"]})


def wandb_and(here: str) -> TableRow:
    def convert(value: Any, given: Given) -> Translated:
        if value is None:
            return taken(note="not given, here either")
        return taken({"reports.trackers": ["wandb"], here: file_name(value, given)})

    return same(here, convert)


def lower_min(value: Any, given: Given) -> Any:
    rate = number(given.get("trainer.optim.lr", 1e-6), given)
    return other({"actor.optim.min_lr_ratio": min(1.0, number(value, given) / rate)}, "as a share of the learning rate")


def gpus(role: str) -> TableRow:
    return differs(
        f"{role}.n_gpus_per_node",
        "devices of a list",
        lambda value, given: len(value) if isinstance(value, list) else whole(value, given),
    )


def replicas(value: Any, given: Given) -> Translated:
    size = next((whole(given[key], given) for key in given if key.endswith(("parallel.tp", "tensor_parallel_size"))), 1)
    return other({"rollout.n_gpus_per_node": whole(value, given) * size}, f"devices of {value} engines of {size} each")


def nodes(role: str) -> TableRow:
    def convert(value: Any, given: Given) -> Translated:
        if value is None:
            return taken(note="not given, here either")
        nodes = whole(value, given)
        if role == "rollout":
            nodes *= whole(given.get("deployment.num_infer_replicas", 1), given)
        per_node = whole(given.get("deployment.gpus_per_node", 8), given)
        return taken({f"{role}.nnodes": nodes, f"{role}.n_gpus_per_node": per_node})

    return same(f"{role}.nnodes", convert)


def one(here: str) -> TableRow:
    """Make the row of a dimension of the mesh, whose ``auto`` Headway lacks."""

    def convert(value: Any, given: Given) -> Translated:
        if value == "auto":
            return lost(f"choose {here} for a mixture of experts; 1 otherwise")
        return taken({here: whole(value, given)})

    return same(here, convert)


def defaults(given: Given) -> dict[str, Any]:
    """Return prime-rl's defaults where they are not Headway's."""
    values: dict[str, Any] = {
        ENGINE: "vllm",
        "orchestrator.batch_size": 128,
        "orchestrator.algo.type": "grpo",
        "trainer.loss.type": "default",
        "trainer.optim.weight_decay": 0.01,
        "trainer.model.ac": {},
    }
    if any(key.startswith("orchestrator.eval.") for key in given):
        values["orchestrator.eval.sampling.temperature"] = 1.0
    if not any(key in given for key in GROUP_SIZES):
        values["orchestrator.group_size"] = 1
    if not any(key.endswith(("max_async_level", "async_level")) for key in given):
        values["orchestrator.max_off_policy_steps"] = 8
    if not any(key.endswith("ckpt.interval") for key in given):
        values["ckpt.interval"] = -1
    return values


SECTIONS = ("", "trainer.", "orchestrator.", "inference.")
"""Beginnings that the keys of one file may lack: those of a whole run, or of one process."""
ENVIRONMENT = (
    "an environment of verifiers plays and scores unmodified: agent.client=recipes/agents/verifiers_agent.py:run with "
    "agent.params.env={taskset: {id: …}}, and rows that this file writes (docs/agents.md)"
)
SERVER = "nothing to do: replicas get weights and memory from the run (rollout.engine_kwargs takes more)"
LAUNCH = "nothing to do: Ray starts and places the processes (docs/several-machines.md)"
MODEL = "nothing to do: it is about how prime-rl computes, not about what is learned"
BUFFER = "algorithm.filter_groups.enable drops groups without a signal; there are no pools of easy and hard problems"
ROWS: Mapping[str, TableRow] = {
    # the whole run
    "model.name": same("model.path", path),
    "trainer.model.name": same("model.path", path),
    "orchestrator.model.name": same("model.path", path),
    "inference.model.name": same("model.path", path),
    "inference.vllm.model": same("model.path", path),
    "*model.trust_remote_code": same("model.trust_remote_code"),
    "max_steps": differs("rollout.total_rollout_steps", "steps in prompts", steps),
    "orchestrator.max_steps": differs("rollout.total_rollout_steps", "steps in prompts", steps),
    "trainer.max_steps": differs("rollout.total_rollout_steps", "steps in prompts", steps),
    "seq_len": differs("data.max_response_length", "prompt and answer", length),
    "orchestrator.seq_len": differs("data.max_response_length", "prompt and answer", length),
    "trainer.model.seq_len": differs("actor.ppo_max_token_len_per_gpu", "a micro-batch", trained_length),
    "model.seq_len": differs("actor.ppo_max_token_len_per_gpu", "a micro-batch", trained_length),
    "max_async_level": differs("async_training.staleness_threshold", "η", async_level),
    "*.max_async_level": differs("async_training.staleness_threshold", "η", async_level),
    "*async_level": differs("async_training.staleness_threshold", "η", async_level),
    "output_dir": same("run.dir", path),
    "*.output_dir": same("run.dir", path),
    "run.name": same("run.name", file_name),
    "*ckpt": no("nothing to do: the model is exported at the end, and trainer.save_freq writes checkpoints"),
    "*ckpt.interval": every("trainer.save_freq"),
    "*ckpt.keep_last": same("trainer.max_actor_ckpt_to_keep"),
    "*ckpt.resume_step": no("headway train --resume RUN goes on with one of Headway's runs (docs/resume.md)"),
    "*ckpt.*": no("nothing to do: checkpoints have all that a run goes on from (docs/resume.md)"),
    "*resume*": no("headway train --resume RUN goes on with one of Headway's runs (docs/resume.md)"),
    "*wandb": same("reports.trackers", wandb),
    "*wandb.project": wandb_and("reports.project"),
    "*wandb.name": wandb_and("run.name"),
    "*wandb.offline": off("set WANDB_MODE=offline (docs/trackers.md)"),
    "*wandb.*": no("nothing to do: headway show prints what was said; every version is logged (docs/trackers.md)"),
    "*monitors.prime*": no("reports.trackers names what gets the figures (docs/trackers.md)"),
    "*monitors.*": no("nothing to do: metrics.jsonl has every figure (docs/metrics.md)"),
    "*log": no("nothing to do: logs are in the run's directory"),
    "*log.*": no("nothing to do: logs are in the run's directory"),
    "*env_vars*": no("set them in the environment of headway train; agent.env gives them to user code"),
    "*weight_broadcast*": no("param_update.transport says how weights travel (docs/parameter-update.md)"),
    "*rollout_transport*": no("nothing to do: tokens travel in shared memory"),
    "*heartbeat*": no("cluster.stall_timeout_s ends a run that hangs"),
    "slurm.*": no("start Ray on the machines, and give cluster.address=auto (docs/several-machines.md)"),
    "clean*": no("nothing to do: every run has a directory of its own"),
    "bench": off("benchmarks are commands of their own (docs/benchmarks.md)"),
    "trainer_gpu_ids": gpus("trainer"),
    "inference_gpu_ids": gpus("rollout"),
    "deployment.num_train_gpus": same("trainer.n_gpus_per_node", whole),
    "deployment.num_infer_gpus": same("rollout.n_gpus_per_node", whole),
    "deployment.num_train_nodes": nodes("trainer"),
    "deployment.num_infer_nodes": nodes("rollout"),
    "deployment.*": no(LAUNCH),
    # trainer
    "trainer": no("nothing to do: the section is empty"),
    "inference": no("nothing to do: Headway starts the engines"),
    "trainer.optim.type": same("actor.optim.lr", optimizer),
    "trainer.optim.lr": same("actor.optim.lr", number),
    "trainer.optim.weight_decay": same("actor.optim.weight_decay", number),
    "trainer.optim.max_norm": same(
        "actor.grad_clip",
        lambda value, given: (
            lost("gradients are always clipped: raise actor.grad_clip") if value is None else number(value, given)
        ),
    ),
    "trainer.optim.betas1": same(
        "actor.optim.betas", lambda value, given: [number(value, given), given.get("trainer.optim.betas2", 0.999)]
    ),
    "trainer.optim.betas2": same(
        "actor.optim.betas", lambda value, given: [given.get("trainer.optim.betas1", 0.9), number(value, given)]
    ),
    **several("trainer.optim.", "momentum mu nesterov", no("nothing to do: it is of an optimizer that Headway lacks")),
    "trainer.scheduler.type": same("actor.optim.lr_scheduler_type"),
    "trainer.scheduler.warmup_steps": same("actor.optim.lr_warmup_steps", whole),
    "trainer.scheduler.min_lr": differs("actor.optim.min_lr_ratio", "a share", lower_min),
    "trainer.scheduler.*": no("nothing to do: the learning rate falls over the whole run"),
    "trainer.loss.type": differs("algorithm.policy_loss.loss_mode", "other losses", loss),
    "trainer.loss.dppo_mask_low": same("actor.clip_ratio_low", number),
    "trainer.loss.dppo_mask_high": same("actor.clip_ratio_high", number),
    "trainer.loss.kl_tau": off(
        "dppo_tv has no KL to the policy that sampled; actor.use_kl_loss is that to the reference"
    ),
    "trainer.loss.adv_tau": always(1, 1.0, note="advantages have the weight 1"),
    "trainer.loss.*": no("each loss has parameters of its own (docs/algorithms)"),
    "trainer.model.ac": same("model.enable_gradient_checkpointing", checkpointing),
    "trainer.model.ac.*": differs(
        "model.enable_gradient_checkpointing", "all layers, or none", lambda value, given: True
    ),
    "trainer.model.ac_offloading*": no("model.enable_gradient_checkpointing saves what it would move"),
    "trainer.model.fsdp_cpu_offload": same("actor.fsdp_config.param_offload"),
    "trainer.model.optim_cpu_offload": off(
        "actor.fsdp_config.param_offload moves parameters and optimizer, where memory is short"
    ),
    "trainer.model.full_offload*": off("actor.fsdp_config.param_offload moves parameters and optimizer"),
    "trainer.model.reshard_after_forward": same("actor.fsdp_config.reshard_after_forward"),
    "trainer.model.dp_replicate": same("actor.parallel.replicate", whole),
    "trainer.model.cp": same("actor.parallel.cp", whole),
    "trainer.model.cp_style": always("ulysses", note="actor.parallel.cp is Ulysses: it divides heads"),
    "trainer.model.ep": one("actor.parallel.ep"),
    "trainer.model.tp": one("actor.parallel.tp"),
    "trainer.model.*lora.*": no(LORA),
    "trainer.model.lora": no(LORA),
    "trainer.model.quantization*": off("training computes in model.dtype"),
    "trainer.model.optimization_dtype": always("float32", note="master weights are float32"),
    **several(
        "trainer.model.",
        """ac_* attn compile* conversion_dir debug.* deepep_* ep_comm_backend fp8 freeze_moe_router fused_lm_head_*
        impl index_cache.* load_using_meta log_signature moe_* reduce_dtype vlm.*""",
        no(MODEL),
    ),
    "trainer.gc*": no(MODEL),
    "trainer.enable_router_replay": off("the trainer routes tokens to experts by itself"),
    "trainer.dist_timeout_seconds": no("cluster.start_timeout_s and cluster.stall_timeout_s bound waits"),
    "trainer.recompute_logprobs": differs(
        "async_training.use_rollout_log_probs", "π_prox", lambda value, given: not value
    ),
    **several(
        "trainer.",
        """bench.* data.* enable_token_export experimental.* file_monitor.* matmul_precision max_concurrent_runs
        memory_profiler_path metrics_server.* profile_path tokenizer.* toml_files trace_path""",
        no(MODEL),
    ),
    **several("", "data.fake.* data.num_workers", no("nothing to do: rollouts come from the environments")),
    "dist_timeout_seconds": no("cluster.start_timeout_s and cluster.stall_timeout_s bound waits"),
    "model.vlm.*": no("Headway trains on text"),
    # orchestrator
    "orchestrator.batch_size": differs("actor.ppo_mini_batch_size", "rollouts", batch),
    "orchestrator.group_size": same("rollout.n", whole),
    "orchestrator.rollouts_per_example": same("rollout.n", whole),
    "orchestrator.train.source.group_size": same("rollout.n", whole),
    "orchestrator.token_batch_size": no("steps count prompts here: give actor.ppo_mini_batch_size"),
    "orchestrator.micro_batch_size": no("nothing to do: micro-batches have actor.ppo_max_token_len_per_gpu tokens"),
    "orchestrator.oversampling_factor": no("nothing to do: η says how much is generated ahead"),
    "orchestrator.max_off_policy_steps": differs("async_training.max_lag", "what is dropped", off_policy),
    "orchestrator.concurrency.*": no(
        "nothing to do: η bounds what is in flight; rollout.max_concurrent, what a replica decodes"
    ),
    "orchestrator.max_inflight_rollouts": no("nothing to do: η bounds what is in flight"),
    "orchestrator.tasks_per_minute": off("agent.environment_processes bounds open episodes"),
    "orchestrator.mask_truncated_completions": same("algorithm.overlong_filtering"),
    "orchestrator.zero_truncated_completions": off("give an answer that was cut off its 0 in the reward function"),
    "orchestrator.sampling.temperature": same("rollout.temperature", number),
    "orchestrator.sampling.max_tokens": same("data.max_response_length", answer),
    "orchestrator.sampling.max_completion_tokens": same("data.max_response_length", answer),
    "orchestrator.sampling.min_tokens": same("rollout.min_tokens", whole),
    "orchestrator.sampling.*": no("rollout.* has sampling (docs/rollout-engines.md)"),
    "orchestrator.train.sampling.temperature": same("rollout.temperature", number),
    "orchestrator.train.sampling.max_completion_tokens": same("data.max_response_length", answer),
    "orchestrator.train.sampling.*": no(
        "rollout.* has sampling; chat templates are the model's (docs/rollout-engines.md)"
    ),
    "orchestrator.train.filter_zero_advantages": differs(
        "algorithm.filter_groups.enable",
        "filtered groups are refilled here",
        lambda value, given: taken(note="such groups have advantages of 0, and teach nothing"),
    ),
    "orchestrator.train.source.name": no("data.train[].name tells sources apart in metrics"),
    "orchestrator.train.source.ratio": no("data.train[].weight is a source's share of the prompts"),
    "orchestrator.train.source.algo.*": no("all sources are trained with one algorithm"),
    "orchestrator.train.source.curriculum.*": no(
        "algorithm.filter_groups.enable=true leaves groups of equal rewards out"
    ),
    "orchestrator.train.source.*": no(ENVIRONMENT),
    "orchestrator.train.env.group_size": same("rollout.n", whole),
    "orchestrator.train.env.name": no("data.train[].name tells sources apart in metrics"),
    "orchestrator.train.env.ratio": no("data.train[].weight is a source's share of the prompts"),
    "orchestrator.train.env.algo.*": no("all sources are trained with one algorithm"),
    "orchestrator.train.env.*": no(ENVIRONMENT),
    "orchestrator.env.*": no(ENVIRONMENT),
    "orchestrator.environment.*": no(ENVIRONMENT),
    "orchestrator.env_mix.*": no("data.train[].weight is a source's share of the prompts"),
    "orchestrator.algo.type": differs("algorithm.adv_estimator", "an estimator", algorithm),
    "orchestrator.algo.length_penalty.*": no("write it into the reward function, or take reward.overlong_buffer"),
    "orchestrator.algo.*": no("Headway has neither teachers, nor losses on what an environment says"),
    "orchestrator.advantage.*": no("algorithm.adv_estimator chooses it (docs/algorithms)"),
    "orchestrator.buffer.online_difficulty_filtering": same("algorithm.filter_groups.enable"),
    "orchestrator.buffer.seed": same("run.seed", whole),
    "orchestrator.buffer.*": no(BUFFER),
    "orchestrator.filters*": no(BUFFER),
    "orchestrator.eval.interval": every("rollout.test_freq"),
    "orchestrator.val.interval": every("rollout.test_freq"),
    "orchestrator.eval.group_size": same("rollout.val_n", whole),
    "orchestrator.eval.rollouts_per_example": same("rollout.val_n", whole),
    "orchestrator.eval.env.rollouts_per_example": same("rollout.val_n", whole),
    "orchestrator.eval.source.group_size": same("rollout.val_n", whole),
    "orchestrator.eval.env.group_size": same("rollout.val_n", whole),
    "orchestrator.eval.sampling.temperature": same("rollout.val_temperature", number),
    "orchestrator.eval.sampling.*": no("validation samples as training does, at rollout.val_temperature"),
    "orchestrator.eval.skip_first_step": off("the first version is validated"),
    "orchestrator.eval.num_examples": no("data.val_size holds so many rows of data.train out, or data.val has them"),
    "orchestrator.eval.*": no("held-out problems are data.val: rows of the same environment with other seeds"),
    "orchestrator.val.*": no("data.val_size holds so many rows of data.train out, or data.val has them"),
    "orchestrator.renderer.*": no(
        "nothing to do: the tokenizer's chat template renders, and token ids are kept as sampled"
    ),
    "orchestrator.tokenizer.*": no("the tokenizer is that of model.path"),
    "orchestrator.model.lora*": no(LORA),
    "orchestrator.client*": no("nothing to do: Headway starts the engines"),
    # inference
    "inference.vllm.tensor_parallel_size": REPLICA_SIZE,
    "inference.parallel.tp": REPLICA_SIZE,
    "inference.parallel.dp": differs("rollout.n_gpus_per_node", "replicas", replicas),
    "inference.vllm.data_parallel_size": differs("rollout.n_gpus_per_node", "replicas", replicas),
    "inference.vllm.gpu_memory_utilization": same("rollout.engine_kwargs.gpu_memory_utilization", number),
    "inference.gpu_memory_utilization": same("rollout.engine_kwargs.gpu_memory_utilization", number),
    "inference.model.enforce_eager": same("rollout.enforce_eager"),
    "inference.vllm.enforce_eager": same("rollout.enforce_eager"),
    "inference.vllm.max_num_seqs": same("rollout.max_concurrent", whole),
    "inference.*max_model_len": differs("data.max_response_length", "prompt and answer", context),
    "max_model_len": differs("data.max_response_length", "prompt and answer", context),
    "inference.*lora*": no(LORA),
    ENGINE: same("rollout.name"),
    **several(
        "inference.",
        """all2all_backend api_server_count backend_port data_parallel_* deployment.* dry_run enable_* experimental.*
        kv_cache_offload.* model.* parallel.* quantization router.* seed server.* slurm.* toml_files use_*
        vllm.* vllm_extra*""",
        no(SERVER),
    ),
}
PRIME_RL = Project(
    "prime-rl",
    ROWS,
    defaults,
    marks=(
        "orchestrator.*",
        "trainer.optim.*",
        "trainer.model.*",
        "inference.vllm.*",
        "inference.parallel.*",
        "inference_gpu_ids",
        "trainer_gpu_ids",
        "deployment.*",
        "max_async_level",
        "seq_len",
    ),
)
