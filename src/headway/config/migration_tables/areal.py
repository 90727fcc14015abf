"""AReaL: the YAML files of its examples (``actor``, ``rollout``, ``gconfig``, ``train_dataset`` …)."""

from __future__ import annotations

from collections.abc import Mapping

from headway.config.migration_tables import areal_values as of
from headway.config.migration_tables.table_rows import (
    LORA,
    Project,
    TableRow,
    always,
    choice,
    differs,
    file_name,
    like,
    no,
    number,
    off,
    path,
    same,
    several,
    taken,
    whole,
)
from headway.config.migration_tables.table_rows import without as lost

REMEMBERED = "nothing to do: the run's directory has all of it (run.dir)"
SERVER = "nothing to do: replicas get weights, dtype and memory from the run (docs/rollout-engines.md)"
SCHEDULED = "nothing to do: Ray places the processes (docs/several-machines.md)"
COMPUTES = "nothing to do: it is about how AReaL computes, not about what is learned"
LOADED = "nothing to do: rows are read as they are asked for (docs/data.md)"
OF_REFERENCE = "nothing to do: the reference is computed as the actor is, without gradients and optimizer"
OF_CRITIC = "nothing to do: the critic is computed as the actor is, and shares its memory settings"
TABLE: Mapping[str, TableRow] = {
    "experiment_name": same("run.name", file_name),
    "trial_name": same("run.name", lambda value, given: taken(note="a run's directory has its time in its name")),
    "seed": same("run.seed", whole),
    "total_train_epochs": same("data.epochs", of.epochs),
    "total_train_steps": differs("rollout.total_rollout_steps", "steps in prompts", of.steps),
    "total_train_n_seqs": no("give rollout.total_rollout_steps, in prompts"),
    "tokenizer_path": no("nothing to do: the tokenizer is that of model.path"),
    "enable_offload": same("actor.fsdp_config.param_offload"),
    "async_training": always(True, note="rollout.max_head_offpolicyness says how far generation runs ahead"),
    "dynamic_bs": same(
        "algorithm.filter_groups.enable", note="groups whose rewards are equal are filtered, and refilled"
    ),
    "workflow": no("agent.program, environment or client makes episodes (docs/agents.md)"),
    "eval_workflow": no("agent.program, environment or client makes episodes (docs/agents.md)"),
    "max_turns": no("agent.max_turns, with a program, environment or tools (docs/agents.md)"),
    "n_trajs": no("rollout.n, with a program, environment or tools (docs/agents.md)"),
    "max_tokens_per_trajectory": no("data.max_prompt_length + data.max_response_length bound a conversation"),
    "econfig.*": no("it is the environment's: give it as agent.params (docs/agents.md)"),
    "tir.*": no("agent.tools=[python] runs the model's code in the sandbox (docs/sandbox.md)"),
    "allocation_mode": differs("trainer.n_gpus_per_node", "an allocation", of.allocation_mode),
    "cluster.n_nodes": no("nothing to do: trainer.nnodes and rollout.nnodes count machines"),
    "cluster.n_gpus_per_node": no("nothing to do: trainer.n_gpus_per_node and rollout.n_gpus_per_node count devices"),
    "cluster.fileroot": no("run.dir is the run's directory; on several machines a folder that they share"),
    "cluster.*": no(SCHEDULED),
    "scheduler.*": no(SCHEDULED),
    "launcher.*": no(SCHEDULED),
    "*.experiment_name": no(REMEMBERED),
    "*.trial_name": no(REMEMBERED),
    "*.fileroot": no(REMEMBERED),
    "*.scheduling_spec*": no(SCHEDULED),
    "*.scheduling_strategy*": no(
        "nothing to do: a reference or critic is on the trainer's ranks, unless ref.nnodes is given"
    ),
    # rollout
    "rollout.backend": of.devices("rollout"),
    "rollout.max_concurrent_rollouts": no(
        "nothing to do: η bounds what is in flight; rollout.max_concurrent is what one replica decodes at once"
    ),
    "rollout.queue_size": off("⌊(1+η)·B⌋ groups are all that can be queued"),
    "rollout.consumer_batch_size": no("nothing to do: it is train_dataset.batch_size"),
    "rollout.max_head_offpolicyness": differs("async_training.staleness_threshold", "a mode", of.offpolicyness),
    "rollout.enable_rollout_tracing": no("nothing to do: headway show prints what was said (docs/samples.md)"),
    "rollout.dump_to_file": no("nothing to do: samples.jsonl has what was said (reports.samples)"),
    "rollout.check_trajectory_format": no("nothing to do: every answer is checked"),
    "rollout.request_timeout": no("agent.episode_timeout_s and cluster.stall_timeout_s bound waits"),
    "rollout.request_retries": no("agent.episode_retries says how often an episode is run again"),
    "rollout.setup_timeout": same("cluster.start_timeout_s", number),
    "rollout.agent.turn_discount": differs(
        "algorithm.turn_discount",
        "the discount from turn to turn",
        lambda value, given: taken(note="off, as here") if number(value, given) == 1 else number(value, given),
    ),
    "rollout.agent*": no("agent.client, program or environment makes episodes (docs/agents.md)"),
    "rollout.use_lora": off(LORA),
    **several(
        "rollout.",
        """_version admin_api_key api_url model pause_grace_period poll_interval provider_api_key return_routed_experts
        routing_strategy tokenizer_path schedule_policy""",
        no(SERVER),
    ),
    # sampling
    "gconfig.n_samples": same("rollout.n", whole),
    "gconfig.max_new_tokens": same("data.max_response_length", whole),
    "gconfig.min_new_tokens": same("rollout.min_tokens", whole),
    "gconfig.temperature": same("rollout.temperature", number),
    "gconfig.top_p": same("rollout.top_p", number),
    "gconfig.top_k": differs(
        "rollout.top_k",
        "0 is off",
        lambda value, given: 0 if whole(value, given) >= 10**6 else max(whole(value, given), 0),
    ),
    "gconfig.greedy": same("", of.greedy),
    "gconfig.stop": same("rollout.stop", lambda value, given: list(value or [])),
    "gconfig.max_tokens": no("nothing to do: a context is data.max_prompt_length + data.max_response_length"),
    "gconfig.lora_name": off(LORA),
    **several(
        "gconfig.",
        "frequency_penalty ignore_eos stop_token_ids use_beam_search",
        off("rollout.* has sampling (docs/rollout-engines.md)"),
    ),
    **several("", "gconfig.skip_special_tokens eval_gconfig.skip_special_tokens", no("nothing to do: ids are kept")),
    "eval_gconfig.n_samples": same("rollout.val_n", whole),
    "eval_gconfig.temperature": same("rollout.val_temperature", number),
    # actor
    "actor.backend": of.devices("trainer"),
    "actor.path": same("model.path", path),
    "actor.init_from_scratch": off("model.make makes a small model from nothing"),
    "actor.disable_dropout": no("nothing to do: dropout is off where log-probs are compared"),
    "actor.gradient_checkpointing": same("model.enable_gradient_checkpointing"),
    "actor.dtype": choice("model.dtype", {name: name for name in ("bfloat16", "float32", "auto")}),
    "actor.grad_reduce_dtype": no("nothing to do: gradients are added up in float32"),
    "actor.attn_impl": no("nothing to do: attention follows the layout of packed rows (docs/packing.md)"),
    "actor.pad_to_maximum": choice("model.packing", {False: taken(note="rows are packed"), True: "padded"}),
    "actor.enable_tree_training": choice(
        "model.packing", {True: "shared", False: taken(note="model.packing is shared")}
    ),
    "actor.mb_spec.max_tokens_per_mb": same("actor.ppo_max_token_len_per_gpu", whole),
    "actor.mb_spec.*": no("nothing to do: micro-batches are packed by tokens (docs/packing.md)"),
    "actor.optimizer.type": choice(
        "actor.optim.lr",
        {name: taken(note="AdamW over float32 master weights") for name in ("adam", "adamw", "adam_bf16")},
    ),
    "actor.optimizer.lr": same("actor.optim.lr", number),
    "actor.optimizer.weight_decay": same("actor.optim.weight_decay", number),
    "actor.optimizer.beta1": same(
        "actor.optim.betas", lambda value, given: [number(value, given), given.get("actor.optimizer.beta2", 0.999)]
    ),
    "actor.optimizer.beta2": same(
        "actor.optim.betas", lambda value, given: [given.get("actor.optimizer.beta1", 0.9), number(value, given)]
    ),
    "actor.optimizer.eps": no("nothing to do: AdamW's ε is torch's"),
    "actor.optimizer.lr_scheduler_type": choice(
        "actor.optim.lr_scheduler_type", {name: name for name in ("constant", "linear", "cosine")}
    ),
    "actor.optimizer.min_lr_ratio": same("actor.optim.min_lr_ratio", number),
    "actor.optimizer.gradient_clipping": same("actor.grad_clip", number),
    "actor.optimizer.warmup_steps_proportion": differs("actor.optim.lr_warmup_steps", "a share of the run", of.warmup),
    "actor.optimizer.offload": same("actor.fsdp_config.param_offload"),
    **several(
        "actor.optimizer.",
        "hysteresis initial_loss_scale loss_scale_window min_loss_scale",
        no("nothing to do: it is for losses in float16, which Headway has not"),
    ),
    "actor.eps_clip": same("actor.clip_ratio", number),
    "actor.eps_clip_higher": same("actor.clip_ratio_high", of.higher),
    "actor.c_clip": same("algorithm.policy_loss.clip_ratio_c", of.dual),
    "actor.m2_threshold": off("Headway has no M2PO; dppo_tv and off_policy_sequence_mask bound stale tokens, too"),
    "actor.temperature": no("nothing to do: log-probs are those of rollout.temperature"),
    "actor.reward_scaling": of.affine(1),
    "actor.reward_bias": of.affine(0),
    "actor.reward_clip": no("clip in the reward function, where rewards go beyond it"),
    "actor.overlong_reward_penalty": same("reward.overlong_buffer.enable"),
    "actor.overlong_tokens": same(
        "reward.overlong_buffer.len", lambda value, given: taken() if value is None else whole(value, given)
    ),
    "actor.overlong_penalty_factor": same(
        "reward.overlong_buffer.penalty_factor", lambda value, given: taken() if value is None else number(value, given)
    ),
    "actor.mask_no_eos_with_zero": same("algorithm.overlong_filtering"),
    "actor.discount": same("algorithm.gamma", number),
    "actor.gae_lambda": same("algorithm.lam", number),
    "actor.kl_ctl": same("algorithm.kl_ctrl.kl_coef", of.kl),
    "actor.kl_estimator": same("algorithm.kl_penalty", lambda value, given: taken(note="with kl_ctl")),
    "actor.ppo_n_minibatches": same("async_training.require_batches", of.mini_batch_count),
    "actor.recompute_logprob": same("async_training.use_rollout_log_probs", of.recompute),
    "actor.use_decoupled_loss": same("async_training.use_rollout_log_probs", of.decoupled),
    "actor.prox_logp_method": choice(
        "actor.prox_logp_method", {"recompute": "recompute", "loglinear": "loglinear", "metrics": "recompute"}
    ),
    "actor.behav_imp_weight_cap": differs("algorithm.rollout_correction.bound", "a correction", of.cap),
    "actor.behave_imp_weight_cap": differs("algorithm.rollout_correction.bound", "a correction", of.cap),
    "actor.rejection_sampling.upper": differs("algorithm.rollout_correction.bound", "a correction", of.cap),
    "actor.rejection_sampling.*": no("nothing to do: it goes with its `upper`, in algorithm.rollout_correction"),
    "actor.importance_sampling_level": same("algorithm.policy_loss.loss_mode", of.loss_of),
    "actor.use_sapo_loss": same("algorithm.policy_loss.loss_mode", of.loss_of),
    "actor.sapo_tau_pos": of.tau("tau_pos"),
    "actor.sapo_tau_neg": of.tau("tau_neg"),
    "actor.reward_norm*": differs("algorithm.adv_estimator", "an estimator", of.with_estimator),
    "actor.adv_norm*": differs("algorithm.adv_estimator", "an estimator", of.with_estimator),
    "actor.adv_norm.std_level": differs("algorithm.adv_estimator", "an estimator", of.estimator),
    "actor.group_reward_norm": differs(
        "algorithm.adv_estimator", "an estimator", lambda value, given: {True: "grpo"}.get(value, "reinforce_plus_plus")
    ),
    "actor.weight_update_mode": no("param_update.transport says how weights travel (docs/parameter-update.md)"),
    "actor.max_new_tokens": no("nothing to do: it is gconfig.max_new_tokens"),
    "actor.log_agent_stats*": no("nothing to do: metrics of episodes are always there (docs/metrics.md)"),
    "actor.use_lora": off(LORA),
    "actor.lora_*": no(LORA),
    "actor.peft_type": no(LORA),
    "actor.target_modules": no(LORA),
    "actor.fsdp.offload_params": same("actor.fsdp_config.param_offload"),
    "actor.fsdp*": no("nothing to do: FSDP2 decides it here"),
    "actor.megatron.*": no("Headway trains with FSDP2; actor.parallel divides the model (docs/your-own.md)"),
    "actor.archon.*": no("Headway trains with FSDP2; actor.parallel divides the model (docs/your-own.md)"),
    **several(
        "actor.",
        "_version admin_api_key beta is_critic log_level loss_type offload request_timeout setup_timeout use_kernels",
        no(COMPUTES),
    ),
    # further roles and servers
    "critic.optimizer.lr": same("critic.optim.lr", number),
    "critic.eps_clip": same("critic.cliprange_value", number),
    "critic.path": no(
        "nothing to do: the critic begins as a copy of model.path; algorithm.adv_estimator=gae asks for it"
    ),
    "teacher.*": no("Headway does not distil from a teacher"),
    "vllm.gpu_memory_utilization": same(
        "rollout.engine_kwargs.gpu_memory_utilization",
        lambda value, given: number(value, given) if "vllm" in of.server(given) else lost(SERVER),
    ),
    "vllm.enforce_eager": same("rollout.enforce_eager"),
    "vllm.*": no(SERVER),
    "sglang.*": no(SERVER),
    # data
    "train_dataset.path": of.dataset("train"),
    "valid_dataset.path": of.dataset("val"),
    "train_dataset.batch_size": differs("actor.ppo_mini_batch_size", "prompts of a step", of.batch),
    "train_dataset.shuffle": same("data.shuffle"),
    "train_dataset.max_length": same(
        "data.max_prompt_length", lambda value, given: taken() if value is None else whole(value, given)
    ),
    "train_dataset.type": always("rl", note="prompts with ground truths"),
    "valid_dataset.batch_size": no("nothing to do: all held-out problems are asked at once"),
    **several(
        "train_dataset.",
        "dataset_kwargs* drop_last num_dataset_workers num_workers pin_memory setup_timeout split",
        no(LOADED),
    ),
    # what runs beside
    "saver.freq_steps": of.frequency("trainer.save_freq"),
    "saver.freq_*": of.never("trainer.save_freq"),
    "saver.mode": no("nothing to do: checkpoints are written as the run goes on"),
    "evaluator.freq_steps": of.frequency("rollout.test_freq"),
    "evaluator.freq_*": of.never("rollout.test_freq"),
    "recover.mode": no("a run is resumed by headway train --resume RUN (docs/resume.md)"),
    "recover.freq_steps": no("trainer.save_freq counts versions between checkpoints, from which a run goes on"),
    "recover.*": no("trainer.save_freq counts versions between checkpoints, from which a run goes on"),
    "stats_logger.wandb.mode": of.tracker("wandb"),
    "stats_logger.wandb.project": same("reports.project", lambda value, given: taken() if not value else str(value)),
    "stats_logger.wandb.name": off("run.name names the run's directory, and so the run in trackers"),
    "stats_logger.wandb.*": no("W&B reads its own environment variables (docs/trackers.md)"),
    "stats_logger.trackio.mode": of.tracker("trackio"),
    "stats_logger.tensorboard.*": no("nothing to do: reports.trackers=[tensorboard] writes into the run's directory"),
    "stats_logger.*": off("reports.trackers names what gets the figures (docs/trackers.md)"),
    "evaluator.eval_before_train": always(True, note="the first version is validated"),
    "memory_profiler.*": no("headway ctl RUN profile profiles a run that goes on (docs/profiling.md)"),
    "perf_tracer.*": no("nothing to do: headway report draws where the time went (docs/reports.md)"),
}
ROWS: Mapping[str, TableRow] = {
    **like(TABLE, "actor.", "ref.", no(OF_REFERENCE)),
    **like(TABLE, "actor.", "critic.", no(OF_CRITIC)),
    **like(TABLE, "train_dataset.", "valid_dataset.", no(LOADED)),
    **like(TABLE, "gconfig.", "eval_gconfig.", no("validation samples as training does, at rollout.val_temperature")),
    **TABLE,
}
AREAL = Project(
    "AReaL",
    ROWS,
    of.defaults,
    marks=(
        "gconfig.*",
        "train_dataset.*",
        "rollout.max_head_offpolicyness",
        "actor.optimizer.*",
        "actor.mb_spec.*",
        "allocation_mode",
        "stats_logger.*",
        "saver.*",
        "total_train_epochs",
    ),
)
