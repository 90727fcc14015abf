"""Rewards: the user's function, a task's verifier or an exact match, run in processes that can be killed."""
