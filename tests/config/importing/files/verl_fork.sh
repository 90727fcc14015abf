set -x
export VLLM_ATTENTION_BACKEND=XFORMERS

PYTHONUNBUFFERED=1 RAY_DEBUG=1 python3 -m verl.trainer.main_ppo \
    data.train_files=train.parquet \
    data.train_batch_size=512 \
    data.max_prompt_length=4096 \
    data.max_response_length=500 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.state_masking=true \
    actor_rollout_ref.actor.fsdp_config.grad_offload=true \
    actor_rollout_ref.rollout.n_agent=4 \
    actor_rollout_ref.rollout.n_val=8 \
    actor_rollout_ref.rollout.val_temperature=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size=128 \
    trainer.rejection_sample=True \
    trainer.rejection_sample_multiplier=1 \
    +trainer.val_before_train=true \
    trainer.total_epochs=15 \
    do_search=true \
    max_turns=4 \
    retriever.topk=3 \
    2>&1 | tee run.log
