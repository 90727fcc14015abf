"""Checks before a run: inputs, the model, the user's code."""
