"""Supervised fine-tuning: conversations as rows of tokens, and the training ranks that learn from them.

examples  rows of data, a task's solutions, conversations of a function  ─▶ rows of tokens, the assistant's marked
steps     rows of tokens  ─▶ optimizer steps of the trainer
run       ``headway sft``: steps over a data set, with checkpoints, a validation loss and an exported model
warmup    the warm-up of a model that a run makes: steps until its accuracy is in a window
"""
