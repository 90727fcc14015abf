"""One file per box of the picture.

PromptLoader ─▶ Generate ─▶ Rollout ─▶ Reward ─▶ [RefLogProb] ─▶ MessageQueue ─▶ ActorTrain ─▶ ParamUpdate ─▶ Validate
"""
