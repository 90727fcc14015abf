"""Protocols between the pipeline and the parts it calls. The pipeline depends only on these, not on implementations.

                 RewardFn          LogProbEngine
                    ▲                   ▲
    PromptSource ─▶ pipeline ─▶ RolloutEngine ◀════════ weights ════════ TrainEngine
                    └──────────────────────────────────────────────────────────────▲

Everything the pipeline calls is asynchronous and returns plain data. Implementations raise the errors of
`headway.errors`; an implementation that lives in another process raises `WorkerDied` when that process ends.

- `rollout`: calls of the policy, how their tokens are sampled, and the replicas which serve them
- `episode_groups`: prompts, groups of episodes and the workers that make them, scores of responses
- `training`: the trainer, the critic, advantages, an optimizer step's place in the run and its report
- `weights`: a version's way from the trainer to copies of the policy
"""
