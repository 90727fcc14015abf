"""Protocols between the pipeline and the machinery. The pipeline knows these and nothing behind them.

                 RewardFn          LogProbEngine
                    ▲                   ▲
    PromptSource ─▶ pipeline ─▶ RolloutEngine ◀════════ weights ════════ TrainEngine
                    └──────────────────────────────────────────────────────────────▲

Everything the pipeline calls is asynchronous and returns plain data. Implementations raise the errors of
`headway.errors`; an implementation that lives in another process raises `WorkerDied` when that process ends.

- `prompts`: where prompts come from
- `generation`: calls of the policy, and how their tokens are sampled
- `rollout`: replicas, which serve calls
- `episode_groups`: groups of episodes, and who makes them of calls
- `rewards`: scores of responses
- `advantages`: advantages of a fetch's samples
- `steps`: an optimizer step's place in the run, and its report
- `training`: the trainer, the critic, and engines that recompute log-probs
- `weights`: a version's way from the trainer to copies of the policy
- `profiling`: profiles of the run's processes
"""
