# Keys and values of the reward in verl-project/verl, examples/fapo_trainer/run_baseline_7b.sh at 3867dfdf3b, and two more.
overlong_buffer_len=$((1024 * 4))
python3 -m verl.trainer.main_ppo \
    data.train_batch_size=512 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    reward.num_workers=4 \
    reward.reward_model.enable=False \
    reward.reward_manager.source=register \
    reward.reward_manager.name=dapo \
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward.reward_kwargs.overlong_buffer_cfg.len=${overlong_buffer_len} \
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    +reward.reward_kwargs.overlong_buffer_cfg.log=True \
    +reward.reward_kwargs.max_resp_len=8192 \
    reward.custom_reward_function.path=examples/fapo_trainer/reward_fn_reasoning.py \
    reward.custom_reward_function.name=compute_score_baseline
