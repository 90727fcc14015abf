"""verl: PPO and GRPO (`main_ppo`), one step off policy, fully asynchronous. Keys stand without ``actor_rollout_ref.``.

The same trainer reads different keys in each of its programs, so the program is a setting, too: `verl_values.PROGRAM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.config.migration_tables import verl_values as of
from headway.config.migration_tables.table_rows import (
    LORA,
    PACKED,
    REPLICA_SIZE,
    REWARD_MODEL,
    Project,
    TableRow,
    always,
    choice,
    differs,
    file_name,
    interval,
    like,
    no,
    number,
    off,
    other,
    path,
    reward_file,
    same,
    several,
    taken,
    trackers,
    whole,
)

KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_LOSS = KL | {"kl+": "k1+", "k1+": "k1+", "abs+": "abs+", "low_var_kl+": "k3+", "k3+": "k3+"}
ESTIMATORS: Mapping[str, Any] = {
    name: name
    for name in (
        *("gae", "grpo", "rloo", "opo", "remax", "grpo_passk", "gigpo"),
        *("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    )
} | {
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
    "gpg": other({"algorithm.adv_estimator": "dr_grpo"}, "GPG's advantage is the reward less the group's mean"),
}
OF_FSDP = "nothing to do: FSDP2 decides it here"
OF_VLLM = "nothing to do: vLLM decides it; rollout.engine_kwargs takes further arguments"
COMPUTES = "nothing to do: it is about how verl computes, not about what is learned"
OF_OPTIMIZER = "nothing to do: AdamW over float32 master weights"
OF_REFERENCE = "nothing to do: the reference is computed as the actor is, without gradients and optimizer"
OF_CRITIC = "nothing to do: the critic is computed as the actor is, and shares its memory settings"
OPTIMIZER = """
    decay_type eps exp_avg_* lr_decay_ratio lr_decay_steps lr_min lr_start lr_warmup_init lr_wsd_* main_grads_dtype
    min_lr min_lr_factor muon_* name num_cycles optimizer optimizer_impl override_optimizer_config total_training_steps
    use_checkpoint_opt_param_scheduler use_layer_wise_* use_precision_* weight_decay_incr_style zero_indexed_step"""
"""Settings of verl's optimizers that Headway's lacks."""
PROFILED = "headway ctl RUN profile profiles a run that goes on (docs/profiling.md)"
MEGATRON = "Headway trains with FSDP2; actor.parallel divides the model (docs/your-own.md)"
MULTIMODAL = "Headway trains on text"
LOG_PROBS = "nothing to do: log-probs are computed in micro-batches of actor.ppo_max_token_len_per_gpu tokens"
RENAMED: Mapping[str, str] = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager.": "reward_manager.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_model.": "reward_model.",
    "reward.sandbox_fusion.": "reward_model.sandbox_fusion.",
    "sandbox_fusion.": "reward_model.sandbox_fusion.",
}
"""Beginnings of keys of verl's section ``reward`` → those of the older keys, which the rows have."""
SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear", None: taken(note="not given")}
SCHEDULE_KEYS = ("lr_scheduler_type", "warmup_style", "lr_decay_style")
TABLE: Mapping[str, TableRow] = {
    of.PROGRAM: differs("mode", "modes are sets of values", of.mode),
    **{key: always(*rule.values, note=rule.reason) for key, rule in of.FIXED.items()},
    "defaults": always(note="verl's own defaults lie beneath; settings of another base file: give that file, too"),
    "*_target_": no("nothing to do: it names a class of verl's"),
    "hydra.*": no("nothing to do: Headway's files name others under `defaults:`, and references are ${a.b}"),
    # data
    "data.train_files": same("data.train", path),
    "data.val_files": same("data.val", path),
    "data.train_batch_size": differs("async_training.require_batches", "prompts of a step", of.train_batch_size),
    "data.max_prompt_length": same("data.max_prompt_length", whole),
    "data.max_response_length": same("data.max_response_length", whole),
    "data.prompt_key": same("data.prompt_key"),
    "data.shuffle": same("data.shuffle"),
    "data.seed": same("run.seed", lambda value, given: taken() if value is None else value),
    "data.filter_overlong_prompts": always(True, note="longer prompts are left out, and counted"),
    "data.truncation": always(note="no prompt is cut: longer ones are left out, and counted"),
    "data.val_batch_size": no("nothing to do: all held-out problems are asked at once"),
    "data.trust_remote_code": same("model.trust_remote_code"),
    "data.train_max_samples": off("make a smaller file, or take split: train[:1000] of a dataset (docs/data.md)"),
    "data.val_max_samples": same("data.val_max_samples", of.held_out),
    "data.image_key": no(MULTIMODAL),
    "data.video_key": no(MULTIMODAL),
    "data.image_patch_size": no(MULTIMODAL),
    "data.custom_cls.*": off("write the rows to a JSONL or Parquet file, or a task of your own (docs/data.md)"),
    "data.datagen.*": off("a task of your own makes problems as they are asked for (docs/data.md)"),
    "data.sampler.*": off("sources have weights (docs/data.md); there is no curriculum"),
    "data.apply_chat_template_kwargs": off("give data.chat_template_kwargs a mapping of names to values"),
    "data.apply_chat_template_kwargs.*": same("data.chat_template_kwargs.*"),
    "data.tool_config_path": same("agent.tools", of.tools),
    "data.reward_fn_key": always("data_source", note="a row's data_source goes to the reward"),
    **several(
        "data.",
        """audio_key continuous_token.* dataloader_num_workers filter_overlong_prompts_workers function_tool_path
        mm_processor_kwargs return_full_prompt return_multi_modal_inputs return_raw_input_ids tokenizer use_shm
        validation_shuffle""",
        no("nothing to do: rows are read as they are asked for (docs/data.md)"),
    ),
    # model
    "model.path": same("model.path", path),
    "model.trust_remote_code": same("model.trust_remote_code"),
    "model.enable_gradient_checkpointing": same("model.enable_gradient_checkpointing"),
    "model.use_remove_padding": choice("model.packing", {True: PACKED, False: "padded"}),
    "model.torch_dtype": choice("model.dtype", {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32"}),
    "model.lora*": off(LORA),
    "model.target_modules": no(f"nothing to do without LoRA: {LORA}"),
    "model.exclude_modules": off(LORA),
    "model.override_config*": same("", of.override),
    "model.tokenizer_path": off("the tokenizer is that of model.path; put it into the folder"),
    "model.custom_chat_template": off("put it into the tokenizer's files in model.path"),
    "model.external_lib": off("model.trust_remote_code runs the code that comes with a model"),
    "model.mtp.*": off("Headway trains no heads for multi-token prediction"),
    "model.use_shm": no("nothing to do: files are mapped"),
    "model.use_liger": no("nothing to do: logits are computed in slices"),
    "model.use_fused_kernels": no("nothing to do: log-probs are computed in slices of logits"),
    "model.fused_kernel_options.*": no("nothing to do: log-probs are computed in slices of logits"),
    "model.enable_activation_offload": off("model.enable_gradient_checkpointing saves what it would move"),
    **several(
        "model.",
        "gradient_checkpointing_kwargs.* hf_config_path tiled_mlp.*",
        off("look at docs/your-own.md, Model"),
    ),
    # actor
    "actor.ppo_mini_batch_size": same("actor.ppo_mini_batch_size", of.mini_batch),
    "actor.ppo_micro_batch_size": differs(
        "actor.ppo_max_token_len_per_gpu", "tokens of a rank are counted", of.micro_batch_of_all
    ),
    "actor.ppo_micro_batch_size_per_gpu": differs(
        "actor.ppo_max_token_len_per_gpu", "tokens are counted", of.micro_batch
    ),
    "actor.ppo_max_token_len_per_gpu": same("actor.ppo_max_token_len_per_gpu", of.token_budget),
    "actor.ppo_epochs": same("actor.ppo_epochs", whole),
    "actor.optim.lr": same("actor.optim.lr", number),
    "actor.optim.lr_warmup_steps": of.warmup("actor"),
    "actor.optim.lr_warmup_steps_ratio": differs(
        "actor.optim.lr_warmup_steps", "a share of the run", of.steps_of_ratio
    ),
    "actor.optim.weight_decay": same("actor.optim.weight_decay", number),
    "actor.optim.betas": same("actor.optim.betas", lambda value, given: [float(one) for one in value]),
    "actor.optim.min_lr_ratio": same("actor.optim.min_lr_ratio", lambda value, given: float(value or 0)),
    "actor.optim.clip_grad": same("actor.grad_clip", number),
    **{f"actor.optim.{key}": choice("actor.optim.lr_scheduler_type", SCHEDULES) for key in SCHEDULE_KEYS},
    **several("actor.optim.", OPTIMIZER, no(OF_OPTIMIZER)),
    "actor.grad_clip": same("actor.grad_clip", number),
    "actor.clip_ratio": same("actor.clip_ratio", of.clip),
    "actor.clip_ratio_low": same("actor.clip_ratio_low", number),
    "actor.clip_ratio_high": same("actor.clip_ratio_high", number),
    "actor.clip_ratio_c": of.only_in("vanilla", "clip_ratio_c"),
    "actor.tau_pos": of.only_in("sapo", "tau_pos"),
    "actor.tau_neg": of.only_in("sapo", "tau_neg"),
    "actor.policy_loss.loss_mode": differs("algorithm.policy_loss.loss_mode", "other names", of.loss),
    "actor.policy_loss.clip_cov_ratio": of.only_in("clip_cov", "clip_cov_ratio"),
    "actor.policy_loss.clip_cov_lb": of.only_in("clip_cov", "clip_cov_lb"),
    "actor.policy_loss.clip_cov_ub": of.only_in("clip_cov", "clip_cov_ub"),
    "actor.policy_loss.kl_cov_ratio": of.only_in("kl_cov", "kl_cov_ratio"),
    "actor.policy_loss.ppo_kl_coef": of.only_in("kl_cov", "ppo_kl_coef"),
    "actor.loss_agg_mode": choice(
        "actor.loss_agg_mode",
        {name: name for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")},
    ),
    "actor.loss_scale_factor": same(
        "actor.loss_scale_factor", lambda value, given: taken() if value is None else number(value, given)
    ),
    "actor.entropy_coeff": same("actor.entropy_coeff", number),
    "actor.use_kl_loss": same("actor.use_kl_loss"),
    "actor.kl_loss_coef": same("actor.kl_loss_coef", number),
    "actor.kl_loss_type": choice("actor.kl_loss_type", KL_LOSS),
    "actor.use_rollout_log_probs": same("async_training.use_rollout_log_probs", of.rollout_log_probs),
    "actor.use_prefix_grouper": choice("model.packing", {True: "shared", False: taken(note="model.packing is shared")}),
    "actor.ulysses_sequence_parallel_size": same("actor.parallel.cp", whole),
    "actor.fsdp_config.param_offload": same("actor.fsdp_config.param_offload"),
    "actor.fsdp_config.optimizer_offload": differs(
        "actor.fsdp_config.param_offload", "all of it is moved, or nothing", of.optimizer_offload
    ),
    "actor.fsdp_config.offload_policy": same("actor.fsdp_config.param_offload"),
    "actor.fsdp_config.reshard_after_forward": same("actor.fsdp_config.reshard_after_forward"),
    "actor.fsdp_config.fsdp_size": differs("actor.parallel.replicate", "ranks of a copy", of.replicas),
    "actor.fsdp_config.ulysses_sequence_parallel_size": same("actor.parallel.cp", whole),
    "actor.fsdp_config.*": no(OF_FSDP),
    "actor.megatron.tensor_model_parallel_size": same("actor.parallel.tp", whole),
    "actor.megatron.context_parallel_size": same("actor.parallel.cp", whole),
    "actor.megatron.expert_model_parallel_size": same("actor.parallel.ep", whole),
    "actor.megatron.pipeline_model_parallel_size": always(1, note=MEGATRON),
    "actor.megatron.param_offload": same("actor.fsdp_config.param_offload"),
    "actor.megatron.*": no(MEGATRON),
    "actor.checkpoint.*": no("nothing to do: checkpoints have all that a run goes on from (docs/resume.md)"),
    "actor.profiler.*": no(PROFILED),
    "actor.router_replay.*": off("the trainer routes tokens to experts by itself"),
    "actor.freeze_vision_tower": no(MULTIMODAL),
    "actor.data_loader_seed": same("run.seed", whole),
    "actor.shuffle": always(False, note="mini-batches are a fetch's groups in their order"),
    "actor.state_masking": always(True, note="only tokens that the policy sampled are trained on"),
    **several("actor.", "sppo_eta policy_loss.dro_beta", off("Headway has no such loss (docs/algorithms)")),
    **several(
        "actor.",
        """calculate_entropy calculate_sum_pi_squared entropy_checkpointing entropy_from_logits_* load_weight
        num_images_in_input pad_to_length profile.* qat.* rollout_n sum_pi_squared_checkpointing torchtitan.*
        traj_mini_batch_size use_fused_kernels use_remove_padding use_torch_compile veomni.*""",
        no(COMPUTES),
    ),
    # reference
    "ref.log_prob_*": no(LOG_PROBS),
    "ref.profiler.*": no(PROFILED),
    **several("ref.", "model param_offload", no(OF_REFERENCE)),
    # rollout
    "rollout.name": choice(
        "rollout.name",
        {"vllm": "vllm"}
        | {
            name: other({"rollout.name": "vllm"}, f"Headway has no {name}; vllm, or native, which needs nothing more")
            for name in ("sglang", "hf", "trtllm")
        },
    ),
    "rollout.n": same("rollout.n", of.answers),
    "rollout.n_agent": differs("rollout.n", "answers of a prompt", of.agents),
    "rollout.n_val": same("rollout.val_n", whole),
    "rollout.val_temperature": same("rollout.val_temperature", number),
    "rollout.temperature": same("rollout.temperature", number),
    "rollout.top_p": same("rollout.top_p", number),
    "rollout.top_k": differs(
        "rollout.top_k", "0 is off", lambda value, given: taken({"rollout.top_k": max(whole(value, given), 0)})
    ),
    "rollout.do_sample": always(True, note="answers are sampled"),
    "rollout.ignore_eos": always(False, note="an answer ends with the model's stop token"),
    "rollout.tensor_model_parallel_size": REPLICA_SIZE,
    "rollout.data_parallel_size": always(1, note="each device has a replica"),
    "rollout.expert_parallel_size": always(1, note="experts are divided as matrices are"),
    "rollout.gpu_memory_utilization": same("rollout.engine_kwargs.gpu_memory_utilization", number),
    "rollout.max_num_batched_tokens": same("rollout.max_batched_tokens", whole),
    "rollout.max_num_seqs": same("rollout.max_concurrent", whole),
    "rollout.enforce_eager": same("rollout.enforce_eager"),
    "rollout.dtype": choice("rollout.dtype", {"bfloat16": "bfloat16", "float32": "float32", "auto": "auto"}),
    "rollout.max_model_len": same("", of.context),
    "rollout.seed": no("run.seed is the seed of all randomness"),
    "rollout.use_fire_sampling": off("Headway samples at rollout.temperature alone"),
    **several(
        "rollout.", "skip.* skip_rollout skip_dump_dir", off("headway eval measures answers; a run samples its own")
    ),
    "rollout.prompt_length": no("nothing to do: data.max_prompt_length"),
    "rollout.response_length": no("nothing to do: data.max_response_length"),
    "rollout.val_kwargs.n": same("rollout.val_n", whole),
    "rollout.val_kwargs.temperature": same("rollout.val_temperature", number),
    "rollout.val_kwargs.top_p": always(1, 1.0, note="validation samples from all tokens, at rollout.val_temperature"),
    "rollout.val_kwargs.top_k": always(-1, 0, note="validation samples from all tokens, at rollout.val_temperature"),
    "rollout.val_kwargs.do_sample": no("nothing to do: rollout.val_temperature=0 is greedy"),
    "rollout.multi_turn.tool_config_path": same("agent.tools", of.tools),
    "rollout.multi_turn.max_assistant_turns": same("agent.max_turns", of.turns),
    "rollout.multi_turn.max_user_turns": same("agent.max_turns", of.turns),
    "rollout.multi_turn.format": choice(
        "agent.tool_parser",
        {"hermes": taken(note="agent.tool_parser=auto reads what the chat template writes")}
        | {"llama3_json": taken(note="agent.tool_parser=auto reads what the chat template writes")},
    ),
    "rollout.multi_turn.interaction_config_path": off("write it as agent.environment or a program (docs/agents.md)"),
    **several(
        "rollout.multi_turn.",
        """completion_callback enable function_tool_path max_parallel_calls max_tool_response_length max_turns
        num_repeat_rollouts tokenization_sanity_check_mode tool_response_truncate_side use_inference_chat_template""",
        no("agent.tools, environment and program have limits of their own (docs/agents.md)"),
    ),
    **several(
        "rollout.agent.",
        "agent_loop_config_path custom_async_server.* default_agent_loop num_workers agent_loop_manager_class",
        no("agent.tools, program or client says who makes the episode (docs/agents.md)"),
    ),
    "rollout.log_prob_*": no(LOG_PROBS),
    "rollout.free_cache_engine": no("nothing to do: with cluster.placement=shared the engine sleeps meanwhile"),
    "rollout.enable_sleep_mode": no("nothing to do: with cluster.placement=shared the engine sleeps meanwhile"),
    "rollout.multi_stage_wake_up": no("nothing to do: the engine wakes when it is its turn"),
    "rollout.over_sample_rate": off("async_training.order=ready with η > 0 does not wait for the slowest answers"),
    "rollout.load_format": no("nothing to do: replicas get the trainer's weights"),
    "rollout.layered_summon": no("nothing to do: weights are gathered in buckets"),
    "rollout.checkpoint_engine.*": no("param_update.transport says how weights travel (docs/parameter-update.md)"),
    "rollout.engine_kwargs.vllm.*": same("rollout.engine_kwargs.*"),
    "rollout.engine_kwargs.*": no("nothing to do: it is for an engine that Headway lacks"),
    "rollout.trace.*": no("headway show prints what was said, token by token (docs/samples.md)"),
    "rollout.prometheus.*": off("reports.trackers=[prometheus] shows Headway's figures"),
    "rollout.profiler.*": no(PROFILED),
    "rollout.quantization*": off("replicas serve rollout.dtype"),
    **several(
        "rollout.",
        """chat_scheduler cudagraph_capture_sizes disable_log_stats disaggregation.* enable_chunked_prefill
        enable_prefix_caching enable_rollout_routing_replay full_determinism layer_name_map.* logprobs_mode
        moe_load_balance_metrics_interval mtp pipeline_model_parallel_size qat qat.* scheduling_policy
        skip_tokenizer_init standalone_gpu_memory_utilization update_weights_bucket_megabytes swap_space
        max_num_partial_prefills limit_images""",
        no(OF_VLLM),
    ),
    "rollout.nnodes": of.devices("rollout", "nnodes"),
    "rollout.n_gpus_per_node": of.devices("rollout", "n_gpus_per_node"),
    "rollout.total_rollout_steps": of.of_async("rollout.total_rollout_steps", of.rollout_steps),
    "rollout.total_epochs": no("nothing to do: its program counts trainer.total_epochs"),
    "rollout.test_freq": of.validation(of.FULLY_ASYNC),
    # critic
    "critic.optim.lr": same("critic.optim.lr", number),
    "critic.optim.lr_warmup_steps": of.warmup("critic"),
    "critic.optim.lr_warmup_steps_ratio": off("give critic.optim.lr_warmup_steps in optimizer steps"),
    "critic.optim.weight_decay": same("critic.optim.weight_decay", number),
    "critic.ppo_epochs": same("critic.ppo_epochs", whole),
    "critic.cliprange_value": same("critic.cliprange_value", number),
    "critic.grad_clip": same("critic.grad_clip", number),
    "critic.model.path": no("nothing to do: the critic begins as a copy of model.path"),
    "critic.optim.betas": same("critic.optim.betas", lambda value, given: [float(one) for one in value]),
    "critic.optim.min_lr_ratio": same("critic.optim.min_lr_ratio", lambda value, given: float(value or 0)),
    "critic.optim.clip_grad": same("critic.grad_clip", number),
    **{f"critic.optim.{key}": choice("critic.optim.lr_scheduler_type", SCHEDULES) for key in SCHEDULE_KEYS},
    **several("critic.", "enable forward_* fsdp.* kl_ctrl.* model.fsdp_config.* nccl_timeout", no(OF_CRITIC)),
    # algorithm
    "algorithm.adv_estimator": choice("algorithm.adv_estimator", ESTIMATORS),
    "algorithm.gamma": same("algorithm.gamma", number),
    "algorithm.lam": same("algorithm.lam", number),
    "algorithm.norm_adv_by_std_in_grpo": same("algorithm.norm_adv_by_std_in_grpo"),
    "algorithm.use_kl_in_reward": same("algorithm.use_kl_in_reward"),
    "algorithm.kl_penalty": choice("algorithm.kl_penalty", KL),
    "algorithm.kl_ctrl.kl_coef": same("algorithm.kl_ctrl.kl_coef", number),
    "algorithm.kl_ctrl.type": always("fixed", note="the coefficient does not adapt"),
    "algorithm.kl_ctrl.*": no("nothing to do: they are for a coefficient that adapts, and Headway's is fixed"),
    "algorithm.filter_groups.enable": same("algorithm.filter_groups.enable"),
    "algorithm.filter_groups.metric": no("nothing to do: groups are filtered by their rewards"),
    "algorithm.filter_groups.max_num_gen_batches": no("nothing to do: 10·B groups in a row without a signal end a run"),
    "algorithm.rollout_correction.rollout_is": differs("algorithm.rollout_correction.name", "truncate", of.correction),
    "algorithm.rollout_correction.rollout_is_threshold": no("nothing to do: it goes with rollout_is"),
    "algorithm.rollout_correction.rollout_rs": differs("algorithm.rollout_correction.name", "reject", of.rejection),
    "algorithm.rollout_correction.rollout_rs_*": no("it goes with rollout_rs"),
    "algorithm.rollout_correction.bypass_mode": same("async_training.use_rollout_log_probs", of.rollout_log_probs),
    **several(
        "algorithm.",
        """rollout_correction.loss_type rollout_correction.rollout_is_batch_normalize
        rollout_correction.rollout_token_veto_threshold rollout_correction.use_policy_gradient
        rollout_is rollout_is_level rollout_is_mode rollout_is_threshold* rollout_is_veto_threshold""",
        off("choose algorithm.rollout_correction (docs/algorithms/corrections.md)"),
    ),
    "algorithm.sppo_eta": off("Headway has no SPPO"),
    "algorithm.*pf_ppo*": off("Headway has no filtering by policy feedback; algorithm.filter_groups drops groups"),
    # reward
    "custom_reward_function.path": same(
        "reward.function",
        lambda value, given: reward_file(value, given.get("custom_reward_function.name", "compute_score")),
    ),
    "custom_reward_function.name": same("reward.function", lambda value, given: taken(note="with its path")),
    "custom_reward_function.reward_kwargs.*": same("reward.params.*"),
    "reward_model.reward_manager": differs("reward.function", "a scorer by data_source", of.reward_manager),
    "reward_manager.*": no("reward.function says how answers are scored (docs/rewards.md)"),
    "reward_model.enable": off(REWARD_MODEL),
    "reward_model.*overlong_buffer*.enable": same("reward.overlong_buffer.enable"),
    "reward_model.*overlong_buffer*.len": same("reward.overlong_buffer.len", whole),
    "reward_model.*overlong_buffer*.penalty_factor": same("reward.overlong_buffer.penalty_factor", of.penalty),
    "reward_model.*overlong_buffer*.log": no("nothing to do: reward/mean is what rewards were before the penalty"),
    "reward_model.reward_kwargs.max_resp_len": no("nothing to do: data.max_response_length"),
    "reward_model.num_workers": same("reward.workers", whole),
    "reward_model.sandbox_fusion.*": off("reward.function=code runs tests in Headway's sandbox (docs/sandbox.md)"),
    **several(
        "reward_model.",
        """enable_resource_pool forward_* launch_reward_fn_async load_weight max_length megatron.* micro_batch_size*
        model.* model_path n_gpus_per_node nccl_timeout nnodes param_offload profiler.* reward_loop_* rollout.*
        strategy ulysses_sequence_parallel_size use_dynamic_bsz use_reward_loop""",
        no("nothing to do without a reward model; with one: serve it, call it in a reward function"),
    ),
    # the trainer
    "trainer.nnodes": of.devices("trainer", "nnodes"),
    "trainer.n_gpus_per_node": of.devices("trainer", "n_gpus_per_node"),
    "trainer.total_epochs": same("data.epochs", of.epochs),
    "trainer.total_training_steps": differs("rollout.total_rollout_steps", "steps in groups", of.steps),
    "trainer.save_freq": same("trainer.save_freq", interval, "versions"),
    "trainer.test_freq": of.validation(of.PPO),
    "trainer.max_actor_ckpt_to_keep": same("trainer.max_actor_ckpt_to_keep"),
    "trainer.max_critic_ckpt_to_keep": no("nothing to do: the critic's are kept with the actor's"),
    "trainer.project_name": same("reports.project"),
    "trainer.experiment_name": same("run.name", file_name),
    "trainer.default_local_dir": same("run.dir", path),
    "trainer.logger": same("reports.trackers", trackers),
    "trainer.val_before_train": always(True, note="the first version is validated"),
    "trainer.val_only": off("headway eval measures a model"),
    "trainer.critic_warmup": off("the critic trains from the first fetch, beside the actor"),
    "trainer.balance_batch": always(True, note="micro-batches are balanced over ranks by tokens"),
    "trainer.resume_mode": no("a run is resumed by headway train --resume RUN (docs/resume.md)"),
    "trainer.resume_from_path": off("headway train --resume RUN goes on with one of Headway's runs (docs/resume.md)"),
    "trainer.device": choice("cluster.device", {"cuda": "cuda", "cpu": "cpu"}),
    "trainer.log_val_generations": no("headway show prints what was said; reports.samples says of how many groups"),
    "trainer.rollout_data_dir": no("headway show prints what was said; reports.samples says of how many groups"),
    "trainer.validation_data_dir": no("headway show prints what was said; reports.samples says of how many groups"),
    of.TRAINER_MODE: same("mode", lambda value, given: taken(note=f"the mode is {of.MODES[of.program(given)][0]}")),
    **{
        f"trainer.v1.{name}.num_warmup_batches": of.of_trainer_mode(
            "async_training.staleness_threshold", "batches that generation is ahead", name
        )
        for name in (of.COLOCATE_ASYNC, of.SEPARATE_ASYNC)
    },
    "trainer.v1.separate_async.parameter_sync_step": of.of_trainer_mode(
        "async_training.trigger_parameter_sync_step", "mini-batches of a version", of.SEPARATE_ASYNC
    ),
    "trainer.v1.sampler.max_off_policy*": no(
        "async_training.staleness_threshold bounds the lag; with order=ready max_lag and on_overdue do"
    ),
    "trainer.rejection_sample": same(
        "algorithm.filter_groups.enable", note="groups whose rewards are all equal are left out, and refilled"
    ),
    "trainer.rejection_sample_multiplier": no("nothing to do: a group that is left out is replaced by another"),
    "trainer.v1.*": no("the mode, and async_training, say what its trainers do (docs/modes.md)"),
    **several(
        "trainer.",
        """controller_nsight_options.* default_hdfs_dir del_local_ckpt_after_load esi_redundant_time npu_profile.*
        profile_steps ray_wait_register_center_timeout remove_previous_ckpt_in_save use_legacy_worker_impl use_v1
        val_generations_to_log_to_wandb worker_nsight_options.*""",
        no("nothing to do: it is about how verl runs (docs/architecture.md)"),
    ),
    # asynchrony
    "async_training.staleness_threshold": of.of_async("async_training.staleness_threshold", number),
    "async_training.trigger_parameter_sync_step": of.of_async("async_training.trigger_parameter_sync_step", whole),
    "async_training.require_batches": of.of_async("async_training.require_batches", whole),
    "async_training.partial_rollout": same("async_training.on_update", of.partial),
    "async_training.use_rollout_log_probs": same("async_training.use_rollout_log_probs", of.rollout_log_probs),
    "async_training.compute_prox_log_prob": same(
        "async_training.use_rollout_log_probs",
        lambda value, given: taken(note="off, as here") if not value else False,
        "the trainer recomputes π_prox",
    ),
    "async_training.checkpoint_engine.*": no("param_update.transport says how weights travel"),
    "async_training.use_trainer_do_validate": no("nothing to do: validation runs on a replica, beside training"),
    **several(
        "async_training.",
        "concurrent_samples_per_replica dynamic_schedule_* use_dynamic_resource_scheduling",
        no("nothing to do: η bounds what is in flight, and replicas may come and go (docs/architecture.md)"),
    ),
    "checkpoint_engine*": no("param_update.transport says how weights travel"),
    "hybrid_engine": no("nothing to do: the mode says whether devices are shared"),
    "nccl_timeout": no("cluster.start_timeout_s and cluster.stall_timeout_s bound waits"),
    "global_profiler.*": no(PROFILED),
    "transfer_queue.*": no("nothing to do: tokens travel in shared memory"),
    **several("", "distillation.* env.*", off("Headway has neither teachers nor simulators of robots")),
    **several("", "profiler.* skip.*", no(PROFILED)),
    "max_turns": no("agent.max_turns, with a program, environment or tools (docs/agents.md)"),
    **several("", "do_search retriever.*", no("agent.tools or a program asks the search engine (docs/agents.md)")),
    "ray_kwargs.*": no("cluster.address joins a Ray cluster; else one is started"),
    "ray_init.*": no("cluster.address joins a Ray cluster; else one is started"),
}
ROWS: Mapping[str, TableRow] = {
    **like(TABLE, "actor.", "ref.", no(OF_REFERENCE)),
    **like(TABLE, "actor.", "critic.", no(OF_CRITIC)),
    **like(TABLE, "model.", "critic.model.", no(OF_CRITIC)),
    **TABLE,
}
VERL = Project(
    "verl",
    ROWS,
    of.defaults,
    marks=(
        "actor_rollout_ref.*",
        "actor.ppo_mini_batch_size",
        "data.train_files",
        "data.train_batch_size",
        "algorithm.adv_estimator",
        "trainer.total_epochs",
        "trainer.n_gpus_per_node",
        "async_training.*",
        "critic.*",
        of.PROGRAM,
    ),
)
